"""What holmes holds of a GPU's memory beside stock, by the caching allocator, and that nothing grows.

Stock's peak, plus what the plan reckons with: buckets of gradients that have memory of their own
(plan/cost/buckets.py), what a stage keeps of the micro-batches that it has in flight beyond 1F1B's, and their
messages.
"""

import json

import pytest

from holmes_ext.plan.cost.buckets import buffer_bytes
from integration_tests.gpu.commands import FOUR_RANKS, ON_GPU
from integration_tests.jobs import ON_CPU, ROOT, TRAIN, losses, same, some

MEMORY = str(ROOT / "integration_tests" / "gpu" / "memory.py")
EXAMPLES = ROOT / "examples"
HIDDEN, SEQUENCE, ROWS, MICRO_BATCHES = 64, 32, 2, 4
MODEL = (f"--layers 4 --hidden {HIDDEN} --heads 4 --sequence {SEQUENCE} --micro-batch {ROWS} "
         f"--micro-batches {MICRO_BATCHES}").split()
#: An activation between stages.
MESSAGE = ROWS * SEQUENCE * HIDDEN * 4
STEPS, MANY = 8, 200
#: name -> (words behind `python`, flags of holmes)
JOBS = {
    "plain torch": ((str(EXAMPLES / "plain_torch" / "train.py"), *MODEL), ()),
    "DeepSpeed's pipeline": ((TRAIN, *MODEL, "--stages", "2"), ()),
    "DeepSpeed's pipeline, two more in flight": ((TRAIN, *MODEL, "--stages", "2"),
                                                 ("--holmes-inflight", "2")),
    "megatron-core": ((str(EXAMPLES / "megatron_core" / "train.py"), *MODEL, "--pipeline", "2", "--overlap"),
                      ()),
}
#: Of Python's own and torch's caches (in 200 steps of stock 3 to 6 MB).
CACHES = 16e6
#: Threads and open files that something makes once, at whatever step; what grows has one more for each step.
ONCE = 3


def held(lab, folder, words, steps):
    """Of each rank what memory.py found; the losses."""
    folder.mkdir()
    log = folder / "log.jsonl"
    ran = lab.run(MEMORY, str(folder), *words, "--steps", str(steps), "--log-file", str(log), **FOUR_RANKS,
                  env={**ON_GPU, "PYTHONPATH": ON_CPU})
    assert ran.result.returncode == 0 and not ran.hang, ran.said
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert all(len(one["steps"]) == steps for one in ranks)
    return ranks, losses(log)


def kept(lab, folder, words):
    """Bytes that each rank of stock keeps of a micro-batch at most: its second in flight, which only the
    first stage has."""
    one, _ = held(lab, folder, (*words, "--micro-batches", "1"), STEPS)
    two, _ = held(lab, folder.with_name(f"{folder.name} of two"), (*words, "--micro-batches", "2"), STEPS)
    return [after["peak"] - before["peak"] for before, after in zip(one, two)]


@pytest.mark.parametrize("job", some(JOBS, "DeepSpeed's pipeline"))
def test_holmes_holds_what_the_plan_says(lab, tmp_path, job):
    words, flags = JOBS[job]
    stock, expected = held(lab, tmp_path / "stock", words, STEPS)
    ours, found = held(lab, tmp_path / "holmes",
                       (*words, "--holmes", "--holmes-cluster", str(lab.file), *flags), STEPS)
    assert same(expected, found)
    in_flight = ours[0]["in_flight"]
    assert bool(flags) <= bool(in_flight)
    of_two = kept(lab, tmp_path / "kept", words) if in_flight else [0] * 4
    for rank, (before, after) in enumerate(zip(stock, ours)):
        more = max(0, in_flight[rank // 2] - (2 - rank // 2)) if in_flight else 0
        of_plan = (buffer_bytes(after["gradients"]) + more * max(of_two)
                   + 2 * MESSAGE * max(in_flight, default=0))
        assert after["peak"] <= before["peak"] + of_plan, (rank, before["peak"], after["peak"], of_plan)


@pytest.mark.parametrize("job", some(JOBS, "plain torch"))
def test_nothing_grows(lab, tmp_path, job):
    """Over 200 steps (40 of plain torch): bytes of the allocator, threads, open files; the process by no more
    than Python's caches. Its losses stay stock's."""
    words, flags = JOBS[job]
    steps = 40 if job == "plain torch" else MANY
    _, expected = held(lab, tmp_path / "stock", words, steps)
    ranks, found = held(lab, tmp_path / "holmes",
                        (*words, "--holmes", "--holmes-cluster", str(lab.file), *flags), steps)
    assert same(expected, found, 1e-4)
    for rank, one in enumerate(ranks):
        early, late = one["steps"][steps // 4], one["steps"][-1]
        grown = [after - before for before, after in zip(early, late)]
        allocated, threads, files, resident = grown
        assert allocated == 0 and max(threads, files) <= ONCE and resident < CACHES, (rank, one["steps"])
