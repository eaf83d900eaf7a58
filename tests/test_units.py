import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.units import format_bytes, format_rate, parse_rate, parse_seconds


@pytest.mark.parametrize(
    "text,rate",
    [
        ("25Gb/s", 25e9),
        ("250 Mb/s", 250e6),
        ("1.6Gb/s", 1.6e9),
        ("1Tbps", 1e12),
        ("9600b/s", 9600),
        ("5kbit/s", 5000),
        ("7 Mbit", 7e6),
    ],
)
def test_rates(text, rate):
    assert parse_rate(text, "f") == rate
    assert parse_rate(format_rate(rate), "f") == rate


@pytest.mark.parametrize(
    "text,seconds", [("50us", 50e-6), ("1ms", 1e-3), ("2 s", 2.0), ("3ns", 3e-9), ("0us", 0.0)]
)
def test_seconds(text, seconds):
    assert parse_seconds(text, "f") == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "25",
        "25GB/s",
        "25 gb/s",
        "-1Gb/s",
        "1.2.3Gb/s",
        ".Gb/s",
        "0Gb/s",
        "1e9b/s",
        25,
        None,
        True,
        "9" * 400 + "Gb/s",
    ],
)
def test_bad_rates(value):
    with pytest.raises(HolmesError, match="^here: "):
        parse_rate(value, "here")


@pytest.mark.parametrize("value", ["", "5", "5m", "-1s", "..s", 5, None, "9" * 400 + "s"])
def test_bad_seconds(value):
    with pytest.raises(HolmesError, match="^here: "):
        parse_seconds(value, "here")


def test_format():
    assert format_rate(25e9) == "25 Gb/s"
    assert format_rate(512) == "512 b/s"
    assert format_rate(123.456e9, 2) == "1.2e+02 Gb/s"
    assert format_bytes(34.94e9) == "34.9 GB"
    assert format_bytes(34.94e9, 4) == "34.94 GB"
    assert format_bytes(12) == "12 B"
