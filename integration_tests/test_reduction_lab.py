"""Tests data-parallel training of examples/plain_torch with holmes on two emulated clusters.

The tests check the losses, the traffic between the clusters, and what the job prints when a rank is killed.
"""

import pytest
from carriers import ON_GPUS, gpu_only

from integration_tests.jobs import ONE_AT_A_TIME, ROOT, SCRIPTS, losses, over_nccl, said, same

SCRIPT = str(ROOT / "examples" / "plain_torch" / "train.py")
MODEL = "--layers 2 --hidden 128 --sequence 16 --micro-batch 1".split()
GRADIENT_MB = (2 * (12 * 128 * 128 + 13 * 128) + (256 + 128 + 2) * 128 - (128 - 16) * 128) * 4 / 1e6


def train(lab, tmp_path, steps, *flags, env=None):
    """Train, and return the losses and the MB that each node sent over Ethernet."""
    before = lab.lab.counters()
    log = tmp_path / f"{steps}.jsonl"
    result = lab.run(SCRIPT, *MODEL, "--steps", str(steps), "--log-file", str(log), *flags, env=env)
    assert result.returncode == 0, result.outputs
    sent = {node: nics["eth0"] for node, nics in lab.sent(before).items()}
    return losses(log), sent


@pytest.fixture(scope="module")
def runs(two_clusters, tmp_path_factory):
    """Return the losses, and the MB of a step that each node sent over Ethernet, by way of reduction.

    The MB of a step are computed from a long and a short run. Adaptation is off, because on busy cores a
    job may find that a ring is as fast.
    """
    results = {}
    as_planned = (*two_clusters.holmes, "--holmes-adapt", "off")
    ways = {
        "flat": ((), {"GLOO_SOCKET_IFNAME": "eth0"}),
        "a hierarchical all-reduce": (as_planned, None),
    }
    for name, (flags, env) in ways.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        _, mb_of_3_steps = train(two_clusters, folder, 3, *flags, env=env)
        losses_of_steps, mb_of_11_steps = train(two_clusters, folder, 11, *flags, env=env)
        step_mb = {node: (mb - mb_of_3_steps[node]) / 8 for node, mb in mb_of_11_steps.items()}
        results[name] = (losses_of_steps, step_mb)
    return results


@over_nccl
def test_what_crosses_is_the_least_possible(runs):
    """Each cluster of C = 2 sends 2 (C-1)/C = 1 gradient, a half from each of its two nodes.

    Headers and small all-reduces may add 6 %.
    """
    _, hierarchical_mb = runs["a hierarchical all-reduce"]
    for node, step_mb in hierarchical_mb.items():
        assert GRADIENT_MB / 2 <= step_mb <= GRADIENT_MB / 2 * 1.06 + 0.02, node
    _, flat_mb = runs["flat"]
    for (
        node,
        step_mb,
    ) in flat_mb.items():  # in a ring of n = 4 nodes, each sends 2 (n-1)/n gradients
        assert step_mb >= GRADIENT_MB * 1.5, node


@over_nccl
@pytest.mark.row("a plain torch loop")
def test_losses_are_the_flat_ring_s(runs):
    flat, _ = runs["flat"]
    hierarchical, _ = runs["a hierarchical all-reduce"]
    assert len(flat) == 11 and same(flat, hierarchical, 1e-5)


@gpu_only
@over_nccl
def test_one_hardware_queue_has_the_same_losses_and_is_told_once(two_clusters, runs, tmp_path):
    """With one hardware queue, a step of the reduction waits for kernels of the backward pass."""
    log = tmp_path / "log"
    result = two_clusters.run(
        SCRIPT,
        *MODEL,
        "--steps",
        "11",
        "--log-file",
        str(log),
        *two_clusters.holmes,
        env=ONE_AT_A_TIME["CUDA_DEVICE_MAX_CONNECTIONS"],
    )
    assert result.returncode == 0, result.outputs
    assert sum("CUDA_DEVICE_MAX_CONNECTIONS=1: " in line for line in said(result)) == 1, (
        result.outputs
    )
    assert same(runs["a hierarchical all-reduce"][0], losses(log))


def test_a_rank_that_dies_ends_the_job_with_its_node_s_name(two_clusters):
    env = {"NODE_THAT_DIES": "b1"}
    script = str(SCRIPTS / "dies.py")
    result = two_clusters.run(
        script,
        SCRIPT,
        *MODEL,
        "--steps",
        "1000000",
        *two_clusters.holmes,
        "--holmes-adapt",
        "off",
        env=env,
        timeout=120,
        grace=20,
    )
    assert result.returncode == 137
    text = "".join(result.outputs.values())
    assert "step 11:" in result.stdout[0], "it must have trained before"
    assert "node b1 (rank 3) is lost" in text, text
    if ON_GPUS:
        parts = ("NCCL's COMM_ERROR", "in the group of ranks ")
    else:
        parts = ("reduction of bucket 0 of 2", "fabric ethernet in the group of ranks 0, 1, 2, 3")
    assert all(part in text for part in parts), text
