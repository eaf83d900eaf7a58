"""One rank of the check of NCCL's numbers: every collective, type and size against plain arithmetic on the
CPU.

    python nccl_numbers.py [--largest ELEMENTS] [--types float32,...]    torchrun's variables say which rank
Prints a JSON line: {"rank", "checks", "wrong": [...]}. Inputs are small integers, so sums are exact in every
type.
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
    """What a rank brings: integers below 8 that depend on rank and place."""
    return ((torch.arange(size) * 7 + rank * 3) % 8).to(kind)


class Checks:
    def __init__(self, largest: int, types: list[str]):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.count, self.wrong = 0, []
        sizes = [size for size in (1, 3, 1000, 4099, 65536, 1 << 20, 1 << 24) if size <= largest]
        for name, size in itertools.product(types, sizes):
            self.kind, self.name, self.size = TYPES[name], name, size
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

    def brought(self, size: int | None = None) -> list[torch.Tensor]:
        return [values(rank, size or self.size, self.kind) for rank in range(self.world)]

    def compare(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        self.count += 1
        found = found.cpu()
        if not torch.equal(found, expected):
            place = (found != expected).nonzero()[0].item()
            self.wrong.append(
                f"{what} {self.name} {self.size}: at {place} {found[place]} is not {expected[place]}"
            )

    def all_reduce(self) -> None:
        brought = torch.stack(
            [one.double() if self.kind.is_floating_point else one.long() for one in self.brought()]
        )
        expected = {
            "SUM": brought.sum(0),
            "MAX": brought.max(0).values,
            "MIN": brought.min(0).values,
        }
        if self.world <= 2:
            expected["PRODUCT"] = brought.prod(0)
        for name, value in expected.items():
            mine = self.brought()[self.rank].cuda()
            dist.all_reduce(mine, getattr(dist.ReduceOp, name))
            self.compare(f"all_reduce {name}", mine, value.to(self.kind))
        if self.kind.is_floating_point and self.world in (2, 4, 8):  # the mean is exact
            mine = self.brought()[self.rank].cuda()
            dist.all_reduce(mine, dist.ReduceOp.AVG)
            self.compare("all_reduce AVG", mine, (brought.sum(0) / self.world).to(self.kind))

    def broadcast(self) -> None:
        root = self.size % self.world
        mine = self.brought()[self.rank].cuda()
        dist.broadcast(mine, root)
        self.compare("broadcast", mine, self.brought()[root])

    def reduce(self) -> None:
        root = self.size % self.world
        mine = self.brought()[self.rank].cuda()
        dist.reduce(mine, root)
        if self.rank == root:
            self.compare("reduce", mine, sum(one.long() for one in self.brought()).to(self.kind))

    def all_gather(self) -> None:
        found = torch.empty(self.size * self.world, dtype=self.kind, device="cuda")
        dist.all_gather_into_tensor(found, self.brought()[self.rank].cuda())
        self.compare("all_gather", found, torch.cat(self.brought()))

    def reduce_scatter(self) -> None:
        found = torch.empty(self.size, dtype=self.kind, device="cuda")
        dist.reduce_scatter_tensor(found, self.brought(self.size * self.world)[self.rank].cuda())
        whole = sum(one.long() for one in self.brought(self.size * self.world)).to(self.kind)
        self.compare(
            "reduce_scatter", found, whole[self.rank * self.size : (self.rank + 1) * self.size]
        )

    def all_to_all(self) -> None:
        found = torch.empty(self.size * self.world, dtype=self.kind, device="cuda")
        dist.all_to_all_single(found, self.brought(self.size * self.world)[self.rank].cuda())
        parts = [one.chunk(self.world)[self.rank] for one in self.brought(self.size * self.world)]
        self.compare("all_to_all", found, torch.cat(parts))

    def send_receive(self) -> None:
        """Each rank sends to all others and receives from them, in one group."""
        found = {
            peer: torch.empty(self.size, dtype=self.kind, device="cuda")
            for peer in range(self.world)
            if peer != self.rank
        }
        mine = self.brought()[self.rank].cuda()
        ops = [dist.P2POp(dist.isend, mine, peer) for peer in found]
        ops += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in found.items()]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        for peer, tensor in found.items():
            self.compare("send_receive", tensor, self.brought()[peer])

    def gather_scatter(self) -> None:
        root = 0
        found = [torch.empty(self.size, dtype=self.kind, device="cuda") for _ in range(self.world)]
        dist.gather(self.brought()[self.rank].cuda(), found if self.rank == root else None, root)
        if self.rank == root:
            self.compare(
                "gather",
                torch.stack([one.cpu() for one in found]).flatten(),
                torch.cat(self.brought()),
            )
        mine = torch.empty(self.size, dtype=self.kind, device="cuda")
        dist.scatter(
            mine, [one.cuda() for one in self.brought()] if self.rank == root else None, root
        )
        self.compare("scatter", mine, self.brought()[self.rank])


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
