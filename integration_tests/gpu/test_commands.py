"""Tests that training commands have the same losses on GPUs with NCCL as on CPUs with gloo.

The GPUs are emulated, or one physical GPU is shared by all ranks. The number of ranks depends on the run:

    default               2 nodes with 2 emulated GPUs each: 4 ranks
    one physical GPU      4 nodes with 1 process each: 4 ranks
    HOLMES_TEST_FULL=1    4 nodes with 2 emulated GPUs each: 8 ranks; Megatron with tensor parallelism 2
"""

from dataclasses import replace

import pytest
from carriers import PHYSICAL
from checkouts import checkout_or_skip

from integration_tests.gpu import commands
from integration_tests.jobs import FULL, full, same, some

TENSOR = commands.TENSOR if FULL and not PHYSICAL else ()
NODES = "a0,b0,a1,b1" if FULL or PHYSICAL else "a0,b0"
RANKS = commands.PROCESSES * len(NODES.split(","))


def megatron_lm(folder):
    return commands.megatron_lm(folder, checkout_or_skip("Megatron-LM"), *TENSOR)


def megatron_deepspeed(zero):
    return lambda folder: commands.megatron_deepspeed(
        folder, checkout_or_skip("Megatron-DeepSpeed"), zero, *(TENSOR if zero else ())
    )


def torchtitan(way):
    return lambda folder: commands.torchtitan(folder, way, RANKS)


DEEPSPEED = ("ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "pipeline")
#: Name -> function that returns the command, given a folder for its files.
COMMANDS = {
    **{
        f"DeepSpeed, {name}": lambda folder, number=number: commands.deepspeed(folder)[number]
        for number, name in enumerate(DEEPSPEED)
    },
    "Trainer of transformers": commands.trainer,
    "Megatron-LM": megatron_lm,
    **{f"Megatron-DeepSpeed, ZeRO {zero}": megatron_deepspeed(zero) for zero in (0, 1)},
    **(
        {f"torchtitan, {way}": torchtitan(way) for way in ("HSDP", "1F1B")}
        if commands.INSTALLED.is_dir()
        else {}
    ),  # make torchtitan
}


#: Commands of exhaustive runs only. ZeRO 1 and 3 contain what ZeRO 0 and 2 do, stacks/test_pipelining.py runs
#: torch's own 1F1B over NCCL, and DeepSpeed and Megatron-LM contain what Megatron-DeepSpeed does. The HSDP of
#: torchtitan takes as long as the commands that are left.
EXHAUSTIVE = (
    "DeepSpeed, ZeRO 0",
    "DeepSpeed, ZeRO 2",
    "Megatron-DeepSpeed, ZeRO 0",
    "Megatron-DeepSpeed, ZeRO 1",
    "torchtitan, 1F1B",
    "torchtitan, HSDP",
)


@pytest.mark.parametrize(
    "name", some(COMMANDS, *(name for name in COMMANDS if name not in EXHAUSTIVE))
)
def test_losses_are_those_on_cpus(lab, tmp_path, name):
    command = COMMANDS[name](tmp_path)
    on_gpus = command.losses(lab.lab, NODES, lab.gpus)
    on_cpus = command.losses(lab.lab, NODES, gpus=None)
    assert len(on_gpus) >= 4
    assert on_gpus[-1] < on_gpus[0]
    assert same(on_gpus, on_cpus), (on_gpus, on_cpus)


@full
@pytest.mark.parametrize("name", COMMANDS)
def test_losses_under_holmes_are_stocks(lab, tmp_path, name):
    """The losses with holmes equal those without, both over NCCL."""
    stock = COMMANDS[name](tmp_path)
    ours = replace(stock, name=f"{stock.name} holmes", words=(*stock.words, "--holmes"))
    expected = stock.losses(lab.lab, NODES, lab.gpus)
    assert len(expected) >= 4 and same(ours.losses(lab.lab, NODES, lab.gpus), expected)


def test_a_pipeline_whose_layers_wait_for_the_device(lab, tmp_path):
    """A pipeline with holmes's early receives does not hang if its layers wait for the device."""
    stock = commands.deepspeed(tmp_path)[4]
    expected = stock.losses(lab.lab, NODES, lab.gpus)
    assert len(expected) >= 4
    for wait in ("synchronize", "empty_cache"):
        words = (str(commands.HERE / "waits.py"), wait, *stock.words, "--holmes")
        waits = replace(stock, name=f"{stock.name}, {wait}", words=words)
        assert same(waits.losses(lab.lab, NODES, lab.gpus), expected), wait
