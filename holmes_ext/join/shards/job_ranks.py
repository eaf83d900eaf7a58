"""What the ranks of one job say to each other about its rounds, and how they gather a fragment that all of
them hold.

Two groups: `control`, of all ranks, for small messages from the thread that runs the rounds (gloo; nothing
else may use it, so that the order of its collectives is the same on all ranks); `replicas`, of those that
hold the same parts, used by the training thread alone, on the fast fabric.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.join.orthogonal import Matrices, Matrix
from holmes_ext.join.shards.ownership import RankRange, owned_ranges
from holmes_ext.join.shards.state import Fragment
from holmes_ext.join.shards.weights import Part

_MASK = 2**64 - 1


class JobRanks:
    """control: None where the job is one process. All methods are collective over the job."""

    def __init__(self, control: dist.ProcessGroup | None):
        self._control = control
        self.rank = dist.get_rank(control) if control is not None else 0
        self.ranks = dist.get_world_size(control) if control is not None else 1

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Of all ranks' values, place by place, in float64."""
        mine = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        return self._reduced(mine, dist.ReduceOp.SUM).tolist()

    def all_reduce_checksums(self, values: Sequence[int]) -> list[int]:
        """Sums modulo 2^64, in halves so that nothing overflows."""
        halves = [part for value in values for part in (value & 0xFFFFFFFF, value >> 32)]
        total = self._reduced(torch.tensor(halves, device="cpu"), dist.ReduceOp.SUM).tolist()
        return [(low + (high << 32)) & _MASK for low, high in zip(total[::2], total[1::2])]

    def broadcast_from_rank_0(self, document: Any) -> Any:
        """Rank 0's document, on all ranks; those of the others count for nothing."""
        if self._control is None:
            return document
        data = json.dumps(document).encode() if self.rank == 0 else b""
        length = torch.tensor([len(data)], device="cpu")
        dist.broadcast(length, group=self._control, group_src=0)
        text = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if self.rank == 0
            else torch.empty(int(length), dtype=torch.uint8, device="cpu")
        )
        dist.broadcast(text, group=self._control, group_src=0)
        return json.loads(bytes(text.numpy()))

    def all_gather(self, document: Any) -> list[Any]:
        """All ranks' documents, in rank order."""
        if self._control is None:
            return [document]
        data = json.dumps(document).encode()
        longest = self._reduced(torch.tensor([len(data)], device="cpu"), dist.ReduceOp.MAX)
        text = torch.full((int(longest),), ord(" "), dtype=torch.uint8, device="cpu")
        text[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = [torch.empty_like(text) for _ in range(self.ranks)]
        dist.all_gather(texts, text, group=self._control)
        return [json.loads(bytes(text.numpy())) for text in texts]

    def refuse(self, text: str) -> NoReturn:
        """What is wrong, known on all ranks: rank 0 tells it."""
        raise (RemoteError if self.rank else HolmesError)(text)

    def run_on_all_ranks(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; or the HolmesError of the first rank that raised one, on all."""
        result, trouble = None, None
        try:
            result = call()
        except HolmesError as error:
            trouble = error
        troubles = [line for line in self.all_gather(trouble and str(trouble)) if line is not None]
        if troubles:
            raise (
                trouble
                if trouble is not None and str(trouble) == troubles[0]
                else RemoteError(troubles[0])
            )
        return result

    def _reduced(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        if self._control is not None:
            dist.all_reduce(tensor, operation, group=self._control)
        return tensor


class Replicas:
    """whole = gather(fragment, own): what this rank holds of a fragment, from what its replicas exchange
    each.

    owned: who of the position exchanges what; replicas: ranks that hold the same parts, this one among them,
    sorted; group: theirs, None where this rank alone holds its parts. device: where the group's backend moves
    tensors.
    """

    def __init__(
        self,
        owned: Sequence[RankRange],
        replicas: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        self._owned, self._replicas, self._group, self._device = (
            list(owned),
            list(replicas),
            group,
            device,
        )

    def gather(self, fragment: Fragment, mine: torch.Tensor) -> list[Part]:
        """mine: values of the ranges that this rank exchanges (float32, host). Parts that cover the
        fragment."""
        start, stop = fragment.start, fragment.stop
        if self._group is None:
            return _parts(fragment.ranges, mine)
        ranges = [owned_ranges(self._owned, rank, start, stop) for rank in self._replicas]
        lengths = [sum(b - a for a, b in spans) for spans in ranges]
        sent = torch.zeros(max(lengths), dtype=torch.float32, device=self._device)
        sent[: mine.numel()].copy_(mine)
        rows = torch.empty(len(ranges), max(lengths), dtype=torch.float32, device=self._device)
        dist.all_gather(list(rows.unbind()), sent, group=self._group)
        parts = [part for spans, row in zip(ranges, rows) for part in _parts(spans, row)]
        return sorted(parts, key=lambda part: part.start)


def _parts(ranges: Sequence[tuple[int, int]], values: torch.Tensor) -> list[Part]:
    made, place = [], 0
    for start, stop in ranges:
        made.append(Part(start, values[place : place + stop - start]))
        place += stop - start
    return made


@dataclass(frozen=True, kw_only=True)
class CutMatrices(Matrices):
    """Matrices of which ranks of a job hold parts (ZeRO, FSDP, a distributed optimizer): gathered inside the
    job for the outer step, and each rank keeps its part.

        rank 0 exchanges  [ a       b  ]          gathered  [ a       b    ][ b c     ]   orthogonal: a, b
        rank 1 exchanges              [ b c    ]  gathered  [ a       b    ][ b c     ]   orthogonal:    b, c

    places: in the whole fragment, of those of which this rank exchanges something. holders: all
    ranks of the position."""

    fragment: Fragment
    holders: Replicas

    needs_others: ClassVar[bool] = True

    def orthogonalize(self, flat: torch.Tensor) -> None:
        row = torch.cat([part.values for part in self.holders.gather(self.fragment, flat)]).cpu()
        super().orthogonalize(row)
        for a, b in self.fragment.ranges:
            flat[self.fragment.places(a, b)] = row[
                a - self.fragment.start : b - self.fragment.start
            ]


def gather_cut_matrices(
    fragments: Sequence[Fragment],
    matrices: Sequence[Matrix],
    holders: Replicas,
    device: torch.device,
) -> None:
    """From now on the outer steps of these fragments are collective over the ranks of the position."""
    for fragment in fragments:
        places = [
            replace(matrix, start=matrix.start - fragment.start)
            for matrix in matrices
            if any(matrix.start < b and a < matrix.stop for a, b in fragment.ranges)
        ]
        fragment.matrices = CutMatrices(
            places=places, device=device, fragment=fragment, holders=holders
        )
