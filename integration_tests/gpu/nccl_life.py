"""One rank of what happens to communicators besides collectives: python nccl_life.py SCENE

torchrun's variables say which rank. Prints a JSON line when its case is over."""

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
    """The sum of the ranks of a group's members, by all_reduce."""
    value = torch.full((1000,), float(dist.get_rank()), device="cuda")
    dist.all_reduce(value, group=group)
    assert value.unique().numel() == 1
    return value[0].item()


@case
def groups() -> object:
    """Groups of rows and columns, side by side."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [dist.new_group(list(range(start, start + 2))) for start in range(0, world, 2)]
    columns = [dist.new_group(list(range(start, world, 2))) for start in range(2)]
    return [total(), total(rows[rank // 2]), total(columns[rank % 2])]


@case
def split() -> object:
    """ncclCommSplit of a communicator that is bound to its device."""
    world = dist.get_world_size()
    halves = [list(range(world // 2)), list(range(world // 2, world))]
    half = dist.split_group(split_ranks=halves)
    return [total(), total(half), total()]


@case
def many_in_one_call() -> object:
    """Collectives of several tensors in one ncclGroup."""
    values = [torch.full((size,), float(dist.get_rank()), device="cuda") for size in (1, 100, 5000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for value in values:
            dist.all_reduce(value)
    manager.wait()
    return [value.unique().tolist() for value in values]


@case
def abort() -> object:
    """A collective that a rank never joins is aborted by the others, and their device lives on."""
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
