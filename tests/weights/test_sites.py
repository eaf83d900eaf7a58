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


def test_the_first_host_of_each_site_pulls_over_the_wan_and_the_others_form_a_chain():
    sites = sites_of(("a1", ()), ("a2", ()), ("b1", ()), ("a3", ()))
    assert sites.source("a1", [1, 2]) == sites.source("b1", [1, 2]) == Source("", (1, 2))
    assert sites.source("a2", [1]) == Source("a1:1", (1,))
    assert sites.source("a3", [1]) == Source("a2:1", (1,))
    assert sites.source("a3", []) == Source("a2:1")  # where it opens streams ahead


def test_a_host_that_has_the_version_is_the_source_of_all():
    sites = sites_of(("a1", ()), ("a2", (1,)), ("a3", ()))
    assert sites.source("a1", [1]) == sites.source("a3", [1]) == Source("a2:1", (1,))
    assert sites.source("a1", [1, 2]) == Source("a2:1", (1,))  # a2 waits for version 2 itself
    assert sites.source("a3", [1, 2]) == Source("a2:1", (1, 2))  # it arrived after a2
    assert sites.source("a2", [1, 2]) == Source("a1:1", (2,))


def test_another_host_takes_over_from_one_that_is_gone_or_silent():
    sites = sites_of(("a1", ()), ("a2", ()))
    sites.remove("a1")
    assert sites.source("a2", [1]) == Source("", (1,))
    sites = sites_of(("a1", ()), ("a2", ()))
    sites.report("a2", "a", report("a2"), now=SILENCE_S + 1)
    sites.forget_silent(SILENCE_S + 1)
    assert sites.source("a2", [1]) == Source("", (1,))


def test_a_host_that_reaches_no_other_pulls_over_the_wan():
    sites = sites_of(("a1", (1,)), ("a2", ()))
    sites.report("a2", "a", report("a2", unreachable=("a1:1",)), now=0.0)
    assert sites.source("a2", [1]) == Source("", (1,))


def test_no_hosts_wait_for_each_other():
    """Whatever three hosts have: each way from source to source ends at one that has the version."""
    names = ("a1", "a2", "a3")
    for all_staged in itertools.product([(), (1,), (2,), (1, 2)], repeat=3):
        staged = dict(zip(names, all_staged, strict=True))
        sites = sites_of(*staged.items())
        for name, version in itertools.product(names, [1, 2]):
            way = [name]
            while way[-1] and version not in staged[way[-1]]:
                source = sites.source(way[-1], [1, 2])
                if version not in source.versions:
                    break  # it gets an older one first
                assert source.address[:2] not in way, (staged, way)
                way.append(source.address[:2])


def test_news_are_what_other_hosts_depend_on():
    sites = sites_of(("a1", ()))
    assert not sites.report("a1", "a", report("a1", received=100, version=1), now=1.0)
    assert sites.report("a1", "a", report("a1", (1,)), now=1.0)
    assert sites.report("a1", "a", report("a1", (1,), current=1), now=1.0)
    assert sites.report("a2", "a", report("a2"), now=1.0)


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
