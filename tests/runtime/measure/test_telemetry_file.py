import json
from types import SimpleNamespace

import pytest

from holmes_ext.report.files import read
from holmes_ext.runtime.measure import telemetry_file
from holmes_ext.runtime.measure.operations import Op
from holmes_ext.runtime.measure.telemetry import Recorder
from holmes_ext.runtime.measure.telemetry_file import Writer

HEAD = {
    "run": "r",
    "rank": 0,
    "world": 2,
    "node": "a0",
    "cluster": "a",
    "fabrics": {"ib": ["ib", 1000]},
}


def operation(start, end, kind="data", peer=None, ranks=(0, 1), sent=100.0):
    group = SimpleNamespace(
        kind=lambda sizes, to, rank: kind,
        ranks=ranks,
        name="7",
        transport=SimpleNamespace(fabric="ib"),
        backend="gloo",
    )
    op = Op(group, "all_reduce" if peer is None else "send", 200, sent, peer, 3, start)
    op.end, op.waited = end, 0.25
    return op


def writer(path, **more):
    return Writer(
        path / "run" / "rank0.jsonl",
        HEAD,
        Recorder(0, None),
        lambda rank: "b" if rank == 1 else "a",
        **more,
    )


def test_what_the_last_step_left_under_way_is_added_to_it(tmp_path):
    made = writer(tmp_path)
    sums = [operation(10.0, 11.0)]
    made.on_step(0, 10.0, 12.0, 64, sums, [], None)
    made.recorder.step, made.recorder.unfinished = (
        1,
        [operation(11.5, 12.5), operation(11.0, 12.5, "pipeline", peer=1), operation(11.0, 0.0)],
    )
    made.close()
    step = read(tmp_path / "run" / "rank0.jsonl").steps[0]
    assert step["groups"] == [
        ["data", "ib", "across", 2, 400, 200, 2.0, 0.5],
        ["pipeline", "ib", "across", 1, 200, 100, 1.5, 0.25],
    ]
    assert step["between"] == [["a", "b", 300, 0.75]]


def test_a_step_is_one_line(tmp_path):
    made = writer(tmp_path)
    made.on_step(
        2,
        10.0,
        12.0,
        64,
        [operation(10.0, 11.0), operation(10.5, 11.5), operation(11, 11.25, "pipeline", peer=0)],
        [("forward", 10, 11)],
        None,
    )
    made.put({"clock": [1.5, 0.1]})
    made.close()
    one = read(tmp_path / "run" / "rank0.jsonl")
    assert one.closed and not one.cut and one.clock == (1.5, 0.1)
    step = one.steps[2]
    assert step["groups"] == [
        ["data", "ib", "across", 2, 400, 200, 1.5, 0.5],
        ["pipeline", "ib", "inside", 1, 200, 100, 0.25, 0.25],
    ]
    assert step["between"] == [["a", "b", 200, 0.5]]
    assert step["spans"] == [["forward", 10, 11]] and step["ops"][0] == [
        "data",
        "ib",
        "all_reduce",
        "7",
        3,
        None,
        10.0,
        11.0,
        0.25,
        100,
    ]
    assert "ops" in step and not telemetry_file.traced(3)


def test_what_leaves_the_cluster_counts_by_where_it_goes(tmp_path):
    cluster_of = dict(enumerate("aabbc")).get
    made = Writer(tmp_path / "rank1.jsonl", HEAD | {"rank": 1}, Recorder(1, None), cluster_of)
    received = operation(0, 1, "pipeline", peer=3, sent=0.0)
    done = [
        operation(0, 1, ranks=(0, 1, 2, 4)),  # the next rank is in b
        operation(0, 1, ranks=(1, 0, 4)),  # the next one is in a, then c: only the waiting counts
        operation(0, 1, ranks=(0, 1)),
        operation(0, 1, "pipeline", peer=2, sent=30.0),
        received,
    ]
    assert made.cluster_pair_totals(done) == [
        ["a", "b", 130, 0.5],
        ["a", "c", 0, 0.25],
        ["b", "a", 0, 0.25],
    ]
    made.close()


def test_the_file_is_bounded(tmp_path, capsys):
    made = writer(tmp_path, limit=4000)
    for step in range(200):
        made.on_step(step, 1.0 * step, step + 1.0, 0, [operation(step, step + 0.5)], [], None)
    made.close()
    path = tmp_path / "run" / "rank0.jsonl"
    assert 3500 < path.stat().st_size <= 4000
    assert len(read(path).steps) > 10  # whole lines
    err = capsys.readouterr().err
    assert (
        err.count("\n") == 1
        and "telemetry of rank 0 ends here (the file has reached 0 MiB); training goes on" in err
    )


def test_a_full_disk_ends_telemetry_not_training(tmp_path, capsys, monkeypatch):
    made = writer(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(telemetry_file.os, "write", full)
    made.on_step(0, 0.0, 1.0, 0, [], [], None)
    made.on_step(1, 1.0, 2.0, 0, [], [], None)
    made.close()
    assert "No space left on device" in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_a_file_is_never_written_over(tmp_path):
    writer(tmp_path).close()
    with pytest.raises(FileExistsError):
        writer(tmp_path)


def test_tensorboard_gets_the_totals(tmp_path):
    written = []
    add = lambda name, value, step: written.append((name, value, step))  # noqa: E731
    board = SimpleNamespace(add_scalar=add, close=lambda: written.append("closed"))
    made = writer(tmp_path, make_board=lambda: board)
    made.on_step(4, 0.0, 2.0, 0, [operation(0, 1)], [], None)
    made.close()
    assert (
        ("holmes/step_s", 2.0, 4) in written
        and ("holmes/data across (ib)/exposed_s", 0.25, 4) in written
        and written[-1] == "closed"
    )
    assert ("holmes/data across (ib)/Gbps", 100 * 8 / 1e9, 4) in written


def test_a_step_of_many_operations_stays_small(tmp_path):
    made = writer(tmp_path)
    made.on_step(5, 0.0, 1.0, 0, [operation(0, 1) for _ in range(6000)], [], None)
    made.close()
    lines = (tmp_path / "run" / "rank0.jsonl").read_text().splitlines()
    step = json.loads(lines[1])
    assert len(step["ops"]) == 5000 and step["groups"][0][3] == 6000
