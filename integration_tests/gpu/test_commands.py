"""Users' training commands on emulated GPUs: the losses of the same commands on CPUs and gloo.

HOLMES_TEST_FULL=1: on 2 + 2 nodes with 2 GPUs each (8 ranks, tensor 2 with Megatron), else on 1 + 1 (4
ranks).
"""

from dataclasses import replace

import pytest

from integration_tests.gpu import commands
from integration_tests.jobs import FULL, full, same

NODES, TENSOR = ("a0,b0,a1,b1", commands.TENSOR) if FULL else ("a0,b0", ())


def compare(lab, command):
    gpu, cpu = (command.losses(lab.lab, NODES, gpus) for gpus in (lab.gpus, None))
    assert len(gpu) >= 4 and gpu[-1] < gpu[0] and same(gpu, cpu), (gpu, cpu)


@pytest.mark.parametrize("number", range(5), ids=["ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "pipeline"])
def test_deepspeed(lab, tmp_path, number):
    compare(lab, commands.deepspeed(tmp_path)[number])


@full
@pytest.mark.parametrize("number", range(5), ids=["ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "pipeline"])
def test_deepspeed_under_holmes(lab, tmp_path, number):
    """Stock's losses, both over NCCL."""
    stock = commands.deepspeed(tmp_path)[number]
    ours = replace(stock, name=f"{stock.name} holmes", words=(*stock.words, "--holmes"))
    assert same(ours.losses(lab.lab, NODES, lab.gpus), stock.losses(lab.lab, NODES, lab.gpus))


def test_a_pipeline_whose_layers_wait_for_the_device(lab, tmp_path):
    """With holmes's early receives: it ends, with stock's losses."""
    stock = commands.deepspeed(tmp_path)[4]
    expected = stock.losses(lab.lab, NODES, lab.gpus)
    assert len(expected) >= 4
    for wait in ("synchronize", "empty_cache"):
        words = (str(commands.HERE / "waits.py"), wait, *stock.words, "--holmes")
        waits = replace(stock, name=f"{stock.name}, {wait}", words=words)
        assert same(waits.losses(lab.lab, NODES, lab.gpus), expected), wait


def test_trainer_of_transformers(lab, tmp_path):
    compare(lab, commands.trainer(tmp_path))


def test_pretrain_gpt_of_megatron_lm(lab, tmp_path):
    checkout = commands.checkout_of("MEGATRON_LM_DIR", "Megatron-LM")
    if checkout is None:
        pytest.skip("git clone https://github.com/NVIDIA/Megatron-LM checkouts/Megatron-LM")
    compare(lab, commands.megatron_lm(tmp_path, checkout, *TENSOR))


@pytest.mark.parametrize("zero", [0, 1])
def test_pretrain_gpt_of_megatron_deepspeed(lab, tmp_path, zero):
    checkout = commands.checkout_of("MEGATRON_DEEPSPEED_DIR", "Megatron-DeepSpeed")
    if checkout is None:
        pytest.skip(
            "git clone https://github.com/deepspeedai/Megatron-DeepSpeed checkouts/Megatron-DeepSpeed")
    compare(lab, commands.megatron_deepspeed(tmp_path, checkout, zero, *(TENSOR if zero else ())))


@pytest.mark.skipif(not commands.INSTALLED.is_dir(), reason="make stacks")
@pytest.mark.parametrize("way", ["HSDP", "1F1B"])
def test_torchtitan_s_train(lab, tmp_path, way):
    compare(lab, commands.torchtitan(tmp_path, way, 2 * len(NODES.split(","))))
