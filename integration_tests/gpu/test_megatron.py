"""Megatron-LM's own pretrain_gpt.py on emulated GPUs, tensor, pipeline and data parallel, with the distributed optimizer:
losses and gradient norms of the same command on CPUs and gloo.

MEGATRON_LM_DIR, or checkouts/Megatron-LM: git clone https://github.com/NVIDIA/Megatron-LM. HOLMES_TEST_FULL=1: 2 x 2 x 2
on 2 + 2 nodes, else pipeline 2 x data 2 on 1 + 1.
"""

import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest

from integration_tests.jobs import FULL, ROOT

CHECKOUT = Path(os.environ.get("MEGATRON_LM_DIR") or ROOT / "checkouts" / "Megatron-LM")
pytestmark = pytest.mark.skipif(not (CHECKOUT / "pretrain_gpt.py").is_file(),
                                reason="git clone https://github.com/NVIDIA/Megatron-LM checkouts/Megatron-LM")
SIZE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2" if FULL else "--pipeline-model-parallel-size 2"
FLAGS = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 16 --train-iters 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 0 --eval-interval 1000 --log-interval 1
    --num-workers 0 --split 100,0,0 --attention-dropout 0 --hidden-dropout 0 {SIZE} --use-distributed-optimizer
    --transformer-impl local --no-rope-fusion --no-persist-layer-norm --init-method-std 0.02 --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
""".split()
PRELOAD = ("megatron.training.training",)


@pytest.fixture
def environment(tmp_path):
    """What its Makefile calls, of this Python; the shim, which does nothing where CUDA is, in every process."""
    from megatron_cpu_shim import write_sitecustomize

    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python3").symlink_to(sys.executable)
    (tools / "python3-config").write_text(f"#!/bin/sh\necho {sysconfig.get_config_var('EXT_SUFFIX')}\n")
    (tools / "python3-config").chmod(0o755)
    paths = [write_sitecustomize(tmp_path), str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "eth0"}


def pretrain(lab, environment, backend, **options):
    """{iteration: (loss, gradient norm)}"""
    command = [str(CHECKOUT / "pretrain_gpt.py"), *FLAGS, "--distributed-backend", backend]
    ran = lab.run(*command, order="a0,b0,a1,b1" if FULL else "a0,b0", preload=PRELOAD, env=environment, **options)
    assert ran.result.returncode == 0, ran.said
    pattern = r"iteration\s+(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) "
    return {int(step): (float(loss), float(norm)) for step, loss, norm in re.findall(pattern, ran.said)}, ran


def test_losses_and_norms_are_those_of_the_cpu(lab, environment):
    gpu, ran = pretrain(lab, environment, "nccl")
    cpu, _ = pretrain(lab, environment, "gloo", on_gpus=False)
    assert sorted(gpu) == [1, 2, 3, 4] and gpu[4][0] < gpu[1][0]
    assert gpu == pytest.approx(cpu, abs=1e-6)
    assert {group.network for group in ran.groups} == {"Socket", "inside a node"}
