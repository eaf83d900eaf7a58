"""What travels between jobs: compress=2bit."""

import pytest
import torch
from joined_jobs import coordinator, in_threads, joined_of

from holmes_ext.join.codecs import TwoBits
from holmes_ext.join.settings import parse_outer

CHUNK = TwoBits.chunk
#: Elements of the jobs' model.
COUNT = 16 * CHUNK


def values(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) ** 3


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_makes_its_chunk_not_finite_and_leaves_no_residual(wrong):
    x, codec, residual = values(2 * CHUNK), TwoBits(), torch.zeros(2 * CHUNK)
    x[5] = wrong
    got = codec.decode(codec.encode(x, residual), x)
    assert not got[:CHUNK].isfinite().all() and got[CHUNK:].isfinite().all()
    assert residual.isfinite().all()


def test_any_bytes_are_some_values():
    """A liar's."""
    codec = TwoBits()
    wire = torch.randint(0, 256, (codec.buffer(torch.empty(CHUNK)).numel(),), dtype=torch.uint8)
    assert codec.decode(wire, torch.empty(CHUNK)).shape == (CHUNK,)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 100, 511, 512, 513, 3000])
def test_two_bits_are_a_sign_and_one_of_two_magnitudes(count):
    x, codec = values(count), TwoBits()
    wire = codec.encode(x, None)
    assert (
        wire.numel()
        == codec.buffer(x).numel()
        == sum(4 + -(-min(CHUNK, count - start) // 4) for start in range(0, count, CHUNK))
    )
    got = codec.decode(wire, torch.empty(count))
    for start in range(0, count, CHUNK):
        part, there = x[start : start + CHUNK], got[start : start + CHUNK]
        assert len(there.abs().unique()) <= 2
        far = there.abs() > 0
        assert torch.equal(there[far].sign(), part[far].sign())


@pytest.mark.parametrize("power", [1, 3], ids=["normal", "its cube"])
def test_no_other_two_magnitudes_are_much_nearer(power):
    x = torch.randn(CHUNK, generator=torch.Generator().manual_seed(3)) ** power
    error = (x - TwoBits().decode(TwoBits().encode(x, None), x)).square().sum()
    sizes = x.abs().sort().values.double()
    least = min(
        float(sum((part - part.mean()).square().sum() for part in (sizes[:k], sizes[k:])))
        for k in range(1, CHUNK)
    )
    assert error <= 1.03 * least


def test_two_bits_are_an_eighth_of_bf16():
    x = values(64 * CHUNK)
    assert TwoBits().buffer(x).numel() / (2 * x.numel()) == (4 + CHUNK / 4) / (2 * CHUNK) < 0.13


def test_what_two_bits_round_off_is_added_the_next_time():
    x = torch.randn(CHUNK, generator=torch.Generator().manual_seed(0))
    codec, residual, total = TwoBits(), torch.zeros(CHUNK), torch.zeros(CHUNK)
    for _ in range(50):
        total += codec.decode(codec.encode(x, residual), x)
    torch.testing.assert_close(total + residual, 50 * x, rtol=1e-4, atol=1e-3)
    assert (total / 50 - x).norm() / x.norm() < 0.05


# DiLoCo whose pseudo-gradients are rounded, with error feedback, R jobs, H inner steps, outer rate alpha:
#     Delta_r <- theta - theta_r             what job r has made in H steps of its own
#     e_r <- e_r + Delta_r
#     sent_r <- Q(e_r)                       e_r <- e_r - sent_r, kept as bfloat16
#     theta <- theta - alpha / R sum of sent_r;   theta_r <- theta
ALPHA, STEPS, ROUNDS = 1.0, 3, 4


def inner_step(job, step):
    return values(COUNT, 100 * step + len(job))


def two_bits(part):
    """Sign times the mean of those below, or above, the middle of both means: five steps of Lloyd's."""
    sizes, middle = part.abs(), part.abs().mean()
    for _ in range(5):
        small = sizes <= middle
        means = sizes[small].mean(), sizes[~small].mean()
        middle = sum(means) / 2
    return part.sign() * torch.where(small, *(mean.bfloat16().float() for mean in means))


def with_error_feedback(jobs):
    theta = torch.zeros(COUNT)
    errors = {job: torch.zeros(COUNT) for job in jobs}
    for number in range(ROUNDS):
        sent = []
        for job in jobs:
            own = theta.clone()
            for step in range(STEPS * number, STEPS * (number + 1)):
                own -= inner_step(job, step)
            errors[job] = errors[job] + (theta - own)
            sent.append(torch.cat([two_bits(part) for part in errors[job].split(CHUNK)]))
            errors[job] = (errors[job] - sent[-1]).bfloat16().float()
        theta = theta - ALPHA * torch.stack(sent).mean(0)
        yield theta


def train(name, port, settings):
    """Return the weights after each round."""
    model = torch.nn.ParameterList([torch.zeros(2, COUNT // 2)])
    joined = joined_of(model, name, port, settings)
    joined.begin()
    history = []
    for step in range(STEPS * ROUNDS):
        with torch.no_grad():
            model[0].view(-1).sub_(inner_step(name, step))
        joined.after_step()
        if (step + 1) % STEPS == 0:
            history.append(model[0].detach().flatten().clone())
    joined.end()
    return history


def test_joined_jobs_have_the_weights_of_the_equations():
    settings = parse_outer(f"min=2,every={STEPS},fragments=1,delay=0,momentum=0,compress=2bit")
    with coordinator() as server:
        jobs = ("east", "westward")
        found = in_threads(
            {name: lambda name=name: train(name, server.port, settings) for name in jobs}
        )
    for number, theta in enumerate(with_error_feedback(jobs)):
        for history in found.values():
            torch.testing.assert_close(history[number], theta, rtol=1e-5, atol=1e-5)
