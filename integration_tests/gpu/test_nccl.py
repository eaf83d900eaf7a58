"""Tests the results of NCCL's collectives on emulated GPUs, and the life of its communicators.

The results are compared for different numbers of ranks and channels, data types and sizes. One small case
always runs. The exhaustive cases have 2 to 8 ranks, 1 to 4 channels, and up to 64 MB.
"""

from pathlib import Path

import pytest

from integration_tests.jobs import full

HERE = Path(__file__).parent
MOST = 1 << 24  # elements of float32: 64 MB

#: Number of ranks -> (nodes, processes of each node).
PLACES = {
    2: ("a0", 2),
    3: ("a0,a1,b0", 1),
    4: ("a0,a1", 2),
    6: ("a0,a1,b0", 2),
    8: ("a0,a1,b0,b1", 2),
}


def run_numbers(lab, ranks: int, channels: int, largest: int, types: str) -> None:
    """Run nccl_numbers.py on this many ranks and channels, and assert that it finds no error."""
    order, processes = PLACES[ranks]
    env = {"NCCL_MIN_NCHANNELS": str(channels), "NCCL_MAX_NCHANNELS": str(channels)}
    arguments = ("--largest", str(largest), "--types", types)
    script = str(HERE / "nccl_numbers.py")
    ran = lab.run(script, *arguments, order=order, processes=processes, env=env)
    for line in ran.json:
        assert line["checks"] > 20 and line["wrong"] == []


def test_three_channels_among_three_nodes(lab):
    run_numbers(lab, ranks=3, channels=3, largest=4099, types="float32,bfloat16,int32")


@full
@pytest.mark.parametrize("ranks", list(PLACES))
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_ranks_and_channels(lab, ranks, channels):
    types = "float32,bfloat16,float16,int32,int64,uint8"
    run_numbers(lab, ranks, channels, largest=65536, types=types)


@full
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_large_ones(lab, ranks, kind):
    run_numbers(lab, ranks, channels=2, largest=MOST // (ranks // 2), types=kind)


@pytest.mark.parametrize("nonblocking", [False, True], ids=["blocking", "non-blocking"])
def test_groups_of_rows_and_columns(lab, nonblocking):
    env = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"} if nonblocking else {}
    ran = lab.run(str(HERE / "nccl_life.py"), "groups", order="a0,b0", env=env)
    assert ran.json == [[6, 1, 2], [6, 1, 4], [6, 5, 2], [6, 5, 4]]


def test_a_split_communicator(lab):
    ran = lab.run(str(HERE / "nccl_life.py"), "split", order="a0,b0")
    # Sums of all ranks, of a half of them, and of all again.
    assert ran.json == [[6, 1, 6]] * 2 + [[6, 5, 6]] * 2


def test_several_collectives_in_one_group(lab):
    ran = lab.run(str(HERE / "nccl_life.py"), "many_in_one_call", order="a0")
    assert ran.json == [[[1.0]] * 3] * 2


def test_an_aborted_collective_leaves_the_device_alive(lab):
    ran = lab.run(str(HERE / "nccl_life.py"), "abort", order="a0")
    assert ran.json == ["stayed away", [False, [2, 2, 2]]]
