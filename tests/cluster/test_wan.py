"""Uplinks and links between clusters: what the file says, what a way passes, what contradicts itself."""

import pytest

from holmes_ext.cluster.measured import with_measured_values
from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.cluster.wan import MeasuredPair
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from tests.clusters import TWO, spec, toml

THREE = toml(
    "a ib 2Gb/s a[0-1] uplink=300Mb/s",
    "b roce 1Gb/s b[0-1]",
    "c ib 1Gb/s c0 fabric=a",
    latency="3us",
)
PAIRS = """
[[between]]
clusters = ["a", "b"]
rate = "100Mb/s"
latency = "20ms"
[[between]]
clusters = ["a", "c"]
[[between]]
clusters = ["c", "b"]
rate = "10Mb/s"
"""


def test_path_lists_what_is_shared():
    site = site_from_spec(parse_spec(THREE + PAIRS))
    keys = [hop.key for hop in site.path("a0", "b1")]
    assert keys == [
        ("out", "a0", "ethernet"),
        ("uplink", "a"),
        ("between", "a", "b"),
        ("in", "b1", "ethernet"),
    ]
    assert [hop.rate_bps for hop in site.path("a0", "b1")] == [250e6, 300e6, 100e6, 250e6]
    assert sum(hop.latency_s for hop in site.path("a0", "b1")) == pytest.approx(0.02)
    assert [hop.key[0] for hop in site.path("b1", "a0")] == ["out", "between", "downlink", "in"]
    assert sum(hop.latency_s for hop in site.path("b1", "c0")) == pytest.approx(
        30e-6
    )  # [ethernet]'s, once
    assert site.path("a0", "a0") == ()


def test_a_shared_fabric_does_not_pass_the_links_between():
    site = site_from_spec(parse_spec(THREE + PAIRS))
    assert [hop.key[2] for hop in site.path("a0", "c0")] == ["a", "a"]


def test_without_links_the_network_is_flat():
    site = site_from_spec(spec(*TWO))
    assert not site.wan
    assert [(hop.rate_bps, hop.latency_s) for hop in site.path("a0", "b0")] == [
        (250e6, 30e-6),
        (250e6, 0.0),
    ]


def test_site_travels_and_digest_counts_the_links():
    site, flat = (
        site_from_spec(parse_spec(text)) for text in (THREE + PAIRS, THREE.replace("uplink", "gpu"))
    )
    assert Site.from_dict(site.to_dict()) == site
    assert site.digest != flat.digest
    assert (
        parse_spec(THREE + PAIRS).digest != parse_spec(THREE + PAIRS.replace("20ms", "21ms")).digest
    )


@pytest.mark.parametrize(
    "old,new,message",
    [
        ('"c", "b"', '"a", "b"', "'between[2].clusters': the pair 'a' and 'b' is given twice"),
        ('"c", "b"', '"b", "a"', "the pair 'b' and 'a' is given twice"),
        ('"c", "b"', '"b", "b"', "a link of 'b' with itself"),
        ('"c", "b"', '"b"', "1 name; a link joins two clusters"),
        ('"c", "b"', '"c", "bb"', "no cluster is called 'bb'; did you mean 'b'"),
        (
            '[[between]]\nclusters = ["a", "c"]\n',
            "",
            "'between': 'a' and 'c' missing; give every pair",
        ),
        ('rate = "10Mb/s"', 'rate = "0Mb/s"', "'between[2].rate': a rate must be above 0"),
        ('"20ms"', '"3600s"', "'between[0].latency': 3600 s one way; it must be at most 10 s"),
        ('"20ms"', '"-1ms"', "'between[0].latency': '-1ms' is not a time"),
        ('latency = "20ms"', "delay = 3", "'between[0].delay' is not known"),
        ("[[between]]", "[between]", "TOML"),
    ],
)
def test_bad_links(old, new, message):
    with pytest.raises(HolmesError, match=message.replace("[", r"\[")) as error:
        parse_spec(THREE + PAIRS.replace(old, new))
    assert "\n" not in str(error.value)


def test_notes_name_what_looks_unmeant():
    low = parse_spec(THREE.replace("300Mb/s", "50Mb/s") + PAIRS, "c.toml").notes
    assert low[0] == "c.toml: the uplink of cluster 'a' is 50 Mb/s, less than one node's 250 Mb/s"
    assert "between 'a' and 'b' is 100 Mb/s, more than the uplink of 'a' (50 Mb/s)" in low[1]
    assert not parse_spec(THREE + PAIRS).notes


def test_what_was_measured_takes_the_place_of_what_is_stated():
    text = with_measured_values(
        THREE + PAIRS, {}, "c.toml", [MeasuredPair(("b", "a"), 90_000_000, 0.021, 40_000_000)]
    )
    found = parse_spec(with_measured_values(text, {}, "c.toml", parse_spec(text).pairs))
    assert found.digest == parse_spec(THREE + PAIRS).digest  # what was measured does not count
    assert found.pairs == (MeasuredPair(("b", "a"), 90_000_000, 0.021, 40_000_000),)
    path = Links.of_spec(found).site(site_from_spec(found)).path("a0", "b0")
    assert [hop.rate_bps for hop in path] == [250e6, 300e6, 90e6, 250e6]
    assert sum(hop.latency_s for hop in path) == pytest.approx(0.021)
