"""pytest plugin that decides how many of the slow tests run: all, none, or a share.

There are two kinds of slow tests:

    exhaustive    tests with the mark `full`
    recorded      tests that took 5 seconds or more in an earlier run, by the file slow_tests.json. Tests
                  with the mark `each_landing` are exempt: they run however slow they are

The environment variable HOLMES_TEST_FULL selects how many of them run:

    1          all (make nightly)
    0          no exhaustive test, and all recorded ones
    not set    of the exhaustive tests one of 30 (SHARE), or of N for those with the mark full(share=N);
               of the recorded tests one of 3 (SHARE_OF_RECORDED)

HOLMES_TEST_SEED determines which share. Its default is the hash of the commit: each commit runs another
share, and repeated runs of one commit run the same share. A test that the command line names by its node id
(FILE::TEST) always runs.

The plugin also writes the number of deselected tests into the run's JUnit XML, where summary.py reads it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.junitxml import xml_key

ROOT = Path(__file__).resolve().parents[1]
#: Seconds of the slow tests: {"FILE::TEST": seconds}. `make slow-tests` writes it (slow_tests.py).
RECORD = Path(__file__).with_name("slow_tests.json")
SHARE = 30  # one of this many exhaustive tests runs if HOLMES_TEST_FULL is not set
SHARE_OF_RECORDED = 3  # the same, of the tests in RECORD
LEFT_OUT = pytest.StashKey[int]()  # number of slow tests that do not run
full = pytest.mark.full


def some(cases: Iterable, *chosen) -> list:
    """Return `cases` for pytest.mark.parametrize, all marked as slow tests except those in `chosen`.

    Slow tests (mark `full`) are left out of most runs; the cases in `chosen` always run.
    """
    cases = list(cases)
    assert set(chosen) <= set(cases), set(chosen) - set(cases)
    return [case if case in chosen else pytest.param(case, marks=full) for case in cases]


@functools.cache
def turns_of_recorded_tests() -> dict[str, int]:
    """Return the turn of each slow test in RECORD, by its node id.

    Turns are counted from the slowest test on. So any SHARE_OF_RECORDED neighbours in this order run in
    different landings, and all landings take about the same time.
    """
    seconds = json.loads(RECORD.read_text())
    slowest_first = sorted(seconds, key=lambda name: (-seconds[name], name))
    return {name: turn for turn, name in enumerate(slowest_first)}


@functools.cache
def seed() -> str:
    """Return the seed that determines which share of the slow tests runs.

    It is the variable HOLMES_TEST_SEED. By default, it is the abbreviated hash of the commit, or "0" outside
    a git repository.
    """
    from_environment = os.environ.get("HOLMES_TEST_SEED")
    if from_environment:
        return from_environment
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:  # git is not installed
        return "0"
    return result.stdout.strip() or "0"


def is_in_selected_share(name: str, seed_text: str, share: int = SHARE) -> bool:
    """Return whether the slow test of this name is in the share of slow tests that this seed selects.

    A hash of seed and name decides. Each name is selected by about one of `share` seeds.
    """
    digest = hashlib.sha256(f"{seed_text} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % share == 0


def is_its_turn(turn: int, seed_text: str, share: int) -> bool:
    """Return whether tests with this turn run with this seed.

    Turns 0 to share - 1 run with different seeds; turn `share` runs together with turn 0, and so on.
    """
    digest = hashlib.sha256(seed_text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % share == turn % share


def runs(item: pytest.Item) -> bool:
    """Return whether a test runs, or is deselected.

    A test that the command line names runs, and so does one that is not slow. The module's docstring says
    which of the slow tests run.
    """
    if is_named(item):
        return True
    all_or_none = os.environ.get("HOLMES_TEST_FULL", "")
    slow_marks = list(item.iter_markers("full"))
    if not slow_marks:
        if all_or_none in ("0", "1") or item.get_closest_marker("each_landing"):
            return True
        turn = turns_of_recorded_tests().get(item.nodeid)
        return turn is None or is_its_turn(turn, seed(), SHARE_OF_RECORDED)
    if all_or_none in ("0", "1"):
        return all_or_none == "1"
    return all(_selects(mark, item.nodeid) for mark in slow_marks)


def _selects(mark: pytest.Mark, node_id: str) -> bool:
    """Return whether a mark `full` of a test lets it run, if HOLMES_TEST_FULL is not set.

    full                                one of 30 seeds
    full(share=4)                       one of 4 seeds: for tests that are quick, but many
    full(together=NAME)                 all tests with this name, or none: they share an expensive fixture
    full(turn=2, share=3)               the seeds whose turn this is: tests with the turns 0, 1 and 2 run with
                                        different seeds
    """
    share = mark.kwargs.get("share", SHARE)
    if "turn" in mark.kwargs:
        return is_its_turn(mark.kwargs["turn"], seed(), share)
    return is_in_selected_share(mark.kwargs.get("together", node_id), seed(), share)


def is_named(item: pytest.Item) -> bool:
    """Return whether an argument of pytest's command line names this test by its node id, FILE::TEST."""
    path, _, test = item.nodeid.partition("::")
    for argument in item.config.args:
        if "::" not in argument:
            continue
        named_path, _, named_test = argument.partition("::")
        if Path(named_path).resolve() != Path(item.config.rootpath, path):
            continue
        # The argument may name a parametrized test, of which this is a case, or the class of this test.
        is_case_or_method = test.startswith((f"{named_test}[", f"{named_test}::"))
        if test == named_test or is_case_or_method:
            return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow tests that this run leaves out, and record what the other tests are about.

    A test that runs a framework has the mark row(NAME) with its name. pytest writes the name into the JUnit
    XML, as a property of the test.
    """
    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.stash[LEFT_OUT] = len(left_out)  # for pytest_sessionfinish
        config.hook.pytest_deselected(items=left_out)
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]  # pytest runs what is left in its list
    for item in items:
        for mark in item.iter_markers("row"):
            item.user_properties.extend(("row", name) for name in mark.args)


def pytest_report_header() -> str:
    wanted = os.environ.get("HOLMES_TEST_FULL", "")
    if wanted in ("0", "1"):
        share = "all" if wanted == "1" else "none"
        return f"exhaustive tests: {share} (HOLMES_TEST_FULL={wanted})"
    return (
        f"exhaustive tests: one of {SHARE}; slow ones: one of {SHARE_OF_RECORDED}; "
        f"HOLMES_TEST_SEED={seed()}"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Read the number of deselected tests from a worker process of pytest-xdist that has ended.

    With pytest-xdist, only the workers collect tests. Each worker collects all tests, and reports the same
    number.
    """
    left_out = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[LEFT_OUT] = max(node.config.stash[LEFT_OUT], left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the number of deselected tests, and the seed that determined them, into the JUnit XML.

    A worker process of pytest-xdist writes no XML. It passes the number to the main process.
    """
    left_out = session.config.stash[LEFT_OUT]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = left_out  # xdist sends it to the main process
        return
    xml = session.config.stash.get(xml_key, None)
    if xml is not None:
        xml.add_global_property("left_out", left_out)
        xml.add_global_property("seed", os.environ.get("HOLMES_TEST_FULL") or seed())


@pytest.fixture(params=[False, pytest.param(True, marks=full)], ids=["sample", "exhaustive"])
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Return False in one case of the test, and True in another one, which is slow.

    A test with many inputs checks a sample of them if this is False, and all of them if it is True. The slow
    case has the mark `full`, so that only some runs of the tests execute it.
    """
    return request.param
