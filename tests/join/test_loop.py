"""Joined jobs of one rank each, as threads.

Their weights are compared, round by round, with the papers' equations written out for whole models.
"""

import threading

import joined_jobs
import pytest
import torch
from joined_jobs import coordinator, in_threads, joined_of

from holmes_ext.errors import HolmesError
from holmes_ext.join.settings import parse_outer

_SEEDING = threading.Lock()  # torch's generator is the process's


def model_of(seed=0):
    with _SEEDING:
        return joined_jobs.model_of(seed)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def inner_step(model, optimizer, job, step):
    """One step of job number `job` on data of its own."""
    inputs, labels = joined_jobs.batch(8, job, step)
    optimizer.zero_grad()
    (model(inputs) - labels).square().mean().backward()
    optimizer.step()


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(number, name, port, settings, steps, seed=0, records=None, default="cpu", **more):
    """Return the weights after each step.

    default: device of tensors that the program makes.
    """
    model = model_of(seed)
    optimizer = optimizer_of(model)
    with torch.device(default):
        joined = joined_of(model, name, port, settings, records, **more)
        joined.begin()
    history = []
    for step in range(steps):
        inner_step(model, optimizer, number, step)
        with torch.device(default):
            joined.after_step()
        history.append(flat(model))
    joined.end()
    return history


def run(text, steps, jobs=("east", "west"), **more):
    settings = parse_outer(f"min={len(jobs)},{text}")
    with coordinator() as server:
        return in_threads(
            {
                name: lambda k=k, name=name: train(k, name, server.port, settings, steps, **more)
                for k, name in enumerate(jobs)
            }
        )


def test_a_default_device_of_the_program_changes_nothing():
    """torch.set_default_device("cuda"): what lives on the host is made there."""
    text = "every=4,fragments=2,delay=1,compress=off"
    for one, other in zip(run(text, 5).values(), run(text, 5, default="meta").values()):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def expected(text, steps, jobs=2, alpha=None):
    """Return the weights of DiLoCo and Streaming DiLoCo for whole models.

    They follow algorithms 1 and 2 of the papers. alpha None: local progress is kept.
    """
    settings = parse_outer(text)
    models = [model_of() for _ in range(jobs)]
    optimizers = [optimizer_of(model) for model in models]
    total = len(flat(models[0]))
    from holmes_ext.join.shards.ownership import fragment_cuts

    cuts = fragment_cuts(total, settings.fragments)
    anchor, momentum = flat(models[0]), torch.zeros(total)
    histories, number, sent, average = [[] for _ in models], 0, [], None
    for step in range(steps):
        for k, (model, optimizer) in enumerate(zip(models, optimizers)):
            inner_step(model, optimizer, k, step)
        place = (step + 1) % settings.period
        part = slice(cuts[number % settings.fragments], cuts[number % settings.fragments + 1])
        if place == (settings.period - settings.delay) % settings.period:
            sent = [flat(model)[part] for model in models]
            average = torch.stack([anchor[part] - one for one in sent]).mean(0)
        if place == 0:
            mu = {1: 0.0, 2: 0.3, 4: 0.5}[jobs]  # momentum=auto
            momentum[part] = mu * momentum[part] + average
            anchor[part] -= settings.lr * (average + mu * momentum[part])
            for k, model in enumerate(models):
                now = flat(model)
                now[part] = (
                    anchor[part] + (now[part] - sent[k])
                    if alpha is None
                    else alpha * now[part] + (1 - alpha) * anchor[part]
                )
                torch.nn.utils.vector_to_parameters(now, model.parameters())
            number += 1
        for history, model in zip(histories, models):
            history.append(flat(model))
    return histories


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("delay, alpha", [(0, None), (2, None), (2, 0.0), (2, 0.5)])
def test_diloco_is_the_papers(fragments, delay, alpha):
    mix = "keep" if alpha is None else alpha
    text = f"algorithm=diloco,every=12,fragments={fragments},delay={delay},compress=off,mix={mix}"
    found = run(text, 30)
    for mine, theirs in zip(found.values(), expected(text, 30, alpha=alpha)):
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), rtol=1e-5, atol=1e-6)


