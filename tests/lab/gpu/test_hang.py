"""Tests the deadlock detection for jobs on emulated GPUs (lab/holmes_lab/gpu/hang.py).

A wait-for graph holds the hosts and the pending kernels of all ranks; a cycle in it is a deadlock.
"""

import json
import mmap
import struct
import threading
import time

import pytest
from holmes_lab.gpu import communicators
from holmes_lab.gpu.hang import WaitForGraph
from holmes_lab.gpu.hang_report import explain
from holmes_lab.gpu.state import Watch, parse
from holmes_lab.gpu.watcher import Watcher

PAIR = {"0xa": (0, 1), "0xb": (0, 1)}


def kernel(
    sequence: int,
    communicator: str,
    member: int,
    peer: int | None = None,
    started: bool = True,
    **waits,
):
    waits = waits or ({"peer": peer, "direction": "recv", "channel": 0} if peer is not None else {})
    return {
        "kind": "kernel",
        "name": "ncclDevKernel",
        "sequence": sequence,
        "position": sequence,
        "started": started,
        "sms": 1,
        "communicator": communicator,
        "group": "",
        "rank": member,
        "ranks": 2,
        "number": 0,
        "what": "AllReduce of 4",
        "waits_for": waits,
    }


def stream(number: int, *work: dict, queue: int = 0) -> dict:
    return {"device": 0, "stream": number, "queue": queue, "work": list(work)}


def host(*places: tuple[int, int], call: str = "cudaDeviceSynchronize", **more) -> dict:
    return {
        "call": call,
        "for": [{"device": 0, "stream": one, "sequence": two} for one, two in places],
        **more,
    }


def rank(number: int, *streams: dict, hosts: tuple = ()):
    return parse(number, {"streams": list(streams), "hosts": list(hosts), "node": f"n{number}"})


def test_two_communicators_in_other_orders():
    """Two ranks use two communicators in opposite orders.

    Each rank's host waits for a kernel whose peer has not been launched, because the other host
    waits too.
    """
    graph = WaitForGraph(
        [
            rank(0, stream(7, kernel(1, "0xa", 0, peer=1)), hosts=(host((7, 1)),)),
            rank(1, stream(8, kernel(1, "0xb", 1, peer=0)), hosts=(host((8, 1)),)),
        ],
        PAIR,
    )
    circle = graph.find_cycle()
    assert [type(wait.waiter).__name__ for wait in circle] == [
        "RankHost",
        "WorkId",
        "RankHost",
        "WorkId",
    ]
    lines = explain(graph, {})
    assert (
        "rank 0: its host waits in cudaDeviceSynchronize for rank 0: "
        "stream 7: kernel AllReduce of 4"
    ) in lines[1]
    assert (
        "waits for data from rank 1, which has launched no kernel for it: rank 1: its host"
        in lines[2]
    )
    assert lines[5] == "where each rank is:"
    assert lines[6] == "  rank 0 (n0): its host waits in cudaDeviceSynchronize"
    stands_at = (
        "    stream 7 (hardware queue 0): kernel AllReduce of 4 (communicator 0xa, operation 0) "
        "waits for data"
    )
    assert lines[7].startswith(stands_at)
    assert len(lines) == 10


def test_a_host_outside_cuda_may_do_anything():
    graph = WaitForGraph(
        [rank(0, stream(7, kernel(1, "0xa", 0, peer=1)), hosts=(host((7, 1)),)), rank(1)], PAIR
    )
    assert graph.find_cycle() == []
    stack = 'Thread 0x7 (most recent call first):\n  File "train.py", line 7 in load\n'
    lines = explain(graph, {1: "b0:1"}, {1: stack})
    assert "no cycle" in lines[0]
    assert lines[-3:] == [
        "  rank 1 (b0:1): its host is in no CUDA call",
        "      Thread 0x7 (most recent call first):",
        '        File "train.py", line 7 in load',
    ]


def launched(*whats: tuple[int, str]) -> list[dict]:
    return [
        {"communicator": "0xa", "group": "dp", "collective": number, "what": what}
        for number, what in whats
    ]


