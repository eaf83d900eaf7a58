"""A thread of the backend that asks for an interpreter which ends would abort the process (status 134)."""

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holmes_ext.runtime.groups import callbacks

#: A callback that asks for the interpreter all the time, for longer than it takes to end.
PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
from holmes_ext.runtime.groups.callbacks import before_exit

def call(done):
    for _ in range(600):
        time.sleep(0.001)
    return done.value()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
given = before_exit(call) if sys.argv[1] == "before_exit" else call
getattr(future, sys.argv[2])(given)
"""


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROGRAM, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("way", ["then", "add_done_callback"])
def test_the_interpreter_waits_for_what_a_thread_of_gloo_calls(way):
    result = run("before_exit", way)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 stops such threads")
def test_it_would_abort():
    """The test above can fail: without before_exit(), the process aborts.

    It is a race. The end of the group may wait for the call first (status 0; a call without end
    hangs there), or the thread is in the middle of something else (SIGSEGV).
    """

    def aborts() -> bool:
        result = run("plain", "then")
        return (
            result.returncode == -6
            and "terminate called" in result.stderr
            or result.returncode == -11
        )

    assert any(aborts() for _ in range(15))


def test_what_a_call_returns_and_raises_passes():
    from torch.futures import Future

    from holmes_ext.runtime.groups.callbacks import before_exit

    future: Future = Future()
    twice, broken = (
        future.then(before_exit(lambda done: 2 * done.value())),
        future.then(before_exit((1.0).hex)),
    )
    future.set_result(3)
    assert twice.wait() == 6
    with pytest.raises(RuntimeError):
        broken.wait()


def test_the_exit_waits_for_a_thread_of_gloo_that_still_runs():
    """A time limit alone is not enough: on a busy machine the thread may wait longer for a CPU."""
    started, finished = threading.Event(), threading.Event()

    def run():
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        name.write_text("pt_gloo_runloop")
        started.set()
        hashlib.sha256(bytes(150_000_000))  # runs without the GIL, as gloo does
        finished.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    callbacks.let_threads_free_tensors()
    assert finished.is_set()
    thread.join()


class TestTheEndOfTheExitsWait:
    """The exit waits for operations under way as long as gloo does, and says so after a while."""

    @pytest.fixture
    def awaited(self, monkeypatch):
        events = {}
        monkeypatch.setattr(callbacks, "_awaited", events)
        monkeypatch.setattr(callbacks, "_SILENT_S", 0.05)
        return events

    def test_an_operation_that_ends_late_is_waited_for(self, awaited, capsys):
        ended = threading.Event()
        awaited[ended] = 60.0
        timer = threading.Timer(0.2, ended.set)
        timer.start()
        callbacks._wait()
        assert ended.is_set()
        assert "the exit waits up to 60 s for 1 operation under way" in capsys.readouterr().err
        timer.join()

    def test_an_operation_that_has_ended_is_not_reported(self, awaited, capsys):
        ended = threading.Event()
        ended.set()
        awaited[ended] = 60.0
        callbacks._wait()
        assert capsys.readouterr().err == ""

    def test_an_operation_that_never_ends_is_given_up(self, awaited, monkeypatch):
        awaited[threading.Event()] = 0.1
        callbacks._wait()

    def test_a_closed_stream_does_not_matter(self, awaited, monkeypatch):
        awaited[threading.Event()] = 0.2
        monkeypatch.setattr(sys, "stderr", None)
        callbacks._wait()
