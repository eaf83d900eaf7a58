"""What travels between jobs: compress=topk, compress=2bit."""

import pytest
import torch
from joined_jobs import coordinator, in_threads, joined_of

from holmes_ext.errors import HolmesError
from holmes_ext.join.rounds.codecs import CHUNK, DECAY, TopK, TwoBits, codec_of
from holmes_ext.join.settings import parse_outer

#: Of two bits.
SHORT = TwoBits.chunk


def values(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) ** 3


@pytest.mark.parametrize("count", [1, 3, 5, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 777])
def test_the_largest_of_each_chunk_arrive(count):
    x, codec = values(count), TopK(88)
    wire = codec.encode(x, None)
    assert wire.numel() == codec.buffer(x).numel() and wire.dtype == torch.uint8
    got = codec.decode(wire, torch.empty(count))
    for start in range(0, count, CHUNK):
        part, there = x[start : start + CHUNK], got[start : start + CHUNK]
        sent = there.nonzero().flatten()
        largest = set(part.abs().topk(len(sent)).indices.tolist())
        assert set(sent.tolist()) == largest and len(sent) <= max(4, 88)
        assert torch.equal(there[sent].sign(), part[sent].sign())
    if count >= CHUNK:
        assert (got[:CHUNK] != 0).sum() == 88


def test_two_magnitudes_are_the_means_of_the_halves():
    x = torch.zeros(CHUNK)
    x[[0, 7, 4095, 100]] = torch.tensor([1.0, -2.0, 4.0, -8.0])
    got = TopK(4).decode(TopK(4).encode(x, None), x)
    assert got[[0, 7, 4095, 100]].tolist() == [1.5, -1.5, 6.0, -6.0] and (got != 0).sum() == 4


def test_it_is_under_two_percent_of_bf16():
    x = values(64 * CHUNK)
    assert TopK(88).buffer(x).numel() / (2 * x.numel()) < 0.02


def test_what_is_left_out_is_added_the_next_time():
    x, codec, residual = values(2 * CHUNK), TopK(88), torch.zeros(2 * CHUNK)
    wire = codec.encode(x, residual)
    torch.testing.assert_close(residual, x - codec.decode(wire, x))
    before = residual.clone()
    again = codec.decode(codec.encode(torch.zeros_like(x), residual), x)
    torch.testing.assert_close(residual, DECAY * before - again)
    assert codec_of(parse_outer("compress=topk")).decay == DECAY and codec_of(parse_outer("")).decay == 1


def test_over_many_rounds_nothing_is_lost_but_the_decay():
    """Of a constant gradient the mean of what arrives comes near, and elements that are small get their
    turn."""
    x, codec, residual, total = values(CHUNK), TopK(400), torch.zeros(CHUNK), torch.zeros(CHUNK)
    for _ in range(200):
        total += codec.decode(codec.encode(x, residual), x)
    assert torch.dot(total, x) / (total.norm() * x.norm()) > 0.95
    assert (total != 0).float().mean() > 4 * 400 / CHUNK - 0.1


@pytest.mark.parametrize("codec", [TopK(88), TwoBits()], ids=["topk", "2bit"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_makes_its_chunk_not_finite_and_leaves_no_residual(codec, wrong):
    x, residual = values(2 * CHUNK), torch.zeros(2 * CHUNK)
    x[5] = wrong
    got = codec.decode(codec.encode(x, residual), x)
    assert not got[:CHUNK].isfinite().all() and got[CHUNK:].isfinite().all()
    assert residual.isfinite().all()


@pytest.mark.parametrize("codec", [TopK(88), TwoBits()], ids=["topk", "2bit"])
def test_any_bytes_are_some_values(codec):
    """A liar's: places are of the chunk, whatever the bits say."""
    wire = torch.randint(0, 256, (codec.buffer(torch.empty(CHUNK)).numel(),), dtype=torch.uint8)
    assert codec.decode(wire, torch.empty(CHUNK)).shape == (CHUNK,)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 100, 511, 512, 513, 3000])
