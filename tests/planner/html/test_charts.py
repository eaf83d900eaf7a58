"""Charts of the pages: sizes, limits of axes, colors and names."""

import re
from itertools import combinations
from types import SimpleNamespace

import pytest

from holmes_ext.cluster import nic
from holmes_ext.join.pictures import Incarnation, losses_figure
from holmes_ext.planner.html import chart, cut, pictures
from holmes_ext.planner.html.between import _ticks
from holmes_ext.planner.html.over_time import over_time_figure
from holmes_ext.planner.html.plan_pictures import CAUSE_STYLES, painted
from holmes_ext.report.figures import PlanRow


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


@pytest.mark.parametrize("width", [chart.NARROW, chart.WIDE])
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
    assert axis.get_xlim()[1] < 25 and "the last 10" in axis.get_title("left")
    assert [text.get_text() for text in axis.get_xticklabels()][-1] == "256"


@pytest.mark.parametrize("width", [chart.NARROW, chart.WIDE])
def test_a_chart_has_its_width_and_no_small_text(width):
    rows = [("stage 0", passes(5))]
    text = pictures.svg(pictures.timeline({"x": (rows, 5.0)}, "seconds; " * 20, width))
    points = float(re.search(r'width="([\d.]+)pt"', text)[1])
    assert points == pytest.approx(72 * width, abs=1)
    sizes = [float(size) for size in re.findall(r"([\d.]+)px", text)]
    assert sizes and min(sizes) >= 8.25  # points: 11 CSS pixels
    assert 96 * chart.NARROW <= 390 - 2 * 15  # a page's margins


def test_one_cluster_has_no_picture_of_the_network_between_clusters():
    def names(clusters):
        site = SimpleNamespace(clusters=clusters)
        return set(painted(SimpleNamespace(network=SimpleNamespace(site=site))))

    assert names(["a", "b"]) - names(["a"]) == {"ethernet"}