def test_unlike_collectives_are_told():
    """The first that differs; what a rank has not come to yet differs from nothing."""
    own = [
        launched(
            (0, "AllReduce of 4 Float32"), (1, "AllReduce of 8 Float32"), (2, "Broadcast of 1 Int8")
        ),
        launched(
            (0, "AllReduce of 4 Float32"), (1, "AllReduce of 9 Float32"), (2, "AllReduce of 1 Int8")
        ),
        launched((0, "AllReduce of 4 Float32")),
    ]
    states = [
        parse(number, {"streams": [], "hosts": [], "recent": recent})
        for number, recent in enumerate(own)
    ]
    assert (
        "mismatched collectives in group dp, communicator 0xa: AllReduce of 8 Float32 on rank 0;"
        " AllReduce of 9 Float32 on rank 1"
    ) in explain(WaitForGraph(states, PAIR), {})
    assert WaitForGraph(states[2:], PAIR).find_mismatches() == []


def test_sends_and_receives_need_not_be_alike():
    states = [
        parse(number, {"streams": [], "hosts": [], "recent": launched((-1, what))})
        for number, what in enumerate(("Send to 1 (4 bytes)", "Recv from 0 (4 bytes)"))
    ]
    assert WaitForGraph(states, PAIR).find_mismatches() == []


def test_a_rank_that_does_not_answer_may_do_anything():
    graph = WaitForGraph(
        [rank(0, stream(7, kernel(1, "0xa", 0, peer=1)), hosts=(host((7, 1)),))], PAIR
    )
    assert graph.find_cycle() == []


def test_a_kernel_that_computes_moves_on():
    computes = {**kernel(1, "", -1), "name": "matmul", "sms": 0}
    graph = WaitForGraph(
        [
            rank(0, stream(7, computes, kernel(2, "0xa", 0, started=False)), hosts=(host((7, 2)),)),
            rank(1, stream(8, kernel(1, "0xa", 1, peer=0)), hosts=(host((8, 1)),)),
        ],
        PAIR,
    )
    assert graph.find_cycle() == []


def test_streams_that_head_each_other():
    """Rank 0's Recv of a waits for rank 1's kernel of a, and so on in a circle.

    The kernel of a stands in its stream behind one of b.
    """
    graph = WaitForGraph(
        [
            rank(0, stream(7, kernel(1, "0xa", 0, peer=1), kernel(2, "0xb", 0, started=False))),
            rank(1, stream(8, kernel(1, "0xb", 1, peer=0), kernel(2, "0xa", 1, started=False))),
        ],
        PAIR,
    )
    whys = [wait.reason for wait in graph.find_cycle()]
    assert len(whys) == 4 and whys.count("comes in its stream after") == 2


def test_what_comes_between_in_a_stream_is_not_told():
    """The wait of another stream enters the circle at an event in the middle of rank 0's stream."""
    record = {
        "kind": "event record",
        "name": "cudaEventRecord",
        "sequence": 2,
        "position": 2,
        "started": False,
        "sms": 0,
        "waits_for": {},
    }
    of_7 = {"after": {"device": 0, "stream": 7, "sequence": 2}}
    graph = WaitForGraph(
        [
            rank(
                0,
                stream(5, {**record, "kind": "event wait", "waits_for": of_7}),
                stream(7, kernel(1, "0xa", 0, peer=1), record, kernel(3, "0xb", 0, started=False)),
                hosts=(host((5, 2)),),
            ),
            rank(1, stream(8, kernel(1, "0xb", 1, peer=0), kernel(2, "0xa", 1, started=False))),
        ],
        PAIR,
    )
    told = [line for line in explain(graph, {}) if "comes in its stream after" in line]
    assert len(told) == 2 and not any("event record" in line for line in told)


def test_one_hardware_queue():
    """A gradient that was posted before the forward pass that its sender needs: the pass stands behind it."""
    posted = kernel(1, "0xa", 0, peer=1)
    waits = {
        "kind": "event wait",
        "name": "cudaStreamWaitEvent",
        "sequence": 1,
        "position": 2,
        "started": False,
        "sms": 0,
        "waits_for": {"after": {"device": 0, "stream": 7, "sequence": 1}},
    }
    behind = {**kernel(1, "0xb", 0, started=False, queue=0), "position": 3}
    graph = WaitForGraph(
        [
            rank(0, stream(7, posted), stream(9, waits), stream(11, behind)),
            rank(1, stream(8, kernel(1, "0xb", 1, peer=0)), hosts=(host((8, 1)),)),
        ],
        PAIR,
    )
    assert "stands in hardware queue 0 behind" in [wait.reason for wait in graph.find_cycle()]


