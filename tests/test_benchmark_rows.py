"""Rows of benchmarks: what was timed on cores that had no time left counts as neither met nor missed."""

import sys
from types import SimpleNamespace

import pytest
from test_docs import ROOT

sys.path.insert(0, str(ROOT / "docs"))
sys.path.insert(0, str(ROOT / "benchmarks"))
import matrix  # noqa: E402
import matrix_table  # noqa: E402
import tables  # noqa: E402
from harness import Row, Runs, finish, kept_rows, write  # noqa: E402
from matrix_rows import ROWS  # noqa: E402


@pytest.mark.parametrize(
    "busy, met, status, said",
    [
        (None, False, 1, "at least 1.6: **not met**"),
        (0.8, False, 1, "at least 1.6: **not met**"),
        (0.81, None, 0, "at least 1.6: bound by this machine's cores, not counted"),
    ],
)
def test_a_target_missed_on_busy_cores(tmp_path, capsys, busy, met, status, said):
    row = Row.median("4+4", "holmes : stock", [1.4, 1.5, 1.6], "x", True, ">= 1.6", busy)
    assert row.met is met and tables.target(row.to_dict()) == said
    assert finish([row], tmp_path / "rows.json", "title") == status
    assert ("bound by" in capsys.readouterr().out) == (status == 0)
    assert kept_rows(tmp_path / "rows.json") == [row]


def test_rows_that_nobody_measured_so_are_written_as_before(tmp_path):
    row = Row.median("4+4", "loss", [1e-7], "nats", False, "<= 1e-6")
    write([row], tmp_path / "rows.json")
    assert row.met and set(row.to_dict()) == {
        "scene",
        "metric",
        "value",
        "unit",
        "spread",
        "emulated",
        "target",
        "met",
    }


def test_a_benchmark_that_was_cut_short_goes_on_where_it_was(tmp_path, capsys):
    made = []

    def run(value):
        return lambda: made.append(value) or {"loss": value}

    first = Runs(tmp_path / "runs.json")
    assert first.of("east, seed 1", run(2.5)) == {"loss": 2.5}
    again = Runs(tmp_path / "runs.json", minutes=1e-9)
    assert again.of("east, seed 1", run(3.5)) == {"loss": 2.5}, "not made again"
    assert again.of("west, seed 1", run(4.5)) is None and made == [2.5]
    assert "left out, 1e-09 minutes are over: west, seed 1" in capsys.readouterr().err
    assert Runs(tmp_path / "runs.json").of("west, seed 1", run(4.5)) == {"loss": 4.5}


def test_tables_of_versions_have_no_column_of_dashes():
    told = matrix_table.FEW[-1]
    made = [
        matrix_row(told, "features on", 13),
        matrix_row(told, "tests passed", 7),
        matrix_row(told, "Trainer, holmes : stock", 1.234, busy=0.9),
    ]
    head, _, *lines = matrix_table.table(
        "few", made, {told: {"parts": {"check": "2026-11-24"}}}
    ).split("\n")
    assert [cell.strip() for cell in head.split("|")[1:-1]] == [
        "versions",
        "features on",
        "tests passed",
        "in the lab, holmes : stock",
        "date",
    ]
    title = matrix_table.TITLES.get(told, told)
    assert lines == [f"| {title} | 13 | 7 | Trainer 1.23 x (cores busy) | 2026-11-24 |"]
    assert set(matrix_table.FEW) <= set(ROWS)
    assert (
        len(matrix_table.FEW) <= 10
        and matrix_table.table("few", [], {}) == "None has been made yet."
    )


@pytest.mark.parametrize(
    "off, failed, status", [({}, 0, 0), ({"ddp": "a parameter is gone"}, 0, 1), ({}, 1, 1)]
)
def test_the_newest_of_everything_is_installed_anew_and_judged(
    tmp_path, monkeypatch, off, failed, status
):
    (tmp_path / "build" / "matrix" / "next").mkdir(parents=True)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(
        matrix,
        "create_environment",
        lambda row, pip, slim: matrix.environment_folder(row) / "python",
    )
    monkeypatch.setattr(matrix, "run", lambda *_: SimpleNamespace(stdout="torch==2.16.0"))
    monkeypatch.setattr(matrix, "check", lambda row, python, found: found.update(off=off) or [])
    monkeypatch.setattr(
        matrix, "tests", lambda row, *_: [matrix.figure(row, "failed", failed, "", "<= 0")]
    )
    assert matrix.next_versions([], slim=False) == status
    assert not (tmp_path / "build" / "matrix" / "next").exists(), "last week's newest"


def matrix_row(case, metric, value, busy=None):
    return Row.of(case, metric, value, "", (value, value), False, "", busy)
