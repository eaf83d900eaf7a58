"""Limits of the memory that messages of joined jobs hold in the coordinator."""

import pytest

from holmes_ext.join.sockets.memory import MemoryBudget, MemoryExhausted


def ignore() -> None:
    """Cut no connection."""


def test_memory_is_released_with_its_message():
    budget = MemoryBudget(most=100, most_of_job=60)
    with budget.reservation("east", ignore) as memory:
        memory.grow(20)
        memory.grow(30)
        assert budget.held == 50
    assert budget.held == 0
    with pytest.raises(OSError), budget.reservation("east", ignore) as memory:
        memory.grow(50)
        raise OSError("the connection broke")
    assert budget.held == 0


def test_all_messages_of_a_job_have_one_limit():
    budget = MemoryBudget(most=1000, most_of_job=60)
    with budget.reservation("east", ignore) as first, budget.reservation("east", ignore) as second:
        first.grow(40)
        with pytest.raises(MemoryExhausted, match="messages of job east would take more than"):
            second.grow(21)
        second.grow(20)
        with budget.reservation("west", ignore) as other:
            other.grow(60)


def test_the_job_that_holds_most_makes_room():
    """A crowd of large unfinished messages does not keep the small ones of other jobs out."""
    budget, closed = MemoryBudget(most=100, most_of_job=90), []
    with (
        budget.reservation("zero", lambda: closed.append("zero")) as large,
        budget.reservation("west", lambda: closed.append("west")) as small,
        budget.reservation("east", lambda: closed.append("east")) as new,
    ):
        large.grow(80)
        small.grow(10)
        new.grow(20)
        assert closed == ["zero"] and budget.held == 30
        with pytest.raises(MemoryExhausted, match="needed for smaller messages"):
            large.grow(1)
    assert budget.held == 0


def test_who_holds_most_gets_no_memory_of_others():
    budget, closed = MemoryBudget(most=100, most_of_job=90), []
    with (
        budget.reservation("west", lambda: closed.append("west")) as small,
        budget.reservation("zero", lambda: closed.append("zero")) as large,
    ):
        small.grow(40)
        large.grow(60)
        with pytest.raises(MemoryExhausted, match="messages of all jobs would take more than"):
            large.grow(1)
    assert closed == []