def test_full_multiprocessors():
    wanting = {**kernel(1, "0xb", 0, started=False, sms=2, free=0), "sms": 2}
    graph = WaitForGraph(
        [
            rank(0, stream(7, kernel(1, "0xa", 0, peer=1)), stream(9, wanting)),
            rank(1, stream(8, kernel(1, "0xb", 1, peer=0), kernel(2, "0xa", 1, started=False))),
        ],
        PAIR,
    )
    assert any("multiprocessors" in wait.reason for wait in graph.find_cycle())


def test_what_only_the_network_holds_up_is_no_circle():
    """A collective that all ranks run is under way, so no rank waits in a circle.

    If one of three ranks has not launched it, or has launched another one, the others wait for that
    rank.
    """
    ring = {"0xa": (0, 1, 2)}

    def states(third):
        return [
            rank(0, stream(7, kernel(1, "0xa", 0, peer=1)), hosts=(host((7, 1)),)),
            rank(1, stream(7, kernel(1, "0xa", 1, peer=2)), hosts=(host((7, 1)),)),
            rank(2, stream(7, third), hosts=(host((7, 1)),)),
        ]

    third = kernel(1, "0xa", 2, peer=0)
    assert WaitForGraph(states(third), ring).find_cycle() == []
    assert len(WaitForGraph(states({**third, "what": "AllReduce of 5"}), ring).find_cycle()) == 3
    assert (
        len(
            WaitForGraph(
                states(kernel(1, "0xb", 2, peer=0)), {**ring, "0xb": (0, 1, 2)}
            ).find_cycle()
        )
        > 1
    )


def test_a_message_under_way_is_no_circle():
    def kernels(*directions):
        sent = [
            {
                **kernel(1, "0xa", number),
                "what": f"{direction} {1 - number}",
                "waits_for": {"peer": 1 - number, "direction": direction, "channel": 0},
            }
            for number, direction in enumerate(directions)
        ]
        return [rank(number, stream(7, one)) for number, one in enumerate(sent)]

    assert WaitForGraph(kernels("send", "recv"), PAIR).find_cycle() == []
    assert len(WaitForGraph(kernels("send", "send"), PAIR).find_cycle()) == 2


def test_a_connection_that_is_not_made():
    connecting = host(call="NCCL, to connect to", communicator="0xa", peer=1)
    graph = WaitForGraph(
        [
            rank(0, hosts=(connecting,)),
            rank(1, stream(8, kernel(1, "0xb", 1, peer=0)), hosts=(host((8, 1)),)),
        ],
        PAIR,
    )
    assert "rank 0: its host waits in NCCL, to connect to rank 1: its host" in explain(graph, {})[1]


def page(directory, number: int, progress: int = 1) -> mmap.mmap:
    path = directory / f"rank{number}.watch"
    path.write_bytes(struct.pack("=QQQ", progress, 0, 0).ljust(mmap.PAGESIZE, b"\0"))
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), mmap.PAGESIZE)


def answer(directory, number: int, mapped: mmap.mmap, state: dict) -> None:
    """As a rank's thread does."""
    (directory / f"rank{number}.json").write_text(json.dumps(state))
    while (asked := mapped[8:16]) == mapped[16:24]:
        time.sleep(0.01)
    mapped[16:24] = asked


def stuck(number: int, communicator: str) -> dict:
    waiting = stream(7, kernel(1, communicator, number, peer=1 - number))
    return {"streams": [waiting], "hosts": [host((7, 1))]}


def test_ranks_are_asked(tmp_path):
    mapped = page(tmp_path, 0)
    thread = threading.Thread(target=answer, args=(tmp_path, 0, mapped, stuck(0, "0xa")))
    thread.start()
    page(tmp_path, 1)  # and never answers
    states = Watch(tmp_path).request_states(timeout_s=1.0)
    thread.join()
    assert [state.rank for state in states] == [0]


def test_the_watcher_is_sure_before_it_tells(tmp_path):
    now = [0.0]
    pages = [page(tmp_path, number) for number in (0, 1)]
    for number in (0, 1):
        line = {
            "communicator": "0xa",
            "rank": number,
            "ranks": 2,
            "group": "",
            "network": "IB",
            "self": f"p{number}",
            "members": ["p0", "p1"],
        }
        other = {**line, "communicator": "0xb"}
        (tmp_path / f"rank{number}.communicators").write_text(
            f"{json.dumps(line)}\n{json.dumps(other)}\n"
        )
    watcher = Watcher(tmp_path, clock=lambda: now[0])
    assert watcher.poll() is None
    now[0] += 100
    pages[0][0:8] = struct.pack("=Q", 2)  # it moved
    assert watcher.poll() is None
    now[0] += 100
    threads = [
        threading.Thread(target=answer, args=(tmp_path, number, pages[number], stuck(number, name)))
        for number, name in ((0, "0xa"), (1, "0xb"))
    ]
    for thread in threads:
        thread.start()
    graph = watcher.poll()
    for thread in threads:
        thread.join()
    assert graph is not None and len(graph.find_cycle()) == 4


