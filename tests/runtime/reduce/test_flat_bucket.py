"""How the running job puts gradients into buckets: plan/cost/buckets.py's cut, by dtype and device."""

from holmes_ext.runtime.reduce.flat_bucket import Item, fill_buckets, layout_digest


def items(*numels, key="float32"):
    return [Item(f"p{number}", numel, 4, key) for number, numel in enumerate(numels)]


def test_buckets_keep_the_order_and_the_limit():
    assert fill_buckets(items(1, 1, 1, 1, 1), [4, 3, 2, 1, 0], 8) == ((4, 3), (2, 1), (0,))


def test_an_item_above_the_limit_stands_alone():
    assert fill_buckets(items(1, 100, 1), [2, 1, 0], 8) == ((2,), (1,), (0,))


def test_keys_never_mix_and_buckets_stand_where_they_are_complete():
    mixed = [Item("a", 1, 4, "f32"), Item("b", 1, 2, "bf16"), Item("c", 1, 4, "f32"), Item("d", 1, 2, "bf16")]
    assert fill_buckets(mixed, [0, 1, 2, 3], 8) == ((0, 2), (1, 3))
    assert fill_buckets(mixed, [1, 0, 2, 3], 4) == ((0,), (2,), (1, 3))


def test_every_item_is_in_one_bucket():
    order = [3, 0, 4, 1, 2]
    buckets = fill_buckets(items(5, 1, 9, 2, 2), order, 16)
    assert sorted(index for bucket in buckets for index in bucket) == sorted(order)


def test_digest_sees_names_shapes_order_and_size():
    base = layout_digest(items(1, 2), 8)
    assert base == layout_digest(items(1, 2), 8)
    assert (
        len(
            {base, layout_digest(items(2, 1), 8), layout_digest(items(1, 2), 9), layout_digest(items(1, 2, key="x"), 8)}
        )
        == 4
    )
