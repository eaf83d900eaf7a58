"""What travels of a tensor: parts of its rows, gathered over the tensor group."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

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
    assert [size for size, _ in done] == [part] * (2 * parts)  # 2 rows of 3 in each of `rows`, padded to a multiple
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
