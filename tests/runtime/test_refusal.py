"""runtime/refusal: one of the ranks tells what all of them met."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.runtime import deadline as refusal
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process


class Store(dist.HashStore):
    """One whose methods can be replaced."""


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(refusal, "_WAIT", 0.1)
    yield made
    session.set_active(None)


def told_on(store, rank, text, key_prefix="holmes/1"):
    session.set_active(
        SimpleNamespace(
            process=Process(rank, 2, 0, 1, "", 0, "test"), store=store, key_prefix=key_prefix
        )
    )
    return type(refusal.told_once(HolmesError(text)))


def test_the_first_rank_tells_and_all_end(store, capfd):
    for rank, text, lines in (
        (1, "too many stages", 1),
        (0, "too many stages", 0),
        (0, "another matter", 1),
        (1, "too many stages", 1),
    ):
        assert told_on(store, rank, text) is RemoteError
        assert capfd.readouterr().err == f"holmes: {text}\n" * lines, (
            rank,
            text,
        )  # rank 1 tells again when it comes again


def test_a_rank_whose_teller_died_tells_itself(store):
    store.compare_set = lambda *_: b"1"
    assert told_on(store, 0, "too many stages") is HolmesError


def test_a_job_that_was_started_again_tells_again(store, capfd):
    """By its round, on which all ranks agree: torchrun's agents do not on how often they restarted."""
    for round in ("holmes/1", "holmes/2"):
        assert [told_on(store, rank, "too many stages", round) for rank in (1, 0)] == [
            RemoteError
        ] * 2
        assert capfd.readouterr().err == "holmes: too many stages\n"


def test_without_a_store_each_rank_tells():
    assert told_on(None, 0, "no store") is told_on(None, 1, "no store") is HolmesError
    session.set_active(None)
    error = HolmesError("no session")
    assert refusal.told_once(error) is error
