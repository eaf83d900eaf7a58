"""Tests how much GPU memory a job takes with holmes, and that its resources do not grow with the steps.

Compared is the peak of torch's caching allocator with that of the same job without holmes. With holmes, the
peak may be higher by:

    buckets of gradients that have memory of their own (plan/buckets.py)
    activations of the micro-batches that a pipeline stage holds beyond those of the 1F1B schedule
    buffers of the messages between pipeline stages
"""

import json

import pytest
from carriers import LESS_MEMORY, PHYSICAL

from holmes_ext.plan.buckets import buffer_bytes
from integration_tests.gpu.commands import FOUR_RANKS, ON_GPU
from integration_tests.jobs import ON_CPU, ROOT, TRAIN, losses, same, some

emulated_only = pytest.mark.skipif(
    PHYSICAL, reason="NCCL's own library allocates as NVIDIA built it"
)
MEMORY = str(ROOT / "integration_tests" / "gpu" / "memory.py")
EXAMPLES = ROOT / "examples"
HIDDEN = 64
SEQUENCE = 32
ROWS = 2  # samples of a micro-batch
MICRO_BATCHES = 4
MODEL = (
    f"--layers 4 --hidden {HIDDEN} --heads 4 --sequence {SEQUENCE} --micro-batch {ROWS} "
    f"--micro-batches {MICRO_BATCHES}"
).split()
#: Bytes of the activation that a micro-batch sends to the next stage.
MESSAGE = ROWS * SEQUENCE * HIDDEN * 4
STEPS = 8
MANY = 200  # steps of the test for growth
#: name -> (words behind `python`, flags of holmes)
JOBS = {
    "plain torch": ((str(EXAMPLES / "plain_torch" / "train.py"), *MODEL), ()),
    "DeepSpeed's pipeline": ((TRAIN, *MODEL, "--stages", "2"), ()),
    "DeepSpeed's pipeline, two more in flight": (
        (TRAIN, *MODEL, "--stages", "2"),
        ("--holmes-inflight", "2"),
    ),
    "megatron-core": (
        (str(EXAMPLES / "megatron_core" / "train.py"), *MODEL, "--pipeline", "2", "--overlap"),
        (),
    ),
}
#: Bytes by which caches of Python and torch may grow (3 to 6 MB in 200 steps without holmes).
CACHES = 16e6
#: Number of threads and open files that may be made once, at a late step. A leak would make one in each step.
ONCE = 3


def run_measured(lab, folder, words, steps):
    """Run a training command under memory.py.

    Returns:
        The memory, threads and open files that memory.py measured on each rank, and the losses.
    """
    folder.mkdir()
    log = folder / "log.jsonl"
    # memory.py runs the script `words` in each rank, and writes what it measured into rank0.json and so on.
    ran = lab.run(
        MEMORY,
        str(folder),
        *words,
        "--steps",
        str(steps),
        "--log-file",
        str(log),
        **FOUR_RANKS,
        env={**ON_GPU, "PYTHONPATH": ON_CPU},
    )
    assert ran.result.returncode == 0, ran.said
    assert not ran.hang, ran.said  # the report on ranks that wait for each other
    measured = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert all(len(of_rank["steps"]) == steps for of_rank in measured)
    return measured, losses(log)


def activation_bytes_of(lab, folder, words):
    """Return the bytes of one micro-batch's activations on each rank of the job without holmes.

    That is the difference between the peaks with two micro-batches and with one. It is zero on the last
    stage, which has only one micro-batch in flight.
    """
    one, _ = run_measured(lab, folder, (*words, "--micro-batches", "1"), STEPS)
    folder_of_two = folder.with_name(f"{folder.name} of two")
    two, _ = run_measured(lab, folder_of_two, (*words, "--micro-batches", "2"), STEPS)
    return [after["peak"] - before["peak"] for before, after in zip(one, two)]


@pytest.mark.parametrize("job", some(JOBS, "DeepSpeed's pipeline"))
def test_holmes_holds_what_the_plan_says(lab, tmp_path, job):
    """Each rank's peak of GPU memory exceeds that without holmes by no more than the plan expects.

    The plan expects memory for buckets of gradients, for micro-batches that a stage holds beyond those of the
    1F1B schedule, and for messages between stages.
    """
    words, holmes_flags = JOBS[job]
    stock, stock_losses = run_measured(lab, tmp_path / "stock", words, STEPS)
    command = (*words, "--holmes", "--holmes-cluster", str(lab.file), *holmes_flags)
    ours, our_losses = run_measured(lab, tmp_path / "holmes", command, STEPS)
    assert same(stock_losses, our_losses)

    # Micro-batches that each of the two stages may hold; empty if the framework decides that, not holmes.
    in_flight = ours[0]["in_flight"]
    if holmes_flags:  # --holmes-inflight, which lets stages hold more micro-batches than 1F1B does
        assert in_flight
    activation_bytes = max(activation_bytes_of(lab, tmp_path / "kept", words)) if in_flight else 0
    for rank, (before, after) in enumerate(zip(stock, ours)):
        stage = rank // 2
        more_in_flight = 0
        if in_flight:
            held_by_1f1b = 2 - stage  # the first of two stages holds two micro-batches
            more_in_flight = max(0, in_flight[stage] - held_by_1f1b)
        bucket_bytes = buffer_bytes(after["gradients"])
        # An activation forward and its gradient backward, for each micro-batch.
        message_bytes = 2 * MESSAGE * max(in_flight, default=0)
        planned = bucket_bytes + more_in_flight * activation_bytes + message_bytes
        peaks = (before["peak"], after["peak"])
        assert after["peak"] <= before["peak"] + planned, (rank, peaks, planned)


@pytest.mark.parametrize("job", some(JOBS, "plain torch"))
def test_nothing_grows(lab, tmp_path, job):
    """The memory, threads and open files of a job with holmes do not grow in the last three quarters of it.

    The resident memory of the process may grow by the size of Python's and torch's caches. The losses are
    those of the job without holmes.
    """
    words, flags = JOBS[job]
    steps = 40 if job == "plain torch" else MANY
    _, stock_losses = run_measured(lab, tmp_path / "stock", words, steps)
    command = (*words, "--holmes", "--holmes-cluster", str(lab.file), *flags)
    ranks, our_losses = run_measured(lab, tmp_path / "holmes", command, steps)
    assert same(stock_losses, our_losses, tolerance=1e-4)
    for rank, measured in enumerate(ranks):
        # After each step: bytes of the GPU's allocator, threads, open files, resident bytes of the process.
        early, late = measured["steps"][steps // 4], measured["steps"][-1]
        growth = [after - before for before, after in zip(early, late)]
        allocated_bytes, threads, open_files, resident_bytes = growth
        assert allocated_bytes == 0, (rank, measured["steps"])
        # ONCE: threads and files that are made once, at a later step. CACHES: growth of caches, in bytes.
        assert max(threads, open_files) <= ONCE, (rank, measured["steps"])
        assert resident_bytes < CACHES, (rank, measured["steps"])


@emulated_only
def test_a_communicator_takes_little_host_memory(lab):
    """NCCL allocates 120 MB for a communicator. What it does not use must take no memory of this machine."""
    script = str(ROOT / "integration_tests" / "gpu" / "communicator_memory.py")
    ran = lab.run(script, order="a0,b0", processes=1, env=LESS_MEMORY)
    for of_rank in ran.json:
        assert 0 < of_rank["mb_for_each_group"] < 40
