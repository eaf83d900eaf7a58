"""Charts of the pages: sizes, limits of axes, colors and names."""

import re
import time
from itertools import combinations
from math import log
from types import SimpleNamespace

import pytest
from matplotlib.colors import to_hex

from holmes_ext.cluster import nic
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.join import estimate as joined
from holmes_ext.join.pictures import Incarnation, losses_figure, rounds_figure
from holmes_ext.join.show_plan import JoinedForecast
from holmes_ext.join.simulated_rounds import JoinedJob
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.planner.html import chart, cut, pictures
from holmes_ext.planner.html.between import _ticks, draw_clusters, draw_what_if
from holmes_ext.planner.html.over_time import over_time_figure
from holmes_ext.planner.html.plan_pictures import CAUSE_STYLES, painted, placement
from holmes_ext.planner.search.fewer import best_use
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.space import Limits
from holmes_ext.report.figures import PlanRow

WIDTHS = [chart.NARROW, chart.WIDE]
MODEL = Model(
    layers=8,
    hidden=1024,
    heads=8,
    sequence=512,
    vocabulary=1000,
    micro_batches=1,
    gpu=Gpu(flops=1e13),
)
ONE = dict.fromkeys(("tensor", "context", "virtual", "micro_batch"), (1,))
LIMITS = Limits({**ONE, "zero": (0,), "recompute": ("none",)})
#: Cluster b is far away: a job is faster on a and c alone.
FAR_CLUSTER = """version = 2
ethernet = {rate = "25Gb/s"}
cluster = [{name = "a", kind = "ethernet", nodes = ["a[0-1]"]},
           {name = "b", kind = "ethernet", nodes = ["b[0-1]"]},
           {name = "c", kind = "ethernet", nodes = ["c[0-1]"]}]
between = [{clusters = ["a", "b"], rate = "1Mb/s", latency = "90ms"},
           {clusters = ["b", "c"], rate = "2Mb/s", latency = "80ms"},
           {clusters = ["a", "c"], rate = "100Gb/s", latency = "1ms"}]
"""


@pytest.fixture(autouse=True)
def no_open_figures():
    yield
    pictures.pyplot().close("all")


@pytest.fixture(scope="module")
def without_b():
    """Return the result of a search on the clusters of FAR_CLUSTER, of which it leaves out b."""
    spec = parse_spec(FAR_CLUSTER)
    request = SearchResult(Network(site_from_spec(spec), Links.of_spec(spec)), MODEL, 16, LIMITS)
    result = best_use(search(request, prove=False), spec, time.monotonic() + 60)
    assert result.network.site.clusters == ("a", "c")
    return result


def extents_of(texts):
    """Return the boxes of the texts that are drawn, in pixels."""
    return [text.get_window_extent() for text in texts if text.get_text()]


def rgb(color):
    return [int(color[at : at + 2], 16) for at in (1, 3, 5)]


SPANS = {name: color for name, (color, _) in chart.KINDS.items()}
PLAN_SPANS = [SPANS[name] for name in SPANS if name not in ("send", "receive", "reduce")]
RUN_SPANS = [SPANS[name] for name in SPANS if name not in ("inside", "across")]


@pytest.mark.parametrize(
    "colors",
    [
        {*PLAN_SPANS, *chart.CLUSTER_COLORS, *(color for color, _ in CAUSE_STYLES.values())},
        {*RUN_SPANS, *(nic.KINDS[name].color for name in ("ib", "roce", "ethernet"))},
        {*RUN_SPANS, chart.PLAN, chart.ROUND, chart.EXPOSED_ROUND},
    ],
    ids=["plan", "demo", "report"],
)
def test_a_color_has_one_meaning_on_a_page(colors):
    for one, two in combinations(sorted(colors), 2):
        assert sum(abs(a - b) for a, b in zip(rgb(one), rgb(two))) >= 45, (one, two)
    assert len(set(CAUSE_STYLES.values())) == len(CAUSE_STYLES)


