"""Every table that a command prints keeps to COLUMNS, through a pipe too.

`holmes patches` prints one row for each feature.
"""

import re
from pathlib import Path

import pytest
from holmes_lab.cli import demo, joined_demo
from sysfs_builder import dgx_a100, ports_down
from telemetry_files import write

from holmes_ext.cli.main import main
from holmes_ext.cli.show.table import Screen
from holmes_ext.join import cli as join
from holmes_ext.patches import all_patches

CLUSTER = str(Path(__file__).parents[2] / "examples/clusters/two_clusters_4.toml")
MODEL = str(Path(CLUSTER).parents[1] / "models/deepspeed_demo.toml")
SIZES = ["--sizes", "pipeline=2"]
CITIES = str(Path(CLUSTER).with_name("eight_cities_64.toml"))
GPT = (
    "pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 "
    "--pipeline-model-parallel-size 2"
).split()
#: Tables of commands that run for long: columns, and a row of long cells.
LONG_RUNS = {
    "demo": (
        demo.COLUMNS,
        ("all-RDMA", "10.950 (10.950-10.950)", "26900", "1.00", "1.00", "3.4000", "100.0", "400.0"),
    ),
    "demo --joined": (joined_demo.COLUMNS, ("east", "100", "200", "160", "5.123", "3.456")),
    "join status": (
        join.COLUMNS,
        (
            "frankfurt-1",
            "waiting",
            "1024",
            "123456",
            "7000",
            "6900",
            "100",
            "12.3",
            "1.23",
            "1.25 Gb/s",
            "0.123",
            "12345",
            "0.1",
        ),
    ),
}


@pytest.fixture
def commands(tmp_path):
    """Return the words of each command by its name, on data that make wide tables."""
    write(tmp_path / "telemetry", between=[["a", "b", 1e8, 0.02], ["b", "a", 1e8, 0.02]])
    dgx = str(dgx_a100(tmp_path / "dgx"))
    return {
        "discover": ["discover", "--sysfs", dgx],
        "discover of a node that is down": [
            "discover",
            "--sysfs",
            str(ports_down(tmp_path / "down")),
        ],
        "patches": ["patches"],
        "patches --all": ["patches", "--all"],
        "report": ["report", str(tmp_path / "telemetry")],
        "plan": ["plan", "--cluster", CLUSTER, *SIZES],
        "plan of many clusters": ["plan", "--cluster", CITIES, "--pipeline", "8"],
        "plan of a command": ["plan", "--cluster", CLUSTER, "--seconds", "1", "--", *GPT],
        "plan --joined": [
            "plan",
            "--cluster",
            CLUSTER,
            "--model",
            MODEL,
            "--global-batch",
            "24",
            "--seconds",
            "1",
            "--joined",
        ],
    }


@pytest.mark.parametrize("width", [60, 80, 100])
def test_tables_keep_to_columns(commands, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for name, words in commands.items():
        main(words)
        lines = capsys.readouterr().out.splitlines()
        rules = [n for n, line in enumerate(lines) if line.strip().startswith("───")]
        assert rules, name
        for n in rules:
            rows = [line for line in lines[n - 1 : n + 3] if "too narrow" not in line]
            assert max(map(len, rows)) <= width, (name, rows)


@pytest.mark.parametrize("width", [60, 80])
def test_no_table_is_wider_than_the_screen(commands, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    table_widths = []  # of the tables of a command
    print_whole = Screen._print_whole

    def record(screen, grid, missing):
        capsys.readouterr()
        print_whole(screen, grid, missing)
        table_widths.append(max(map(len, capsys.readouterr().out.splitlines())))

    monkeypatch.setattr(Screen, "_print_whole", record)
    widths = {}
    for name, words in commands.items():
        main(words)
        widths[name] = table_widths.copy()
        table_widths.clear()
    for name, (columns, row) in LONG_RUNS.items():
        Screen().table(columns, [row])
        widths[name] = table_widths.copy()
        table_widths.clear()
    assert all(widths.values())  # each has a table
    too_wide = {name: found for name, found in widths.items() if max(found) > width}
    assert not too_wide


def test_one_row_a_feature(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["patches"])
    out = capsys.readouterr().out
    names = [patch.feature.name for patch in all_patches()]
    missing = re.findall(
        r"[\w-]+(?= \d)", out.partition("not installed here (and their features): ")[2]
    )
    here = dict.fromkeys(
        patch.feature.name
        for patch in all_patches()
        if patch.feature.requirement.name not in missing
    )
    firsts = [line.split()[0] for line in out.splitlines()[2:] if line[:1].isalpha()]
    assert here and firsts[: len(here)] == list(here)
    assert f"{len(names)} functions of {len(set(names))} features; --all" in out
    monkeypatch.delenv("COLUMNS")
    main(["patches", "--all"])
    shown = capsys.readouterr().out
    assert all(patch.target in shown and patch.feature.what for patch in all_patches())
