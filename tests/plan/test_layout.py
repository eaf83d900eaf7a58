"""layout: components and groups, against definitions written out rank by rank."""

import itertools

import pytest

from holmes_ext.plan.sizes import INSIDE, groups
from holmes_ext.plan.sizes import Sizes

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-tp-cp-ep-dp", "dp-tp-cp-ep-pp", "tp-pp-cp-ep-dp")


def small_sizes():
    for order, pipeline, tensor, context, data in itertools.product(ORDERS, (1, 2, 3, 4, 6), (1, 2, 3), (1, 2),
                                                                    (1, 2, 3)):
        for expert in (1, 2):
            if (data * context * tensor) % expert == 0:
                yield Sizes(pipeline, tensor, context, expert, data, order)


def tied_components(sizes, processes, world):
    """Sets of slots connected by groups other than pipeline ones: flood fill over the groups themselves."""
    slots = [{rank // processes for rank in group} for kind in INSIDE for group in groups(sizes, kind)]
    components = [{slot} for slot in range(world // processes)]
    for group in slots:
        touched = [component for component in components if component & group]
        components = [component for component in components if not component & group] + [set().union(*touched)]
    return {frozenset(component) for component in components}


def test_components_are_what_groups_connect():
    """Also that the layout's own assertion (all components alike) holds for every small case."""
    for sizes in small_sizes():
        world = sizes.pipeline * sizes.tensor * sizes.context * sizes.data
        for processes in (count for count in range(1, 9) if world % count == 0):
            layout = Layout(sizes, processes)
            joined = {frozenset(slots) for slots in layout.components}
            tied = tied_components(sizes, processes, world)
            # stages are whole in components; single-rank stages may be less tied than the layout's components
            assert all(any(part <= whole for whole in joined) for part in tied), (sizes, processes)
            if sizes.tensor * sizes.context * sizes.data > 1:
                assert joined == tied, (sizes, processes)


def test_groups_cover_all_ranks_and_stay_in_a_stage():
    for sizes in small_sizes():
        world = sizes.pipeline * sizes.tensor * sizes.context * sizes.data
        for kind in INSIDE:
            found = groups(sizes, kind)
            assert sorted(rank for group in found for rank in group) == list(range(world)), (sizes, kind)
            assert [group[0] for group in found] == sorted(group[0] for group in found), (sizes, kind)
            assert all(len({sizes.stage(rank) for rank in group}) == 1 for group in found), (sizes, kind)


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
@pytest.mark.parametrize("shape", [(2, 2, 1, 2), (2, 2, 2, 2), (4, 1, 2, 2), (1, 2, 2, 4), (2, 1, 1, 4)])
def test_groups_agree_with_megatron(order, shape):
    state = pytest.importorskip("megatron.core.parallel_state")
    pipeline, tensor, context, data = shape
    sizes = Sizes(pipeline, tensor, context, 1, data, order)
    generator = state.RankGenerator(tensor, 1, data, pipeline, context, order)
    for kind, token in (("data", "dp-cp"), ("tensor", "tp"), ("context", "cp"), ("pipeline", "pp")):
        assert sorted(map(tuple, map(sorted, generator.get_ranks(token)))) == sorted(groups(sizes, kind)), kind


@pytest.mark.parametrize("expert", (2, 4))
def test_expert_groups_agree_with_megatron(expert):
    state = pytest.importorskip("megatron.core.parallel_state")
    sizes = Sizes(2, 2, 1, expert, 4)  # the expert grid of 16 ranks: tensor 2, expert, pipeline 2
    generator = state.RankGenerator(2, expert, 4 // expert, 2, 1, "tp-cp-ep-dp-pp")
    assert sorted(map(tuple, generator.get_ranks("ep"))) == groups(sizes, "expert")


def test_edges_and_ties():
    layout = Layout(Sizes(2, 2).complete(16), 4)  # 4 slots, a stage is two of them
    assert layout.components == ((0, 1), (2, 3))
    assert layout.onward == {(0, 0): 4, (1, 1): 4}
    (tie,) = layout.ties["data"]
    assert (tie.slots, tie.members, tie.count) == ((0, 1), 4, 2)
    assert layout.ties["tensor"] == ()
    half = Layout(Sizes(4).complete(8), 4)  # two whole stages in each slot: one edge inside, one onward
    assert half.components == ((0,), (1,))
    assert half.onward == {(0, 0): 2}
    partly = Layout(Sizes(6).complete(18), 2)  # 3 ranks a stage: ranks 0 1 | 2 3 | 4 5 send 0 -> 3, 1 -> 4, 2 -> 5
    assert partly.inner == ({(0, 1): 1, (0, 2): 1, (1, 2): 1},)
    assert partly.onward == {(1, 0): 1, (2, 0): 1, (2, 1): 1}
