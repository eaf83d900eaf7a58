"""Tests examples/deepspeed_pipeline with DeepSpeed's engine, in processes that use CPUs."""

import json
import os
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import ranks

from integration_tests.jobs import full

pytest.importorskip("deepspeed")
SCRIPT = Path(__file__).parents[2] / "examples" / "deepspeed_pipeline" / "train.py"
SIZES = "--layers 4 --hidden 32 --heads 4 --sequence 32 --micro-batch 2 --lr 3e-3".split()
STEPS = 8
number = count()


def train(folder: Path, processes: int, *options: str) -> dict[int, float]:
    """Run the script as a job of this many processes, and return step -> loss."""
    log = folder / f"{next(number)}.jsonl"
    store, environ = ranks.hosted_store()
    command = [
        sys.executable,
        str(SCRIPT),
        *SIZES,
        "--steps",
        str(STEPS),
        "--log",
        str(log),
        *options,
    ]
    shared = {
        **environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    jobs = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        errors = [job.communicate(timeout=180)[1] for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()
    assert [job.returncode for job in jobs] == [0] * processes, "\n".join(errors)
    left = [name for name in os.listdir("/dev/shm") if str(store.port) in name]
    assert not left, "DeepSpeed's shared-memory op left its buffers behind"
    return {row["step"]: row["loss"] for row in map(json.loads, log.read_text().splitlines())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("deepspeed_example")


@pytest.fixture(scope="module")
def two_by_two(folder):
    """Return the losses of 2 pipeline stages x 2 data-parallel ranks, to compare others with.

    The job leaves checkpoints of steps 4 and 8 in folder/saved.
    """
    return train(
        folder,
        4,
        "--stages",
        "2",
        "--micro-batches",
        "4",
        "--save",
        str(folder / "saved"),
        "--save-every",
        "4",
    )


def test_the_loss_falls(two_by_two):
    assert list(two_by_two) == list(range(1, STEPS + 1))
    # The untrained model predicts each of 256 bytes with the same probability: ln 256 = 5.545.
    assert 5.4 < two_by_two[1] < 5.7
    assert two_by_two[STEPS] < two_by_two[1] - 0.5


@pytest.mark.full(share=4)
@pytest.mark.parametrize(
    "processes, options",
    [
        pytest.param(1, "--stages 1 --micro-batches 8", id="one process"),
        pytest.param(4, "--stages 4 --micro-batches 8", id="pipeline 4", marks=full),
        pytest.param(
            4,
            "--stages 2 --micro-batches 4 --partition-method type:Embedding --activation-checkpoint 2",
            id="7+1 layers, recomputed",
            marks=full,
        ),
    ],
)
def test_every_split_of_the_same_batch_has_the_same_loss(folder, two_by_two, processes, options):
    assert train(folder, processes, *options.split()) == pytest.approx(two_by_two, abs=1e-5)


def test_a_resumed_job_continues_exactly(folder, two_by_two):
    saved = folder / "resumed"
    shutil.copytree(folder / "saved", saved)
    # DeepSpeed reads this file to find the checkpoint: as if the job had died before step 8.
    (saved / "latest").write_text("step4")
    resumed = train(folder, 4, "--stages", "2", "--micro-batches", "4", "--load", str(saved))
    assert resumed == {step: loss for step, loss in two_by_two.items() if step > 4}


@full
def test_tied_weights_have_the_same_loss_under_a_pipeline(folder, two_by_two):
    tied = train(folder, 4, "--tied", "--stages", "2", "--micro-batches", "4")
    assert tied == pytest.approx(train(folder, 1, "--tied", "--micro-batches", "8"), abs=1e-5)
    assert tied[1] != pytest.approx(two_by_two[1], abs=1e-5)


@full
def test_bf16_with_zero_1_follows_float32(folder, two_by_two):
    losses = train(
        folder, 4, "--stages", "2", "--micro-batches", "4", "--dtype", "bf16", "--zero", "1"
    )
    assert losses == pytest.approx(two_by_two, abs=0.03) and losses != two_by_two


def test_a_checkpoint_of_another_model_is_refused_in_one_line(folder, two_by_two):
    command = [
        sys.executable,
        str(SCRIPT),
        *SIZES,
        "--layers",
        "3",
        "--micro-batches",
        "8",
        "--load",
        str(folder / "saved"),
    ]
    unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    result = subprocess.run(
        command,
        env={k: v for k, v in os.environ.items() if k not in unset},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert (
        "saved with layers 4, but this job has layers 3" in result.stderr
        and "Traceback" not in result.stderr
    )
