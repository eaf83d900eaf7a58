"""Compares the results of NCCL's collectives with plain arithmetic on the CPU, in one rank.

    python nccl_numbers.py [--largest ELEMENTS] [--types float32,...]

torchrun's environment variables must be set. Every collective, type and size is checked. Prints a JSON
line: {"rank", "checks", "wrong": [...]}. Inputs are small integers, so sums are exact in every type.
"""

import argparse
import itertools
import json
import os
import sys

import torch
import torch.distributed as dist

TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "int8": torch.int8,
}


def values(rank: int, size: int, kind: torch.dtype) -> torch.Tensor:
    """Return a rank's input: integers below 8 that depend on the rank and the position."""
    return ((torch.arange(size) * 7 + rank * 3) % 8).to(kind)


class Checks:
    """Checks of every collective for each type and size, made when an instance is created."""

    def __init__(self, largest: int, types: list[str]):
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.count = 0  # number of checks
        self.wrong: list[str] = []  # descriptions of wrong results
        sizes = [size for size in (1, 3, 1000, 4099, 65536, 1 << 20, 1 << 24) if size <= largest]
        for name, size in itertools.product(types, sizes):
            self.kind = TYPES[name]
            self.name = name
            self.size = size
            for check in (
                self.all_reduce,
                self.broadcast,
                self.reduce,
                self.all_gather,
                self.reduce_scatter,
                self.all_to_all,
                self.send_receive,
                self.gather_scatter,
            ):
                check()

    def inputs(self, size: int | None = None) -> list[torch.Tensor]:
        """Return the inputs of all ranks, in the order of the ranks."""
        return [values(rank, size or self.size, self.kind) for rank in range(self.world)]

    def compare(self, operation: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        """Count a check, and describe the first wrong number in `wrong` if the tensors differ."""
        self.count += 1
        result = result.cpu()
        if not torch.equal(result, expected):
            index = (result != expected).nonzero()[0].item()
            difference = f"at {index} {result[index]} is not {expected[index]}"
            self.wrong.append(f"{operation} {self.name} {self.size}: {difference}")

    def all_reduce(self) -> None:
        exact_kind = torch.float64 if self.kind.is_floating_point else torch.int64
        inputs = torch.stack(self.inputs()).to(exact_kind)
        expected = {
            "SUM": inputs.sum(0),
            "MAX": inputs.max(0).values,
            "MIN": inputs.min(0).values,
        }
        if self.world <= 2:
            expected["PRODUCT"] = inputs.prod(0)
        for name, value in expected.items():
            mine = self.inputs()[self.rank].cuda()
            dist.all_reduce(mine, getattr(dist.ReduceOp, name))
            self.compare(f"all_reduce {name}", mine, value.to(self.kind))
        if self.kind.is_floating_point and self.world in (2, 4, 8):  # the mean is exact
            mine = self.inputs()[self.rank].cuda()
            dist.all_reduce(mine, dist.ReduceOp.AVG)
            self.compare("all_reduce AVG", mine, (inputs.sum(0) / self.world).to(self.kind))

    def broadcast(self) -> None:
        root = self.size % self.world
        mine = self.inputs()[self.rank].cuda()
        dist.broadcast(mine, root)
        self.compare("broadcast", mine, self.inputs()[root])

    def reduce(self) -> None:
        root = self.size % self.world
        mine = self.inputs()[self.rank].cuda()
        dist.reduce(mine, root)
        if self.rank == root:
            total = sum(values.long() for values in self.inputs())
            self.compare("reduce", mine, total.to(self.kind))

    def all_gather(self) -> None:
        gathered = torch.empty(self.size * self.world, dtype=self.kind, device="cuda")
        dist.all_gather_into_tensor(gathered, self.inputs()[self.rank].cuda())
        self.compare("all_gather", gathered, torch.cat(self.inputs()))

    def reduce_scatter(self) -> None:
        shard = torch.empty(self.size, dtype=self.kind, device="cuda")
        inputs = self.inputs(self.size * self.world)
        dist.reduce_scatter_tensor(shard, inputs[self.rank].cuda())
        total = sum(values.long() for values in inputs).to(self.kind)
        self.compare("reduce_scatter", shard, total.chunk(self.world)[self.rank])

    def all_to_all(self) -> None:
        received = torch.empty(self.size * self.world, dtype=self.kind, device="cuda")
        inputs = self.inputs(self.size * self.world)
        dist.all_to_all_single(received, inputs[self.rank].cuda())
        parts = [values.chunk(self.world)[self.rank] for values in inputs]
        self.compare("all_to_all", received, torch.cat(parts))

    def send_receive(self) -> None:
        """Send to all other ranks and receive from them, in one group of operations."""
        received = {
            peer: torch.empty(self.size, dtype=self.kind, device="cuda")
            for peer in range(self.world)
            if peer != self.rank
        }
        mine = self.inputs()[self.rank].cuda()
        ops = [dist.P2POp(dist.isend, mine, peer) for peer in received]
        ops += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in received.items()]
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        for peer, tensor in received.items():
            self.compare("send_receive", tensor, self.inputs()[peer])

    def gather_scatter(self) -> None:
        root = 0
        gathered = None
        parts = None
        if self.rank == root:
            gathered = [
                torch.empty(self.size, dtype=self.kind, device="cuda") for _ in range(self.world)
            ]
            parts = [values.cuda() for values in self.inputs()]
        dist.gather(self.inputs()[self.rank].cuda(), gathered, root)
        if gathered is not None:
            self.compare("gather", torch.cat(gathered), torch.cat(self.inputs()))
        mine = torch.empty(self.size, dtype=self.kind, device="cuda")
        dist.scatter(mine, parts, root)
        self.compare("scatter", mine, self.inputs()[self.rank])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", type=int, default=65536)
    parser.add_argument("--types", default=",".join(TYPES))
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    checks = Checks(args.largest, args.types.split(","))
    print(
        json.dumps({"rank": checks.rank, "checks": checks.count, "wrong": checks.wrong[:20]}),
        flush=True,
    )
    dist.destroy_process_group()
    sys.exit(bool(checks.wrong))
