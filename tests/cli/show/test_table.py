import pytest

from holmes_ext.cli.show.table import Column, Screen

COLUMNS = [
    Column("NIC"),
    Column("rate", right=True),
    Column("LID"),
    Column("PCI", drop=1),
    Column("NUMA", drop=2),
    Column("note", wrap=10),
]
ROWS = [
    ["mlx5_0:1", "200 Gb/s", "", "0000:41:00.0", "0", "over [bond0] and a few words more"],
    ["eth0", "25 Gb/s", "", "0000:42:00.0", "1", "first\nsecond"],
]


@pytest.fixture
def printed(capsys, monkeypatch):
    def show(columns="", **options):
        monkeypatch.setenv("COLUMNS", columns)
        Screen().table(COLUMNS, ROWS, **options)
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return show


def test_a_pipe_gets_all_in_full(printed):
    title, head, _, *rows = printed(title="NICs [of] a0")
    assert title == "NICs [of] a0"
    assert head.split() == [
        "NIC",
        "rate",
        "PCI",
        "NUMA",
        "note",
    ]  # a column of empty cells is left out
    assert rows[0] == "mlx5_0:1  200 Gb/s  0000:41:00.0  0     over [bond0] and a few words more"
    assert [row.split()[-1] for row in rows[1:]] == ["first", "second"]


def test_words_are_wrapped_before_columns_go(printed):
    lines = printed("60")
    assert "PCI" in lines[0] and "NUMA" in lines[0] and max(map(len, lines)) <= 60
    assert "more" in " ".join(lines).split()


@pytest.mark.parametrize("columns,gone", [("51", ["NUMA"]), ("45", ["PCI", "NUMA"])])
def test_a_narrow_screen_loses_the_least_useful_columns_and_says_so(printed, columns, gone):
    *lines, legend = printed(columns)
    assert lines[0].split() == [
        name for name in ("NIC", "rate", "PCI", "NUMA", "note") if name not in gone
    ]
    assert legend.startswith(f"too narrow for: {', '.join(gone)}; COLUMNS=")
    assert max(map(len, lines)) <= int(columns)
    wide = legend.partition("COLUMNS=")[2].partition(",")[0]
    assert "too narrow" not in " ".join(printed(wide))


def test_what_must_stay_is_never_cut(printed):
    assert "200 Gb/s" in " ".join(printed("12"))


def test_a_long_word_is_folded_not_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    Screen().table([Column("state"), Column("target", wrap=20)], [["fits", "x" * 50]])
    assert capsys.readouterr().out.count("x") == 50


def test_no_rows(capsys):
    Screen().table(COLUMNS, [])
    assert capsys.readouterr().out.split()[:6] == ["NIC", "rate", "LID", "PCI", "NUMA", "note"]


def test_a_line_is_never_broken(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    Screen(stderr=True).line("a [b] " * 20)
    assert capsys.readouterr().err == "a [b] " * 20 + "\n"


def test_no_character_is_lost_at_any_width(capsys, monkeypatch):
    for width in range(30, 110):
        monkeypatch.setenv("COLUMNS", str(width))
        Screen().table(COLUMNS, ROWS)
        out = capsys.readouterr().out
        lost = [
            name
            for name in ("PCI", "NUMA")
            if f"too narrow for: {name}" in out or f", {name};" in out
        ]
        cells = [
            cell for row in ROWS for column, cell in zip(COLUMNS, row) if column.name not in lost
        ]
        assert all(
            out.count(letter) >= "".join(cells).count(letter)
            for letter in "abcdefmnorsvw0123456789"
        ), width
        lines = [line.rstrip() for line in out.splitlines() if not line.startswith("too narrow")]
        assert width < 34 or max(map(len, lines)) <= width
