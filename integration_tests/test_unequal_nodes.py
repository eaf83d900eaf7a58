"""Tests jobs on a cluster whose nodes run one process each, and one whose node runs two.

Every engine must learn what it learns without holmes, in the order of the launcher (a0 b0 a1).
"""

import pytest
from clusters import toml

from integration_tests.jobs import (
    ROOT,
    SIZE,
    lab_fixture,
    losses,
    said,
    same,
    train,
    train_megatron,
)

PLAIN = str(ROOT / "examples" / "plain_torch" / "train.py")
MODEL = "--layers 2 --hidden 64 --sequence 16 --micro-batch 1 --steps 6".split()
#: Four ranks: 0 on a0, 1 and 2 on b0, 3 on a1.
nodes = lab_fixture(
    toml("a ib 2Gb/s a[0-1] processes=1", "b roce 1.6Gb/s b0 processes=2", ethernet="250Mb/s")
)
STOCK = {"GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize("sizes", ["", "pipeline=2"])
def test_plain_torch(nodes, tmp_path, sizes):
    """The ranks of a cluster follow each other; each node keeps its local ranks."""
    flags = [*nodes.holmes, *(["--holmes-sizes", sizes] if sizes else [])]
    for name, more, env in (("stock", [], STOCK), ("holmes", flags, {})):
        result = nodes.run(PLAIN, *MODEL, "--log-file", str(tmp_path / name), *more, env=env)
        assert result.returncode == 0, result.outputs
    (line,) = said(result)
    assert "world size 4, ranks renumbered" in line
    assert "a (2 nodes, ib)" in line and "b (1 node, roce)" in line
    assert same(losses(tmp_path / "stock"), losses(tmp_path / "holmes"), 1e-5)


def test_deepspeed_pipeline(nodes, tmp_path):
    """A stage on both nodes of a, the other on the node of b; its two ranks share the node."""
    flags = ("--stages", "2")
    train(nodes, tmp_path / "stock", *flags, size=SIZE, env=STOCK)
    text = train(
        nodes, tmp_path / "holmes", *flags, *nodes.holmes, "--holmes-sizes", "pipeline=2", size=SIZE
    )
    assert "data groups on memory and ib" in text, text
    assert same(losses(tmp_path / "stock"), losses(tmp_path / "holmes"), 1e-5)


def test_megatron_pipeline(nodes, tmp_path):
    """megatron-core: two stages, with data parallelism inside each cluster."""
    losses_of = {}
    for name, flags in (("stock", ()), ("holmes", nodes.holmes)):
        folder = tmp_path / name
        folder.mkdir()
        splits = {"pipeline": "--pipeline 2 --micro-batches 4 --steps 3"}
        results, _, text = train_megatron(nodes, folder, splits, *flags)
        losses_of[name] = [entry["loss"] for entry in results["pipeline"]["entries"]]
    assert "ranks renumbered" in text
    assert len(losses_of["stock"]) > 1 and same(losses_of["stock"], losses_of["holmes"], 1e-5)
