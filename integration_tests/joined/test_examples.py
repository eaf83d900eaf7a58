"""Tests the examples of megatron-core and DeepSpeed's pipeline engine as joined jobs on loopback.

Both jobs read the same data, so their pseudo-gradients agree: their losses must be equal at every step,
even if the jobs divide the model differently. Elements that were averaged with wrong elements of the other
job would show in the first step after a round.
"""

import os
import subprocess
import sys
from pathlib import Path

import carriers
import pytest
from joined_jobs import coordinator

from integration_tests.jobs import FRAMEWORKS, ROOT, full, losses

SIZE = "--layers 2 --hidden 32 --heads 2 --sequence 16 --steps 9".split()
MEGATRON = [str(ROOT / "examples" / "megatron_core" / "train.py"), *SIZE]
PIPELINE = [
    str(ROOT / "examples" / "deepspeed_pipeline" / "train.py"),
    *SIZE,
    "--stages",
    "2",
    "--micro-batch",
    "1",
]
OUTER = "min=2,every=4,fragments=2,delay=1,compress=off,timeout=120"
WHOLE = "min=2,every=4,fragments=1,delay=1,compress=off,timeout=120"


def start(name, ranks, command, port, outer, log):
    """Start a joined job by torchrun, and return its process."""
    env = {
        **os.environ,
        **carriers.environment(ranks),
        **FRAMEWORKS,
        "OMP_NUM_THREADS": "1",
    }
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
    ]
    flags = [
        "--log-file",
        str(log),
        "--holmes",
        "--holmes-preflight",
        "off",
        "--holmes-outer",
        outer,
        "--holmes-join",
        f"{name}@127.0.0.1:{port}",
    ]
    with open(f"{log}.txt", "w") as output:
        return subprocess.Popen(
            [*torchrun, *command, *flags], stdout=output, stderr=subprocess.STDOUT, env=env
        )


def run(directory: Path, east, west, outer):
    """Run two joined jobs, and return the losses of both.

    Args:
        east: (number of ranks, command) of the first job.
        west: The same of the second job.
        outer: Value of --holmes-outer of both jobs, or one value for each.
    """
    outer_east, outer_west = (outer, outer) if isinstance(outer, str) else outer
    with coordinator() as server:
        jobs = []
        for name, job, value in (("east", east, outer_east), ("west", west, outer_west)):
            ranks, command = job
            log = directory / f"{name}.json"
            jobs.append(start(name, ranks, command, server.port, value, log))
        try:
            status = [job.wait(240) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        texts = [(directory / f"{name}.json.txt").read_text()[-4000:] for name in ("east", "west")]
        assert status == [0, 0], "\n".join(texts)
        assert sum("commit (" in line for line in server.told) >= 2, server.told
    return [losses(directory / f"{name}.json") for name in ("east", "west")]


CASES = {
    "megatron, distributed optimizer, overlapped, bf16": (
        (
            2,
            [
                *MEGATRON,
                *"--distributed-optimizer --overlap --micro-batches 2 --dtype bf16".split(),
            ],
        ),
        (1, [*MEGATRON, *"--micro-batches 4 --dtype bf16".split()]),
        OUTER,
    ),
    "megatron, tensor parallel, float32": (
        (2, [*MEGATRON, *"--tensor 2 --micro-batches 2".split()]),
        (4, [*MEGATRON, *"--tensor 2 --micro-batches 1 --distributed-optimizer".split()]),
        OUTER,
    ),
    "megatron, tensor parallel, whole matrices": (
        (2, [*MEGATRON, *"--tensor 2 --micro-batches 2".split()]),
        (4, [*MEGATRON, *"--tensor 2 --micro-batches 1 --distributed-optimizer".split()]),
        f"{OUTER},algorithm=muon",
    ),
    "megatron, pipeline": (
        (2, [*MEGATRON, *"--pipeline 2 --micro-batches 4".split()]),
        (2, [*MEGATRON, *"--pipeline 2 --micro-batches 4".split()]),
        WHOLE,
    ),
    "DeepSpeed's pipeline": (
        (2, [*PIPELINE, "--micro-batches", "4"]),
        (4, [*PIPELINE, "--micro-batches", "2"]),
        WHOLE,
    ),
}


@full
@pytest.mark.parametrize("case", CASES)
def test_jobs_of_different_make_train_alike(case, tmp_path):
    east, west = run(tmp_path, *CASES[case])
    assert len(east) == len(west) == 9
    tolerance = 2e-3 if "bf16" in case else 1e-4
    assert max(abs(a - b) for a, b in zip(east, west)) < tolerance, (east, west)
