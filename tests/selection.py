"""Selects which exhaustive tests a run contains, and writes into the JUnit XML what summary.py needs.

A test or a case marked `full` costs more than it adds to each landing. HOLMES_TEST_FULL decides:

    1          all of them run (make nightly)
    0          none of them runs
    not set    a tenth of them runs, so that every landing tries some and none rots for long

HOLMES_TEST_SEED chooses the tenth. It is the commit if that variable is not set, so each landing runs
another tenth, and the same commit always the same one. A test whose node id stands on the command line
(FILE::TEST) runs anyway. The root's conftest.py loads this plugin.
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
SHARE = 10  # one of this many exhaustive tests runs in a landing
LEFT_OUT = pytest.StashKey[int]()
full = pytest.mark.full


def some(cases: Iterable, *chosen) -> list:
    """Return all cases for pytest.mark.parametrize; those that are not chosen are exhaustive."""
    cases = list(cases)
    assert set(chosen) <= set(cases), set(chosen) - set(cases)
    return [case if case in chosen else pytest.param(case, marks=full) for case in cases]


@functools.cache
def seed() -> str:
    """Return HOLMES_TEST_SEED, or the commit of this tree, or "0" if git does not know it."""
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
    """Return whether the exhaustive tests of this name run in a landing with this seed."""
    digest = hashlib.sha256(f"{seed_text} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % SHARE == 0


def runs(item: pytest.Item) -> bool:
    """Return whether a test belongs to this run, by its mark `full` and the environment.

    Tests with full(together=NAME) are chosen together: they share a fixture that takes long.
    """
    marks = list(item.iter_markers("full"))
    if not marks or is_named(item):
        return True
    wanted = os.environ.get("HOLMES_TEST_FULL", "")
    if wanted in ("0", "1"):
        return wanted == "1"
    names = [mark.kwargs["together"] for mark in marks if "together" in mark.kwargs]
    return in_the_tenth(names[0] if names else item.nodeid, seed())


def is_named(item: pytest.Item) -> bool:
    """Return whether the command line names this test by its node id."""
    names = [argument for argument in item.config.args if "::" in argument]
    path, _, test = item.nodeid.partition("::")
    for name in names:
        named_path, _, named_test = name.partition("::")
        same_file = Path(named_path).resolve() == Path(item.config.rootpath, path)
        if same_file and (
            test == named_test or test.startswith((f"{named_test}[", f"{named_test}::"))
        ):
            return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.stash[LEFT_OUT] = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]
    for item in items:
        for mark in item.iter_markers("row"):
            # JUnit XML has these as properties of the test.
            item.user_properties.extend(("row", name) for name in mark.args)


def pytest_report_header() -> str:
    wanted = os.environ.get("HOLMES_TEST_FULL", "")
    if wanted in ("0", "1"):
        return f"exhaustive tests: {'all' if wanted == '1' else 'none'} (HOLMES_TEST_FULL={wanted})"
    return f"exhaustive tests: a tenth, HOLMES_TEST_SEED={seed()}"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Take the count from a worker of xdist: the process that starts the workers collects nothing."""
    counted = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[LEFT_OUT] = max(node.config.stash[LEFT_OUT], counted)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
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
    """Whether to try all inputs, or a sample of them: a test that takes this has both cases."""
    return request.param