def test_four_jobs_move_further_and_one_moves_as_far_as_alone():
    text = "algorithm=diloco,every=6,fragments=2,delay=1,compress=off"
    names = ("east", "west", "north", "south")
    for mine, theirs in zip(run(text, 18, names).values(), expected(text, 18, jobs=4)):
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), rtol=1e-5, atol=1e-6)
    (one,) = run(text, 18, ("east",)).values()
    torch.testing.assert_close(one[-1], train_alone(0, 18), rtol=1e-5, atol=1e-6)


def test_auto_momentum_counts_jobs_by_their_shares():
    auto, given = (parse_outer(text).outer_algorithm() for text in ("", "momentum=0.7"))
    assert [auto.momentum_of([1 / jobs] * jobs) for jobs in (1, 2, 3, 4, 16)] == [
        0.0,
        0.3,
        0.4,
        0.5,
        0.8,
    ]
    assert auto.momentum_of([0.98, 0.02]) == 0.0 and auto.momentum_of([0.51, 0.49]) == 0.3
    assert given.momentum_of([1.0]) == 0.7


def test_plain_averaging_makes_all_jobs_the_mean():
    found = run("algorithm=average,every=5,fragments=1,delay=0,compress=off", 5)
    alone = [train_alone(k, 5) for k in range(2)]
    for history in found.values():
        torch.testing.assert_close(history[-1], (alone[0] + alone[1]) / 2, rtol=1e-5, atol=1e-6)


def train_alone(number, steps):
    model = model_of()
    optimizer = optimizer_of(model)
    for step in range(steps):
        inner_step(model, optimizer, number, step)
    return flat(model)


