"""Shards that jobs can join with, and those that they cannot."""

from contextlib import nullcontext

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.join import _maps, _shares_some
from holmes_ext.runtime.outer.settings import OuterSettings


def ranks(*holdings, position="all"):
    return [{"position": position, "holdings": [list(one) for one in held]} for held in holdings]


def test_replicas_and_shards_are_fine():
    assert _shares_some(ranks([(0, 9)], [(0, 9)])) is None
    assert _shares_some(ranks([(0, 4), (8, 9)], [(4, 8)], [(4, 8)])) is None
    assert _shares_some([*ranks([(0, 9)]), *ranks([(3, 5)], position="other")]) is None


def test_ranks_that_share_some_elements_are_not():
    assert _shares_some(ranks([(0, 5)], [(4, 9)])) == 1
    assert _shares_some(ranks([(0, 9)], [(0, 9)], [(2, 3)])) == 2


class OneRank:
    def refuse(self, text):
        raise HolmesError(text)


@pytest.mark.parametrize("held, refused", [
    ([(0, 60)], ""),
    ([(0, 20), (20, 60)], ""),
    ([(0, 30), (30, 60)], "ranks 0 and 1 of job east hold parts of 'up.weight' .ZeRO, FSDP"),
])  # fmt: skip
def test_muon_is_refused_where_shards_cut_a_matrix(held, refused):
    whole = [["down.weight", 0, 20], ["up.weight", 20, 60]]
    rows = [{"position": "all", "digest": "d", "total": 60, "holdings": [one], "whole": whole}
            for one in held]  # fmt: skip
    settings = OuterSettings(algorithm="muon", fragments=1)
    with pytest.raises(HolmesError, match=refused) if refused else nullcontext():
        _maps("east", rows, settings, OneRank())
