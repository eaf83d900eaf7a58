"""tests/ranks.py: what becomes of ranks that raise, die or hang."""

import os
import threading

import pytest
import ranks
import torch.distributed as dist


def rank_and_environment(rank, text):
    return rank, text, dist.get_world_size(), os.environ.get("HOLMES_TEST_WORD")


def test_answers_come_in_rank_order_from_the_callers_environment(monkeypatch):
    monkeypatch.setenv("HOLMES_TEST_WORD", "here")
    assert ranks.run_ranks(rank_and_environment, 2, "x") == [
        (0, "x", 2, "here"),
        (1, "x", 2, "here"),
    ]


def goes_wrong(rank, how):
    ranks.say(how)
    ranks.all_are_here(rank, 2)
    if how == "die":
        os._exit(3 + rank)
    if how == "raise" and rank == 1:
        raise ValueError("wrong")
    threading.Event().wait()


@pytest.mark.parametrize(
    "how, told",
    [
        ("raise", r"rank 1:\n(?s:.*)ValueError: wrong"),
        ("die", r"no answer: \[\(0, 3\), \(1, 4\)\]"),
        ("hang", r"no answer: \[\(0, -9\), \(1, -9\)\]"),
    ],
)
def test_what_goes_wrong_is_an_error(how, told):
    with pytest.raises(ranks.RankError, match=told) as error:
        ranks.run_ranks(goes_wrong, 2, how, timeout_s=15 if how == "hang" else 60)
    assert sorted(error.value.said) == [f"rank 0: {how}", f"rank 1: {how}"]
