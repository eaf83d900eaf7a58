"""Tests examples/fsdp2 over both clusters with --holmes-fsdp hybrid.

The losses must not change, and less traffic must cross between the clusters.
"""

from functools import partial

from integration_tests.commands.test_telemetry import check_bytes, sent_mb_of
from integration_tests.jobs import ROOT, full, same
from integration_tests.stacks import test_pipelining as pipelining

SCRIPT = str(ROOT / "examples" / "fsdp2" / "train.py")
MODEL = "--layers 2 --hidden 128 --heads 4 --sequence 16 --micro-batch 1 --micro-batches 2".split()
WEIGHTS_MB = (2 * (12 * 128 * 128 + 13 * 128) + (256 + 16 + 2 + 256) * 128) * 4 / 1e6
train = partial(pipelining.train, steps=8, command=(SCRIPT, *MODEL))


@full
def test_hybrid_trains_the_same_and_sends_a_gradient_for_each_cluster(two_clusters, tmp_path):
    hybrid = (*two_clusters.holmes, "--holmes-fsdp", "hybrid")
    # Without the flag, weights are sharded over all ranks, and holmes prints an advice.
    stock, lines, flat_mb = train(two_clusters, tmp_path, "stock", *two_clusters.holmes)
    assert any("FSDP gathers" in line and "--holmes-fsdp hybrid:" in line for line in lines), lines
    ours, lines, _ = train(two_clusters, tmp_path, "hybrid", *hybrid)
    assert same(stock, ours)
    assert any("FSDP hybrid: sharded inside" in line for line in lines), lines
    _, _, mb_of_4_steps = train(two_clusters, tmp_path, "short", *hybrid, steps=4)
    _, _, mb_of_12_steps = train(two_clusters, tmp_path, "long", *hybrid, steps=12)
    # Each of the two clusters sends one gradient a step, and small messages.
    assert (mb_of_12_steps - mb_of_4_steps) / 8 < 2 * WEIGHTS_MB * 1.1 + 0.1
    assert flat_mb / 8 > 5 * WEIGHTS_MB


@full
def test_checkpoints_load_under_either_mesh(two_clusters, tmp_path):
    hybrid = ("--holmes-fsdp", "hybrid")
    place = str(tmp_path / "checkpoint")
    for first, second in ((hybrid, ()), ((), hybrid)):
        train(
            two_clusters, tmp_path, "first", *two_clusters.holmes, *first, "--save", place, steps=3
        )
        same_way, *_ = train(
            two_clusters, tmp_path, "same", *two_clusters.holmes, *first, "--load", place, steps=6
        )
        other_way, *_ = train(
            two_clusters, tmp_path, "other", *two_clusters.holmes, *second, "--load", place, steps=6
        )
        assert len(other_way) == 3 and same(same_way, other_way)


@full
def test_telemetry_sees_its_collectives(two_clusters, tmp_path):
    before = two_clusters.lab.counters()
    train(
        two_clusters,
        tmp_path,
        "seen",
        *two_clusters.holmes,
        "--holmes-fsdp",
        "hybrid",
        "--holmes-telemetry",
        str(tmp_path / "files"),
    )
    sent = two_clusters.sent(before)
    run, mb_by_cluster, mb_by_kind = sent_mb_of(tmp_path / "files")
    assert all(len(rank.steps) == 8 and rank.closed for rank in run.ranks)
    check_bytes(mb_by_cluster, sent)
    assert mb_by_kind["data", "inside", "a"] > 8 * 2 * WEIGHTS_MB
    assert mb_by_kind["data", "across", "ethernet"] > 8 * WEIGHTS_MB
