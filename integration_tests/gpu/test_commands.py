"""Training commands of users on emulated GPUs, not changed by a character: the losses of the same commands on CPUs and
gloo.

HOLMES_TEST_FULL=1: on 2 + 2 nodes with 2 GPUs each (8 ranks), else on 1 + 1 (4 ranks).
"""

import pytest

from integration_tests.jobs import FULL, ROOT, SIZE, losses, same

HERE = ROOT / "integration_tests" / "gpu"
NODES = "a0,b0,a1,b1" if FULL else "a0,b0"
ON_CPU = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}
ON_GPU = {"DS_ACCELERATOR": "cuda", "DS_BUILD_OPS": "0"}


def both(lab, *command, preload, log=None):
    """(losses on emulated GPUs, losses on CPUs); log: where the command writes them, else each rank prints them."""
    found = []
    for on_gpus, env in ((True, ON_GPU), (False, ON_CPU)):
        file = log and log.with_name(f"{'gpu' if on_gpus else 'cpu'}-{log.name}")
        words = [str(file) if word == "LOG" else word for word in command]
        ran = lab.run(*words, order=NODES, preload=preload, env=env, on_gpus=on_gpus)
        assert ran.result.returncode == 0, ran.said
        assert bool(ran.groups) == on_gpus
        found.append(losses(file) if log else ran.json[0]["losses"])
    return found


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_zero(lab, stage):
    gpu, cpu = both(lab, str(HERE / "zero.py"), "--stage", str(stage), preload=("torch", "deepspeed"))
    assert len(gpu) == 4 and gpu[3] < gpu[0] and same(gpu, cpu)


def test_deepspeed_pipeline(lab, tmp_path):
    script = str(ROOT / "examples" / "deepspeed_pipeline" / "train.py")
    command = [script, *SIZE, "--stages", "2", "--log", "LOG"]
    gpu, cpu = both(lab, *command, preload=("torch", "deepspeed"), log=tmp_path / "log.jsonl")
    assert gpu[-1] < gpu[0] and same(gpu, cpu)


def test_trainer_of_transformers(lab, tmp_path):
    script = str(ROOT / "examples" / "trainer" / "train.py")
    model = "--layers 2 --hidden 64 --sequence 16 --micro-batch 2 --micro-batches 2 --steps 4".split()
    command = [script, *model, "--output", str(tmp_path / "out"), "--log-file", "LOG"]
    gpu, cpu = both(lab, *command, preload=("torch", "transformers.trainer"), log=tmp_path / "log.jsonl")
    assert len(gpu) == 4 and gpu[-1] < gpu[0] and same(gpu, cpu)
