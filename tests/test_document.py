import pytest

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError


def table(**values):
    return Table(values, "f.toml", "top")


def test_reads_what_is_there():
    document = table(a=1, b="x", c=[1, 2], d={"e": 2.5}, f=[{"g": True}], h="2Gb/s", i="3us")
    assert document.take("a", int) == 1
    assert document.take("a", float) == 1
    assert document.take("b", str) == "x"
    assert document.list("c", int) == (1, 2)
    assert document.table("d").take("e", float) == 2.5
    assert document.tables("f")[0].take("g", bool) is True
    assert document.rate("h") == 2_000_000_000
    assert document.seconds("i", 1.0) == pytest.approx(3e-6)
    document.done()


def test_defaults():
    document = table()
    assert document.take("a", int, 7) == 7
    assert document.list("c", str, ("x",)) == ("x",)
    assert document.table("d", {}).values == {}
    assert document.tables("f") == []
    assert document.rate("h", required=False) == 0
    assert document.seconds("i", 1.5) == 1.5


@pytest.mark.parametrize(
    "values,read,message",
    [
        ({}, lambda t: t.take("rate", str), r"f.toml: key 'top.rate' is missing"),
        ({"rat": "1"}, lambda t: t.take("rate", str), r"is 'rat' a misspelling of it\?"),
        ({"a": True}, lambda t: t.take("a", int), "True is not a whole number"),
        ({"a": True}, lambda t: t.take("a", float), "True is not a number"),
        ({"a": "1"}, lambda t: t.take("a", float), "'1' is not a number"),
        ({"a": float("nan")}, lambda t: t.take("a", float), "not a finite number"),
        ({"a": 10**400}, lambda t: t.take("a", float), "not a finite number"),
        ({"a": 1}, lambda t: t.take("a", str), "1 is not a text"),
        ({"a": 1}, lambda t: t.take("a", bool), "1 is not true or false"),
        ({"a": ["x", 1]}, lambda t: t.list("a", str), "is not a list, each item a text"),
        ({"a": [True]}, lambda t: t.list("a", int), "is not a list, each item a whole number"),
        ({}, lambda t: t.list("a", int), "'top.a': is missing"),
        ({"a": 1}, lambda t: t.table("a"), "'top.a' is not a table"),
        ({}, lambda t: t.table("a"), "'top.a' is missing"),
        ({"a": {}}, lambda t: t.tables("a"), r"write \[\[a\]\]"),
        ({"a": 1}, lambda t: t.rate("a"), "'top.a': 1 is not a text"),
        ({"a": 1}, lambda t: t.seconds("a", 0.0), "'top.a': 1 is not a time"),
    ],
)
def test_refuses(values, read, message):
    with pytest.raises(HolmesError, match=message):
        read(table(**values))


def test_unknown_keys():
    document = table(nodes=1, color=2)
    document.take("nodes", int)
    with pytest.raises(HolmesError, match="'top.color' is not known; known here: nodes"):
        document.done()
    document = table(node=1)
    document.list("nodes", str, ())
    with pytest.raises(HolmesError, match="did you mean 'nodes'"):
        document.done()


def test_nested_paths():
    with pytest.raises(HolmesError, match=r"key 'top.f\[1\].g' is missing"):
        table(f=[{"g": 1}, {}]).tables("f")[1].take("g", int)
