"""What stands after --holmes-join and --holmes-outer: read, and refused in one line."""

from dataclasses import replace

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.join import training
from holmes_ext.join.address import JoinAddress, parse_address, port_range
from holmes_ext.join.settings import merge_settings, parse_outer
from holmes_ext.options import Options, options_from, parse_flags


def test_what_is_not_given_suits_what_is():
    assert parse_outer("").period == 8 and parse_outer("").delay == 5
    assert (parse_outer("").lr, parse_outer("").momentum) == (
        1.0,
        None,
    )  # docs/benchmarks/joined.md has why
    assert (parse_outer("every=6").fragments, parse_outer("every=6").delay) == (3, 1)
    assert (parse_outer("every=1").fragments, parse_outer("every=1").delay) == (1, 0)
    assert parse_outer("fragments=5").every == 35
    assert parse_outer("every=60s").seconds == 60 and parse_outer("every=60s").every == 0
    assert (parse_outer("algorithm=average").lr, parse_outer("algorithm=average").momentum) == (
        1.0,
        0.0,
    )
    co2 = parse_outer("algorithm=co2,momentum=0.3")
    assert (co2.lr, co2.momentum, co2.fragments, co2.every) == (0.5, 0.3, 1, 32)
    assert parse_outer("algorithm=co2,fragments=2").fragments == 2
    assert parse_outer("algorithm=co2,momentum=auto").momentum is None
    assert (
        parse_outer("").agreed()["momentum"] == "auto"
        and parse_outer("momentum=0").agreed()["momentum"] == 0
    )


@pytest.mark.parametrize(
    "text, why",
    [
        (
            "every=30,fragments=4",
            r"every=30 is not divisible by fragments=4: .*; write every=28 or every=32",
        ),
        ("every=8,fragments=4,delay=2", r"delay=2 must be less than every / fragments = 2 steps"),
        ("every=0", "every=0 is not above 0"),
        ("every=x", "'x' is not steps or seconds"),
        ("evry=30", "'evry' is not known; did you mean 'every'"),
        ("lr", "'lr' is not NAME=VALUE"),
        ("lr=0.1,lr=0.2", "lr is given twice"),
        ("lr=nan", "'nan' is not a number"),
        ("momentum=1", "momentum=1 is not 0 to 0.9999"),
        ("momentum=much", "'much' is not a number, or auto"),
        ("mix=2", "mix='2' is neither keep nor a share"),
        ("compress=int4", "'int4' is not one of off, bf16, int8"),
        ("compress=topk", "compress=topk was removed; compress is one of off, bf16, int8, 2bit$"),
        ("every=8, compress = topk, topk=128", "compress=topk was removed"),
        ("topk=128", "compress=topk was removed"),
        ("aggregate=best", "is not one of mean, median"),
        ("part=2/2", "part='2/2' is not k/K"),
        ("min=0", "min=0 is not 1 to 64"),
    ],
)
def test_bad_settings(text, why):
    with pytest.raises(HolmesError, match=why):
        parse_outer(text)


def test_places():
    assert parse_address("east@10.0.0.1:4000") == JoinAddress("east", "10.0.0.1", 4000)
    assert parse_address("east@host").port == 29600
    assert parse_address("east@[::1]:4000") == JoinAddress("east", "::1", 4000)
    for text in (
        "east",
        "@host:1",
        "east@",
        "east@host:x",
        "east@host:70000",
        "a b@host:1",
        "east@::1:5",
        "\x1b[1m@host",
    ):
        with pytest.raises(HolmesError, match="is not NAME@HOST:PORT"):
            parse_address(text)


