"""The all-gather in order of use: how a buffer is cut, and what arrives, in several processes."""

import os

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import run_ranks

from holmes_ext.runtime.reduce import gather
from holmes_ext.runtime.reduce.gather import OrderedGather, Piece, cut


def test_pieces_are_cut_at_owners_and_come_in_the_order_of_use(monkeypatch):
    monkeypatch.setattr(gather, "SMALLEST_BYTES", 12)
    monkeypatch.setattr(gather, "LARGEST_BYTES", 16)
    parameters = [(0, 2, 3), (2, 3, 1), (3, 8, 0), (8, 11, 2)]  # the twelfth element is padding
    assert cut(12, 2, parameters, 4) == [
        Piece(3, 6, 0, 0),
        Piece(6, 7, 1, 0),
        Piece(7, 8, 1, 0),
        Piece(0, 3, 0, 1),
        Piece(8, 12, 1, 2),
    ]


@pytest.mark.parametrize("count, numel", [(1, 10), (2, 4096), (3, 999), (4, 40_000)])
def test_pieces_cover_the_buffer_once(monkeypatch, count, numel):
    monkeypatch.setattr(gather, "SMALLEST_BYTES", 2000)
    monkeypatch.setattr(gather, "LARGEST_BYTES", 5000)
    numel -= numel % count
    found = sorted(cut(numel, count, [(k, min(k + 300, numel), k) for k in range(0, numel, 300)], 4), key=lambda p: p.start)
    assert [p.start for p in found] == [0, *(p.stop for p in found[:-1])] and found[-1].stop == numel
    for piece in found:
        assert piece.owner == piece.start // (numel // count) == (piece.stop - 1) // (numel // count)


def gathers(rank, count, kind, rounds=3, share=1000):
    """Whether every part was there when it was waited for, in several gathers over one object."""
    gather.SMALLEST_BYTES = 800
    gather_ = OrderedGather(dist.group.WORLD)
    gather_._gloo = kind == "chain"
    flat = torch.empty(count * share)
    pieces = cut(len(flat), count, [(k, k + 100, 7 * k % 1700) for k in range(0, len(flat), 100)], 4)
    good = True
    for number in range(rounds):
        wanted = torch.arange(len(flat), dtype=torch.float32) + number
        flat.fill_(-1.0)
        flat[rank * share : (rank + 1) * share] = wanted[rank * share : (rank + 1) * share]
        handle = gather_([(piece.owner, flat[piece.start : piece.stop]) for piece in pieces])
        for k, piece in enumerate(pieces):
            handle.wait(k)
            good &= torch.equal(flat[piece.start : piece.stop], wanted[piece.start : piece.stop])
        handle.finish()
        good &= torch.equal(flat, wanted)
    return good


@pytest.mark.parametrize("count", [2, 3, 4])
def test_everything_arrives_in_order(count):
    assert run_ranks(gathers, count, count, "chain") == [True] * count


def test_by_broadcasts_as_nccl_does_it():
    assert run_ranks(gathers, 3, 3, "broadcast") == [True] * 3


def dies(rank):
    gather_ = OrderedGather(dist.group.WORLD)
    ranks.all_are_here(rank, 3)
    if rank == 2:
        os._exit(0)
    parts = list(torch.zeros(300).split(100))
    try:
        handle = gather_(list(enumerate(parts)))
        handle.wait(2)
        handle.finish()
    except RuntimeError as error:
        ranks.say(error)
    os._exit(0)


def test_a_rank_that_dies_is_an_error_for_whoever_waits():
    with pytest.raises(ranks.RankError, match="gave no answer") as error:
        run_ranks(dies, 3)
    assert any(line.startswith("rank 0:") for line in error.value.said)  # its parts come from rank 2
