"""Script of one rank that uses communicators of NCCL in other ways than plain collectives.

    nccl_life.py CASE

torchrun's environment variables must be set. Prints a JSON line when the case is over.
"""

import argparse
import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

CASES: dict[str, Callable[[], object]] = {}


def case(function: Callable[[], object]) -> Callable[[], object]:
    CASES[function.__name__] = function
    return function


def total(group=None) -> float:
    """Return the sum of the ranks of a group's members, computed by an all-reduce."""
    value = torch.full((1000,), float(dist.get_rank()), device="cuda")
    dist.all_reduce(value, group=group)
    assert value.unique().numel() == 1
    return value[0].item()


@case
def groups() -> object:
    """Make process groups of rows and columns of the ranks, and return this rank's sums."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [dist.new_group(list(range(start, start + 2))) for start in range(0, world, 2)]
    columns = [dist.new_group(list(range(start, world, 2))) for start in range(2)]
    return [total(), total(rows[rank // 2]), total(columns[rank % 2])]


@case
def split() -> object:
    """Split a communicator that is bound to its device, by ncclCommSplit."""
    world = dist.get_world_size()
    halves = [list(range(world // 2)), list(range(world // 2, world))]
    half = dist.split_group(split_ranks=halves)
    return [total(), total(half), total()]


@case
def many_in_one_call() -> object:
    """Reduce several tensors in one ncclGroup."""
    values = [torch.full((size,), float(dist.get_rank()), device="cuda") for size in (1, 100, 5000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for value in values:
            dist.all_reduce(value)
    manager.wait()
    return [value.unique().tolist() for value in values]


@case
def abort() -> object:
    """Abort an all-reduce that rank 0 never joins, and use the device afterwards."""
    total()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["aborted"])
        return "stayed away"
    work = dist.all_reduce(torch.ones(1000, device="cuda"), async_op=True)
    done = work.is_completed()
    dist.distributed_c10d._abort_process_group()
    store.set("aborted", "1")
    return [done, (torch.ones(3, device="cuda") + 1).tolist()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if arguments.case == "split" else None)
    print(json.dumps(CASES[arguments.case]()), flush=True)
    if arguments.case != "abort":
        dist.destroy_process_group()
