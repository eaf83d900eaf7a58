"""Tensor ranks share out what a stage sends to another cluster: losses are stock's, and half of the bytes
cross.
"""

import pytest
from clusters import toml

from integration_tests.jobs import full, lab_fixture, train_megatron

#: 65 rows of a tensor, which 2 ranks cannot share out evenly. 1F1B goes through the mailbox, the interleaved
#: schedule through megatron-core's unbatched operations.
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
    """MB that crossed under holmes, of stock's; what was said. Losses are stock's."""
    flags = (*clusters.holmes, "--holmes-sizes", "tensor=2,pipeline=2", *flags)
    done, sent, said = train_megatron(clusters, directory, SPLITS, *flags, model=MODEL, **env)
    for name in SPLITS:
        for one, other in zip(stock[0][name]["entries"], done[name]["entries"], strict=True):
            assert abs(one["loss"] - other["loss"]) <= tolerance, (name, one, other)
            assert abs(one["grad_norm"] - other["grad_norm"]) <= 2 * tolerance, (name, one, other)
    crossed, of_stock = (sum(nics["eth0"] for nics in each.values()) for each in (sent, stock[1]))
    return crossed / of_stock, said


def test_half_of_the_bytes_cross_and_losses_are_stocks(stock, clusters, tmp_path):
    share, said = compared(stock, clusters, tmp_path)
    assert "megatron-slices" in said and "2 tensor ranks each send a slice" in said
    assert share <= 0.55, share


@full
def test_batched_operations_too(stock, clusters, tmp_path):
    """megatron-core's own 1F1B sends batches."""
    assert compared(stock, clusters, tmp_path, "--holmes-inflight", "off")[0] <= 0.55


@full
def test_switched_off_all_of_it_crosses(stock, clusters, tmp_path):
    assert compared(stock, clusters, tmp_path, HOLMES_DISABLE="megatron-slices")[0] >= 0.95


@full
def test_slices_in_int8(stock, clusters, tmp_path):
    share, said = compared(
        stock, clusters, tmp_path, "--holmes-compress-activations", "int8", tolerance=0.02
    )
    assert share <= 0.2 and "stage links that cross in int8" in said, share
