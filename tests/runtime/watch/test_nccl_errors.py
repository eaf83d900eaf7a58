"""Tests which failures of NCCL holmes reports, and that it reports them before torch ends the process.

Stand-ins for torch's process groups are used, since the tests run without NCCL.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from holmes_ext.patches import Registry, all_patches
from holmes_ext.runtime import session
from holmes_ext.runtime.watch import failure, nccl_errors, nic_watch, nics

c10d = dist.distributed_c10d


class BackendWithoutHooks:
    """Stand-in for torch's first NCCL backend, ProcessGroupNCCL."""

    def __init__(self):
        self.state = "SUCCESS"

    def get_error(self):
        return SimpleNamespace(name=self.state)

    def abort(self):
        self.state = "COMM_ERROR"


class BackendWithHooks(BackendWithoutHooks):
    """Stand-in for ProcessGroupNCCL2, which is "nccl" since torch 2.15."""

    def __init__(self):
        super().__init__()
        self.hooks = {}

    def register_abort_hook(self, number, hook):
        self.hooks[number] = hook

    def unregister_abort_hook(self, number):
        self.hooks.pop(number, None)

    def lose_a_rank(self):
        """Do what torch's watchdog does when NCCL reports an error, except for the end of the process."""
        self.state = "COMM_ERROR"
        for hook in list(self.hooks.values()):
            hook()


class BackendThatRefusesHooks(BackendWithoutHooks):
    """Stand-in for torch's first NCCL backend in torch 2.15."""

    def register_abort_hook(self, number, hook):
        raise RuntimeError("Backend nccl does not support registerAbortHook")


class Group:
    """Stand-in for a process group with one backend, for tensors on GPUs."""

    _device_types = (torch.device("cuda"),)

    def __init__(self, backend, ranks):
        self.backend = backend
        self.ranks = ranks

    def _get_backend(self, device):
        return self.backend

    def abort(self):
        self.backend.abort()


@pytest.fixture
def make_group(monkeypatch):
    """Return a function that makes a group of two or more ranks, which torch then knows."""
    groups = {}  # as torch's list of groups: group -> its backend's name and store
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_map=groups))
    monkeypatch.setattr(nccl_errors, "group_ranks", lambda group: group.ranks)

    def make(backend, ranks=(0, 1)):
        group = Group(backend, list(ranks))
        groups[group] = ("nccl", None)
        return group

    return make


@pytest.fixture
def watch(monkeypatch):
    """Watch over NCCL on rank 1, whose thread does not run: a failure is only seen through torch's hook."""
    plan = SimpleNamespace(world_size=2, node_of=lambda rank: f"b{rank}")
    current = SimpleNamespace(rank=1, node=SimpleNamespace(name="b1"), plan=plan, groups=[])
    monkeypatch.setattr(session, "_active", current)
    monkeypatch.setattr(failure, "_first", lambda mine: mine)  # no other rank has failed before
    monkeypatch.setattr(nics, "in_use", lambda current: [])
    watch = nic_watch.NicWatch(patience_s=0.0)
    monkeypatch.setattr(watch, "run", lambda: None)
    watch.start()
    yield watch
    watch.stop()


def test_a_failure_is_reported_before_torch_ends_the_process(make_group, watch, capfd):
    group = make_group(BackendWithHooks())
    nccl_errors.register_abort_hook(group)
    group.backend.lose_a_rank()
    line = "holmes: rank 1 on node b1: communication failed; node b0 (rank 0) is lost: NCCL's COMM_ERROR"
    assert capfd.readouterr().err.startswith(line)


def test_a_failure_is_reported_once(make_group, watch, capfd):
    """torch runs the hook again when another thread finds the same failure, and for each group."""
    for group in (make_group(BackendWithHooks()), make_group(BackendWithHooks())):
        nccl_errors.register_abort_hook(group)
        group.backend.lose_a_rank()
        group.backend.lose_a_rank()
    watch.look(now=0.0)
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_nothing_is_reported_after_the_end_of_the_watch(make_group, watch, capfd):
    group = make_group(BackendWithHooks())
    nccl_errors.register_abort_hook(group)
    watch.stop()
    group.backend.lose_a_rank()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("backend", [BackendWithoutHooks, BackendThatRefusesHooks])
