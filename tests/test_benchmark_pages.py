"""The pages of docs/benchmarks/: how long they are, and that they show each result with its origin."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_docs import ROOT, generate
from test_page_style import words

tables = generate.tables
benchmark_tables = generate.benchmark_tables
PAGES = [ROOT / "docs" / "numbers.md", *sorted((ROOT / "docs" / "benchmarks").glob("*.md"))]
GENERATED = re.compile(r"<!-- generated: .*?<!-- /generated -->", re.DOTALL)
SOURCES = re.compile(r"<!-- generated: sources ([^>]*?) -->")
COMMAND = re.compile(r"^    python benchmarks/(\w+\.py)(.*)$", re.MULTILINE)
MOST_PAGES, MOST_WORDS = 6, 3000
#: Results that a page other than those of the benchmarks shows.
SHOWN_ELSEWHERE = {"matrix.json"}
#: Results of `make nccl` and of `make gpu` on a physical GPU, which no program of benchmarks/ makes.
NO_PROGRAM = {"gpu_h100.json", "gpu_h200.json"}


def hand_written(page: Path) -> str:
    return GENERATED.sub("", page.read_text())


def sources() -> set[str]:
    """Return the names of all results files whose origin a page shows."""
    texts = [found for page in PAGES for found in SOURCES.findall(page.read_text())]
    return {name for text in texts for name in text.split()}


def rows_of(file: str) -> list[dict]:
    document = json.loads((tables.RESULTS / file).read_text())
    return document.get("rows", []) if isinstance(document, dict) else []


def test_there_are_few_pages_with_few_words():
    assert len(PAGES) - 1 <= MOST_PAGES
    count = {page.name: words(hand_written(page)) for page in PAGES}
    assert sum(count.values()) <= MOST_WORDS, count


def test_sentences_are_short():
    text = "\n".join(hand_written(page) for page in PAGES)
    prose = [line for line in text.splitlines() if not re.match(r"    |\||#|!\[", line)]
    sentences = re.split(r"(?<=[.?:])\s|\n\n", "\n".join(prose))
    lengths = [count for sentence in sentences if (count := words(sentence)) > 1]
    assert sum(lengths) / len(lengths) <= 25


def test_pages_show_the_origin_of_every_result():
    files = {path.name for path in tables.RESULTS.glob("*.json") if rows_of(path.name)}
    assert files | NO_PROGRAM == sources() | SHOWN_ELSEWHERE


def test_tables_show_only_files_whose_origin_the_page_has():
    for page in PAGES:
        text = page.read_text()
        named = {name for found in SOURCES.findall(text) for name in found.split()}
        used = set(re.findall(r"<!-- generated: (?:rows|cells|variants|ranges) (\S+?);", text))
        assert used <= named, page.name


@pytest.mark.parametrize("file", sorted(path.name for path in tables.RESULTS.glob("*.json")))
def test_emulated_results_are_labelled(file):
    rows = rows_of(file)
    if rows:
        is_emulated = any(row["emulated"] for row in rows)
        assert not is_emulated or "emulated" in benchmark_tables.how_made(file)


def test_labels_are_explained():
    explained = (ROOT / "docs" / "numbers.md").read_text()
    for label in benchmark_tables.HOW_MADE:
        for part in label.split(" and "):
            assert f"| {part} |" in explained


def test_a_file_without_a_label_is_refused():
    with pytest.raises(KeyError, match="HOW_MADE"):
        benchmark_tables.how_made("unknown.json")


def test_every_result_has_its_command():
    text = "".join(page.read_text() for page in PAGES)
    for file in sources() - NO_PROGRAM:
        program = benchmark_tables._program_of(file.removesuffix(".json"))
        assert f"    python benchmarks/{program}.py" in text, file


def test_programs_have_the_options_of_the_commands():
    harness = (benchmark_tables.PROGRAMS / "harness.py").read_text()
    for page in PAGES:
        for program, options in COMMAND.findall(page.read_text()):
            source = (benchmark_tables.PROGRAMS / program).read_text() + harness
            for option in re.findall(r"--[a-z-]+", options):
                assert f'"{option}"' in source, (program, option)


def test_the_page_and_the_program_have_the_same_worst_error():
    all_results = benchmark_tables.errors().splitlines()[-1]
    worst = re.findall(r"[\d.]+", all_results)[-1]
    assert f"{worst}%" in tables.model_error()


def test_the_page_counts_the_planners_that_were_run():
    planners = {
        row["metric"].partition(":")[0]: row["value"]
        for row in rows_of("planners.json")
        if row["metric"].endswith("cases with a plan that starts and fits, of 24")
    }
    others = [name for name in planners if name not in ("holmes plan", "typed", "random")]
    assert len([name for name in others if planners[name]]) == 10
    assert [name for name in others if not planners[name]] == ["Aceso"]
    text = (ROOT / "docs" / "benchmarks" / "planner.md").read_text()
    assert "Ten public planners" in text and "Aceso" in hand_written(
        ROOT / "docs/benchmarks/planner.md"
    )


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Write a results file "made.json" with two variants in two cases."""
    rows = [
        {"scene": case, "metric": metric, "value": value, "unit": "x", "spread": [value, value]}
        for case, metric, value in (
            ("first 1", "speed, a", 1.0),
            ("first 1", "speed, b", 2.0),
            ("first 1", "size, b", 3.0),
            ("second 1", "speed, a", 5.0),
        )
    ]
    (tmp_path / "made.json").write_text(json.dumps({"rows": rows}))
    for module in (tables, benchmark_tables):
        monkeypatch.setattr(module, "RESULTS", tmp_path)


def test_variants(results):
    table = benchmark_tables.variants("made.json; case=first.*; speed=speed, (.*); size=size, (.*)")
    assert table.splitlines()[2:] == ["| a | 1.00 x |  |", "| b | 2.00 x | 3.00 x |"]
    with pytest.raises(AssertionError, match="no row"):
        benchmark_tables.variants("made.json; weight=weight, (.*)")


def test_ranges(results):
    table = benchmark_tables.ranges("made.json; metric=speed, a; all=.* 1; one=second 1")
    assert table.splitlines()[2:] == [
        "| all | 2 | 1.00 | 3.00 | 5.00 |  |",
        "| one | 1 | 5.00 | 5.00 | 5.00 |  |",
    ]
    with pytest.raises(AssertionError, match="no row: none"):
        benchmark_tables.ranges("made.json; metric=speed, a; none=third")