@pytest.mark.parametrize("low, high", [(0.6, 0.7), (1.0, 1.3), (0.5, 12), (10.6, 200)])
def test_ticks_of_a_logarithmic_axis_lie_inside(low, high):
    ticks = _ticks(pictures.pyplot(), low, high)
    assert ticks and all(low <= tick <= high for tick in ticks)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_limits_of_the_what_if_chart_come_from_its_data(without_b, width):
    for axis in draw_what_if(without_b, width).axes:
        low, high = axis.get_ylim()
        seconds = [second for line in axis.lines[:2] for second in line.get_ydata()]
        shares = [log(second / low) / log(high / low) for second in seconds]
        assert min(shares) > 0.03 and max(shares) < 0.97  # no marker lies on the border
    (left, right) = draw_what_if(without_b, width).axes
    extremes = [line.get_ydata() for axis in (left, right) for line in axis.lines[:2]]
    low, high = left.get_ylim()
    assert min(map(min, extremes)) / low < 2 and high / max(map(max, extremes)) < 2


def test_clusters_that_are_left_out_stay_in_the_picture_with_their_links(without_b):
    (axis,) = draw_clusters(without_b).axes
    texts = [text.get_text() for text in axis.texts]
    assert "b\n2 nodes\nleft out" in texts
    assert {"1 Mb/s\n90 ms", "2 Mb/s\n80 ms", "100 Gb/s\n1 ms"} < set(texts)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_cluster_has_one_color_in_all_pictures(without_b, width):
    (axis,) = draw_clusters(without_b).axes
    of_circles = [to_hex(circle.get_facecolor()[0]) for circle in axis.collections]
    (axis,) = placement(without_b, width).axes
    handles, names = axis.get_legend_handles_labels()
    of_bars = {name: to_hex(bars[0].get_facecolor()) for name, bars in zip(names, handles)}
    assert of_bars == {"a": of_circles[0], "c": of_circles[2]}
    assert len(set(of_circles)) == 3


def test_the_hidden_chart_of_another_width_shares_no_id():
    """A browser takes the first element with an id, and draws no hatches of a hidden one."""

    def paint(width):
        figure, axis = pictures.pyplot().subplots()
        axis.bar([0], [1], hatch="///")
        return figure

    wide, narrow = pictures.chart(paint, "bars").split("<div class=narrow>")
    ids = [set(re.findall(r'\bid="([^"]+)"', part)) for part in (wide, narrow)]
    assert len(ids[0]) >= 2 and not ids[0] & ids[1]
    assert set(re.findall(r"url\(#([^)]+)\)", narrow)) <= ids[1]


def test_weak_colors_are_drawn():
    figure, axis = pictures.pyplot().subplots()
    axis.axvspan(0, 1, color=chart.INK, alpha=0.04)
    assert "opacity: 0.04" in pictures.svg(figure)


