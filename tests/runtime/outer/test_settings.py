"""What stands after --holmes-join and --holmes-outer: read, and refused in one line."""

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.runtime.outer import training
from holmes_ext.runtime.outer.address import JoinAddress, parse_address, token_from
from holmes_ext.runtime.outer.settings import parse_outer


def test_what_is_not_given_suits_what_is():
    assert parse_outer("").period == 8 and parse_outer("").delay == 5
    assert (parse_outer("").lr, parse_outer("").momentum) == (1.0, None)  # docs/benchmarks/joined.md has why
    assert (parse_outer("every=6").fragments, parse_outer("every=6").delay) == (3, 1)
    assert (parse_outer("every=1").fragments, parse_outer("every=1").delay) == (1, 0)
    assert parse_outer("fragments=5").every == 35
    assert parse_outer("every=60s").seconds == 60 and parse_outer("every=60s").every == 0
    assert (parse_outer("algorithm=average").lr, parse_outer("algorithm=average").momentum) == (1.0, 0.0)
    co2 = parse_outer("algorithm=co2,momentum=0.3")
    assert (co2.lr, co2.momentum, co2.fragments, co2.every) == (0.5, 0.3, 1, 32)
    assert parse_outer("algorithm=co2,fragments=2").fragments == 2
    assert parse_outer("algorithm=co2,momentum=auto").momentum is None
    assert (
        parse_outer("").agreed()["momentum"] == "auto" and parse_outer("momentum=0").agreed()["momentum"] == 0
    )


@pytest.mark.parametrize("text, why", [
    ("every=30,fragments=4", r"every=30 is not divisible by fragments=4: .*; write every=28 or every=32"),
    ("every=8,fragments=4,delay=2", r"delay=2 must be less than every / fragments = 2 steps"),
    ("every=0", "every=0 is not above 0"), ("every=x", "'x' is not steps or seconds"),
    ("evry=30", "'evry' is not known; did you mean 'every'"), ("lr", "lr needs a value, such as lr=1.0"),
    ("lr=0.1,lr=0.2", "lr stands twice"), ("lr=nan", "'nan' is not a number"),
    ("momentum=1", "momentum=1 is not 0 to 0.9999"), ("momentum=much", "'much' is not a number, or auto"),
    ("mix=2", "mix='2' is neither keep nor a share"), ("compress=int4", "'int4' is not one of off, bf16, int8"),
    ("aggregate=best", "is not one of mean, median"), ("part=2/2", "part='2/2' is not k/K"),
    ("min=0", "min=0 is not 1 to 64"),
])  # fmt: skip
def test_bad_settings(text, why):
    with pytest.raises(HolmesError, match=why):
        parse_outer(text)


def test_places():
    assert parse_address("east@10.0.0.1:4000") == JoinAddress("east", "10.0.0.1", 4000)
    assert parse_address("east@host").port == 29600
    for text in ("east", "@host:1", "east@", "east@host:x", "east@host:70000", "a b@host:1"):
        with pytest.raises(HolmesError, match="is not NAME@HOST:PORT"):
            parse_address(text)


def test_tokens(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    assert token_from({"HOLMES_JOIN_TOKEN_FILE": str(tmp_path / "token")}) == "secret"
    with pytest.raises(HolmesError, match="no_such cannot be read"):
        token_from({"HOLMES_JOIN_TOKEN_FILE": str(tmp_path / "no_such")})
    with pytest.raises(HolmesError, match="needs the run's token: set HOLMES_JOIN_TOKEN"):
        token_from({})


def test_without_join_nothing_is_asked_for():
    assert training.request(Options(), {}) == [] and not training.asked()
    assert not training.claim(object(), lambda: pytest.fail("it was asked"))
    with pytest.raises(HolmesError, match="give --holmes-join"):
        training.request(Options(outer="every=4"), {})


def test_own_settings_may_differ():
    ours, theirs = parse_outer("min=1,timeout=5,part=0/2"), parse_outer("min=2,part=1/2")
    assert ours.agreed() == theirs.agreed() != parse_outer("lr=0.5").agreed()
