"""runtime/refusal: one of the ranks tells what all of them met."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.runtime import session
from holmes_ext.runtime.start import rank as start
from holmes_ext.runtime.start import refusal
from holmes_ext.runtime.start.launcher import Process


class Store(dist.HashStore):
    """One whose methods can be replaced."""


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(start, "_stores", [made])
    monkeypatch.setattr(refusal, "_WAIT", 0.1)
    yield made
    session.set_active(None)


def told_on(rank, text, world=2):
    session.set_active(SimpleNamespace(process=Process(rank, world, 0, 1, "", 0, "test")))
    return type(refusal.told_once(HolmesError(text)))


def test_the_first_rank_tells_and_all_end(store, capfd):
    for rank, text, lines in ((1, "too many stages", 1), (0, "too many stages", 0), (0, "another matter", 1), (1, "too many stages", 1)):
        assert told_on(rank, text) is RemoteError
        assert capfd.readouterr().err == f"holmes: {text}\n" * lines, (rank, text)  # rank 1 tells again when it comes again


def test_a_rank_whose_teller_died_tells_itself(store):
    store.compare_set = lambda *_: b"1"
    assert told_on(0, "too many stages") is HolmesError


def test_without_a_store_each_rank_tells(store, monkeypatch):
    monkeypatch.setattr(start, "_stores", [])
    assert told_on(0, "no store") is told_on(1, "no store") is HolmesError
    session.set_active(None)
    error = HolmesError("no session")
    assert refusal.told_once(error) is error
