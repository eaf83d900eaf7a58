"""Tests DeepSpeed's pipeline engine on two emulated clusters.

Gradients must stay on the fast networks of the clusters, and the losses must equal those without holmes.
"""

import re
from dataclasses import replace

import pytest
from carriers import gloo_only, gpu_only

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.plan.build import build_plan
from integration_tests.jobs import (
    ONE_AT_A_TIME,
    SCRIPTS,
    SIZE,
    STEPS,
    TRAIN,
    fast,
    full,
    launch,
    losses,
    over_nccl,
    said,
    same,
    train,
)


def measured(clusters, log, *flags, **more):
    """Train a job; return the loss of every step, and MB a step: {node: {NIC: MB sent}}."""
    before = clusters.lab.counters()
    train(clusters, log, *flags, **more)
    losses_of_steps = losses(log)
    assert len(losses_of_steps) == STEPS and losses_of_steps[-1] < losses_of_steps[0]
    mb_per_step = {}  # node -> NIC -> MB
    for node, nics in clusters.sent(before).items():
        mb_per_step[node] = {nic: mb / STEPS for nic, mb in nics.items()}
    return losses_of_steps, mb_per_step


@pytest.mark.row("DeepSpeed's pipeline engine")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--stages", "2"), id="fp32"),
        pytest.param(
            ("--stages", "2", "--zero", "1", "--dtype", "bf16"), id="ZeRO 1 bf16", marks=over_nccl
        ),
        pytest.param(("--stages", "2", "--tied"), id="tied", marks=full),
    ],
)
@pytest.mark.each_landing
def test_the_loss_is_stocks_and_gradients_stay_inside_clusters(two_clusters, tmp_path, flags):
    stock, stock_sent = measured(two_clusters, tmp_path / "stock", *flags)
    holmes, sent = measured(two_clusters, tmp_path / "holmes", *flags, *two_clusters.holmes)
    assert same(stock, holmes)
    for node, nics in sent.items():
        assert fast(stock_sent[node]) < 0.01
        assert nics["eth0"] < 0.5 * stock_sent[node]["eth0"], (node, nics, stock_sent[node])
        assert fast(nics) > 0.5 * stock_sent[node]["eth0"], (node, nics, stock_sent[node])


def test_a_pair_of_stages_inside_a_cluster_uses_its_fabric(two_clusters, tmp_path):
    """With 4 pipeline stages, the stage links a0-a1 and b0-b1 are inside clusters, and a1-b0 crosses.

    Each stage has one rank, so there are no gradients to reduce.
    """
    flags = ("--stages", "4", *two_clusters.holmes)
    losses_with, sent = measured(two_clusters, tmp_path / "on", *flags)
    env = {"HOLMES_DISABLE": "deepspeed-p2p,deepspeed-stage-links"}
    losses_without, sent_without = measured(two_clusters, tmp_path / "off", *flags, env=env)
    assert same(losses_with, losses_without)
    # micro-batches x rows x sequence x hidden x 4 bytes, in each direction
    activations_mb = 4 * 2 * 16 * 128 * 4 / 1e6
    for node in ("a0", "b1"):  # ends of the pipeline, with one neighbour inside the cluster
        assert fast(sent_without[node]) < 0.01
        assert sent_without[node]["eth0"] > activations_mb
        assert fast(sent[node]) > activations_mb
        assert sent[node]["eth0"] < sent_without[node]["eth0"] - 0.9 * activations_mb
    for node in ("a1", "b0"):  # inner stages, with one neighbour inside the cluster and one across
        assert fast(sent[node]) > activations_mb
        assert sent[node]["eth0"] > activations_mb


@gpu_only
@full
@pytest.mark.parametrize("how", ONE_AT_A_TIME)
def test_messages_that_come_early_hold_nothing_up(two_clusters, tmp_path, how):
    """A job trains if all CUDA streams share one hardware queue, or the CPU waits for each launch."""
    flags = ("--stages", "2", "--tied")
    stock, _ = measured(two_clusters, tmp_path / "stock", *flags)
    ours, _ = measured(
        two_clusters, tmp_path / "ours", *flags, *two_clusters.holmes, env=ONE_AT_A_TIME[how]
    )
    assert same(stock, ours)


@full
def test_more_micro_batches_in_flight_learn_the_same(two_clusters, tmp_path):
    """Three more micro-batches in flight than under 1F1B have the losses of the engine's own schedule.

    There are four stages, and messages are received in advance from the third step on.
    """
    flags = ("--stages", "4", *two_clusters.holmes)
    more, _ = measured(two_clusters, tmp_path / "more", *flags, "--holmes-inflight", "3")
    engines, _ = measured(two_clusters, tmp_path / "off", *flags, "--holmes-inflight", "off")
    assert same(more, engines)


def test_an_order_that_crosses_although_it_need_not_is_told(two_clusters, tmp_path):
    """A plan without sizes places the nodes such that data groups span clusters, which holmes reports.

    The sizes of the engine show that another order of the nodes would be better.
    """
    plan = build_plan(site_from_spec(two_clusters.spec))
    replace(plan, nodes=("a0", "b0", "a1", "b1")).save(tmp_path / "plan.json")
    planned = ("--holmes-plan", str(tmp_path / "plan.json"))
    text = train(two_clusters, tmp_path / "log", "--stages", "2", *two_clusters.holmes, *planned)
    message = "2 data groups span clusters (on ethernet) and need not: start with --holmes-sizes pipeline=2"
    assert text.count(message) == 1


@pytest.mark.parametrize("planned", ["pipeline=4", "pipeline=1"])
def test_sizes_that_are_not_the_jobs_end_it_in_one_line(two_clusters, planned):
    flags = ("--stages", "2", *two_clusters.holmes, "--holmes-sizes", planned)
    result = launch(two_clusters, TRAIN, *SIZE, *flags)
    assert set(result.statuses.values()) == {2}, result.outputs
    text = "".join(result.outputs.values())
    assert (
        text.count(f"holmes: --holmes-sizes says {planned}, but the program initializes pipeline=2")
        == 1
    )
    assert "Traceback" not in text and "is lost" not in text


@gloo_only  # with a GPU, DeepSpeed passes a CUDA device to gloo's groups, which torch refuses
@pytest.mark.parametrize("step", [pytest.param(0, marks=full), 3])
def test_a_shorter_micro_batch_ends_the_job_in_one_line(two_clusters, step):
    """A shorter micro-batch ends the job, before shapes of messages are known and afterwards.

    Without holmes, half a message would stay in the buffer.
    """
    result = launch(
        two_clusters, str(SCRIPTS / "shorter_batch.py"), str(step), "1", *two_clusters.holmes
    )
    assert set(result.statuses.values()) == {2}, result.outputs
    message = (
        r"holmes: stage link from stage 0 to stage 1 \(to rank [23]\): micro-batch 1 is \(3, 8\) "
        r"torch.float32, expected \(4, 8\) torch.float32; give all"
    )
    lines = [line for line in said(result) if re.search(message, line)]
    assert lines, result.outputs
    for rank, text in result.outputs.items():
        assert re.search("holmes: .*stage link from stage 0 .*to stage 1", text), (rank, text)
        assert "Traceback" not in text, (rank, text)