def test_ports_and_addresses():
    assert port_range("", "", {}).ports == (0, 0) and port_range("none", "", {}).ports is None
    assert port_range("29700", "", {}).ports == (29700, 29700)
    assert port_range("29700-29763", "", {"HOLMES_JOIN_PORT": "5"}).ports == (29700, 29763)
    assert port_range("", "", {"HOLMES_JOIN_PORT": "29700", "LOCAL_RANK": "3"}).ports == (
        29703,
        29703,
    )
    told = port_range("29700-29763", "gate.example.org:4000", {})
    assert (told.host, told.advertised(29702)) == ("gate.example.org", 4002)
    assert port_range("29700", "[fd00::1]", {}).advertised(29700) == 29700
    for ports, address, environ in (
        ("x", "", {}),
        ("5-4", "", {}),
        ("0", "", {}),
        ("70000", "", {}),
        ("5-", "", {}),
        ("", "host:5", {}),
        ("", "a b", {}),
        ("", "", {"HOLMES_JOIN_PORT": "x"}),
    ):
        with pytest.raises(HolmesError):
            port_range(ports, address, environ)


def test_options_about_certificates(monkeypatch):
    monkeypatch.setattr(training, "_job", None)
    (line,) = training.request(options_from(join="east@10.0.0.1"), {})
    assert "encrypted between jobs (TLS 1.3)" in line
    with pytest.raises(HolmesError, match="give both, or none"):
        training.request(options_from(join="east@10.0.0.1", join_ca="ca.pem"), {})
    both = {"join_certificate": "job.pem", "join_ca": "ca.pem"}
    with pytest.raises(HolmesError, match="with --holmes-join-certificate leave it out"):
        training.request(options_from(join="east@10.0.0.1", join_invitation="i", **both), {})
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    with pytest.raises(HolmesError, match=r"pip install 'holmes_ext\[join\]'"):
        training.request(options_from(join="east@127.0.0.1"), {})
    assert training.request(options_from(join="east@10.0.0.1", **both), {}), "they need no package"
    training.end()


def test_removed_options_say_what_replaces_them():
    with pytest.raises(HolmesError, match="--holmes-join-plain was removed; all traffic"):
        parse_flags(["--holmes-join-plain", "on"], {})
    for name in ("HOLMES_JOIN_TOKEN", "HOLMES_JOIN_TOKEN_FILE"):
        with pytest.raises(HolmesError, match=f"{name} was removed; run `holmes join invite NAME"):
            parse_flags([], {name: "x"})


def test_without_join_nothing_is_asked_for():
    assert training.request(Options(), {}) == [] and not training.is_requested()
    assert not training.claim(object(), lambda: pytest.fail("it was asked"))
    with pytest.raises(HolmesError, match="give --holmes-join"):
        training.request(options_from(outer="every=4"), {})


def test_a_job_has_the_settings_of_the_run():
    run = parse_outer("every=16,fragments=2,delay=3,compress=off,min=2")
    assert merge_settings(run, "") == run
    own = merge_settings(run, "timeout=5,part=1/2,every=16")
    assert own == replace(run, timeout=5.0, part="1/2")
    seconds = parse_outer("every=60s,momentum=0.5")
    assert merge_settings(seconds, "every=60s,momentum=0.5") == seconds


@pytest.mark.parametrize(
    "run, given, words",
    [
        ("every=16", "every=32", "every=32 contradicts this run: `holmes join serve` has every=16"),
        ("every=60s", "every=32", "every=32 contradicts this run: .* has every=60s"),
        ("every=32", "every=60s", "every=60s contradicts this run: .* has every=32"),
        ("", "min=64", "min=64 contradicts this run: .* has min=1"),
        ("", "momentum=0.5", "momentum=0.5 contradicts this run: .* has momentum=auto"),
        (
            "momentum=0.5",
            "momentum=auto",
            "momentum=auto contradicts this run: .* has momentum=0.5",
        ),
    ],
)
def test_a_job_cannot_contradict_the_settings_of_the_run(run, given, words):
    with pytest.raises(HolmesError, match=words):
        merge_settings(parse_outer(run), given)


def test_own_settings_may_differ():
    ours, theirs = parse_outer("min=1,timeout=5,part=0/2"), parse_outer("min=2,part=1/2")
    assert ours.agreed() == theirs.agreed() != parse_outer("lr=0.5").agreed()


def test_settings_of_joined_jobs_need_a_job_that_joins():
    with pytest.raises(HolmesError, match="give --holmes-join NAME@HOST:PORT too"):
        training.request(options_from(outer="every=8"))
