"""examples/fsdp2 over both clusters: the same losses by --holmes-fsdp hybrid, and how much less crosses."""

from functools import partial

from integration_tests.commands.test_telemetry import check_bytes, told
from integration_tests.jobs import ROOT, full, same
from integration_tests.stacks import test_pipelining as pipelining

SCRIPT = str(ROOT / "examples" / "fsdp2" / "train.py")
MODEL = "--layers 2 --hidden 128 --heads 4 --sequence 16 --micro-batch 1 --micro-batches 2".split()
WEIGHTS_MB = (2 * (12 * 128 * 128 + 13 * 128) + (256 + 16 + 2 + 256) * 128) * 4 / 1e6
train = partial(pipelining.train, steps=8, command=(SCRIPT, *MODEL))


@full
def test_hybrid_trains_the_same_and_sends_a_gradient_for_each_cluster(two_clusters, tmp_path):
    hybrid = (*two_clusters.holmes, "--holmes-fsdp", "hybrid")
    stock, told, flat = train(two_clusters, tmp_path, "stock", *two_clusters.holmes)
    assert any("FSDP gathers" in line and "--holmes-fsdp hybrid:" in line for line in told), told
    ours, told, _ = train(two_clusters, tmp_path, "hybrid", *hybrid)
    assert same(stock, ours) and any("FSDP hybrid: sharded inside" in line for line in told), told
    _, _, short = train(two_clusters, tmp_path, "short", *hybrid, steps=4)
    _, _, long = train(two_clusters, tmp_path, "long", *hybrid, steps=12)
    assert (long - short) / 8 < 2 * WEIGHTS_MB * 1.1 + 0.1, (
        "each of 2 clusters one gradient, and small things"
    )
    assert flat / 8 > 5 * WEIGHTS_MB


@full
def test_checkpoints_load_under_either_mesh(two_clusters, tmp_path):
    hybrid, place = ("--holmes-fsdp", "hybrid"), str(tmp_path / "checkpoint")
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
    run, by_cluster, by_kind = told(tmp_path / "files")
    assert all(len(one.steps) == 8 and one.closed for one in run.ranks)
    check_bytes(by_cluster, sent)
    assert by_kind["data", "inside", "a"] > 8 * 2 * WEIGHTS_MB
    assert by_kind["data", "across", "ethernet"] > 8 * WEIGHTS_MB
