"""No race is reported of what holmes launches, as none is of stock's runs: by torch's CUDA sanitizer, and by
the emulated GPU's own search for missing waits (--gpu-order random), which knows NCCL's kernels, too."""

from dataclasses import replace

import pytest

from integration_tests.jobs import FULL, ROOT, SIZE, TRAIN

EXAMPLES = ROOT / "examples"
SMALL = "--layers 4 --hidden 32 --heads 4 --sequence 16 --micro-batch 1 --micro-batches 4 --steps 4".split()
#: name -> words of the command behind `python`
JOBS = {
    "plain torch": (str(EXAMPLES / "plain_torch" / "train.py"), *SMALL),
    "DeepSpeed's pipeline": (TRAIN, *SIZE, "--stages", "2", "--zero", "1", "--dtype", "bf16"),
    "torch's pipelining": (str(EXAMPLES / "torch_pipelining" / "train.py"), *SMALL),
    "FSDP2": (str(EXAMPLES / "fsdp2" / "train.py"), *SMALL),
}
MORE = {"FSDP2": ("--holmes-fsdp", "hybrid")}
DEEPSPEED = {"DS_ACCELERATOR": "cuda", "DS_BUILD_OPS": "0"}


@pytest.mark.parametrize("job", JOBS if FULL else ["plain torch"])
@pytest.mark.parametrize("late", [False, True], ids=["sanitizer", "random order"])
def test_no_race_is_reported(lab, gpus, job, late):
    """The sanitizer's reports end a program with CUDASanitizerErrors."""
    how = {"gpus": replace(gpus, seed=1)} if late else {}
    env = DEEPSPEED if late else {**DEEPSPEED, "TORCH_CUDA_SANITIZER": "1"}
    for flags in ((), ("--holmes", "--holmes-cluster", str(lab.file), *MORE.get(job, ()))):
        ran = lab.run(*JOBS[job], *flags, order="a0,b0", env=env, **how)
        assert ran.result.returncode == 0 and "CSAN detected" not in ran.said, ran.said
        assert ran.races == []
