import threading
import time

import pytest
import torch.distributed as dist

from holmes_ext.runtime.measure import clock


def test_the_offset_of_a_clock_is_found():
    store, ahead = dist.HashStore(), 1000.0
    thread = threading.Thread(target=clock.answer, args=(store, "p", [1], 30.0), daemon=True)
    thread.start()
    offset, error = clock.ask(store, "p", 1, 30.0, lambda: time.monotonic() + ahead)
    thread.join(30)
    assert 0 <= error < 30 and abs(offset + ahead) <= error + 1e-6


def test_a_node_that_does_not_ask_is_passed_over():
    store = dist.HashStore()
    for number in range(clock.QUESTIONS):  # of node 2, all in advance
        store.set(f"p/ask/2/{number}", "")
    clock.answer(store, "p", [1, 2], 0.2)
    assert store.check([f"p/answer/2/{clock.QUESTIONS - 1}"]) and not store.check(["p/answer/1/0"])


def test_nobody_answers():
    with pytest.raises(RuntimeError):
        clock.ask(dist.HashStore(), "p", 1, 0.1)


@pytest.mark.parametrize("waits", [clock.ask, clock.answer])
def test_waiting_for_another_node_can_be_ended(waits):
    """A thread that waits inside of the store while the interpreter ends would abort the process."""
    node, ended = 1 if waits is clock.ask else [1], threading.Event()
    errors = []

    def run():
        try:
            waits(dist.HashStore(), "p", node, 600.0, ended=ended)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ended.set()
    thread.join(60)
    assert not thread.is_alive()
    assert errors == (["no p/answer/1/0 in the store"] if waits is clock.ask else [])
