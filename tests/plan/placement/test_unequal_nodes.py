"""Placements on nodes with different numbers of ranks: against definitions written out rank by rank."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from holmes_ext.plan.placement import Fold, Placement, family_of
from holmes_ext.plan.sizes import INSIDE, Sizes, groups

WIDTHS = (4, 8)  # ranks of a node of type 0 and of type 1
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-tp-cp-ep-dp")
#: Types of the nodes, in the order of the ranks: 16, 24 and 32 ranks.
NODES = (
    (0, 0, 1),
    (1, 0, 0),
    (0, 1, 0),
    (0, 0, 1, 1),
    (1, 1, 0, 0),
    (0, 1, 1, 0),
    (0, 0, 1, 0, 0, 1),
    (0, 0, 0, 0, 1, 1),
)


def placed(node_types, sizes):
    return Placement.of(sizes, 4, node_types, WIDTHS)


def node_of_ranks(node_types):
    """Index of the node of every rank, listed node by node."""
    return [index for index, each in enumerate(node_types) for _ in range(WIDTHS[each])]


def placements():
    """Every order of axes, pipeline, tensor and context size that fits the nodes."""
    for node_types, order in itertools.product(NODES, ORDERS):
        world = sum(WIDTHS[each] for each in node_types)
        for pipeline, tensor, context in itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 8), (1, 2)):
            if world % (pipeline * tensor * context) == 0:
                data = world // (pipeline * tensor * context)
                sizes = Sizes(pipeline, tensor, context, data=data, order=order)
                yield node_types, placed(node_types, sizes)


def test_every_rank_is_on_its_node():
    placement = placed((0, 1, 0), Sizes(data=16))
    assert [placement.node_of(rank) for rank in range(16)] == [0] * 4 + [1] * 8 + [2] * 4
    assert placement.stage_ranks == 16


def test_equal_widths_number_ranks_as_one_width_does():
    sizes = Sizes(2, 2, data=4)
    given = Placement.of(sizes, 4, (0, 1, 0, 1), (4, 4))
    assert given.stages == Placement.of(sizes, 4, (0, 1, 0, 1)).stages
    assert given.has_equal_nodes


def test_stages_count_the_ranks_on_each_type_of_node():
    for node_types, placement in placements():
        sizes = placement.sizes
        node_of = node_of_ranks(node_types)
        for stage, content in enumerate(placement.stages):
            ranks = [rank for rank in range(len(node_of)) if sizes.stage(rank) == stage]
            types = [node_types[node_of[rank]] for rank in ranks]
            listed = [node_type for node_type, count in content for _ in range(count)]
            assert listed == types, placement


def test_stages_of_different_components_share_no_node():
    for node_types, placement in placements():
        components = placement.components
        assert sorted(itertools.chain(*components)) == list(range(len(node_types)))
        node_of = node_of_ranks(node_types)
        for rank, node in enumerate(node_of):
            component = placement.sizes.stage(rank) // placement.stages_per_component
            assert node in components[component], placement
        for nodes, part in zip(components, placement.parts):
            types = [node_type for node_type, count in part for _ in range(count)]
            assert types == [node_types[node] for node in nodes], placement


def test_components_can_be_put_together_again():
    for node_types, placement in placements():
        parts = [
            [node_type for node_type, count in part for _ in range(count)]
            for part in placement.parts
        ]
        again = Placement.of_parts(placement.sizes, 4, parts, WIDTHS)
        assert again.node_types() == list(node_types), placement
        alone = placement.alone(0)
        assert alone.node_types() == parts[0]
        assert alone.stage_ranks == placement.stage_ranks


@pytest.mark.parametrize("role", INSIDE)
def test_compact_placement_counts_all_groups(role):
    """A Fold keeps one of several equal ranks; its counts are those of all groups of the job."""
    for node_types, placement in placements():
        node_of = node_of_ranks(node_types)
        sizes = placement.sizes
        if role == "expert":
            if sizes.data * sizes.context % 2:
                continue
            sizes = replace(sizes, expert=2)
            placement = replace(placement, sizes=sizes)
        expected: Counter = Counter()
        for ranks in groups(sizes, role):
            ranks_on = Counter(node_of[rank] for rank in ranks)
            nodes = Counter((node_types[node], count) for node, count in ranks_on.items())
            if len(ranks) > 1 or role == "data":
                expected[sizes.stage(ranks[0]), frozenset(nodes.items())] += 1
        counted: Counter = Counter()
        fold = Fold(placement)
        for stage in range(sizes.pipeline):
            for family in fold.families(stage, role):
                nodes = Counter()
                for part in family.parts:
                    nodes[part.node_type, part.ranks_per_node] += part.nodes
                counted[stage, frozenset(nodes.items())] += family.count
        assert counted == expected, placement


def test_messages_between_stages_are_counted_at_the_nics_of_their_nodes():
    for node_types, placement in placements():
        sizes = placement.sizes
        if sizes.pipeline == 1:
            continue
        node_of = node_of_ranks(node_types)
        leaving: Counter = Counter()  # node -> messages from stage 0 to 1 that leave it
        local = 0
        for rank, node in enumerate(node_of):
            if sizes.stage(rank) == 0:
                if node_of[rank + placement.stride] == node:
                    local += 1
                else:
                    leaving[node] += 1
        fold = Fold(placement)
        links = fold.stage_links(0, 1, lambda types: "every class sends at the same time")
        assert sum(link.count for link in links if link.local) == local
        assert sum(link.count for link in links) == placement.stage_ranks
        most = max((link.leaving for link in links if not link.local), default=0)
        assert most == max(leaving.values(), default=0), placement


def test_groups_like_a_given_one_fill_its_nodes():
    """Of a wide node's eight ranks, a group with two leaves six: three more groups share its NIC."""
    placement = placed((0, 1), Sizes(data=12))
    family = family_of(placement, (0, 1, 4, 5))
    parts = {part.node_type: (part.ranks_per_node, part.groups) for part in family.parts}
    assert parts == {0: (2, 2), 1: (2, 4)}


def test_random_orders_of_nodes():
    """The same counts of data-parallel groups, in orders in which wide nodes begin anywhere."""
    rng = random.Random(0)
    for _ in range(100):
        node_types = [rng.randrange(2) for _ in range(rng.randrange(2, 9))]
        world = sum(WIDTHS[each] for each in node_types)
        pipeline = rng.choice([size for size in (1, 2, 3, 4, 5, 7) if world // 4 % size == 0])
        tensor = rng.choice((1, 2, 4))
        sizes = Sizes(pipeline, tensor, data=world // pipeline // tensor, order=rng.choice(ORDERS))
        placement = placed(node_types, sizes)
        node_of = node_of_ranks(node_types)
        expected: Counter = Counter()
        for ranks in groups(sizes, "data"):
            ranks_on = Counter(node_of[rank] for rank in ranks)
            nodes = Counter((node_types[node], count) for node, count in ranks_on.items())
            expected[frozenset(nodes.items())] += 1
        counted: Counter = Counter()
        for stage in range(pipeline):
            for family in Fold(placement).families(stage):
                nodes = Counter()
                for part in family.parts:
                    nodes[part.node_type, part.ranks_per_node] += part.nodes
                counted[frozenset(nodes.items())] += family.count
        assert counted == expected, (node_types, sizes)
