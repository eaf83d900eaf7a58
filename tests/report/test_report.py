import json
import os
import random
import re
from dataclasses import replace

import pytest
from telemetry_files import write

from holmes_ext import document
from holmes_ext.cli.main import main
from holmes_ext.join.pictures import Incarnation
from holmes_ext.planner.html import over_time
from holmes_ext.report.figures import achieved, summarize
from holmes_ext.report.files import load
from holmes_ext.report.trace import chosen_step, pictured, trace


def test_figures(tmp_path):
    write(tmp_path)
    summary = summarize(load(tmp_path))
    assert (summary.world, summary.steps, summary.step_s, summary.tokens_per_second) == (
        2,
        6,
        pytest.approx(1.0),
        pytest.approx(640),
    )
    data, pipeline = summary.rows
    assert (data.kind, data.where, data.ranks, data.operations, data.sent, data.most_exposed) == (
        "data",
        "across",
        2,
        1,
        2_000_000,
        0,
    )
    assert (data.busy_s, data.exposed_s) == (pytest.approx(0.45), pytest.approx(0.3))
    assert data.configured_bps == 250_000_000
    assert data.achieved_bps == pytest.approx(
        2_000_000 * 8 / 0.4
    )  # from when the late one has come
    assert pipeline.achieved_bps == pytest.approx(1000 * 8 / 0.1) and pipeline.sent == 500
    ways = {(row.source, row.target): row for row in summary.pairs}
    assert ways["a", "b"].sent == 2_001_000 and ways["b", "a"].exposed_s == pytest.approx(0.2)
    assert ways["a", "b"].achieved_bps == pytest.approx(
        2_001_000 * 8 / 0.5
    )  # the reduction and the message
    assert ways["a", "b"].configured_bps == 0 == ways["a", "b"].round_trip_s
    linked = summarize(
        load(write(tmp_path / "linked", between=[["a", "b", 1e8, 0.02], ["b", "a", 1e8, 0.02]]))
    )
    assert (linked.pairs[0].configured_bps, linked.pairs[0].round_trip_s) == (1e8, 0.04)
    assert summary.slowest.rank == 1 and summary.slowest.own_s == pytest.approx(0.7)
    assert summary.ranks[0].exposed_s == pytest.approx(0.5)


def test_the_verdict_names_the_network_where_it_costs_more_than_any_rank(tmp_path, capsys):
    """2 MB in 0.4 s over 250 Mb/s; the later rank's own work is 0.2 s more than the other's."""
    write(tmp_path)
    summary = summarize(load(tmp_path))
    assert summary.slow_link is summary.rows[0]
    assert main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "a slow network costs more: data groups across clusters on ethernet "
        "carry 40 Mb/s of 250 Mb/s"
    ) in said
    quick = replace(summary.rows[0], configured_bps=1e8)
    assert replace(summary, rows=(quick,)).slow_link is None
    late = replace(summary.ranks[1], own_s=0.9)
    assert replace(summary, ranks=(summary.ranks[0], late)).slow_link is None


def test_scaled_rates_of_the_lab_are_told(tmp_path, capsys):
    write(tmp_path, scale=0.01)
    assert main(["report", str(tmp_path)]) == 0
    assert (
        "note: NICs were emulated (holmes lab) and carried 0.01 x their rates"
        in capsys.readouterr().out
    )


def test_a_reducers_own_figure_counts_where_its_threads_wait(tmp_path):
    place = write(tmp_path)
    for path in place.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines[2:]:
            line["reduction"] = {"exposed": 0.6}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarize(load(tmp_path)).rows[0].exposed_s == pytest.approx(0.6)


def test_one_time_axis(tmp_path):
    """Nodes whose clocks are 500 s apart: in the trace their steps begin together."""
    write(tmp_path)
    run = load(tmp_path)
    assert chosen_step(run, None) == 5 and chosen_step(run, 2) == 2
    document = json.loads(json.dumps(trace(run, 5)))
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    for event in events:
        assert (
            isinstance(event["pid"], int)
            and isinstance(event["tid"], int)
            and isinstance(event["name"], str)
        )
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
    begins = [event["ts"] for event in events if event["name"] == "step 5"]
    assert begins == pytest.approx([0.0, 0.0], abs=1)
    reduce = [event for event in events if event["name"] == "all_reduce"]
    assert [event["ts"] for event in reduce] == pytest.approx([0.4e6, 0.5e6], abs=1)
    assert reduce[0]["args"]["bytes_sent"] == 2_000_000
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert set(names.values()) == {"compute", "data", "pipeline"}
    assert pictured(run, 5)[1]["events"][0][1] == pytest.approx(5.0)


