"""How the running job puts gradients into buckets: plan/buckets.py's cut, by dtype and device."""

import torch

from holmes_ext.runtime.reduce.flat_bucket import Item, fill_buckets, layout_digest

F32, BF16 = ((dtype, torch.device("cpu")) for dtype in (torch.float32, torch.bfloat16))


def items(*numels, key=F32):
    return [Item(f"p{number}", numel, 4, key) for number, numel in enumerate(numels)]


def test_buckets_keep_the_order_and_the_limit():
    assert fill_buckets(items(1, 1, 1, 1, 1), [4, 3, 2, 1, 0], 8) == ((4, 3), (2, 1), (0,))


def test_an_item_above_the_limit_stands_alone():
    assert fill_buckets(items(1, 100, 1), [2, 1, 0], 8) == ((2,), (1,), (0,))


def test_keys_never_mix_and_buckets_stand_where_they_are_complete():
    mixed = [
        Item("a", 1, 4, F32),
        Item("b", 1, 2, BF16),
        Item("c", 1, 4, F32),
        Item("d", 1, 2, BF16),
    ]
    assert fill_buckets(mixed, [0, 1, 2, 3], 8) == ((0, 2), (1, 3))
    assert fill_buckets(mixed, [1, 0, 2, 3], 4) == ((0,), (2,), (1, 3))


def test_every_item_is_in_one_bucket():
    order = [3, 0, 4, 1, 2]
    buckets = fill_buckets(items(5, 1, 9, 2, 2), order, 16)
    assert sorted(index for bucket in buckets for index in bucket) == sorted(order)


def test_digest_sees_names_shapes_order_and_size():
    alike = [
        items(1, 2),
        items(2, 1),
        items(1, 2, key=BF16),
        items(1, 2, key=(torch.float32, torch.device("cuda:0"))),
    ]
    assert len({layout_digest(items(1, 2), 9), *(layout_digest(each, 8) for each in alike)}) == 5
    assert layout_digest(items(1, 2), 8) == layout_digest(items(1, 2), 8)


def test_digest_is_the_same_on_each_gpu_of_a_node():
    """And sees which parameters are together on one of several."""

    def on(*devices):
        return layout_digest(
            [Item("p", 1, 4, (torch.float32, torch.device(device))) for device in devices], 8
        )

    assert (
        on("cuda:0", "cuda:0")
        == on("cuda:1", "cuda:1")
        != on("cuda:0", "cuda:1")
        == on("cuda:2", "cuda:0")
    )
    assert on("cuda:0", "cuda:1", "cuda:1") != on("cuda:0", "cuda:1", "cuda:0")
