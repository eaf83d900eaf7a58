import io
import json
import os
import sys
import threading
from dataclasses import dataclass, field

import pytest

from holmes_ext import document
from holmes_ext.document import Table, load_json, load_toml
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
    assert document.tables("f") == ()
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
        ({}, lambda t: t.list("a", int), "'top.a' is missing"),
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


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.name:
            raise HolmesError("key 'name' must not be empty")


@dataclass(frozen=True)
class Outer:
    inner: Inner
    rate: float
    many: tuple[Inner, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    index: int | None = 3
    on: bool = False


INNER = {"name": "a", "sizes": [1, 2]}
WHOLE = {"inner": INNER, "rate": 1, "many": [{"name": "b"}], "texts": {"x": "y"}, "index": None}


def test_into_a_dataclass():
    expected = Outer(Inner("a", (1, 2)), 1, (Inner("b"),), {"x": "y"}, None)
    assert Table(json.loads(json.dumps(WHOLE)), "f").into(Outer) == expected
    found = Table({"inner": {"name": "a"}, "rate": 2.5}, "f").into(Outer, on=True)
    assert found == Outer(Inner("a"), 2.5, on=True)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"rate": None}, "f: key 'rate': None is not a number"),
        ({"rate": True}, "f: key 'rate': True is not a number"),
        ({"inner": 3}, "f: key 'inner' is not a table"),
        ({"inner": {}}, "f: key 'inner.name' is missing"),
        ({"inner": {"name": ""}}, "f: key 'inner': key 'name' must not be empty"),
        ({"inner": {"name": "a", "size": []}}, "'inner.size' is not known; did you mean 'sizes'"),
        (
            {"inner": {"name": "a", "sizes": ["1"]}},
            "'inner.sizes': .* is not a list, each item a whole number",
        ),
        ({"many": [{"name": "b"}, {}]}, r"'many\[1\].name' is missing"),
        ({"texts": {"x": 1}}, "'texts.x': 1 is not a text"),
        ({"index": "1"}, "'index': '1' is not a whole number"),
        ({"more": 1}, "'more' is not known"),
    ],
)
def test_into_refuses(change, message):
    with pytest.raises(HolmesError, match=message):
        Table({**WHOLE, **change}, "f").into(Outer)


def test_version():
    Table({"version": 1}, "f").version(1)
    for values, message in (
        ({"version": 2}, "is 2; this holmes_ext reads version 1"),
        ({}, "is missing"),
    ):
        with pytest.raises(HolmesError, match=f"f: key 'version' {message}"):
            Table(values, "f").version(1)
    for version, message in ((2, "reads version 3; write it again$"), (4, "reads version 3$")):
        with pytest.raises(HolmesError, match=message):
            Table({"version": version}, "f").version(3, "write it again")


@pytest.mark.parametrize(
    "load,content,message",
    [
        (load_toml, None, "cannot be read .No such file or directory.; mend it"),
        (load_json, b"\xff", "cannot be read .*utf-8.*; mend it"),
        (load_toml, b"a = ", "not valid TOML"),
        (load_toml, b"a = " + b"9" * 5000, "not valid TOML"),
        (load_json, b"{", "not valid JSON: .*; mend it"),
        (load_json, b"[" * 100_000, "not valid JSON: .*; mend it"),
        (load_json, b"[]", "not a JSON object; mend it"),
        (load_json, b'{"a": NaN}', "not valid JSON: NaN is no number of JSON"),
        (load_json, b'{"a": -Infinity}', "not valid JSON: -Infinity is no number of JSON"),
        (load_json, b'{"a": "\\ud800"}', "not valid JSON"),
    ],
)
def test_files_that_cannot_be_read(load, content, message, tmp_path):
    path = tmp_path / "f"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HolmesError, match=f"^{path}: {message}"):
        load(path, "mend it")


@pytest.mark.parametrize("endless", [True, False])
def test_what_no_document_is_as_long_as_is_not_read_to_its_end(endless, tmp_path, monkeypatch):
    """/dev/zero, or a sparse file of a terabyte, took all memory."""
    monkeypatch.setattr(document, "_MOST_BYTES", 2**22)
    path = tmp_path / "long"
    with open(path, "w") as file:
        file.truncate(2**40)
    with pytest.raises(HolmesError, match="more than 4 MiB"):
        load_toml("/dev/zero" if endless else path, "mend it")


def test_a_pipe_that_nobody_fills_is_not_waited_for(tmp_path, monkeypatch):
    """`--cluster PIPE` hung."""
    monkeypatch.setattr(document, "_PIPE_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(HolmesError, match="cannot be read .nothing comes out of it"):
        load_toml(tmp_path / "pipe", "mend it")
    monkeypatch.setattr(document, "_PIPE_S", 30)
    os.write(writer, b"a = 1")
    threading.Timer(0.05, os.close, [writer]).start()
    assert load_toml(tmp_path / "pipe", "mend it").take("a", int) == 1


def test_what_a_terminal_would_obey_is_not_in_an_error():
    assert str(HolmesError("a\x1b]0;title\x07 b\nc")) == "a?]0;title? b c"


DEEP = 101


@pytest.mark.parametrize(
    "load,text",
    [
        (load_json, '{"a": ' + "[" * DEEP + "]" * DEEP + "}"),
        (load_json, '{"a": ' * DEEP + "1" + "}" * DEEP),
        (load_json, '{"a": [' + "[]," * 1000 + "[]]}"),
        (load_toml, "a = " + "[" * DEEP + "]" * DEEP),
        (load_toml, "[a" + ".a" * DEEP + "]"),
    ],
    ids=["lists", "objects", "values", "toml lists", "toml tables"],
)
def test_files_have_limits_of_levels_and_values(load, text, tmp_path, monkeypatch):
    """Functions that call themselves for each level failed; many empty lists took gigabytes."""
    monkeypatch.setattr(document, "_MOST_VALUES", 1000)
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(HolmesError, match=f"^{path}: not valid .*(levels|more than .* values)"):
        load(path, "mend it")


def test_files_of_many_levels_are_read(tmp_path):
    path = tmp_path / "f"
    path.write_text('{"a": ' + "[" * 90 + "]" * 90 + "}")
    assert load_json(path, "mend it").values["a"]


def test_standard_input_has_a_limit(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffa text"))
    assert document.read_standard_input("write it") == "a text"
    monkeypatch.setattr(document, "_MOST_BYTES", 2**20)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 2**21))
    with pytest.raises(HolmesError, match="standard input cannot be read .it has more than 1 MiB"):
        document.read_standard_input("write it")
