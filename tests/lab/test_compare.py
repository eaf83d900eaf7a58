import json

import pytest
from holmes_lab.compare import Series, all_rdma, max_loss_difference
from holmes_lab.emulate import trace
from matplotlib.colors import to_rgba

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.html import pictures
from holmes_ext.samples import examples

SPEC = load_spec(examples() / "clusters" / "two_clusters_4.toml")


def test_medians_and_spread():
    series = Series("x", steps=[[1.0, 9.0, 2.0], [4.0, 4.0, 5.0], [3.0, 3.0, 3.0]])
    assert series.medians == [2.0, 4.0, 3.0]
    assert (series.median, series.spread) == (3.0, (2.0, 4.0))


def test_megabytes_are_the_mean_over_the_nodes():
    sent = {"a0": {"eth0": 1e6, "ib0": 4e6}, "b0": {"eth0": 3e6, "roce0": 0.0}}
    assert Series("x", sent=sent).megabytes == (2.0, 2.0)


def test_largest_loss_difference():
    assert (
        max_loss_difference(
            Series("a", losses=[1.0, 2.0, 3.0]), Series("b", losses=[1.0, 2.5, 3.1])
        )
        == 0.5
    )


def test_the_bound_is_one_cluster_of_the_fastest_fabric():
    bound = all_rdma(SPEC)
    (cluster,) = bound.spec.clusters
    assert cluster.nodes == ("a0", "a1", "b0", "b1") == bound.order
    assert (cluster.kind, cluster.rate_bps) == ("ib", 2 * 10**9)
    assert bound.env == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert {node.fabrics for node in site_from_spec(bound.spec).nodes} == {("all", "ethernet")}


def events(offset):
    step = [
        ["forward", 0.0, 0.1, 0],
        ["send", 0.1, 0.12, 100],
        ["backward", 0.2, 0.4, 0],
        ["reduce", 0.4, 0.7, 10**6],
    ]
    made = []
    for number in range(4):
        made += [
            [kind, number + a + offset, number + b + offset, size] for kind, a, b, size in step
        ]
        made.append(["optimizer", number + 0.7 + offset, number + 0.8 + offset, 0])
    return made


@pytest.fixture
def traced(tmp_path):
    for rank in range(2):
        document = {"rank": rank, "node": f"n{rank}", "cluster": "a", "events": events(rank * 0.05)}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(document))
    return pictures.load_traces(tmp_path)


def test_a_step_reaches_from_the_last_optimizers_end_to_the_next(traced):
    assert [t["node"] for t in traced] == ["n0", "n1"]
    begin, end = pictures.last_step(traced)
    assert (begin, end) == pytest.approx((1.85, 2.85))


def test_pictures_are_drawn(traced, monkeypatch):
    site = site_from_spec(SPEC)
    nodes = [node.name for node in site.nodes]
    bound = site_from_spec(all_rdma(SPEC).spec)
    sizes = Sizes(pipeline=2).complete(4)
    figure = pictures.placement_figure(
        [("x", site, nodes, True), ("y", bound, nodes, False)], sizes
    )
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "a0: rank 0\nstage 0" in texts and "b1: rank 3\nstage 1" in texts
    assert "a0: rank 0" in pictures.svg(figure)
    timeline = pictures.timeline_figure({"stock": traced})
    assert len(timeline.axes[0].collections) == 2 * 5
    monkeypatch.setattr(pictures, "MANY", 3)
    many = pictures.timeline_figure({"stock": traced})
    assert len(many.axes[0].images) == 2 and "<image" in pictures.svg(many)
    alone = pictures.svg_file(timeline)
    assert (
        alone.startswith("<svg")
        and "prefers-color-scheme" in alone
        and "gradient reduction" in alone
    )


def test_traced_calls_count_once_and_until_their_wait():
    made = []

    class Work:
        def wait(self):
            return "waited"

    inner = trace._traced(lambda value: Work(), "send", made)
    outer = trace._traced(lambda value: inner(value).wait(), "send", made)
    tensor = __import__("torch").zeros(10)
    assert (
        outer(tensor) == "waited" and len(made) == 1 and made[0][0] == "send" and made[0][3] == 40
    )
    work = inner(tensor)
    assert len(made) == 1  # not over before wait()
    assert work.wait() == "waited" and len(made) == 2
    assert work.wait() == "waited" and len(made) == 2


def test_a_smaller_picture_shows_the_same():
    bar = (
        '<path d="M 1.234 2 \nL 1.234 5.67 \nL 9 5.67 \nL 9 2 \nz\n" clip-path="url(#p)" style="fill: '
        '#4c78a8"/>\n'
    )
    found = pictures.shortened(f'<g>\n{bar}{bar}</g>\n<text x="1.239">0.8436 s</text>')
    place = "M1.2 2V5.6H9V2z"
    look = 'clip-path="url(#p)" style="fill: #4c78a8"'
    assert found == f'<g>\n<path d="{place}{place}" {look}/>\n</g>\n<text x="1.2">0.8436 s</text>'


def test_spans_too_short_to_be_seen_are_shares_of_the_time():
    """A thousand passes, a quarter of each weights and the rest optimizer, then nothing for as long."""
    spans = [
        one
        for number in range(1000)
        for one in (("weights", number, number + 0.25), ("optimizer", number + 0.25, number + 1))
    ]
    (axis,) = pictures.timeline({"x": ([("stage 0", spans)], 2000.0)}, "seconds").axes
    (image,) = (one.get_array() for one in axis.images)
    share = {
        kind: (image == to_rgba(pictures.KINDS[kind][0])).all(axis=2).mean(axis=0)
        for kind in ("weights", "optimizer")
    }
    half = pictures.PIECES // 2
    assert share["weights"][:half].mean() == pytest.approx(0.25, abs=0.02)
    assert share["weights"][:half].max() < 0.4, "no piece differs much from its neighbours"
    both = share["weights"] + share["optimizer"]
    assert both[: half - 1].min() > 0.95 and both[half + 1 :].max() < 0.05