def test_events_of_one_thread_do_not_cross(tmp_path):
    place = write(tmp_path)
    path = place / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    begin = lines[7]["begin"]
    lines[7]["ops"] += [
        [
            "data",
            "ethernet",
            "all_reduce",
            "1",
            90 + n,
            None,
            begin + 0.4 + n / 100,
            begin + 0.8 + n / 100,
            0.0,
            1,
        ]
        for n in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    by_lane = {}
    for event in trace(load(tmp_path), 5)["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == "data" and event["pid"] == 0:
            by_lane.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_lane) == 6
    for spans in by_lane.values():
        assert all(
            end <= start + 1 for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:])
        )


def report(capsys, *arguments):
    status = main(["report", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_tables(tmp_path, capsys):
    write(tmp_path)
    status, out, err = report(capsys, tmp_path)
    assert status == 0 and not err
    assert "2 ranks, 6 steps of 1.0000 s" in out and "640 tokens/s" in out
    assert (
        "across, ethernet" in out
        and "250 Mb/s" in out
        and "40 Mb/s" in out
        and "slowest: rank 1 on b0" in out
    )
    status, out, _ = report(
        capsys, tmp_path, "--json", "--trace", tmp_path / "t.json", "--html", tmp_path / "t.html"
    )
    assert (
        status == 0
        and json.loads(out)["slowest_rank"] == 1
        and json.loads(out)["rows"][0]["kind"] == "data"
    )
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["step"] == 5
    page = (tmp_path / "t.html").read_text()
    assert page.count("<svg") == 4 and "across, ethernet" in page


def test_the_newest_of_several_runs(tmp_path, capsys):
    write(tmp_path, "20260101-000000-a")
    write(tmp_path, "20260102-000000-b")
    status, out, _ = report(capsys, tmp_path)
    assert status == 0 and "2 runs in" in out and "20260102-000000-b" in out
    assert "run 20260101-000000-a" in report(capsys, tmp_path / "20260101-000000-a")[1]


def test_a_line_that_is_cut_and_a_rank_that_is_absent_are_told(tmp_path, capsys):
    place = write(tmp_path, world=3)
    path = place / "rank1.jsonl"
    path.write_text(path.read_text()[:-20])
    status, out, _ = report(capsys, tmp_path)
    assert status == 0 and "rank1.jsonl ends in the middle of a line" in out
    assert "1 of 3 ranks have no file here (rank 2)" in out
    assert "5 steps" in out  # those that all ranks have whole


def test_a_clock_that_was_not_compared_is_told(tmp_path, capsys):
    path = write(tmp_path) / "rank1.jsonl"
    path.write_text(
        "".join(line + "\n" for line in path.read_text().splitlines() if "clock" not in line)
    )
    assert "clocks of b0 were not compared" in report(capsys, tmp_path)[1]


def spoil(place, change):
    path = place / "rank1.jsonl"
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("".join(line + "\n" for line in lines))


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda lines: lines.__setitem__(4, "{"), r"rank1.jsonl: line 5 is not JSON"),
        (lambda lines: lines.__setitem__(4, "[1]"), r"line 5 is not JSON"),
        (lambda lines: lines.__setitem__(4, '{"other": 1}'), r"line 5: neither a step"),
        (
            lambda lines: lines.__setitem__(
                4, '{"step": 2, "begin": 1, "end": 2, "groups": [["data"]]}'
            ),
            r"line 5: step 2: 'groups'",
        ),
        (
            lambda lines: lines.__setitem__(4, '{"step": 2, "begin": 1, "end": "x", "groups": []}'),
            r"line 5: key 'end'",
        ),
        (
            lambda lines: lines.__setitem__(0, '{"holmes_telemetry": 2}'),
            r"line 1: of version 2, this holmes reads version 1",
        ),
        (
            lambda lines: lines.__setitem__(0, '{"x": 2}'),
            r"line 1: not a file of holmes's telemetry",
        ),
        (
            lambda lines: lines.__setitem__(0, lines[0].replace('"run1"', '"run2"')),
            r"files of two runs are mixed: rank0.jsonl is of run run1",
        ),
        (
            lambda lines: lines.__setitem__(0, lines[0].replace('"rank": 1', '"rank": 0')),
            r"are both of rank 0",
        ),
        (
            lambda lines: lines.__setitem__(0, lines[0].replace('"rank": 1', '"rank": "1"')),
            r"line 1: key 'rank'",
        ),
        (lambda lines: lines.clear(), r"rank1.jsonl: line 1 is not whole"),
        (lambda lines: lines.__delitem__(slice(1, None)), r"no step is finished on all"),
    ],
)
def test_bad_files_are_one_line(tmp_path, capsys, change, expected):
    spoil(write(tmp_path), change)
    status, out, err = report(capsys, tmp_path)
    assert status == 2 and not out and err.count("\n") == 1 and re.search(expected, err), err


