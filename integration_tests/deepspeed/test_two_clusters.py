"""DeepSpeed's pipeline engine on two emulated clusters: where bytes go under holmes, and that what is learned does not change."""

import json

import pytest

from integration_tests.conftest import ROOT, full

TRAIN = str(ROOT / "examples" / "deepspeed_pipeline" / "train.py")
SIZE = "--layers 4 --hidden 128 --heads 4 --sequence 16 --micro-batch 2 --micro-batches 4 --steps 6".split()
STEPS = 6


def train(two_clusters, log, *flags, env=None):
    """Losses of every step, and MB that every NIC sent for each step."""
    before = two_clusters.lab.counters()
    result = two_clusters.run(
        TRAIN, *SIZE, "--log", str(log), *flags, preload=("torch", "deepspeed"), env={"DS_ACCELERATOR": "cpu", **(env or {})}
    )
    assert result.returncode == 0, result.outputs
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert len(losses) == STEPS and losses[-1] < losses[0]
    sent = {node: {nic: mb / STEPS for nic, mb in nics.items()} for node, nics in two_clusters.sent(before).items()}
    return losses, sent


def fast(nics):
    return max(mb for nic, mb in nics.items() if nic != "eth0")


@pytest.mark.parametrize(
    "flags",
    [("--stages", "2"), ("--stages", "2", "--zero", "1", "--dtype", "bf16"), pytest.param(("--stages", "2", "--tied"), marks=full)],
    ids=["fp32", "ZeRO 1 bf16", "tied"],
)
def test_the_loss_is_stocks_and_gradients_stay_inside_clusters(two_clusters, tmp_path, flags):
    stock, stock_sent = train(two_clusters, tmp_path / "stock", *flags)
    holmes, sent = train(two_clusters, tmp_path / "holmes", *flags, "--holmes", "--holmes-cluster", str(two_clusters.file))
    assert max(abs(a - b) for a, b in zip(stock, holmes)) <= 1e-6
    for node, nics in sent.items():
        assert fast(stock_sent[node]) < 0.01
        assert nics["eth0"] < 0.5 * stock_sent[node]["eth0"], (node, nics, stock_sent[node])
        assert fast(nics) > 0.5 * stock_sent[node]["eth0"], (node, nics, stock_sent[node])


def test_a_pair_of_stages_inside_a_cluster_uses_its_fabric(two_clusters, tmp_path):
    """Pipeline 4: the edges a0-a1 and b0-b1 are inside clusters, a1-b0 crosses; there are no gradients to reduce."""
    flags = ("--stages", "4", "--holmes", "--holmes-cluster", str(two_clusters.file))
    losses, sent = train(two_clusters, tmp_path / "on", *flags)
    without, sent_without = train(two_clusters, tmp_path / "off", *flags, env={"HOLMES_DISABLE": "deepspeed-p2p"})
    assert max(abs(a - b) for a, b in zip(losses, without)) <= 1e-6
    activations = 4 * 2 * 16 * 128 * 4 / 1e6  # micro-batches x rows x sequence x hidden x 4 bytes, each way
    for node in ("a0", "b1"):  # the ends of the pipeline: one neighbour, inside the cluster
        assert fast(sent_without[node]) < 0.01 and sent_without[node]["eth0"] > activations
        assert fast(sent[node]) > activations and sent[node]["eth0"] < sent_without[node]["eth0"] - 0.9 * activations
    for node in ("a1", "b0"):  # the middle: one neighbour on the fabric, one over Ethernet
        assert fast(sent[node]) > activations and sent[node]["eth0"] > activations


def test_an_order_that_crosses_although_it_need_not_is_told(two_clusters, tmp_path):
    """A plan made for no sizes, with the nodes in turn: the engine's own sizes show that it could be better."""
    from dataclasses import replace

    from holmes_ext.cluster.site import site_from_spec
    from holmes_ext.plan.build import build_plan

    plan = build_plan(site_from_spec(two_clusters.spec))
    replace(plan, nodes=("a0", "b0", "a1", "b1")).save(tmp_path / "plan.json")
    result = two_clusters.run(
        TRAIN, *SIZE, "--stages", "2", "--holmes", "--holmes-cluster", str(two_clusters.file), "--holmes-plan", str(tmp_path / "plan.json"),
        preload=("torch", "deepspeed"), env={"DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert result.returncode == 0
    told = "2 data groups straddle clusters (on ethernet) and need not: start with --holmes-sizes pipeline=2"
    assert "".join(result.outputs.values()).count(told) == 1


@pytest.mark.parametrize("planned", ["pipeline=4", "pipeline=1"])
def test_sizes_that_are_not_the_jobs_end_it_in_one_line(two_clusters, planned):
    result = two_clusters.run(
        TRAIN, *SIZE, "--stages", "2", "--holmes", "--holmes-cluster", str(two_clusters.file), "--holmes-sizes", planned,
        preload=("torch", "deepspeed"), env={"DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert set(result.statuses.values()) == {2}, result.outputs
    said = "".join(result.outputs.values())
    assert said.count(f"holmes: --holmes-sizes says {planned}, but the program initializes pipeline=2") == 1
    assert "Traceback" not in said and "is lost" not in said
