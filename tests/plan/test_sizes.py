import itertools

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import Sizes, parse_sizes


def test_complete_works_out_data():
    assert Sizes(2, 2).complete(16).data == 4
    assert Sizes(2, 2, data=4).complete(16) == Sizes(2, 2, data=4)


@pytest.mark.parametrize("sizes,world", [(Sizes(3), 8), (Sizes(16), 8), (Sizes(2), 0)])
def test_world_that_does_not_divide(sizes, world):
    with pytest.raises(HolmesError, match=f"does not divide the world size {world}"):
        sizes.complete(world)


@pytest.mark.parametrize("data", [2, 3])
def test_sizes_whose_product_is_not_the_world_size(data):
    with pytest.raises(HolmesError, match=f"x data {data} is not the world size 8; leave data out"):
        Sizes(2, data=data).complete(8)


def test_expert_must_divide():
    with pytest.raises(HolmesError, match="expert size 3 does not divide"):
        Sizes(expert=3).complete(8)


@pytest.mark.parametrize(
    "values,message",
    [
        ({"pipeline": 0}, "pipeline is 0"),
        ({"tensor": -2}, "tensor is -2"),
        ({"data": -1}, "data is -1"),
        ({"order": ""}, "order ''"),
        ({"order": "tp-tp-pp"}, "each at most once"),
        ({"order": "tp-xx"}, "its parts are"),
        ({"order": "tp-dp", "pipeline": 2}, "lacks pp, whose size is 2"),
        ({"order": "tp-cp-dp-pp", "expert": 2}, "lacks ep, whose size is 2"),
    ],
)
def test_bad_sizes(values, message):
    with pytest.raises(HolmesError, match=message):
        Sizes(**values)


def test_default_order_is_the_documented_grid():
    sizes = Sizes(2, 2).complete(8)
    assert sizes.strides() == {"tp": 1, "cp": 2, "dp": 2, "pp": 4}
    assert sizes.group(5, "dp") == (5, 7)
    assert sizes.group(5, "pp") == (1, 5)
    assert [sizes.stage(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_axes_that_the_order_leaves_out_are_outermost():
    assert Sizes(order="dp-tp").axes == ("dp", "tp", "cp", "pp")


@pytest.mark.parametrize(
    "order", ["-".join(axes) for axes in itertools.permutations(("tp", "cp", "dp", "pp"))]
)
def test_groups_partition_the_world(order):
    sizes = Sizes(2, 2, 3, data=2, order=order).complete(24)
    for axis in ("tp", "cp", "dp", "pp"):
        found = {sizes.group(rank, axis) for rank in range(24)}
        assert sorted(rank for group in found for rank in group) == list(range(24))
        assert all(rank in sizes.group(rank, axis) for rank in range(24))
    for rank in range(24):
        assert sorted(sizes.stage(other) for other in sizes.group(rank, "pp")) == [0, 1]


def test_deepspeed_has_the_same_grid():
    topology = pytest.importorskip("deepspeed.runtime.pipe.topology")
    grid = topology.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    sizes = Sizes(2, 2).complete(12)
    for axis, name in (("pp", "pipe"), ("dp", "data"), ("tp", "model")):
        assert {tuple(group) for group in grid.get_axis_comm_lists(name)} == {
            sizes.group(rank, axis) for rank in range(12)
        }


def test_parse():
    assert parse_sizes("pipeline=2, tensor=4,order=tp-cp-ep-pp-dp", "f") == Sizes(
        2, 4, order="tp-cp-ep-pp-dp"
    )
    assert parse_sizes("", "f") == Sizes()


@pytest.mark.parametrize(
    "text",
    [
        "pipeline",
        "pipes=2",
        "pipeline=",
        "pipeline=two",
        "pipeline=-1",
        "pipeline=2,pipeline=4",
        "tensor=" + "9" * 5000,
    ],
)
def test_parse_refuses(text):
    with pytest.raises(HolmesError, match="^here: "):
        parse_sizes(text, "here")
