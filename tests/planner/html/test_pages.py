"""The pages of `holmes plan`, `report` and `demo` in a real browser.

The console stays empty, no text is cut or lies over another one, and the page uses no network. Each
page is tried on a phone's width and a desk's, light and dark.
"""

from __future__ import annotations

import json
import re
from itertools import product

import clusters
import pytest
from browser import Browser, chromium
from holmes_lab.cli import demo, joined_demo
from holmes_lab.compare import Series, Variant, all_rdma
from holmes_lab.process.ranks import interleave
from telemetry_files import write

from holmes_ext.cli.main import main
from holmes_ext.cluster.spec import load_spec
from holmes_ext.planner.html.page import command, heading, page, picture, table
from holmes_ext.planner.html.pictures import load_traces
from holmes_ext.samples import examples

CLUSTERS = examples() / "clusters"
MODEL = str(examples() / "models" / "deepspeed_demo.toml")
needs_chromium = pytest.mark.skipif(
    not chromium(), reason="no Chromium: apt-get install chromium-headless-shell"
)
EVENTS = [
    ["forward", 0.0, 0.1, 0],
    ["send", 0.1, 0.12, 100],
    ["backward", 0.2, 0.4, 0],
    ["reduce", 0.4, 0.7, 10**6],
]


def of_the_demo(folder):
    """From runs that never were."""
    spec = load_spec(CLUSTERS / "two_clusters_4.toml")
    order = interleave(spec)
    variants = [Variant("stock", spec, order), Variant("holmes", spec, order), all_rdma(spec)]
    for variant in variants:
        (folder / variant.name).mkdir()
        for rank, node in enumerate(order):
            about = {
                "rank": rank,
                "node": node,
                "cluster": "a",
                "events": EVENTS,
                "step": [0.0, 0.8],
            }
            (folder / variant.name / f"rank{rank}.json").write_text(json.dumps(about))
    said = [
        "holmes: 2 clusters: a (2 nodes, ib) -> b (2 nodes, roce); world size 4, ranks renumbered; "
        "patched: ranks"
    ]
    sent = {node: {"eth0": 1e6, "ib0": 4e6} for node in order}
    series = {
        one.name: Series(one.name, steps=[[0.9, 1.0]], losses=[3.4], sent=sent, lines=said)
        for one in variants
    }
    traces = {one.name: load_traces(folder / one.name) for one in variants}
    return demo._report(variants, series, demo._result(series), traces)


def of_the_joined_demo():
    """Return the page of a run in which west is killed at its end."""
    losses = [5.0 - 0.1 * step for step in range(20)]
    job = {"from": 0.0, "to": 20.0, "losses": losses, "seconds": [1.0] * len(losses)}
    jobs = [{"job": name, **job} for name in ("east", "west", "west")]
    events = ["12:00:00 job west is gone: its connection was closed"] * 5
    result = {"jobs": jobs, "events": events, "rounds": 3, "rounds_of_both": 2}
    return joined_demo._report([joined_demo._row(one) for one in jobs], result)


