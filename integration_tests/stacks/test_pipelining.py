"""Tests examples/torch_pipelining, which uses torch.distributed.pipelining, on two emulated clusters.

With holmes, the losses under each schedule must be those without holmes, and little traffic may use Ethernet.
"""

import pytest

from integration_tests.jobs import ROOT, SCRIPTS, full, losses, over_nccl, said, same, some

SCRIPT = str(ROOT / "examples" / "torch_pipelining" / "train.py")
MODEL = "--layers 4 --hidden 128 --heads 4 --sequence 16 --micro-batch 1 --micro-batches 4".split()
#: MB of gradients of the two layers of a stage, which its replicas reduce in a step.
STAGE_MB = 2 * (12 * 128 * 128 + 13 * 128) * 4 / 1e6
#: MB of the activation of a micro-batch, and of its gradient, which returns.
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
    """Train, and return the losses, the messages of holmes, and the MB of all nodes on Ethernet."""
    log = directory / f"{name}.jsonl"
    before = clusters.lab.counters()
    result = clusters.run(*command, "--steps", str(steps), "--log-file", str(log), *flags)
    assert result.returncode == 0, result.outputs
    ethernet_mb = sum(nics["eth0"] for nics in clusters.sent(before).values())
    return losses(log), said(result), ethernet_mb


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
    *_, mb_of_2_steps = train(two_clusters, tmp_path, "few", *flags, steps=2)
    *_, mb_of_12_steps = train(two_clusters, tmp_path, "many", *flags, steps=12)
    step_mb = (mb_of_12_steps - mb_of_2_steps) / 10
    # In each pipeline, one stage link crosses: 4 micro-batches, forward and backward.
    pipelines = {"1F1B": 2, "four stages": 1}[way]
    crossing_mb = pipelines * 4 * 2 * MESSAGE_MB
    assert step_mb < 1.2 * crossing_mb + 0.05 < STAGE_MB


@full
def test_skip_connections_of_a_traced_model(two_clusters, tmp_path):
    """The pipeline's own group carries skip connections, since their ends are no neighbours."""
    losses_of_runs = []
    for name, flags in (("stock", ()), ("holmes", two_clusters.holmes)):
        result = two_clusters.run(
            str(SCRIPTS / "skips.py"), str(tmp_path / name), *flags, timeout=120
        )
        assert result.returncode == 0, result.outputs
        losses_of_runs.append(losses(tmp_path / name))
    stock, ours = losses_of_runs
    assert len(ours) == 4 and min(ours) > 0.5 and same(stock, ours)
    assert any("pipelining" in line for line in said(result)), result.outputs
