"""Rules of the service: which host pulls over the WAN, and when all sites switch."""

import itertools

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.weights.sites import SILENCE_S, HostReport, Sites, Source


def report(host, staged=(), current=None, **more):
    return HostReport(host, f"{host}:1", tuple(staged), current, **more)


def sites_of(*hosts):
    """Return the sites of hosts: (name, staged versions); the first letter of a name is its site."""
    sites = Sites()
    for name, staged in hosts:
        sites.report(name, name[0], report(name, staged), now=0.0)
    return sites


def test_the_first_host_of_each_site_pulls_over_the_wan():
    sites = sites_of(("a1", ()), ("a2", ()), ("b1", ()))
    assert sites.source("a1", [1]) == Source("")
    assert sites.source("a2", [1]) is None
    assert sites.source("b1", [1]) == Source("")


def test_the_others_pull_from_a_host_that_has_it():
    sites = sites_of(("a1", (1,)), ("a2", ()), ("b1", ()))
    assert sites.source("a2", [1, 2]) == Source("a1:1")
    assert sites.source("a1", [1]) is None
    sites.report("a2", "a", report("a2", (1, 2)), now=0.0)
    assert sites.source("a1", [1, 2]) == Source("a2:1")  # also the first one


def test_the_others_follow_the_first_one_while_it_receives():
    sites = sites_of(("a1", ()), ("a2", ()), ("a3", ()))
    sites.report("a1", "a", report("a1", version=1), now=0.0)
    assert sites.source("a2", [1]) == sites.source("a3", [1]) == Source("a1:1")
    sites.report("a2", "a", report("a2", version=1), now=0.0)
    assert sites.source("a1", [1]) == Source("")
    assert sites.source("a3", [2]) is None


def test_another_host_takes_over_from_one_that_is_gone_or_silent():
    sites = sites_of(("a1", ()), ("a2", ()))
    sites.gone("a1")
    assert sites.source("a2", [1]) == Source("")
    sites = sites_of(("a1", ()), ("a2", ()))
    sites.report("a2", "a", report("a2"), now=SILENCE_S + 1)
    sites.forget_silent(SILENCE_S + 1)
    assert sites.source("a2", [1]) == Source("")


def test_a_host_that_reaches_no_other_pulls_over_the_wan():
    sites = sites_of(("a1", (1,)), ("a2", ()))
    sites.report("a2", "a", report("a2", unreachable=("a1:1",)), now=0.0)
    assert sites.source("a2", [1]) == Source("")


def test_someone_always_makes_progress():
    """Whatever three hosts have: of those that miss a version, one at least has a source."""
    subsets = [(), (1,), (2,), (1, 2)]
    for staged in itertools.product(subsets, repeat=3):
        names = ("a1", "a2", "a3")
        sites = sites_of(*zip(names, staged, strict=True))
        missing = [name for name, has in zip(names, staged, strict=True) if set(has) != {1, 2}]
        assert not missing or any(sites.source(name, [1, 2]) for name in missing), staged


def test_commit_waits_for_hosts_in_step_only():
    sites = Sites()
    assert sites.may_commit(1, None)  # no host is connected
    sites.report("a1", "a", report("a1", (1, 2), current=1), now=0.0)
    sites.report("b1", "b", report("b1", (1,), current=1), now=0.0)
    sites.report("c1", "c", report("c1", ()), now=0.0)  # a latecomer
    assert not sites.may_commit(2, 1)
    sites.report("b1", "b", report("b1", (1, 2), current=1), now=0.0)
    assert sites.may_commit(2, 1)
    assert not sites.may_commit(2, None)  # nothing is committed yet: all hosts count


@pytest.mark.parametrize(
    "changes",
    [
        {"staged": tuple(range(10_001))},
        {"host": "a\nb"},
        {"address": "x" * 301},
        {"unreachable": ("a:1",) * 65},
    ],
)
def test_reports_have_limits(changes):
    valid = {"host": "a", "address": "", "staged": (), "current": None}
    with pytest.raises(HolmesError, match="report"):
        HostReport(**{**valid, **changes})
