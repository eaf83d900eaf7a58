"""Tests that an output of megatron-core arrives whole, though its memory is freed while it is being sent."""

from pathlib import Path

FREED_OUTPUT = str(Path(__file__).with_name("freed_output.py"))


def test_a_freed_output_arrives_whole(lab):
    """Under holmes, memory that megatron-core frees too early is not used again until the message is sent.

    Without holmes, torch 2.15's backend "nccl" sends the numbers of a later tensor (docs/versions.md).
    """
    ran = lab.run(FREED_OUTPUT, "--holmes", order="a0,b0", processes=1)
    assert ran.result.returncode == 0, ran.said
    assert [line["is_right"] for line in ran.json] == [True, True]