def test_bad_usage_is_one_line(tmp_path, capsys):
    for arguments, expected in (
        ([tmp_path / "none"], "there is no such directory"),
        ([tmp_path], "holds no telemetry"),
    ):
        status, _, err = report(capsys, *arguments)
        assert status == 2 and expected in err and err.count("\n") == 1
    write(tmp_path)
    for more, expected in (
        (
            ["--step", "3", "--trace", tmp_path / "t"],
            "step 3 is not traced on all ranks; these are: 2, 5",
        ),
        (["--step", "3"], "give one of them"),
        (["--trace", tmp_path / "none" / "t"], "cannot be written"),
    ):
        status, _, err = report(capsys, tmp_path, *more)
        assert status == 2 and expected in err and err.count("\n") == 1
    write(tmp_path / "short", steps=2)
    assert "no step is traced" in report(capsys, tmp_path / "short", "--trace", tmp_path / "t")[2]


def test_damaged_files_never_give_a_traceback(tmp_path, capsys):
    """Bytes of a good file changed at random: figures, or one line."""
    path = write(tmp_path) / "rank1.jsonl"
    good, chance = path.read_bytes(), random.Random(7)
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            bad[chance.randrange(len(bad))] = chance.choice(b'{}[]",:0123456789.-e \n\xff')
        path.write_bytes(bytes(bad))
        status, _, err = report(capsys, tmp_path, "--json")
        assert status in (0, 2) and (status == 0 or err.count("\n") == 1)


def test_without_traced_steps_nothing_is_achieved(tmp_path):
    write(tmp_path, steps=2)
    assert achieved(load(tmp_path)) == {} and summarize(load(tmp_path)).rows[0].achieved_bps == 0


def test_rounds_with_other_jobs(tmp_path, capsys):
    place = write(tmp_path)
    for rank in (0, 1):
        with open(place / f"rank{rank}.jsonl", "a") as file:
            for number, verdict in ((1, "commit"), (2, "void"), (3, "commit")):
                told = {
                    "round": number,
                    "verdict": verdict,
                    "bytes": 500_000,
                    "seconds": 2.0 + rank,
                }
                told |= {"exposed": 0.25 * rank, "drift": 0.5 if number == 1 else None}
                file.write(json.dumps({"outer": told}) + "\n")
    row = summarize(load(tmp_path)).joined
    assert (row.rounds, row.counted, row.sent, row.seconds, row.exposed_s, row.drift) == (
        3,
        2,
        1e6,
        3.0,
        0.25,
        0.5,
    )
    assert report(capsys, tmp_path, "--html", str(tmp_path / "page.html"))[0] == 0
    assert "rounds with other jobs" in (tmp_path / "page.html").read_text()
    assert summarize(load(write(tmp_path / "alone").parent)).joined is None


def test_the_losses_of_joined_jobs_stand_where_their_steps_ended():
    assert Incarnation("west", 10.0, [5.0, 1.0, 2.0], [3.0, 2.0, 1.0]).ends == [7.0, 8.0, 10.0]


