"""pytest plugin that selects the exhaustive tests of a run, and writes the selection into the JUnit XML.

Exhaustive tests have the mark `full`. They take too long to run all of them before each merge. The variable
HOLMES_TEST_FULL selects:

    1          all exhaustive tests (make nightly)
    0          no exhaustive tests
    not set    a tenth of them, so that each of them runs every few merges

HOLMES_TEST_SEED determines the tenth. Its default is the commit: each commit runs another tenth, and always
the same one. A test that the command line names by its node id (FILE::TEST) always runs.

The conftest.py of the repository's root loads this plugin. summary.py reads the XML.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.junitxml import xml_key

ROOT = Path(__file__).resolve().parents[1]
SHARE = 10  # one of this many exhaustive tests runs if HOLMES_TEST_FULL is not set
LEFT_OUT = pytest.StashKey[int]()  # number of exhaustive tests that do not run
full = pytest.mark.full


def some(cases: Iterable, *chosen) -> list:
    """Return all cases for pytest.mark.parametrize, all except `chosen` with the mark of exhaustive tests."""
    cases = list(cases)
    assert set(chosen) <= set(cases), set(chosen) - set(cases)
    return [case if case in chosen else pytest.param(case, marks=full) for case in cases]


@functools.cache
def seed() -> str:
    """Return HOLMES_TEST_SEED; if it is not set, the abbreviated commit, or "0" outside a git repository."""
    given = os.environ.get("HOLMES_TEST_SEED")
    if given:
        return given
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return "0"
    return done.stdout.strip() or "0"


def in_the_tenth(name: str, seed_text: str) -> bool:
    """Return whether the exhaustive tests of this name belong to the tenth that this seed determines.

    A hash spreads the names evenly over the tenths.
    """
    digest = hashlib.sha256(f"{seed_text} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % SHARE == 0


def runs(item: pytest.Item) -> bool:
    """Return whether a test runs: it is not exhaustive, or selected, or named by the command line.

    Tests with the mark full(together=NAME) are selected together, because they share an expensive fixture.
    """
    marks = list(item.iter_markers("full"))
    if not marks or is_named(item):
        return True
    wanted = os.environ.get("HOLMES_TEST_FULL", "")
    if wanted in ("0", "1"):
        return wanted == "1"
    for mark in marks:
        if "together" in mark.kwargs:
            return in_the_tenth(mark.kwargs["together"], seed())
    return in_the_tenth(item.nodeid, seed())


def is_named(item: pytest.Item) -> bool:
    """Return whether the command line names this test by its node id."""
    path, _, test = item.nodeid.partition("::")
    for argument in item.config.args:
        if "::" not in argument:
            continue
        named_path, _, named_test = argument.partition("::")
        if Path(named_path).resolve() != Path(item.config.rootpath, path):
            continue
        is_case_or_method = test.startswith((f"{named_test}[", f"{named_test}::"))
        if test == named_test or is_case_or_method:
            return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the exhaustive tests that do not run, and give the others the properties that the XML has."""
    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.stash[LEFT_OUT] = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]
    for item in items:
        for mark in item.iter_markers("row"):
            # The names of README's table rows; summary.py reads them.
            item.user_properties.extend(("row", name) for name in mark.args)


def pytest_report_header() -> str:
    wanted = os.environ.get("HOLMES_TEST_FULL", "")
    if wanted in ("0", "1"):
        share = "all" if wanted == "1" else "none"
        return f"exhaustive tests: {share} (HOLMES_TEST_FULL={wanted})"
    return f"exhaustive tests: a tenth, HOLMES_TEST_SEED={seed()}"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Take the number of deselected tests from a worker of pytest-xdist.

    The main process collects no tests. Each worker collects all of them, so their numbers are equal.
    """
    left_out = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[LEFT_OUT] = max(node.config.stash[LEFT_OUT], left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the number of deselected tests and the seed into the XML; from a worker, into its output."""
    left_out = session.config.stash[LEFT_OUT]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = left_out
        return
    xml = session.config.stash.get(xml_key, None)
    if xml is not None:
        xml.add_global_property("left_out", left_out)
        xml.add_global_property("seed", os.environ.get("HOLMES_TEST_FULL") or seed())


@pytest.fixture(params=[False, pytest.param(True, marks=full)], ids=["sample", "exhaustive"])
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Parameter of tests with many inputs: False for a sample of the inputs, True for all of them.

    The case with all inputs is an exhaustive test.
    """
    return request.param