def test_two_bits_are_a_sign_and_one_of_two_magnitudes(count):
    x, codec = values(count), TwoBits()
    wire = codec.encode(x, None)
    assert wire.numel() == codec.buffer(x).numel() == sum(
        4 + -(-min(SHORT, count - start) // 4) for start in range(0, count, SHORT))
    got = codec.decode(wire, torch.empty(count))
    for start in range(0, count, SHORT):
        part, there = x[start : start + SHORT], got[start : start + SHORT]
        assert len(there.abs().unique()) <= 2
        far = there.abs() > 0
        assert torch.equal(there[far].sign(), part[far].sign())


@pytest.mark.parametrize("power", [1, 3], ids=["normal", "its cube"])
def test_no_other_two_magnitudes_are_much_nearer(power):
    x = torch.randn(SHORT, generator=torch.Generator().manual_seed(3)) ** power
    error = (x - TwoBits().decode(TwoBits().encode(x, None), x)).square().sum()
    sizes = x.abs().sort().values.double()
    least = min(float(sum((part - part.mean()).square().sum() for part in (sizes[:k], sizes[k:])))
                for k in range(1, SHORT))
    assert error <= 1.03 * least


def test_two_bits_are_an_eighth_of_bf16():
    x = values(64 * SHORT)
    assert TwoBits().buffer(x).numel() / (2 * x.numel()) == (4 + SHORT / 4) / (2 * SHORT) < 0.13


def test_what_two_bits_round_off_is_added_the_next_time():
    x = torch.randn(SHORT, generator=torch.Generator().manual_seed(0))
    codec, residual, total = TwoBits(), torch.zeros(SHORT), torch.zeros(SHORT)
    for _ in range(50):
        total += codec.decode(codec.encode(x, residual), x)
    torch.testing.assert_close(total + residual, 50 * x, rtol=1e-4, atol=1e-3)
    assert (total / 50 - x).norm() / x.norm() < 0.05 and codec_of(parse_outer("compress=2bit")).decay == 1


def test_settings():
    assert codec_of(parse_outer("compress=topk,topk=128")).keep == 128
    for text, why in (("topk=6", "not divisible by 4"), ("topk=0", "topk=0 is not 4 to 2048"),
                      ("compress=topk,aggregate=median", "most elements would be 0")):  # fmt: skip
        with pytest.raises(HolmesError, match=why):
            parse_outer(text)


# DiLoCo whose pseudo-gradients are rounded, with error feedback, R jobs, H inner steps, outer rate alpha:
#     Delta_r <- theta - theta_r             what job r has made in H steps of its own
#     e_r <- beta e_r + Delta_r
#     sent_r <- Q(e_r)                       e_r <- e_r - sent_r
#     theta <- theta - alpha / R sum of sent_r;   theta_r <- theta
# topk: SparseLoCo, arXiv 2508.15706, algorithm 1; it has no outer momentum: the error feedback has its part.
# 2bit: the same with beta = 1 and all elements; its residual is kept as bfloat16.
BETA, ALPHA, STEPS, ROUNDS, KEEP = 0.95, 1.0, 3, 4, 12


def inner_step(job, step):
    return values(2 * CHUNK, 100 * step + len(job))


def top_k(part):
    """Sign times the mean of the smaller, or of the larger, half of those that are sent."""
    sent, places = torch.zeros_like(part), part.abs().topk(KEEP).indices
    for half in places[part[places].abs().argsort()].view(2, -1):
        sent[half] = part[half].sign() * part[half].abs().mean().bfloat16().float()
    return sent


def two_bits(part):
    """Sign times the mean of those below, or above, the middle of both means: five steps of Lloyd's."""
    sizes, middle = part.abs(), part.abs().mean()
    for _ in range(5):
        small = sizes <= middle
        means = sizes[small].mean(), sizes[~small].mean()
        middle = sum(means) / 2
    return part.sign() * torch.where(small, *(mean.bfloat16().float() for mean in means))


def with_error_feedback(jobs, rounded, chunk, beta, kept_as):
    theta = torch.zeros(2 * CHUNK)
    errors = {job: torch.zeros(2 * CHUNK) for job in jobs}
    for number in range(ROUNDS):
        sent = []
        for job in jobs:
            own = theta.clone()
            for step in range(STEPS * number, STEPS * (number + 1)):
                own -= inner_step(job, step)
            errors[job] = beta * errors[job] + (theta - own)
            sent.append(torch.cat([rounded(part) for part in errors[job].split(chunk)]))
            errors[job] = (errors[job] - sent[-1]).to(kept_as).float()
        theta = theta - ALPHA * torch.stack(sent).mean(0)
        yield theta


def train(name, port, settings):
    """The weights after each round."""
    model = torch.nn.ParameterList([torch.zeros(2, CHUNK)])
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


@pytest.mark.parametrize("text, equations", [
    (f"compress=topk,topk={KEEP}", (top_k, CHUNK, BETA, torch.float32)),
    ("compress=2bit", (two_bits, SHORT, 1.0, torch.bfloat16))], ids=["SparseLoCo", "2bit"])  # fmt: skip
def test_joined_jobs_have_the_weights_of_the_equations(text, equations):
    settings = parse_outer(f"min=2,every={STEPS},fragments=1,delay=0,momentum=0,{text}")
    with coordinator() as server:
        jobs = ("east", "westward")
        found = in_threads({name: lambda name=name: train(name, server.port, settings) for name in jobs})
    for number, theta in enumerate(with_error_feedback(jobs, *equations)):
        for history in found.values():
            torch.testing.assert_close(history[number], theta, rtol=1e-5, atol=1e-5)
