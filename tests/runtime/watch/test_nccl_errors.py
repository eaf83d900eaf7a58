"""Tests which failures of NCCL holmes reports, and that it reports them before torch aborts the process.

The tests run without NCCL: stand-ins replace torch's process groups and their backends.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from holmes_ext.patches import Registry, all_patches
from holmes_ext.runtime import session
from holmes_ext.runtime.watch import failure, nccl_errors, nics

c10d = dist.distributed_c10d


class BackendWithoutHooks:
    """Stand-in for ProcessGroupNCCL of torch 2.13, which has no method register_abort_hook()."""

    def __init__(self):
        self.error = "SUCCESS"

    def get_error(self):
        return SimpleNamespace(name=self.error)

    def abort(self):
        self.error = "COMM_ERROR"


class BackendWithHooks(BackendWithoutHooks):
    """Stand-in for ProcessGroupNCCL2, the backend "nccl" of torch 2.15."""

    def __init__(self):
        super().__init__()
        self.hooks = {}

    def register_abort_hook(self, hook_id, hook):
        self.hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id):
        self.hooks.pop(hook_id, None)

    def lose_a_rank(self):
        """Set the error and run the abort hooks, as torch's watchdog thread does when a rank is lost.

        Unlike torch, this does not abort the process afterwards.
        """
        self.error = "COMM_ERROR"
        for hook in list(self.hooks.values()):
            hook()


class BackendThatRefusesHooks(BackendWithoutHooks):
    """Stand-in for ProcessGroupNCCL of torch 2.15, whose register_abort_hook() raises a RuntimeError."""

    def register_abort_hook(self, hook_id, hook):
        raise RuntimeError("Backend nccl does not support registerAbortHook")


class Group:
    """Stand-in for a process group that has one backend, for CUDA tensors."""

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
    """Return a function that makes a stand-in for a process group and adds it to torch's list of groups."""
    pg_map = {}  # torch's list of groups: group -> (name of its backend, store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_map=pg_map))
    monkeypatch.setattr(nccl_errors, "group_ranks", lambda group: group.ranks)

    def make(backend, ranks=(0, 1)):
        group = Group(backend, list(ranks))
        pg_map[group] = ("nccl", None)
        return group

    return make


@pytest.fixture
def watch(monkeypatch):
    """Start a NicWatch on rank 1 of a job of two ranks, but without its thread.

    So a failure is only reported by an abort hook, or if the test calls watch.poll().
    """
    plan = SimpleNamespace(world_size=2, node_of=lambda rank: f"b{rank}")
    current = SimpleNamespace(rank=1, node=SimpleNamespace(name="b1"), plan=plan, groups=[])
    monkeypatch.setattr(session, "_active", current)
    monkeypatch.setattr(
        failure, "_store_first_message", lambda mine: mine
    )  # no other rank has reported a failure before
    monkeypatch.setattr(nics, "in_use", lambda current: [])  # there are no NICs to poll
    watch = failure.NicWatch(patience_s=0.0)
    monkeypatch.setattr(watch, "run", lambda: None)  # the thread ends at once
    watch.start()
    yield watch
    watch.stop()


def test_an_abort_hook_reports_a_failure_without_a_poll(make_group, watch, capfd):
    group = make_group(BackendWithHooks())
    nccl_errors.register_abort_hook(group)
    group.backend.lose_a_rank()
    line = "holmes: rank 1 on node b1: communication failed; node b0 (rank 0) is lost: NCCL's COMM_ERROR"
    assert capfd.readouterr().err.startswith(line)


def test_only_the_first_failure_is_reported(make_group, watch, capfd):
    """A group's abort hook may run several times, and several groups have one."""
    first = make_group(BackendWithHooks())
    second = make_group(BackendWithHooks())
    for group in (first, second):
        nccl_errors.register_abort_hook(group)
        group.backend.lose_a_rank()
        group.backend.lose_a_rank()
    watch.poll(now=0.0)
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_an_abort_hook_reports_nothing_after_the_watch_is_stopped(make_group, watch, capfd):
    group = make_group(BackendWithHooks())
    nccl_errors.register_abort_hook(group)
    watch.stop()
    group.backend.lose_a_rank()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("backend_class", [BackendWithoutHooks, BackendThatRefusesHooks])
def test_a_failure_of_a_backend_without_hooks_is_reported_by_a_poll(
    make_group, watch, capfd, backend_class
):
    group = make_group(backend_class())
    nccl_errors.register_abort_hook(group)  # raises no error
    group.backend.error = "TIMEOUT"
    assert capfd.readouterr().err == ""
    watch.poll(now=0.0)
    assert "the timeout has passed" in capfd.readouterr().err


