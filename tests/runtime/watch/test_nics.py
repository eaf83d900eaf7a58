"""The watch over this node's NICs, and the line that an error of the framework's own communication gets."""

import errno
import os
import socket
from dataclasses import replace

import pytest
import torch.distributed as dist

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.transport import Transport
from holmes_ext.runtime.session import GroupRecord
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.watch import failure, nics
from holmes_ext.runtime.watch.nccl_errors import NcclFailure

FABRICS = (Fabric("roce", "roce", 10**9, 4e-6), Fabric(ETHERNET, "ethernet", 10**8, 3e-5))


def node(name, number):
    return Node(
        name,
        "b",
        1,
        (
            Port("roce", "lo", f"127.3.0.{number}", ("mlx5_0:1",)),
            Port(ETHERNET, "lo", f"127.1.0.{number}"),
        ),
    )


@pytest.fixture
def current(monkeypatch):
    """Rank 1 on b1, in a data group with rank 0 on b0 over RoCE; both are this machine's loopback."""
    site = Site((node("b0", 1), node("b1", 2)), FABRICS)
    made = session.Session(
        Options(),
        Process(1, 2, 0, 1, "127.0.0.1", 29500, "test"),
        site,
        Plan(site.digest, ("b0", "b1"), 1),
        1,
        maker=maker,
    )
    made.groups.append(GroupRecord("dp", (0, 1), "gloo", Transport("roce", "roce", "lo", "IB")))
    monkeypatch.setattr(session, "_active", made)
    monkeypatch.setattr(nics, "_at_start", {})
    return made


class Watched(failure.NicWatch):
    """A watch whose NIC is in the trouble that the test says, and whose end is told instead of done."""

    def __init__(self, patience_s):
        self.problem, self.lines = "", []
        super().__init__(
            patience_s,
            lambda port: self.problem if port.fabric == "roce" else "",
            self.lines.append,
        )
        self._tell_once = lambda current, line: self.lines.append(line)


def test_a_link_that_stays_away_ends_the_job_and_is_named(current):
    watch = Watched(20)
    watch.poll(0)
    watch.problem = "has no link"
    for second in range(1, 21):
        watch.poll(second)
    assert len(watch.lines) == 1 and "has no link; the job ends in 20 s" in watch.lines[0]
    watch.poll(21)
    assert watch.lines[1] == (
        "rank 1 on node b1: NIC lo (mlx5_0:1) of node b1 (fabric roce, 127.3.0.2) has no link for 20 s, and "
        "groups of this rank need it; the job ends here"
    )
    assert watch.ended.is_set()


def test_a_link_that_comes_back_costs_a_line(current):
    watch = Watched(20)
    watch.poll(0)
    watch.problem = "has no link"
    watch.poll(1)
    watch.problem = ""
    watch.poll(9)
    watch.poll(60)
    assert (
        len(watch.lines) == 2
        and watch.lines[1] == "NIC lo (mlx5_0:1) of node b1 is back after 8 s"
        and not watch.ended.is_set()
    )


def test_what_was_so_from_the_start_and_what_no_group_needs_end_nothing(current):
    watch = Watched(5)
    watch.problem = "is gone"
    watch.poll(0)
    watch.poll(100)
    assert watch.lines == []
    current.groups[:] = [
        GroupRecord("world", (0, 1), "gloo", Transport(ETHERNET, "ethernet", "lo", "Socket"))
    ]
    watch = Watched(5)
    watch.poll(0)
    watch.problem = "has no link"
    watch.poll(1)
    watch.poll(100)
    assert watch.lines == [] and not watch.ended.is_set()


def test_without_patience_the_job_goes_on(current):
    watch = Watched(0)
    watch.poll(0)
    watch.problem = "has no link"
    watch.poll(1)
    watch.poll(1000)
    assert len(watch.lines) == 1 and "the job ends" not in watch.lines[0]


def test_the_kernel_says_what_a_net_device_is(tmp_path, monkeypatch):
    assert nics.trouble(Port(ETHERNET, "lo")) == "" and "is gone" in nics.trouble(
        Port(ETHERNET, "no-such-nic")
    )
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "counters/link_downed").write_text("3\n")
    monkeypatch.setenv("HOLMES_SYSFS", str(tmp_path))
    ib = Port("ib", "", hcas=("mlx5_0:1",))
    before = nics.counters([ib])
    monkeypatch.setattr(nics, "_at_start", before)
    assert (
        nics.trouble(ib) == ""
        and before == {"mlx5_0:1": {"link_downed": 3}}
        and nics.grown(before, ib) == ""
    )
    (port / "state").write_text("1: DOWN\n")
    (port / "counters/link_downed").write_text("4\n")
    assert nics.trouble(ib) == "has its port mlx5_0:1 in state 1: DOWN"
    assert nics.grown(nics.counters([ib]), ib) == "link_downed +1"


def test_what_the_nics_carry(tmp_path, monkeypatch):
    """An interface's own bytes, and those of the HCA behind it, which sockets do not count."""
    monkeypatch.setenv("HOLMES_SYSFS", str(tmp_path))
    own = nics.bytes_carried(node("b0", 1))["lo"]
    counters = tmp_path / "class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    for name in ("port_xmit_data", "port_rcv_data"):
        (counters / name).write_text(f"{10**12}\n")
    assert 0 < own < 8 * 10**12 <= nics.bytes_carried(node("b0", 1))["lo"]


def test_a_refusal_is_an_answer():
    with socket.socket() as taken:  # bound and not listening: refused
        taken.bind(("127.0.0.1", 0))
        assert nics.answers_at("127.0.0.1", "127.0.0.1", taken.getsockname()[1])
    assert not nics.answers_at("127.0.0.1", "192.0.2.1", seconds=0.2)
    assert nics.answers_at("", "192.0.2.1")


