"""Tests clusters of three and of two nodes, with data parallelism and a pipeline of five stages."""

import pytest
from clusters import toml

from integration_tests.jobs import ROOT, SIZE, full, lab_fixture, losses, said, same, train

PLAIN = str(ROOT / "examples" / "plain_torch" / "train.py")
MODEL = "--layers 2 --hidden 64 --sequence 16 --micro-batch 1 --steps 6".split()
pytestmark = full
unequal = lab_fixture(toml("a ib 2Gb/s a[0-2]", "b roce 1.6Gb/s b[0-1]", ethernet="250Mb/s"))


def test_plain_torch_has_the_losses_of_a_flat_ring(unequal, tmp_path):
    for name, flags in (("stock", ()), ("holmes", unequal.holmes)):
        env = {} if flags else {"GLOO_SOCKET_IFNAME": "eth0"}
        result = unequal.run(PLAIN, *MODEL, "--log-file", str(tmp_path / name), *flags, env=env)
        assert result.returncode == 0, result.outputs
    assert any("2 clusters: a (3 nodes" in line for line in said(result)), said(result)
    our_losses = losses(tmp_path / "holmes")
    assert len(our_losses) == 6 and same(losses(tmp_path / "stock"), our_losses, 1e-5)


@pytest.mark.parametrize("stages", ["1", "5"])
def test_deepspeed_learns_what_stock_does(unequal, tmp_path, stages):
    """Losses do not change with one stage on all nodes (ZeRO 1), and with a stage on each node."""
    flags = ("--stages", stages, *(("--zero", "1") if stages == "1" else ("--layers", "5")))
    for name, more in (("stock", ()), ("holmes", unequal.holmes)):
        train(unequal, tmp_path / name, *flags, *more, size=SIZE)
    assert same(losses(tmp_path / "stock"), losses(tmp_path / "holmes"), 1e-5)
