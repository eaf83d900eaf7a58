"""Tests examples/torch_pipelining, which uses torch.distributed.pipelining, on two emulated clusters.

With holmes, the losses under each schedule must be those without holmes, and little traffic may use Ethernet.
"""

import pytest

from integration_tests.jobs import ROOT, SCRIPTS, full, losses, over_nccl, said, same, some

SCRIPT = str(ROOT / "examples" / "torch_pipelining" / "train.py")
MODEL = "--layers 4 --hidden 128 --heads 4 --sequence 16 --micro-batch 1 --micro-batches 4".split()
#: Of the two layers of a stage: what its replicas reduce in a step.
STAGE_MB = 2 * (12 * 128 * 128 + 13 * 128) * 4 / 1e6
#: Of one micro-batch: what goes down and comes back.
MESSAGE_MB = 16 * 128 * 4 / 1e6
WAYS = {
    "1F1B": "--pipeline 2 --schedule 1F1B",
    "four stages": "--pipeline 4 --schedule 1F1B",
    "GPipe": "--pipeline 2 --schedule GPipe",
    "interleaved": "--pipeline 2 --schedule Interleaved1F1B --chunks 2",
    "breadth first": "--pipeline 2 --schedule LoopedBFS --chunks 2 --mesh dp,pp",
    "zero bubble": "--pipeline 2 --schedule InterleavedZeroBubble --chunks 2 --data-parallel fsdp",
}


def train(clusters, directory, name, *flags, steps=4, command=(SCRIPT, *MODEL)):
    """(losses, what holmes said, MB that all nodes sent on Ethernet)"""
    log, before = directory / f"{name}.jsonl", clusters.lab.counters()
    result = clusters.run(*command, "--steps", str(steps), "--log-file", str(log), *flags)
    assert result.returncode == 0, result.outputs
    return losses(log), said(result), sum(nics["eth0"] for nics in clusters.sent(before).values())


@over_nccl
@pytest.mark.row("torch's pipelining")
@pytest.mark.parametrize("way", some(list(WAYS), "breadth first"))
def test_losses_are_stock_s(two_clusters, tmp_path, way):
    flags = WAYS[way].split()
    stock, *_ = train(two_clusters, tmp_path, "stock", *flags)
    ours, told, _ = train(two_clusters, tmp_path, "holmes", *flags, *two_clusters.holmes)
    assert same(stock, ours) and any("pipelining" in line for line in told), told


@pytest.mark.parametrize("way", some(["1F1B", "four stages"]))
def test_messages_of_the_pipelines_cross_and_no_gradient_does(two_clusters, tmp_path, way):
    flags = (*WAYS[way].split(), *two_clusters.holmes)
    *_, few = train(two_clusters, tmp_path, "few", *flags, steps=2)
    *_, many = train(two_clusters, tmp_path, "many", *flags, steps=12)
    # pipelines, each with one stage link that crosses
    crossing = {"1F1B": 2, "four stages": 1}[way] * 4 * 2 * MESSAGE_MB
    assert (many - few) / 10 < 1.2 * crossing + 0.05 < STAGE_MB


@full
def test_skip_connections_of_a_traced_model(two_clusters, tmp_path):
    """Their ends are no neighbours: the pipeline's own group carries them, whose communicator all its ranks
    make.
    """
    found = []
    for name, flags in (("stock", ()), ("holmes", two_clusters.holmes)):
        result = two_clusters.run(
            str(SCRIPTS / "skips.py"), str(tmp_path / name), *flags, timeout=120
        )
        assert result.returncode == 0, result.outputs
        found.append(losses(tmp_path / name))
    stock, ours = found
    assert len(ours) == 4 and 0.5 < min(ours) and same(stock, ours)
    assert any("pipelining" in line for line in said(result)), result.outputs
