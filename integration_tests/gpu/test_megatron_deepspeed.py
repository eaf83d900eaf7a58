"""Megatron-DeepSpeed's own pretrain_gpt.py on emulated GPUs: the losses of the same command on CPUs and gloo.

MEGATRON_DEEPSPEED_DIR, or checkouts/Megatron-DeepSpeed: git clone https://github.com/deepspeedai/Megatron-DeepSpeed.
HOLMES_TEST_FULL=1: pipeline 2, tensor 2, data 2 with ZeRO 1 on 2 + 2 nodes, else pipeline 2, data 2 on 1 + 1.
"""

import os
import shutil
from pathlib import Path

import pytest

from integration_tests.jobs import FULL, ROOT
from integration_tests.megatron_deepspeed.job import Checkout, read_log

SOURCE = Path(os.environ.get("MEGATRON_DEEPSPEED_DIR") or ROOT / "checkouts" / "Megatron-DeepSpeed")
pytestmark = pytest.mark.skipif(
    not (SOURCE / "pretrain_gpt.py").is_file(),
    reason="git clone https://github.com/deepspeedai/Megatron-DeepSpeed checkouts/Megatron-DeepSpeed")
#: torch's AdamW: DeepSpeed's and Apex's are kernels that nvcc compiles.
FLAGS = ("--pipeline-model-parallel-size", "2", "--cpu-optimizer", "--cpu_torch_adam",
         *(("--tensor-model-parallel-size", "2") if FULL else ()))
DEVICES = {"cuda": {"DS_ACCELERATOR": "cuda", "DS_BUILD_OPS": "0"},
           "cpu": {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron_deepspeed")
    yield Checkout(SOURCE, folder)
    shutil.rmtree(folder)


def test_losses_are_those_of_the_cpu(lab, checkout):
    losses = {}
    for device, env in DEVICES.items():
        words = checkout.arguments(4, *FLAGS, zero=1 if FULL else 0)
        ran = checkout.run(lab, *words, env=env, order="a0,b0,a1,b1" if FULL else "a0,b0", on_gpus=device == "cuda")
        losses[device] = read_log(ran.result).losses
    assert sorted(losses["cuda"]) == [1, 2, 3, 4] and losses["cuda"][4] < losses["cuda"][1]
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=1e-6)
