"""Stage links and passes out of what ranks told, against the simulation that the trace is of."""

from statistics import median

import pytest
from simulated_steps import step_of

from holmes_ext.adapt.stage_links import Direction, Receive, stage_link_of, stage_links_of
from holmes_ext.plan.cost.pipeline import walked_ends


def test_clocks_that_differ_do_not_matter():
    sent, back = (
        {0: 10.0, 1: 11.0},
        {0: 1012.0, 1: 1013.0},
    )  # the other node's clock is 1000 s ahead
    came = {0: Receive(1009.0, 1010.5, True), 1: Receive(1010.5, 1011.5, True)}
    returned = {0: Receive(11.5, 12.5, True), 1: Receive(12.5, 13.5, True)}
    seconds = stage_link_of(Direction(sent, came), Direction(back, returned))
    assert seconds == pytest.approx(0.5)


def test_a_message_that_waited_for_another_or_came_long_ago_tells_nothing():
    sent = {0: 0.0, 1: 0.1, 2: 0.2, 3: 5.0}
    came = {
        0: Receive(0.0, 1.0, True),
        1: Receive(1.0, 2.0, True),
        2: Receive(2.0, 3.0, True),
        3: Receive(4.0, 9.0, False),
    }
    backward = Direction({0: 10.0}, {0: Receive(9.0, 11.0, True)})
    assert stage_link_of(Direction(sent, came), backward) == pytest.approx(1.0)
    assert stage_link_of(Direction(sent, {3: came[3]}), backward) is None


def reports_of(found):
    """Return the two stages' reports of `found`; stage 1's clock is an hour ahead."""
    told = []
    for stage, way, other in ((0, "0>2", "2>0"), (1, "2>0", "0>2")):
        hour, passes = 3600 * stage, found[stage]
        out, into = ("f", "b") if stage == 0 else ("b", "f")
        sent = [
            [index, span.end + hour]
            for (letter, index), (span, _) in passes.items()
            if letter == out
        ]
        came = [
            [index, -1e9, span.start + hour, waited]
            for (letter, index), (span, waited) in passes.items()
            if letter == into
        ]
        told.append(
            {
                "rank": 2 * stage,
                "stage": stage,
                "messages": {f"g {way}": [sent], f"g {other}": [came]},
            }
        )
    return told


CASES = [
    (layers, each, rate)
    for layers in ((3, 3), (2, 4))
    for each in (0.008, 0.02)
    for rate in (5, 12, 40)
]


@pytest.mark.parametrize("case", CASES)
def test_what_a_step_told_predicts_steps_that_nobody_saw(case):
    seen = step_of(case, (2, 1), 8)
    stage_links = stage_links_of(reports_of(seen))
    assert set(stage_links) == {0}
    busy = [
        [
            median(
                span.end - span.start
                for (letter, _), (span, _) in seen[stage].items()
                if letter == kind
            )
            for stage in (0, 1)
        ]
        for kind in "fb"
    ]
    for held, micro_batches in (((3, 1), 8), ((4, 1), 8), ((2, 1), 16), ((4, 1), 12)):
        unseen = step_of(case, held, micro_batches)
        end = max(span.end for passes in unseen.values() for span, _ in passes.values())
        predicted = max(walked_ends(*busy, [stage_links[0]], micro_batches, held))
        if stage_links[0] < 0.8 * max(
            map(sum, zip(*busy))
        ):  # else messages queue, of which the walk knows nothing
            assert predicted == pytest.approx(end, rel=0.02), (held, micro_batches)
