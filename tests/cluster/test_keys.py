"""cluster/keys.py lists every key that the code reads from a cluster.toml, and no other.

The same holds for the required keys.
"""

import re
from pathlib import Path

import pytest

from holmes_ext.cluster.keys import KEYS
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError

#: A file with every table.
FILE = """\
version = 2
name = "x"
[ethernet]
rate = "25Gb/s"
[[cluster]]
name = "a"
kind = "ib"
rate = "200Gb/s"
nodes = ["a0"]
uplink = "10Gb/s"
[[cluster]]
name = "b"
kind = "roce"
rate = "100Gb/s"
nodes = ["b0"]
[[between]]
clusters = ["a", "b"]
rate = "1Gb/s"
[node.a0]
include = ["mlx5_0"]
[link.ethernet]
send = [[1024, 0.1], [2048, 0.2]]
ring = [[1024, 0.1], [2048, 0.2]]
[[measured]]
clusters = ["a", "b"]
rate = "1Gb/s"
latency = "1ms"
"""
_TABLES = {
    "cluster": "[[cluster]]",
    "between": "[[between]]",
    "node": "[node.HOST]",
    "link": "[link.FABRIC]",
    "measured": "[[measured]]",
    "ethernet": "[ethernet]",
}


def test_every_key_that_is_read_is_listed(monkeypatch):
    read, done = set(), Table.done

    def watched(table):
        read.update((re.split(r"[.\[]", table.path)[0], table.path, key) for key in table.read)
        done(table)

    monkeypatch.setattr(Table, "done", watched)
    parse_spec(FILE)
    tables = {
        (_TABLES.get(top, ""), key) for top, path, key in read if path not in ("node", "link")
    }
    tables -= {("", name) for name in _TABLES}  # the tables themselves
    assert tables == {(key.table, key.name) for key in KEYS}


@pytest.mark.parametrize(
    "key", [key for key in KEYS if not key.default], ids=lambda key: key.table + key.name
)
def test_what_is_needed_is_refused_without(key):
    head = re.sub(r"\.(HOST|FABRIC)", r".\\w+", re.escape(key.table).replace(r"\.", "."))
    pattern = (
        rf"({head}\n(?:\w+ = .*\n)*?){key.name} = .*\n" if key.table else rf"()^{key.name} = .*\n"
    )
    without, count = re.subn(pattern, r"\1", FILE, count=1)
    assert count == 1
    with pytest.raises(HolmesError, match=key.name):
        parse_spec(without)


def test_the_page_is_linked():
    assert "cluster_toml.md" in (Path(__file__).parents[2] / "docs/clusters.md").read_text()
