"""Tests that tensor-parallel ranks share the activations that a stage sends to another cluster.

Each rank sends a slice, so half of the bytes cross with two ranks. The losses must not change.
"""

import pytest
from clusters import toml

from integration_tests.jobs import full, lab_fixture, train_megatron

#: An activation has 65 rows, which 2 ranks cannot divide evenly. 1F1B sends through holmes's mailbox, the
#: interleaved schedule by megatron-core's unbatched operations.
MODEL = (
    "--layers 4 --hidden 128 --sequence 65 --micro-batch 1 "
    "--tensor 2 --pipeline 2 --micro-batches 8"
).split()
SPLITS = {"plain": "--steps 4", "interleaved": "--virtual-pipeline 2 --steps 3"}
clusters = lab_fixture(toml("a ib 1Gb/s a0", "b roce 1Gb/s b0", ethernet="1Gb/s", processes=2))


@pytest.fixture(scope="module")
def stock(clusters, tmp_path_factory):
    return train_megatron(clusters, tmp_path_factory.mktemp("stock"), SPLITS, model=MODEL)


def compared(stock, clusters, directory, *flags, tolerance=1e-6, **env):
    """Train with holmes, and assert that the losses are those of the job without holmes.

    Returns:
        MB on Ethernet as a share of the job without holmes, and the output of all ranks.
    """
    flags = (*clusters.holmes, "--holmes-sizes", "tensor=2,pipeline=2", *flags)
    results, sent, output = train_megatron(clusters, directory, SPLITS, *flags, model=MODEL, **env)
    stock_results, stock_sent, _ = stock
    for name in SPLITS:
        entries = zip(stock_results[name]["entries"], results[name]["entries"], strict=True)
        for expected, entry in entries:
            loss_difference = abs(expected["loss"] - entry["loss"])
            norm_difference = abs(expected["grad_norm"] - entry["grad_norm"])
            assert loss_difference <= tolerance, (name, expected, entry)
            assert norm_difference <= 2 * tolerance, (name, expected, entry)
    crossed_mb = sum(nics["eth0"] for nics in sent.values())
    stock_crossed_mb = sum(nics["eth0"] for nics in stock_sent.values())
    return crossed_mb / stock_crossed_mb, output


def test_half_of_the_bytes_cross_and_losses_are_stocks(stock, clusters, tmp_path):
    share, said = compared(stock, clusters, tmp_path)
    assert "megatron-slices" in said and "2 tensor ranks each send a slice" in said
    assert share <= 0.55, share


@full
def test_batched_operations_too(stock, clusters, tmp_path):
    """Slices also work with megatron-core's own 1F1B schedule, which sends in batches."""
    assert compared(stock, clusters, tmp_path, "--holmes-inflight", "off")[0] <= 0.55


@full
def test_switched_off_all_of_it_crosses(stock, clusters, tmp_path):
    assert compared(stock, clusters, tmp_path, HOLMES_DISABLE="megatron-slices")[0] >= 0.95


@full
def test_slices_in_int8(stock, clusters, tmp_path):
    share, said = compared(
        stock, clusters, tmp_path, "--holmes-compress-activations", "int8", tolerance=0.02
    )
    assert share <= 0.2 and "activations between clusters compressed to int8" in said, share