def test_co2_applies_what_is_one_round_old():
    text = "algorithm=co2,every=4,fragments=1,compress=off,lr=0.9,momentum=0.5,clip=0.02"
    found = run(text, 16)
    models = [model_of() for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    start, momentum, before = flat(models[0]), torch.zeros(len(flat(models[0]))), None
    for step in range(16):
        for k in range(2):
            inner_step(models[k], optimizers[k], k, step)
        if (step + 1) % 4 == 0:
            now = torch.stack([start - flat(model) for model in models]).mean(0)
            if before is not None:
                gap = 1 + 0.9 * float(momentum.norm() / before.norm())
                momentum = (0.5 * momentum + before / gap).clamp(-0.02, 0.02)
                start = start - 0.9 * momentum
            before = now
            for model in models:
                torch.nn.utils.vector_to_parameters(start.clone(), model.parameters())
    for k, history in enumerate(found.values()):
        torch.testing.assert_close(history[-1], flat(models[k]), rtol=1e-5, atol=1e-6)
        assert float(momentum.abs().max()) == pytest.approx(
            0.02
        )  # it was clipped, or this tests nothing


@pytest.mark.parametrize("compress", ["off", "bf16", "int8"])
@pytest.mark.parametrize("jobs", [("east", "west"), ("east", "south", "west")])
def test_all_jobs_have_the_same_bits(compress, jobs):
    found = run(f"every=6,fragments=2,delay=0,compress={compress}", 12, jobs)
    first, *others = [history[-1] for history in found.values()]
    part = slice(0, 2 * (len(first) // 4))
    for other in others:
        assert not torch.equal(first, flat(model_of()))
        assert torch.equal(first[part.stop :], other[part.stop :])  # the fragment of the last round


@pytest.mark.parametrize("aggregate", ["median", "trimmed", "geometric", "clipping", "flag"])
def test_robust_aggregates_run(aggregate):
    found = run(f"every=3,fragments=1,delay=0,aggregate={aggregate}", 9, ("east", "south", "west"))
    first, *others = [history[-1] for history in found.values()]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("algorithm, most", [("diloco", 0.05), ("muon", 0.2)])
def test_int8_is_close_to_float32(algorithm, most):
    """Muon's outer step also makes the small singular values of the rounding errors longer."""
    exact, coded = (
        run(f"algorithm={algorithm},every=4,fragments=1,delay=0,compress={kind}", 40)["east"][-1]
        for kind in ("off", "int8")
    )
    assert 0 < (coded - exact).norm() < most * (exact - flat(model_of())).norm()


def test_a_job_that_begins_with_other_weights_takes_the_first_ones():
    settings = parse_outer("min=2,every=3,fragments=1,delay=0,compress=off")
    with coordinator() as server:
        found = in_threads(
            {
                name: lambda k=k, name=name: train(k, name, server.port, settings, 3, seed=k)
                for k, name in enumerate(("east", "west"))
            }
        )
    assert torch.equal(found["east"][-1], found["west"][-1])


def test_the_tokens_of_the_jobs_weigh_them():
    settings = parse_outer("min=2,algorithm=average,every=2,fragments=1,delay=0,compress=off")

    def job(k, name, port, tokens):
        model = model_of()
        optimizer, joined = optimizer_of(model), joined_of(model, name, port, settings)
        joined.begin()
        for step in range(2):
            inner_step(model, optimizer, k, step)
            joined.after_step(tokens)
        joined.end()
        return flat(model)

    with coordinator() as server:
        found = in_threads(
            {
                "east": lambda: job(0, "east", server.port, 300),
                "west": lambda: job(1, "west", server.port, 100),
            }
        )
    torch.testing.assert_close(
        found["east"], 0.75 * train_alone(0, 2) + 0.25 * train_alone(1, 2), rtol=1e-5, atol=1e-6
    )


def test_outer_state_is_twice_the_weights_at_most():
    for compress in ("off", "bf16", "int8"):
        with coordinator() as server:
            joined = joined_of(model_of(), "east", server.port, parse_outer(f"compress={compress}"))
            assert joined.state.host_bytes <= 2 * 4 * len(flat(model_of()))
            joined.end()


def test_a_not_finite_pseudo_gradient_is_left_out_and_its_job_brought_back():
    settings, all_in = parse_outer("every=3,fragments=1,delay=0,compress=off"), threading.Barrier(2)

    def job(k, name, port):
        model, records = model_of(), []
        optimizer, joined = optimizer_of(model), joined_of(model, name, port, settings, records)
        joined.begin()
        all_in.wait()
        for step in range(3):
            inner_step(model, optimizer, k, step)
            if name == "west" and step == 2:
                with torch.no_grad():
                    next(model.parameters())[0, 0] = float("nan")
            joined.after_step()
        joined.end()
        return flat(model), records

    with coordinator() as server:
        found = in_threads(
            {
                name: lambda k=k, name=name: job(k, name, server.port)
                for k, name in enumerate(("east", "west"))
            }
        )
    settings_alone = parse_outer("every=3,fragments=1,delay=0,compress=off")
    with coordinator() as server:
        alone = train(0, "east", server.port, settings_alone, 3)
    for weights, records in found.values():
        assert torch.equal(weights, alone[-1])  # east's own steps are all that counts
        assert records[0].outcome.left_out == {"west": "its pseudo-gradient is not finite"}


def test_jobs_with_other_settings_or_models_are_refused():
    with coordinator() as server:
        first = joined_of(
            model_of(), "east", server.port, parse_outer("every=6,fragments=2,delay=0")
        )
        first.begin()
        second = joined_of(
            model_of(), "west", server.port, parse_outer("every=6,fragments=2,delay=0,lr=0.5")
        )
        with pytest.raises(
            HolmesError,
            match=r"'west' cannot join: it differs from job 'east' in outer lr \(0.5 here, 1.0 in east\)",
        ):
            second.begin()
        third = joined_of(
            torch.nn.Linear(3, 3), "south", server.port, parse_outer("every=6,fragments=2,delay=0")
        )
        with pytest.raises(
            HolmesError, match=r"it differs from job 'east' in weights at all (0|b).* in east"
        ):
            third.begin()
        for one in (first, second, third):
            one.end()


def test_every_in_seconds_adapts_the_steps():
    settings = parse_outer("every=0.4s,fragments=2,delay=1,compress=off")
    periods = []

    def job(port):
        model = model_of()
        optimizer, joined = optimizer_of(model), joined_of(model, "east", port, settings)
        joined.begin()
        pause = threading.Event()
        for step in range(60):
            inner_step(model, optimizer, 0, step)
            pause.wait(0.02)
            joined.after_step()
            periods.append(joined.period)
        joined.end()
        return joined.number

    with coordinator() as server:
        assert in_threads({"east": lambda: job(server.port)})["east"] >= 3
    assert periods[0] == 8 and 2 <= periods[-1] <= 12
