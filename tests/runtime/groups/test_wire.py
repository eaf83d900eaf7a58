"""What travels of a tensor: parts of its rows, gathered over the tensor group."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, seeded

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.groups.wire import PLAIN, Wire


def across(rank, rows, parts):
    """Ranks 0..parts-1 send what all of them have to parts..2 parts-1: (elements of a part, what came)."""
    groups = [dist.new_group(range(start, start + parts)) for start in (0, parts)]
    wire = Wire(parts, rank % parts, groups[rank // parts])
    whole = torch.arange(rows * 6.0).reshape(rows, 2, 3)
    if rank < parts:
        part = wire.outgoing(whole.requires_grad_())
        dist.send(part, rank + parts)
        return part.numel(), None
    tensor = torch.full((rows, 2, 3), -1.0, requires_grad=True)
    part, finish = wire.incoming(tensor)
    dist.recv(part, rank - parts)
    finish()
    return part.numel(), torch.equal(tensor, whole)


@pytest.mark.parametrize("rows, parts, part", [(4, 2, 12), (5, 2, 15), (4, 3, 9), (1, 3, 3)])
def test_each_sends_its_rows_and_all_get_the_whole(rows, parts, part):
    done = run_ranks(across, 2 * parts, rows, parts)
    # 2 rows of 3 in each of `rows`, padded to a multiple
    assert [size for size, _ in done] == [part] * (2 * parts)
    assert all(same for _, same in done[parts:])


def test_a_part_outlives_a_tensor_whose_storage_is_given_up():
    """As deallocate_pipeline_outputs does after it has begun to send."""
    tensor = torch.arange(8.0).reshape(4, 2)
    part = Wire(2, 1).outgoing(tensor)
    tensor.data = torch.empty(1)
    assert part.tolist() == [[4, 5], [6, 7]]


def test_what_is_not_cut_is_not_touched():
    tensor = torch.arange(4.0).requires_grad_()
    assert PLAIN.outgoing(tensor).data_ptr() == tensor.data_ptr()
    part, _ = PLAIN.incoming(tensor)
    assert part.data_ptr() == tensor.data_ptr() and part.shape == (4,) and not part.requires_grad


def one_way(tensor, compression):
    wire, came = Wire(compression=compression), torch.empty_like(tensor)
    sent = wire.outgoing(tensor)
    part, finish = wire.incoming(came)
    part.copy_(sent)
    finish()
    return sent.nbytes / tensor.nbytes, came


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_has_a_scale_for_each_row(dtype):
    tensor = (torch.randn(7, 2, 64) * torch.logspace(-3, 3, 7)[:, None, None]).to(dtype)
    share, came = one_way(tensor, "int8")
    assert share == pytest.approx((1 + 4 / 64) / dtype.itemsize)
    step = tensor.float().abs().amax(-1, keepdim=True) / 127
    rounding = tensor.float().abs() * torch.finfo(dtype).eps
    assert ((came.float() - tensor.float()).abs() <= 0.501 * step + rounding).all()


def test_bf16_halves_float32_and_leaves_the_rest():
    tensor = torch.randn(3, 5)
    share, came = one_way(tensor, "bf16")
    assert share == 0.5 and torch.equal(came, tensor.bfloat16().float())
    for other in (tensor.half(), tensor.double(), tensor.long()):
        share, came = one_way(other, "bf16")
        assert share == 1 and torch.equal(came, other)


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden():
    tensor = torch.zeros(3, 4)
    tensor[1, 2], tensor[2, 0] = float("inf"), float("nan")
    _, came = one_way(tensor, "int8")
    assert (came[0] == 0).all() and came[1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_what_int8_cannot_hold_is_refused_in_one_line_at_both_ends(dtype):
    wire = Wire(compression="int8", stage_link="stage 0's stage link to stage 1")
    for end in (wire.outgoing, wire.incoming):
        with pytest.raises(
            HolmesError,
            match=r"--holmes-compress-activations int8: stage 0's stage link to stage 1 sends \w+; "
            r"only",
        ):
            end(torch.zeros(2, 2, dtype=dtype))


def compressed_slices(rank):
    wire, whole = Wire(2, rank, dist.group.WORLD, "int8"), torch.randn(5, 8, generator=seeded(1))
    came = torch.empty(5, 8)
    part, finish = wire.incoming(came)
    part.copy_(wire.outgoing(whole))
    finish()
    return came, torch.equal(came, one_way(whole, "int8")[1])


def test_tensor_ranks_go_on_with_the_same_numbers():
    (one, same), (other, _) = run_ranks(compressed_slices, 2)
    assert same and torch.equal(one, other)
