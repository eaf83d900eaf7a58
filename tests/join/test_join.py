"""Shards that jobs can join with, and those that they cannot."""

from holmes_ext.join.join import _Layout, _rank_with_partial_overlap


def ranks(*holdings, position="all"):
    return [_Layout(position, "digest", 9, list(held), []) for held in holdings]


def test_replicas_and_shards_are_fine():
    assert _rank_with_partial_overlap(ranks([(0, 9)], [(0, 9)])) is None
    assert _rank_with_partial_overlap(ranks([(0, 4), (8, 9)], [(4, 8)], [(4, 8)])) is None
    assert (
        _rank_with_partial_overlap([*ranks([(0, 9)]), *ranks([(3, 5)], position="other")]) is None
    )


def test_ranks_that_share_some_elements_are_not():
    assert _rank_with_partial_overlap(ranks([(0, 5)], [(4, 9)])) == 1
    assert _rank_with_partial_overlap(ranks([(0, 9)], [(0, 9)], [(2, 3)])) == 2
