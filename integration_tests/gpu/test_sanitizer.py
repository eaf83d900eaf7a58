"""Tests that jobs with holmes have no data race between CUDA streams.

Two tools look for races, in jobs with holmes and without:

    torch's CUDA sanitizer
    the emulated GPU with --gpu-order random, which also checks the kernels of NCCL
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from carriers import PHYSICAL
from holmes_lab.joined import coordinator

from integration_tests.gpu.commands import FOUR_RANKS
from integration_tests.jobs import ON_CPU, ROOT, SIZE, TRAIN, full, some

EXAMPLES = ROOT / "examples"
SMALL = "--layers 4 --hidden 32 --heads 4 --sequence 16 --micro-batch 1 --micro-batches 4 --steps 4".split()
PLAIN = (str(EXAMPLES / "plain_torch" / "train.py"), *SMALL)
#: name -> words of the command behind `python`
JOBS = {
    "plain torch": PLAIN,
    "DeepSpeed's pipeline": (TRAIN, *SIZE, "--stages", "2", "--zero", "1", "--dtype", "bf16"),
    "megatron-core": (
        str(EXAMPLES / "megatron_core" / "train.py"),
        *SMALL,
        "--pipeline",
        "2",
        "--overlap",
    ),
    "torch's pipelining": (str(EXAMPLES / "torch_pipelining" / "train.py"), *SMALL),
    "Trainer (DDP hierarchically)": (
        str(EXAMPLES / "trainer" / "train.py"),
        *"--layers 2 --hidden 32 --sequence 16 --micro-batch 2 --micro-batches 2 --steps 4".split(),
    ),
    "FSDP2": (str(EXAMPLES / "fsdp2" / "train.py"), *SMALL),
    "HSDP": (str(EXAMPLES / "fsdp2" / "train.py"), *SMALL, "--replicas", "2"),
}
#: Name of a job -> further flags of holmes.
HOLMES_FLAGS = {"FSDP2": ("--holmes-fsdp", "hybrid")}
ENV = {"DS_ACCELERATOR": "cuda", "DS_BUILD_OPS": "0", "PYTHONPATH": ON_CPU}
SANITIZED = {**ENV, "TORCH_CUDA_SANITIZER": "1"}


def check(ran):
    """Assert that the job ended well and without a race; the sanitizer ends a program that has one."""
    assert ran.result.returncode == 0 and "CSAN detected" not in ran.said, ran.said
    assert ran.races == []


@pytest.mark.parametrize("job", some(JOBS, "plain torch"))
@pytest.mark.parametrize("late", [False, True], ids=["sanitizer", "random order"])
def test_no_race_is_reported(lab, gpus, job, late):
    if late and PHYSICAL:
        pytest.skip("a physical GPU's kernels are never late on purpose")
    options = {"gpus": replace(gpus, seed=1), "env": ENV} if late else {"env": SANITIZED}
    holmes = ("--holmes", "--holmes-cluster", str(lab.file), *HOLMES_FLAGS.get(job, ()))
    for flags in ((), holmes):
        check(lab.run(*JOBS[job], *flags, **FOUR_RANKS, **options))


@full
def test_no_race_is_reported_of_joined_jobs(lab):
    outer = "min=2,every=2,fragments=1,delay=1"
    with coordinator(lab.lab, outer) as meeting, ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(
                lab.run,
                *PLAIN,
                *meeting.flags(name),
                order=node,
                env={**SANITIZED, **meeting.environment},
            )
            for name, node in (("east", "a0"), ("west", "b0"))
        ]
        for job in jobs:
            check(job.result())