def learned(place, *changes, **more):
    """Rank 0's file of a job whose plan changed: (step, before, then, predicted)."""
    lines = [
        {
            "plan": {
                "step": step,
                "before": before,
                "in_flight": held,
                "now_s": 1.5,
                "then_s": then,
                "back": False,
            }
        }
        for step, before, held, then in changes
    ]
    lines += [more] if more else []
    with open(place / "rank0.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_plans_that_changed_are_listed_with_their_steps(tmp_path, capsys):
    place = write(tmp_path, steps=14)
    assert summarize(load(tmp_path)).plans == ()
    learned(place, (5, [2, 1], [4, 1], 0.9), (9, [4, 1], [2, 1], 1.5))
    plans = summarize(load(tmp_path)).plans
    assert [row.in_flight for row in plans] == [(2, 1), (4, 1), (2, 1)]
    assert [row.predicted_s for row in plans] == [None, 0.9, 1.5]
    assert [row.step for row in plans] == [1, 5, 9] and all(
        row.step_s == pytest.approx(1.0) for row in plans
    )
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "micro-batches in flight" in said and "4+1" in said
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    over_time = html[html.index("Steps over time") :]
    assert "4+1" in over_time and "predicted of a plan" in over_time


def test_a_long_run_is_drawn_with_fewer_points(tmp_path, monkeypatch):
    monkeypatch.setattr(over_time, "MAX_POINTS", 4)
    write(tmp_path, steps=14)
    axis = over_time.over_time_figure(load(tmp_path), ()).axes[0]
    assert list(axis.lines[0].get_xdata()) == [2, 5, 8, 11]


def test_a_job_that_measured_no_model_has_none_to_write(tmp_path, capsys):
    write(tmp_path)
    assert main(["report", str(tmp_path), "--write-model", str(tmp_path / "model.json")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has measured none" in said


def test_a_change_that_is_no_change_is_named(tmp_path, capsys):
    place = write(tmp_path)
    learned(place, (5, [2, 1], "4+1", 0.9))
    assert main(["report", str(tmp_path)]) == 2
    assert "rank0.jsonl: line" in capsys.readouterr().err


def test_a_report_after_a_full_disk_says_which_steps_it_covers(tmp_path):
    place = write(tmp_path, steps=8)
    lines = (place / "rank1.jsonl").read_text().splitlines(keepends=True)
    (place / "rank1.jsonl").write_text("".join(lines[:-3]))  # its last three steps are missing
    with (place / "rank0.jsonl").open("a") as file:
        file.write('{"end":"closed"}\n')
    (note,) = [note for note in load(place).notes if "did not close" in note]
    assert note.startswith(
        "rank 1 did not close the file (the job still runs, was killed, or the disk"
    )
    assert note.endswith("the report covers 3 steps, 2 to 4; rank 0 has steps up to 7")
    with (place / "rank1.jsonl").open("a") as file:
        file.write('{"end":"closed"}\n')
    assert not [note for note in load(place).notes if "did not close" in note]


def irregular(path, kind):
    """Put something else in the place of a telemetry file."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        with open(path, "w") as file:
            file.truncate(2**36)
    elif kind == "folder":
        path.mkdir()
    elif kind == "levels":
        path.write_text("[" * 100_000 + "\n")
    elif kind == "many lines":
        path.write_text("\n" * 2**20)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("pipe", "nothing comes out of it"),
        ("endless", "it has more than 4 MiB"),
        ("sparse", "it has more than 4 MiB"),
        ("folder", "Is a directory"),
        ("levels", "line 1 is not JSON"),
        ("many lines", "line 1 is not JSON"),
    ],
)
def test_what_is_no_telemetry_is_one_line(tmp_path, capsys, monkeypatch, kind, expected):
    """/dev/zero, a file of 64 GB and lists in lists ended in a traceback, and a pipe was waited for."""
    monkeypatch.setattr(document, "_MOST_BYTES", 2**22)
    monkeypatch.setattr(document, "_PIPE_S", 0.05)
    irregular(write(tmp_path) / "rank1.jsonl", kind)
    status, out, err = report(capsys, tmp_path)
    assert status == 2 and not out and err.count("\n") == 1 and expected in err, err


def test_lines_of_many_levels_are_no_telemetry(tmp_path, capsys):
    """Lists in lists that the parser reads, but not each function after it."""
    levels = "[" * 200 + "]" * 200
    spoil(write(tmp_path), lambda lines: lines.__setitem__(4, f'{{"step": {levels}}}'))
    status, _, err = report(capsys, tmp_path)
    assert status == 2 and err.count("\n") == 1 and "line 5 is not JSON" in err
