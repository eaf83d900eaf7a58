"""cluster/wan.py, runtime/measure/probe.py without a network, cli/probe.py's bad ends."""

import os
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest

from holmes_ext.cli.main import main
from holmes_ext.cluster.measured import measured_tables, with_measured_values, write_measured_values
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec, parse_spec
from holmes_ext.cluster.wan import MeasuredLink
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime.measure import probe

TEXT = """# ours, do not lose this comment
version = 2

[ethernet]
rate = "250Mb/s"   # and this one

[[cluster]]
name = "a"
kind = "ib"
rate = "2Gb/s"
nodes = ["a[0-1]"]

[[cluster]]
name = "b"
kind = "roce"
rate = "1Gb/s"
nodes = ["b[0-1]"]
"""
LINKS = {
    "ethernet": MeasuredLink(
        ((1024.0, 0.0002), (65536.0, 0.0024)), ((8192.0, 0.0004), (524288.0, 0.0171))
    ),
    "a": MeasuredLink(((1024.0, 0.0001), (65536.0, 0.0005))),
}


def test_tables_are_replaced_and_the_rest_stays_byte_for_byte():
    once = with_measured_values(TEXT, LINKS, "c.toml")
    assert once.startswith(TEXT.rstrip("\n")) and parse_spec(once).links == LINKS
    other = {"b": LINKS["a"]}
    twice = with_measured_values(once + '\n[node.a1]\nethernet = "eth9"\n', other, "c.toml")
    assert parse_spec(twice).links == other and twice.startswith(TEXT.rstrip("\n"))
    assert parse_spec(twice).overrides["a1"].ethernet == "eth9"
    assert parse_spec(twice).digest == parse_spec(TEXT + '\n[node.a1]\nethernet = "eth9"\n').digest
    assert with_measured_values(once, LINKS, "c.toml") == once


def test_a_table_that_only_looks_like_one_is_not_lost():
    tricky = 'name = """\n[link.a]\nstay\n"""\n' + TEXT
    with pytest.raises(HolmesError, match="safely"):
        with_measured_values(tricky, LINKS, "c.toml")
    inline = TEXT.replace("version = 2", "version = 2\nlink.a.send = [[1, 1], [2, 2]]")
    with pytest.raises(HolmesError, match="safely"):
        with_measured_values(inline, LINKS, "c.toml")


def test_a_file_keeps_its_mode_and_a_failed_write_leaves_it_alone(tmp_path, monkeypatch):
    file = tmp_path / "c.toml"
    file.write_text(TEXT)
    file.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    write_measured_values(link, LINKS)
    assert (
        load_spec(file).links == LINKS
        and stat.S_IMODE(file.stat().st_mode) == 0o640
        and link.is_symlink()
    )
    before = file.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(HolmesError, match="No space left"):
        write_measured_values(file, LINKS)
    assert file.read_text() == before and sorted(os.listdir(tmp_path)) == ["c.toml", "link.toml"]


@pytest.mark.parametrize(
    "table,word",
    [
        ("[link.x]\nsend = [[1, 1], [2, 2]]", "no fabric"),
        ("[link.a]\nsend = [[1, 1]]", "one size"),
        ("[link.a]\nsend = [[2, 1], [1, 2]]", "grow"),
        ("[link.a]\nsend = [[1, 2], [2, 1]]", "grow"),
        ("[link.a]\nsend = [[1, 0], [2, 1]]", "item 0"),
        ("[link.a]\nsend = [[1, 2, 3]]", "item 0"),
        ('[link.a]\nsend = "fast"', "not a list"),
        ("[link.a]\nsned = [[1, 1], [2, 2]]", "did you mean 'send'"),
        ("[link]\na = 3", "not a table"),
    ],
)
def test_bad_tables_name_the_key(table, word):
    with pytest.raises(HolmesError, match=word) as caught:
        parse_spec(TEXT + "\n" + table + "\n")
    assert "key 'link" in str(caught.value) and "\n" not in str(caught.value)


def test_curves_of_a_file_are_what_the_simulation_takes():
    spec = parse_spec(with_measured_values(TEXT, LINKS, "c.toml"))
    links, site = Links.of_spec(spec), site_from_spec(spec)
    ethernet = links.of(site.fabric_by_name["ethernet"])
    assert ethernet.send.seconds(65536) == 0.0024 and ethernet.ring.seconds(524288) == 0.0171
    fabric = links.of(site.fabric_by_name["a"])
    assert fabric.ring.seconds(65536) == fabric.send.seconds(65536) == 0.0005
    assert links.of(site.fabric_by_name["b"]).send.rate_bps == 1e9
    assert parse_spec(TEXT + "\n" + measured_tables(LINKS)).links == LINKS


def session_of(order, processes=1):
    site = site_from_spec(parse_spec(TEXT))
    return SimpleNamespace(site=site, plan=Plan("digest", tuple(order), processes))


def test_who_is_measured():
    session = session_of(("a0", "a1", "b0", "b1"), 2)
    assert probe.pairs(session) == {"a": (0, 2), "ethernet": (0, 4), "b": (4, 6)}
    assert probe.ring_members(session) == {"a": (0, 2), "b": (4, 6), "ethernet": (0, 2, 4, 6)}
    assert probe.pairs(session_of(("a0", "a1"))) == {"a": (0, 1)} and probe.ring_members(
        session_of(("a0", "a1"))
    ) == {"a": (0, 1)}
    assert probe.pairs(session_of(("a0",))) == {} and probe.ring_members(session_of(("a0",))) == {}


def test_the_first_rank_of_each_node_is_measured_where_nodes_have_different_numbers_of_ranks():
    session = session_of(("a0", "a1", "b0", "b1"), 2)
    processes_of = {"a0": 2, "a1": 2, "b0": 4, "b1": 4}
    session.plan = replace(session.plan, processes_of=processes_of)
    assert probe.pairs(session) == {"a": (0, 2), "ethernet": (0, 4), "b": (4, 8)}
    assert probe.ring_members(session)["ethernet"] == (0, 2, 4, 8)


@pytest.mark.parametrize(
    "arguments,word",
    [
        ([], "start it on two nodes"),
        (["--largest", "0"], "--largest"),
        (["--cluster", "/none.toml"], "cannot be read"),
    ],
)
def test_bad_use_is_one_line(arguments, word, tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "c.toml").write_text(TEXT)
    assert main(["probe", "--cluster", str(tmp_path / "c.toml"), *arguments]) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1 and (tmp_path / "c.toml").read_text() == TEXT
