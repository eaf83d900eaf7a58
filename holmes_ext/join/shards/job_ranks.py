"""Collectives of the ranks of a job: small messages about its rounds, and gathering of fragments.

Collectives of a group must have the same order on all ranks. So each of these process groups is used by a
single thread:

    control     gloo, all ranks of the job. Used by the main thread until the rounds thread starts, and then
                by the rounds thread (round_runner.py)
    boundary    gloo, all ranks of the job, with rounds=async. Used by the training thread at the ends of
                periods (rolling_loop.py)
    replicas    default backend (the fast network), the ranks that hold the same weights. Used by the training
                thread
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
from holmes_ext.join.shards.ownership import Range, RankRange, owned_ranges
from holmes_ext.join.shards.state import Fragment
from holmes_ext.join.shards.weights import CHECKSUM_MASK, Part

#: Bits, and mask, of the lower half of a 64-bit checksum.
_HALF_BITS = 32
_HALF_MASK = 2**_HALF_BITS - 1


class JobRanks:
    """Collectives for small CPU messages over all ranks of a job.

    Args:
        control: Group of all ranks, used by a single thread; None: the job is a single process.
    """

    def __init__(self, control: dist.ProcessGroup | None):
        self._control = control
        self.rank = dist.get_rank(control) if control is not None else 0
        self.ranks = dist.get_world_size(control) if control is not None else 1

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sums of all ranks' values, in float64; collective."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        return self._all_reduce(tensor, dist.ReduceOp.SUM).tolist()

    def all_reduce_checksums(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise sums of all ranks' 64-bit checksums, modulo 2^64; collective.

        The halves of each checksum are added up separately, so that int64 does not overflow.
        """
        halves: list[int] = []  # low, high, low, high, ...
        for value in values:
            halves += [value & _HALF_MASK, value >> _HALF_BITS]
        sums = self._all_reduce(torch.tensor(halves, device="cpu"), dist.ReduceOp.SUM).tolist()
        return [
            (low + (high << _HALF_BITS)) & CHECKSUM_MASK for low, high in zip(sums[::2], sums[1::2])
        ]

    def broadcast_from_rank_0(self, document: Any) -> Any:
        """Return rank 0's document (anything that JSON can represent) on all ranks; collective."""
        if self._control is None:
            return document
        data = json.dumps(document).encode() if self.rank == 0 else b""
        # First the length, so that the other ranks can allocate the text.
        length = torch.tensor([len(data)], device="cpu")
        dist.broadcast(length, group=self._control, group_src=0)
        if self.rank == 0:
            text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        dist.broadcast(text, group=self._control, group_src=0)
        return json.loads(bytes(text.numpy()))

    def all_gather(self, document: Any) -> list[Any]:
        """Return the documents of all ranks, in rank order; collective."""
        if self._control is None:
            return [document]
        data = json.dumps(document).encode()
        # An all-gather needs equal lengths: shorter texts are padded with spaces; JSON ignores them.
        longest = self._all_reduce(torch.tensor([len(data)], device="cpu"), dist.ReduceOp.MAX)
        padded = torch.full((int(longest),), ord(" "), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(texts, padded, group=self._control)
        return [json.loads(bytes(text.numpy())) for text in texts]

    def refuse(self, text: str) -> NoReturn:
        """Raise an error that all ranks have found, so that it is printed only once.

        Rank 0 raises a HolmesError, and the program prints it. The other ranks raise a RemoteError, a
        HolmesError that is not printed.
        """
        if self.rank == 0:
            raise HolmesError(text)
        raise RemoteError(text)

    def run_on_all_ranks(self, call: Callable[[], Any]) -> Any:
        """Run `call` on all ranks and return its result; collective.

        Raises:
            HolmesError: On all ranks, if `call` raised a HolmesError on some rank; the message is that of
                the first such rank.
        """
        result = None
        error_here: HolmesError | None = None
        try:
            result = call()
        except HolmesError as error:
            error_here = error
        texts = self.all_gather(None if error_here is None else str(error_here))
        errors = [text for text in texts if text is not None]
        if errors:
            # Only a rank with the error itself raises it as it is, and so prints it. A RemoteError (a kind
            # of HolmesError) is not printed.
            if error_here is not None and str(error_here) == errors[0]:
                raise error_here
            raise RemoteError(errors[0])
        return result

    def _all_reduce(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        if self._control is not None:
            dist.all_reduce(tensor, operation, group=self._control)
        return tensor


class Replicas:
    """Ranks that hold the same weights; each of them exchanges a part with other jobs.

    Args:
        owned: Elements that each rank of the job exchanges at this position of the model-parallel grid.
        replicas: Ranks that hold the same weights, sorted, with this rank.
        group: Their process group; None: no other rank holds these weights.
        device: Device on which the group's backend moves tensors.
    """

    def __init__(
        self,
        owned: Sequence[RankRange],
        replicas: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        self._owned = list(owned)
        self._replicas = list(replicas)
        self._group = group
        self._device = device

    def gather(self, fragment: Fragment, mine: torch.Tensor) -> list[Part]:
        """Gather the values of a part of the model from the ranks that hold it; collective.

        Args:
            fragment: The fragment: a part of the model.
            mine: Values of the elements that this rank exchanges, flat float32 on the CPU.

        Returns:
            Ranges of consecutive elements with their values, in order. Together they are all
            elements of the fragment that these ranks hold.
        """
        if self._group is None:
            return _split_by_ranges(fragment.ranges, mine)
        ranges_of_replicas = [
            owned_ranges(self._owned, rank, fragment.start, fragment.stop)
            for rank in self._replicas
        ]
        lengths = [sum(stop - start for start, stop in ranges) for ranges in ranges_of_replicas]
        # An all-gather needs equal lengths: row r has the elements of the r-th replica, padded with zeros.
        padded = torch.zeros(max(lengths), dtype=torch.float32, device=self._device)
        padded[: mine.numel()].copy_(mine)
        rows = torch.empty(
            len(self._replicas), max(lengths), dtype=torch.float32, device=self._device
        )
        dist.all_gather(list(rows.unbind()), padded, group=self._group)
        parts: list[Part] = []
        for ranges, row in zip(ranges_of_replicas, rows):
            parts += _split_by_ranges(ranges, row)
        return sorted(parts, key=lambda part: part.start)


def _split_by_ranges(ranges: Sequence[Range], values: torch.Tensor) -> list[Part]:
    """Split a flat tensor that has the elements of several ranges, in order; return a view for each range."""
    parts = []
    offset = 0
    for start, stop in ranges:
        parts.append(Part(start, values[offset : offset + stop - start]))
        offset += stop - start
    return parts


@dataclass(frozen=True, kw_only=True)
class CutMatrices(Matrices):
    """Matrices that are divided among ranks of a job (ZeRO, FSDP, a distributed optimizer).

    Muon's outer step orthogonalizes whole matrices. So the ranks first gather the fragment. Then each rank
    orthogonalizes each matrix that contains elements of this rank, and keeps these elements. Example with
    three matrices a, b, c, where the border between the ranks divides b:

                              rank 0             rank 1
        exchanges             a, half of b       other half of b, c
        has after gathering   a, b, c            a, b, c
        orthogonalizes        a, b               b, c
        keeps                 a, half of b       other half of b, c
    """

    # `places` are positions in the whole fragment, not in this rank's part of it.
    fragment: Fragment
    holders: Replicas  # all ranks at this position of the model-parallel grid

    needs_others: ClassVar[bool] = True

    def orthogonalize(self, flat: torch.Tensor) -> None:
        """Orthogonalize the matrices, in place; collective.

        Each rank orthogonalizes the whole matrices that contain elements of it, and keeps these elements.

        Args:
            flat: This rank's elements of the fragment: its ranges, one after the other.
        """
        # gather() returns the elements of all ranks as parts, in order. Together they are the fragment.
        parts = self.holders.gather(self.fragment, flat)
        whole_fragment = torch.cat([part.values for part in parts]).cpu()
        super().orthogonalize(whole_fragment)
        # Copy this rank's ranges back. Their bounds are elements of the flat weights.
        for start, stop in self.fragment.ranges:
            first = start - self.fragment.start
            last = stop - self.fragment.start
            place_in_flat = self.fragment.places(start, stop)  # a slice
            flat[place_in_flat] = whole_fragment[first:last]


def gather_cut_matrices(
    fragments: Sequence[Fragment],
    matrices: Sequence[Matrix],
    holders: Replicas,
    device: torch.device,
) -> None:
    """Let later outer steps of these fragments gather matrices that are divided among ranks.

    Muon orthogonalizes whole matrices. This call only replaces `fragment.matrices`; from then on
    each outer step is collective over `holders`.

    Args:
        fragments: Fragments (parts of the model) of this rank.
        matrices: All weight matrices, as positions in the flat weights.
        holders: All ranks at this position of the model-parallel grid.
        device: Device on which matrices are orthogonalized.
    """
    for fragment in fragments:
        places = []  # positions in the fragment of the matrices with elements of this rank
        for matrix in matrices:
            is_exchanged_here = any(
                matrix.start < stop and start < matrix.stop for start, stop in fragment.ranges
            )
            if is_exchanged_here:
                places.append(replace(matrix, start=matrix.start - fragment.start))
        fragment.matrices = CutMatrices(
            places=places, device=device, fragment=fragment, holders=holders
        )