@pytest.mark.parametrize("waiting", [True, False], ids=["work waits", "no stream has work"])
def test_a_standstill_without_a_circle_is_told_once_and_ended_if_work_waits(tmp_path, waiting):
    now, mapped = [0.0], page(tmp_path, 0)
    watcher = Watcher(tmp_path, clock=lambda: now[0], report_s=60.0, end_s=200.0)
    stands_at = {
        "streams": [stream(7, kernel(1, "0xa", 0, peer=1))] if waiting else [],
        "hosts": [],
    }

    def poll(after: float) -> WaitForGraph | None:
        now[0] += after
        thread = threading.Thread(target=answer, args=(tmp_path, 0, mapped, stands_at), daemon=True)
        thread.start()
        return watcher.poll()

    assert watcher.poll() is None
    assert poll(10) is None
    told = poll(51)
    assert told is not None and told.find_cycle() == [] and not watcher.must_end(told)
    assert poll(60) is None
    ended = poll(80)
    assert (ended is not None and watcher.must_end(ended)) == waiting


def test_stacks_are_asked_for(tmp_path):
    mapped = page(tmp_path, 0)
    watch = Watch(tmp_path)
    watch.progress()

    def write() -> None:
        while mapped[24:32] != struct.pack("=Q", 1):
            time.sleep(0.01)
        (tmp_path / "rank0.stack").write_text("Thread 0x1 (most recent call first):\n")
        mapped[24:32] = struct.pack("=Q", 2)

    thread = threading.Thread(target=write)
    thread.start()
    assert watch.stacks() == {0: "Thread 0x1 (most recent call first):\n"}
    thread.join()


def test_communicators_by_the_ranks_of_the_job(tmp_path):
    for number, own in ((0, "p0"), (3, "p3")):
        line = {
            "communicator": "0xa",
            "rank": number % 2,
            "ranks": 2,
            "group": "stage_link",
            "network": "Socket",
            "self": own,
            "members": ["p0", "p3"],
        }
        (tmp_path / f"rank{number}.communicators").write_text(json.dumps(line) + "\n")
    assert communicators.read(tmp_path) == [
        communicators.Communicator("0xa", (0, 3), "Socket", "stage_link")
    ]


def test_a_communicator_whose_name_is_known_later(tmp_path):
    line = {
        "communicator": "0xa",
        "rank": 0,
        "ranks": 1,
        "network": "IB",
        "self": "p0",
        "members": ["p0"],
    }
    named = [json.dumps({**line, "group": group}) for group in ("", "stage_link", "")]
    (tmp_path / "rank0.communicators").write_text("\n".join(named) + "\n")
    assert communicators.read(tmp_path) == [
        communicators.Communicator("0xa", (0,), "IB", "stage_link")
    ]


def test_a_line_that_tells_only_the_name_of_a_communicator_s_group(tmp_path):
    """A later line replaces the name of a group.

    torch's description of the group is known only after its communicator was made.
    """
    made = {
        "communicator": "0xa",
        "rank": 0,
        "ranks": 1,
        "group": "3",
        "network": "IB",
        "self": "p0",
        "members": ["p0"],
    }
    lines = [
        made,
        {**made, "communicator": "0xb", "group": "4"},
        {"communicator": "0xa", "group": "stage_link"},
    ]
    (tmp_path / "rank0.communicators").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert [communicator.group for communicator in communicators.read(tmp_path)] == [
        "stage_link",
        "4",
    ]


def test_a_rank_that_knows_no_name_leaves_it_to_the_next(tmp_path):
    made = {"communicator": "0xa", "ranks": 2, "network": "IB", "members": ["p0", "p1"]}
    for rank, name in ((0, ""), (1, "stage_link")):
        line = {**made, "rank": rank, "self": f"p{rank}", "group": name}
        (tmp_path / f"rank{rank}.communicators").write_text(json.dumps(line) + "\n")
    assert communicators.read(tmp_path) == [
        communicators.Communicator("0xa", (0, 1), "IB", "stage_link")
    ]