def forecast_of(step_s):
    """Return a forecast of three joined jobs whose steps take so long, in seconds."""
    site = site_from_spec(parse_spec(FAR_CLUSTER))
    jobs = [JoinedJob(name, 10, step_s) for name in site.clusters]
    return JoinedForecast(joined.RoundForecasts(site, 1e6, jobs), 100, 1.0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("step_s, labels", [(0.002, 1), (2.0, 3)])  # long axis, many labels
def test_no_label_of_the_joined_chart_covers_another(width, step_s, labels):
    figure = forecast_of(step_s).figure(width)
    figure.canvas.draw()
    (axis,) = figure.axes
    low, high = axis.get_xlim()
    ticks = [tick.label1 for tick in axis.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert len(ticks) >= 3 and len(axis.texts) == labels
    for texts in (ticks, axis.texts):
        for one, two in combinations(extents_of(texts), 2):
            assert not one.padded(2).overlaps(two)
    # Below its point, a label would cover the line that rises to it.
    assert all(text.xyann[1] > 0 for text in axis.texts)
    assert max(extent.y1 for extent in extents_of(axis.texts)) <= axis.get_window_extent().y1 + 1


def test_rounds_that_were_not_committed_are_hatched():
    """A text in each bar would cover the next one's."""
    report = {"verdict": "commit", "seconds": 2.0, "exposed": 0.1, "drift": 0.5}
    failed = {**report, "verdict": "void", "drift": None}
    run = SimpleNamespace(rounds={1: [report], 2: [failed], 3: [failed], 4: [report]})
    figure = rounds_figure(run)
    above, below = figure.axes
    labels = {bars.get_label(): bars for bars in above.containers}
    failed_bars = labels["under way, not committed (void)"]
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in failed_bars] == [2, 3]
    assert all(bar.get_hatch() for bar in failed_bars)
    assert not any(bar.get_hatch() for bar in labels["under way"])
    assert list(below.lines[0].get_xdata()) == [1, 4]
    assert not above.texts


@pytest.mark.parametrize("width", WIDTHS)
def test_the_name_of_a_job_that_is_killed_late_stays_inside(width):
    lives = [Incarnation("a", 20.0, [1.0] * 20, [2.0] * 20, killed=True)]
    figure = losses_figure(lives, width)
    figure.canvas.draw()
    (axis,) = figure.axes
    (extent,) = extents_of(axis.texts)
    assert extent.x1 <= axis.get_window_extent().x1


@pytest.mark.parametrize("width", WIDTHS)
def test_the_names_of_plans_stay_inside_the_axes(width):
    run = SimpleNamespace(steps=list(range(5, 25)), took=lambda steps: [1.0] * len(steps))
    plans = tuple(
        PlanRow(step, (2, 1), 1.1, 5, 1.0) for step in (0, 3, 10, 24)
    )  # the first ends before the picture, the second begins before it
    figure = over_time_figure(run, plans, width)
    figure.canvas.draw()
    (axis,) = figure.axes
    box = axis.get_window_extent()
    assert len(axis.texts) == 3
    for text in axis.texts:
        extent = text.get_window_extent()
        assert extent.x0 >= box.x0 - 1 and extent.x1 <= box.x1 + 1 and extent.y1 <= box.y1 + 1


def test_the_end_of_a_killed_job_is_named_above_all_lines():
    lives = [
        Incarnation("east", 20.0, [1.0] * 20, [2.0] * 20),
        Incarnation("west", 7.0, [1.0] * 7, [2.0] * 7, killed=True),
        Incarnation("west", 20.0, [1.0] * 10, [2.0] * 10),
    ]
    (axis,) = losses_figure(lives).axes
    (text,) = axis.texts
    assert text.get_text() == "west is killed"
    curves = [line for line in axis.lines if len(line.get_xdata()) > 2]
    (cross,) = [line for line in axis.lines if line.get_marker() == "x"]
    assert cross.get_zorder() > max(line.get_zorder() for line in curves)
    assert text.get_zorder() > max(line.get_zorder() for line in curves)


def passes(count):
    forward = [("forward", float(number), number + 0.5) for number in range(count)]
    return [*forward, *[("backward", number + 0.5, number + 1.0) for number in range(count)]]


def test_of_many_micro_batches_the_first_and_the_last_ten_are_drawn():
    assert cut.cut_of([("stage 0", passes(60))], chunks=1) is None
    rows = [("stage 0", passes(256))]
    found = cut.cut_of(rows, chunks=1)
    assert (found.start, found.end) == (9.5, 246.5)
    ((_, spans),) = found.rows(rows)
    assert len([kind for kind, _, _ in spans if kind == "forward"]) == 10 + 9
    assert len([kind for kind, _, _ in spans if kind == "backward"]) == 9 + 10
    (axis,) = pictures.timeline({"x": (rows, 256.0)}, "seconds").axes
    assert axis.get_xlim()[1] < 25
    title = "x (first and last 10 micro-batches, without 9.5 to 246 s)"
    assert axis.get_title("left") == title
    assert [text.get_text() for text in axis.get_xticklabels()] == ["0", "256"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_chart_has_its_width_and_no_small_text(width):
    rows = [("stage 0", passes(5))]
    text = pictures.svg(pictures.timeline({"x": (rows, 5.0)}, "seconds; " * 20, width))
    points = float(re.search(r'width="([\d.]+)pt"', text)[1])
    assert points == pytest.approx(72 * width, abs=1)
    sizes = [float(size) for size in re.findall(r"([\d.]+)px", text)]
    assert sizes and min(sizes) >= 8.25  # points: 11 CSS pixels
    assert 96 * chart.NARROW <= 390 - 2 * 15  # a page's margins


def test_one_cluster_has_no_picture_of_the_network_between_clusters():
    def result(clusters, on_all=None):
        network = SimpleNamespace(site=SimpleNamespace(clusters=clusters))
        return SimpleNamespace(network=network, on_all=on_all)

    of_two = set(painted(result(["a", "b"])))
    assert of_two - set(painted(result(["a"]))) == {"clusters", "ethernet"}
    # b is left out: it is shown beside a, but no network is between the clusters of the plan.
    assert of_two - set(painted(result(["a"], on_all=result(["a", "b"])))) == {"ethernet"}