def add_rounds(folder):
    """Append rounds with other jobs to the telemetry of a run; two neighbours are not committed."""
    for file in folder.glob("*.jsonl"):
        with file.open("a") as lines:
            for number in range(1, 41):
                verdict = "void" if number in (7, 8) else "commit"
                told = {"round": number, "verdict": verdict, "bytes": 500_000, "seconds": 2.0}
                told |= {"exposed": 0.2, "drift": 0.5 if verdict == "commit" else None}
                lines.write(json.dumps({"outer": told}) + "\n")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Name -> file."""
    top = tmp_path_factory.mktemp("pages")
    names = ("demo", "joined demo", "report", "plan", "given", "one cluster", "joined")
    files = {name: top / f"{name}.html" for name in names}
    (top / "traces").mkdir()
    files["demo"].write_text(of_the_demo(top / "traces"))
    files["joined demo"].write_text(of_the_joined_demo())
    add_rounds(write(top / "telemetry"))
    assert main(["report", str(top / "telemetry"), "--html", str(files["report"])]) == 0
    small, links = (str(CLUSTERS / f"{name}.toml") for name in ("two_clusters_4", "three_links_6"))
    model = ["--model", MODEL, "--global-batch", "24"]
    few = ["--limit", "tensor=1,pipeline=3,virtual=1", "--seconds", "1"]
    assert main(["plan", "--cluster", links, *model, *few, "--html", str(files["plan"])]) == 0
    assert (
        main(["plan", "--cluster", small, *model, "--pipeline", "2", "--html", str(files["given"])])
        == 0
    )
    one_cluster = top / "one.toml"
    one_cluster.write_text(clusters.toml("a ib 2Gb/s a0,a1", ethernet="1Gb/s"))
    # So many micro-batches that only the first and the last ones are drawn.
    many = ["--model", MODEL, "--global-batch", "256", "--pipeline", "2"]
    page_of_one = ["--html", str(files["one cluster"])]
    assert main(["plan", "--cluster", str(one_cluster), *many, *page_of_one]) == 0
    beside = ["--limit", "tensor=1,virtual=1", "--seconds", "1", "--joined"]
    assert main(["plan", "--cluster", links, *model, *beside, "--html", str(files["joined"])]) == 0
    return files


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@needs_chromium
@pytest.mark.parametrize(
    "name, width, dark",
    [
        *product(("demo", "joined demo", "report", "plan", "joined"), (390, 1280), (False, True)),
        ("given", 390, True),
        ("one cluster", 390, False),
    ],
)
def test_a_page_is_whole(pages, browser, name, width, dark):
    seen = browser.open(pages[name], width, dark)
    assert not seen["found"] and not browser.errors
    assert seen["texts"] > 30 and (seen["ground"] == "rgb(255, 255, 255)") == (not dark)


@needs_chromium
def test_faults_are_found(browser, tmp_path):
    wide = "<p style='white-space:nowrap'>" + "far " * 99 + "</p>"
    over = "<p style='margin-bottom:-2.2em'>one text</p><p>another text</p><script>undefined_name()</script>"
    cut = picture(
        "<svg width=50 height=20><text x=10 y=15>longer than its picture</text></svg>", "cut"
    )
    labels = "<text x=0 y=15>first</text><text x=26 y=15>second</text>"
    touching = picture(f"<svg width=90 height=20 font-size=14>{labels}</svg>", "labels")
    file = tmp_path / "bad.html"
    file.write_text(page("bad", wide, over, cut, touching))
    seen = " ".join(browser.open(file, 390, False)["found"])
    for fault in (
        "overlap: one text | another text",
        "overlap: first | second",
        "leaves the page",
        "wider than the window",
        "cut by its picture",
    ):
        assert fault in seen, fault
    assert "undefined_name" in browser.errors[0]


def test_a_page_holds_all_that_it_shows(pages):
    for file in pages.values():
        text = file.read_text()
        assert not re.findall(r"""(?:src|href)=["'](?!data:|#)|url\((?!#)|<script|@import""", text)
        assert text.count("<svg") >= 1 and "prefers-color-scheme:dark" in text
    plan = pages["plan"].read_text()
    for part in (
        "--holmes-cluster",
        "x stock",
        "What if the network",
        "no plan takes less|proven best",
        "stage 0",
    ):
        assert re.search(part, plan), part


def test_parts_are_escaped():
    made = page(
        "<a>", heading("1 < 2", 1), table(["&"], [["<b>"], ["c"]], strong=-1), command("a && b")
    )
    assert "<title>&lt;a&gt;</title>" in made and "<h1>1 &lt; 2</h1>" in made
    assert (
        '<td class="text">&lt;b&gt;</td>' in made
        and '<tr class=strong><td class="text">c</td></tr>' in made
    )
    assert "a &amp;&amp; b" in made


def test_bad_usage_is_one_line(capsys, monkeypatch, tmp_path):
    given = ["plan", "--cluster", str(CLUSTERS / "two_clusters_4.toml"), "--pipeline", "2"]
    assert main([*given, "--html", str(tmp_path / "p.html")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("holmes: --html") and "--model" in said and said.count("\n") == 1
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main([*given, "--model", MODEL, "--html", str(tmp_path / "p.html")]) == 2
    assert capsys.readouterr().err.startswith("holmes: --html needs matplotlib")