def test_an_error_of_communication_names_the_silent_nic(current, monkeypatch):
    monkeypatch.setattr(nics, "answers_at", lambda source, target: not target.startswith("127.3."))
    monkeypatch.setattr(nics, "trouble", lambda port: "")
    line = failure.explain(
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/x.cc:1] Timed out waiting 6000ms for recv\nmore"
        )
    )
    assert (
        line.startswith("rank 1 on node b1: communication failed: [/pytorch") and "\n" not in line
    )
    assert line.endswith(
        "node b0 does not answer on lo (mlx5_0:1) 127.3.0.1 (from lo (mlx5_0:1) 127.3.0.2) within 3 s, but "
        "does over lo"
    )
    monkeypatch.setattr(nics, "answers_at", lambda source, target: False)
    assert failure.explain(dist.DistError("x")).endswith("over no NIC: the node is lost")


def test_an_error_of_communication_names_the_own_dead_nic_and_the_lost_node(current, monkeypatch):
    monkeypatch.setattr(
        nics, "trouble", lambda port: "has no link" if port.fabric == "roce" else ""
    )
    monkeypatch.setattr(
        nics, "counters", lambda ports: {"lo (mlx5_0:1)": {"carrier_down_count": 2}}
    )
    nics._at_start["lo (mlx5_0:1)"] = {"carrier_down_count": 1}
    line = failure.explain(RuntimeError("gloo: Connection closed by peer [127.3.0.1]:4711"))
    assert "communication failed; node b0 (rank 0) is lost at its lo (mlx5_0:1): " in line
    assert (
        "; NIC lo (mlx5_0:1) of node b1 (fabric roce, 127.3.0.2) has no link (carrier_down_count +1 since "
        "the start)" in line
    )


def test_a_full_disk_is_named_and_every_error_is_there_for_the_others(current, monkeypatch):
    published = []
    monkeypatch.setattr(
        failure, "_store_first_message", lambda mine: published.append(mine) or mine
    )
    torchs = RuntimeError(
        "[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0: file "
        "write failed"
    )
    closing = RuntimeError(
        "[enforce fail at inline_container.cc:672] . unexpected pos 2816 vs 2708"
    )
    for error in (OSError(errno.ENOSPC, "No space left on device", "/x"), torchs, closing):
        assert failure.explain(error).startswith(
            f"rank 1 on node b1: {type(error).__name__}: ["
        ) and failure.explain(error).endswith("; is the disk full?")
    assert (
        failure.explain(OSError(errno.EIO, "x")) is None
        and failure.explain(ValueError("shapes do not match")) is None
    )
    assert published[-1] == "rank 1 on node b1: ValueError: shapes do not match"


def test_where_another_rank_refused_bad_input_only_that_is_told(current, monkeypatch):
    monkeypatch.setattr(
        failure,
        "_store_first_message",
        lambda mine: "holmes: stage link from stage 0 to stage 1: give all",
    )
    line = failure.explain(RuntimeError("gloo: Connection closed by peer"))
    assert (
        line
        == "holmes: stage link from stage 0 to stage 1: give all (rank 1 on node b1 ends with it)"
    )
    monkeypatch.setattr(
        failure, "_store_first_message", lambda mine: "rank 0 on node a0: ValueError: no"
    )
    line = failure.explain(RuntimeError("gloo: Connection closed by peer"))
    assert line.startswith("rank 1 on node b1: communication failed") and line.endswith(
        "; first seen as: rank 0 on node a0: ValueError: no"
    )


def test_a_failure_of_nccl_is_printed_once_and_names_the_lost_node(current, monkeypatch, capfd):
    # The NICs of both nodes work, so the message names no NIC.
    monkeypatch.setattr(nics, "trouble", lambda port: "")
    monkeypatch.setattr(nics, "answers_at", lambda source, target: True)
    # NCCL has failed in two groups of this process, which is rank 1.
    failures = [NcclFailure([0, 1, 2], "REMOTE_ERROR"), NcclFailure([0, 1], "COMM_ERROR")]
    monkeypatch.setattr(failure, "nccl_failures", lambda: failures)
    watch = failure.NicWatch(patience_s=0.0, trouble=nics.trouble)
    for second in range(3):
        watch.poll(float(second))
    (line,) = capfd.readouterr().err.splitlines()  # one line after three polls
    # Only the smaller group is named: in it, rank 0 is the only candidate for the lost rank.
    expected = (
        "holmes: rank 1 on node b1: communication failed; node b0 (rank 0) is lost: NCCL's COMM_ERROR in the "
        "group of ranks 0, 1"
    )
    assert line.startswith(expected), line

    # After a timeout no rank is named as lost.
    failures[:] = [NcclFailure([0, 1], "TIMEOUT")]
    assert "; the timeout has passed: NCCL's TIMEOUT" in failure.describe_nccl_failure()
    # Without a failure there is no message.
    failures.clear()
    assert failure.describe_nccl_failure() is None


def test_other_errors_are_left_alone(current):
    assert (
        failure.explain(RuntimeError("shapes do not match")) is None
        and failure.explain(ValueError("gloo")) is None
    )
    current.site = replace(current.site)
    session.set_active(None)
    assert failure.explain(RuntimeError("gloo: Connection closed by peer")) is None


def test_a_store_that_never_answers_delays_the_line_and_no_more(current, monkeypatch):
    read, write = os.pipe()  # nobody ever writes

    class Silent:
        def compare_set(self, *_):
            os.read(read, 1)
            raise RuntimeError("gone")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Silent)
    monkeypatch.setattr(failure, "_STORE_S", 0.1)
    assert failure.with_first("mine") == "mine"
    os.close(write)