def test_hooks_are_removed_when_the_process_exits(make_group):
    """A thread of torch that called Python while the interpreter shuts down would abort the process."""
    group = make_group(BackendWithHooks())
    make_group(BackendWithoutHooks())  # has nothing to remove, and causes no error
    nccl_errors.register_abort_hook(group)
    nccl_errors._unregister_abort_hooks()  # atexit calls this function
    assert group.backend.hooks == {}


def test_the_exit_of_the_process_waits_for_a_running_hook(make_group):
    """Otherwise the interpreter could shut down before the hook has printed its message."""
    group = make_group(BackendWithHooks())
    nccl_errors.register_abort_hook(group)
    events = []
    is_hook_running = threading.Event()

    def report_slowly():
        is_hook_running.set()
        time.sleep(0.2)
        events.append("reported")

    nccl_errors.set_failure_callback(report_slowly)
    watchdog_thread = threading.Thread(target=group.backend.lose_a_rank)
    watchdog_thread.start()
    is_hook_running.wait()
    nccl_errors._unregister_abort_hooks()  # atexit calls this function
    events.append("interpreter shuts down")
    watchdog_thread.join()
    assert events == ["reported", "interpreter shuts down"]


@pytest.mark.parametrize("is_backend_marked", [False, True])
def test_a_group_that_the_program_aborts_is_not_reported(
    make_group, watch, capfd, is_backend_marked
):
    """A program may abort a group, or only the group's backend."""
    aborted = make_group(BackendWithHooks())
    if is_backend_marked:
        nccl_errors.mark_backend_aborted_by_program(aborted.backend)
    else:
        nccl_errors.mark_aborted_by_program(aborted)
    aborted.backend.abort()
    watch.poll(now=0.0)
    assert capfd.readouterr().err == ""

    # A group that loses a rank later is still reported.
    lost = make_group(BackendWithHooks(), ranks=(0, 1, 2))
    lost.backend.error = "COMM_ERROR"
    watch.poll(now=1.0)
    assert "in the group of ranks 0, 1, 2" in capfd.readouterr().err


def test_an_aborted_group_with_a_new_communicator_is_reported_again(make_group, watch, capfd):
    group = make_group(BackendWithHooks())
    nccl_errors.mark_aborted_by_program(group)
    nccl_errors.unmark_aborted_by_program(group)  # the patch of torch's _reconfigure calls this
    group.backend.error = "COMM_ERROR"
    watch.poll(now=0.0)
    assert "is lost" in capfd.readouterr().err


@pytest.fixture
def failure_patches():
    """Apply the patches of patches/torch/failures.py to torch during a test.

    They wrap torch's abort methods and the function that registers a new process group.
    """
    registry = Registry(all_patches())
    registry.enable(["nccl-failures"], required=True)
    yield
    registry.undo()


def test_torchs_abort_methods_mark_the_group(monkeypatch, failure_patches):
    """A gloo group is used, since the patches apply to the base classes of all groups and backends."""
    monkeypatch.setattr(session, "_active", None)
    marked_groups = []
    marked_backends = []
    monkeypatch.setattr(nccl_errors, "mark_aborted_by_program", marked_groups.append)
    monkeypatch.setattr(nccl_errors, "mark_backend_aborted_by_program", marked_backends.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        backend = group._get_backend(torch.device("cpu"))
        backend.abort()
        group.abort()
    finally:
        dist.destroy_process_group()
    assert marked_groups == [group] and marked_backends == [backend]


def test_the_abort_hook_is_registered_with_each_new_group(monkeypatch, failure_patches):
    monkeypatch.setattr(session, "_active", SimpleNamespace())
    groups_with_hook = []
    monkeypatch.setattr(nccl_errors, "register_abort_hook", groups_with_hook.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        new_groups = [dist.group.WORLD, dist.new_group([0])]
    finally:
        dist.destroy_process_group()
    assert groups_with_hook == new_groups


def test_a_python_subclass_of_process_group_can_be_aborted(failure_patches):
    """Aborting it does not recurse without end.

    torch's C++ method abort() calls the Python method of the same name, if the object's class is a Python
    class. Here this method is the patched abort(), which calls the C++ method.
    """

    class PythonGroup(dist.ProcessGroup):
        pass

    PythonGroup(0, 1).abort()
