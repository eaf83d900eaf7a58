"""placement: components and groups, against definitions written out rank by rank."""

import itertools

import pytest

from holmes_ext.plan.placement import Fold, Placement
from holmes_ext.plan.sizes import INSIDE, Sizes, groups

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-tp-cp-ep-dp", "dp-tp-cp-ep-pp", "tp-pp-cp-ep-dp")


def small_sizes():
    every = itertools.product(ORDERS, (1, 2, 3, 4, 6), (1, 2, 3), (1, 2), (1, 2, 3))
    for order, pipeline, tensor, context, data in every:
        for expert in (1, 2):
            if (data * context * tensor) % expert == 0:
                yield Sizes(pipeline, tensor, context, expert, data, order)


def tied_components(sizes, processes, world):
    """Return the sets of slots that groups other than pipeline ones connect.

    They are found by a flood fill over the groups themselves.
    """
    slots = [
        {rank // processes for rank in group} for kind in INSIDE for group in groups(sizes, kind)
    ]
    components = [{slot} for slot in range(world // processes)]
    for group in slots:
        touched = [component for component in components if component & group]
        components = [component for component in components if not component & group] + [
            set().union(*touched)
        ]
    return {frozenset(component) for component in components}


def test_components_are_what_groups_connect():
    """All of them alike."""
    for sizes in small_sizes():
        world = sizes.pipeline * sizes.tensor * sizes.context * sizes.data
        for processes in (count for count in range(1, 9) if world % count == 0):
            components = Placement.of(sizes, processes, [0] * (world // processes)).components
            joined = {frozenset(slots) for slots in components}
            for slots in components:
                assert slots == tuple(slot + slots[0] - components[0][0] for slot in components[0])
            tied = tied_components(sizes, processes, world)
            # stages are whole in components; single-rank stages may be less tied
            assert all(any(part <= whole for whole in joined) for part in tied), (sizes, processes)
            if sizes.tensor * sizes.context * sizes.data > 1:
                assert joined == tied, (sizes, processes)


def test_groups_cover_all_ranks_and_stay_in_a_stage():
    for sizes in small_sizes():
        world = sizes.pipeline * sizes.tensor * sizes.context * sizes.data
        for kind in INSIDE:
            found = groups(sizes, kind)
            assert sorted(rank for group in found for rank in group) == list(range(world)), (
                sizes,
                kind,
            )
            assert [group[0] for group in found] == sorted(group[0] for group in found), (
                sizes,
                kind,
            )
            assert all(len({sizes.stage(rank) for rank in group}) == 1 for group in found), (
                sizes,
                kind,
            )


@pytest.mark.parametrize("kind,axis", [("tensor", "tp"), ("context", "cp"), ("pipeline", "pp")])
def test_groups_agree_with_sizes(kind, axis):
    for sizes in small_sizes():
        assert all(group == sizes.group(group[0], axis) for group in groups(sizes, kind))


def test_known_groups():
    sizes = Sizes(2, 2, 1, 2, 2)  # pipeline 2, tensor 2, expert 2, data 2
    assert groups(sizes, "data") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups(sizes, "expert") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups(sizes, "pipeline") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "shape", [(2, 2, 1, 2), (2, 2, 2, 2), (4, 1, 2, 2), (1, 2, 2, 4), (2, 1, 1, 4)]
)
def test_groups_agree_with_megatron(order, shape):
    state = pytest.importorskip("megatron.core.parallel_state")
    pipeline, tensor, context, data = shape
    sizes = Sizes(pipeline, tensor, context, 1, data, order)
    generator = state.RankGenerator(tensor, 1, data, pipeline, context, order)
    for kind, token in (("data", "dp-cp"), ("tensor", "tp"), ("context", "cp"), ("pipeline", "pp")):
        assert sorted(map(tuple, map(sorted, generator.get_ranks(token)))) == sorted(
            groups(sizes, kind)
        ), kind


@pytest.mark.parametrize("expert", (2, 4))
def test_expert_groups_agree_with_megatron(expert):
    state = pytest.importorskip("megatron.core.parallel_state")
    sizes = Sizes(2, 2, 1, expert, 4)  # the expert grid of 16 ranks: tensor 2, expert, pipeline 2
    generator = state.RankGenerator(2, expert, 4 // expert, 2, 1, "tp-cp-ep-dp-pp")
    assert sorted(map(tuple, generator.get_ranks("ep"))) == groups(sizes, "expert")


def alone(sizes, world, processes):
    return Placement.of(sizes.complete(world), processes, [0] * (world // processes))


def test_stage_links_and_families():
    fold = Fold(alone(Sizes(2, 2), 16, 4))  # 4 slots, a stage is two of them
    assert fold.full_placement.components == ((0, 1), (2, 3))
    assert fold.stage_link(0, 0, 1).leaving == 4 and fold.count == {0: 8}
    (family,) = fold.families(0)
    assert (family.nodes, family.ranks, family.count) == (2, 4, 2)
    assert {one.nodes for one in fold.families(0, "tensor")} == {1}
    half = Fold(
        alone(Sizes(4), 8, 4)
    )  # two whole stages in each slot: one stage link inside, one onward
    assert half.full_placement.components == ((0,), (1,))
    assert half.stage_link(0, 0, 1).local and half.stage_link(0, 1, 2).leaving == 2


def test_components_by_themselves():
    """Two of three ranks a stage on nodes of two: stages share every second node; and blocks of stages."""
    kinds = [0, 1, 1, 0, 0, 1, 1, 1, 0]
    partly = Placement.of(Sizes(6).complete(18), 2, kinds)
    assert partly.stages_per_component == 2 and partly.components == (
        (0, 1, 2),
        (3, 4, 5),
        (6, 7, 8),
    )
    assert partly.alone(1).node_types() == [0, 0, 1] and partly.alone(1).sizes.pipeline == 2
    assert partly.alone(0, 2).node_types() == [0, 1, 1, 1, 1, 0]
    blocks = Placement.of(Sizes(2, order="tp-cp-ep-pp-dp").complete(8), 1, [0, 1] * 4)
    assert blocks.parts == (((0, 4),), ((1, 4),)) and blocks.alone(1).node_types() == [1] * 4
    assert Placement.of_parts(blocks.sizes, 1, [[0] * 4, [1] * 4]) == blocks