def test_a_backend_without_hooks_is_asked_for_its_state(make_group, watch, capfd, backend):
    group = make_group(backend())
    nccl_errors.register_abort_hook(group)
    group.backend.state = "TIMEOUT"
    assert capfd.readouterr().err == ""
    watch.look(now=0.0)
    assert "the timeout has passed" in capfd.readouterr().err


def test_hooks_are_removed_at_the_end_of_the_process(make_group):
    """A thread of torch that called Python while the interpreter ends would abort the process."""
    group = make_group(BackendWithHooks())
    make_group(BackendWithoutHooks())
    nccl_errors.register_abort_hook(group)
    nccl_errors._unregister_abort_hooks()
    assert group.backend.hooks == {}


def test_the_end_of_the_process_waits_for_a_running_hook(make_group):
    """The interpreter must not end before the line about the failure is printed."""
    group = make_group(BackendWithHooks())
    nccl_errors.register_abort_hook(group)
    events = []
    has_begun = threading.Event()

    def report():
        has_begun.set()
        time.sleep(0.2)
        events.append("reported")

    nccl_errors.report_failures_with(report)
    thread_of_torch = threading.Thread(target=group.backend.lose_a_rank)
    thread_of_torch.start()
    has_begun.wait()
    nccl_errors._unregister_abort_hooks()
    events.append("interpreter ends")
    thread_of_torch.join()
    assert events == ["reported", "interpreter ends"]


@pytest.mark.parametrize("abort", ["of the group", "of its backend"])
def test_a_group_that_the_program_aborts_is_not_reported(make_group, watch, capfd, abort):
    aborted = make_group(BackendWithHooks())
    if abort == "of the group":
        nccl_errors.note_abort(aborted)
    else:
        nccl_errors.note_abort_of_backend(aborted.backend)
    aborted.backend.abort()
    watch.look(now=0.0)
    assert capfd.readouterr().err == ""

    # A group that loses a rank later is reported.
    lost = make_group(BackendWithHooks(), ranks=(0, 1, 2))
    lost.backend.state = "COMM_ERROR"
    watch.look(now=1.0)
    assert "in the group of ranks 0, 1, 2" in capfd.readouterr().err


def test_a_group_with_a_new_communicator_is_reported_again(make_group, watch, capfd):
    group = make_group(BackendWithHooks())
    nccl_errors.note_abort(group)
    nccl_errors.note_reconfiguration(group)
    group.backend.state = "COMM_ERROR"
    watch.look(now=0.0)
    assert "is lost" in capfd.readouterr().err


@pytest.fixture
def patched():
    """Apply holmes's patches of torch's abort methods, and of the function that registers a new group."""
    patches = Registry(all_patches())
    patches.enable(["nccl-failures"], required=True)
    yield
    patches.undo()


def test_torch_tells_holmes_when_the_program_aborts_a_group(monkeypatch, patched):
    """Both ways to abort are seen, and torch's own methods are still called."""
    monkeypatch.setattr(session, "_active", None)
    aborted_groups, aborted_backends = [], []
    monkeypatch.setattr(nccl_errors, "note_abort", aborted_groups.append)
    monkeypatch.setattr(nccl_errors, "note_abort_of_backend", aborted_backends.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        backend = group._get_backend(torch.device("cpu"))
        backend.abort()
        group.abort()
    finally:
        dist.destroy_process_group()
    assert aborted_groups == [group] and aborted_backends == [backend]


def test_torch_tells_holmes_of_each_new_group(monkeypatch, patched):
    monkeypatch.setattr(session, "_active", SimpleNamespace())
    new_groups = []
    monkeypatch.setattr(nccl_errors, "register_abort_hook", new_groups.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = [dist.group.WORLD, dist.new_group([0])]
    finally:
        dist.destroy_process_group()
    assert new_groups == groups


def test_a_group_of_another_library_can_be_aborted(patched):
    """Its class is written in Python and inherits `abort`: torch's C++ code must not call holmes's again."""

    class GroupOfALibrary(dist.ProcessGroup):
        pass

    GroupOfALibrary(0, 1).abort()
