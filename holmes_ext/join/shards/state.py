"""The outer state of one rank: of every fragment the elements that it exchanges (ownership.owners), on the
host.

    anchor      float32: as they were after their last outer step; the same bits in every job
    momentum    float32 (bfloat16 beside a residual of bfloat16), where the outer step has one
    residual    what the codec has left out so far, this job's own: bfloat16 (int8, 2bit)

Bytes of an element of the rank: 4 + 4; with int8 and 2bit 4 + 2 + 2, the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.join.codecs import residual_dtype
from holmes_ext.join.orthogonal import Matrices
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.ownership import Range, RankRange, fragment_cuts, owned_ranges
from holmes_ext.join.shards.weights import Weights, checksum

#: Tensors of a fragment that a checkpoint has.
_SAVED = ("anchor", "momentum", "residual")


@dataclass
class Pending:
    """A round that is committed, and whose outer step is still to be taken: by this job when its delay is
    over. gradient: the aggregate; mu, gap: as the algorithm's step() takes them. replaces: it is no step:
    `gradient` is the anchor that another job has after that round, `momentum` its momentum."""

    number: int
    gradient: torch.Tensor
    mu: float = 0.0
    gap: float = 1.0
    residual: torch.Tensor | None = None
    replaces: bool = False
    momentum: torch.Tensor | None = None


@dataclass
class Fragment:
    """Elements [start, stop) of the row; ranges: that this rank exchanges; matrices: in the anchor; version:
    of its last outer step."""

    start: int
    stop: int
    ranges: list[Range]
    anchor: torch.Tensor
    momentum: torch.Tensor | None
    residual: torch.Tensor | None
    matrices: Matrices = Matrices()
    version: int = 0
    pending: list[Pending] = field(default_factory=list)

    @property
    def given(self) -> int:
        """The version that another job can be given: what needs other ranks is not applied for it."""
        return self.version if self.matrices.needs_others else self.promised

    @property
    def promised(self) -> int:
        """The version that it has, or will have when what is pending has been applied."""
        return self.pending[-1].number if self.pending else self.version

    def checksum(self, position: str, salt: str = "") -> int:
        """Of anchor and momentum at this position; the ranks' add up."""
        total = 0
        for start, stop in self.ranges:
            there = self.places(start, stop)
            total += checksum(self.anchor[there], start, f"anchor {position} {salt}")
            if self.momentum is not None:
                total += checksum(self.momentum[there], start, f"momentum {position} {salt}")
        return total & (2**64 - 1)

    def places(self, start: int, stop: int) -> slice:
        """Where elements [start, stop), all in one of the ranges, stand in the anchor."""
        place = 0
        for a, b in self.ranges:
            if a <= start <= stop <= b:
                return slice(place + start - a, place + stop - a)
            place += b - a
        raise KeyError((start, stop))


class OuterState:
    """lock: held by whoever changes a fragment, and by whoever copies one for another job."""

    def __init__(
        self, settings: OuterSettings, weights: Weights, owned: Sequence[RankRange], rank: int
    ):
        self.settings, self.weights, self.lock = settings, weights, threading.Lock()
        self.algorithm = settings.outer_algorithm()
        self.matrices = weights.matrices if self.algorithm.of_matrices else []
        whole = [(matrix.start, matrix.stop) for matrix in self.matrices]
        cuts = fragment_cuts(weights.total, settings.fragments, whole)
        self.fragments = [
            self._fragment(start, stop, owned_ranges(owned, rank, start, stop))
            for start, stop in zip(cuts, cuts[1:])
        ]

    def _fragment(self, start: int, stop: int, ranges: list[Range]) -> Fragment:
        count = sum(b - a for a, b in ranges)
        residual_kind = residual_dtype(self.settings)
        # Beside a residual of two bytes momentum has two as well: all of it is twice the weights at most.
        kind = torch.bfloat16 if residual_kind == torch.bfloat16 else torch.float32
        momentum = (
            torch.zeros(count, dtype=kind, device="cpu") if self.algorithm.keeps_momentum else None
        )
        residual = (
            None if residual_kind is None else torch.zeros(count, dtype=residual_kind, device="cpu")
        )
        anchor = self.weights.read(ranges, torch.empty(count, device="cpu"))
        fragment = Fragment(start, stop, ranges, anchor, momentum, residual)
        mine = [
            matrix
            for matrix in self.matrices
            if any(a <= matrix.start and matrix.stop <= b for a, b in ranges)
        ]
        places = [
            replace(matrix, start=fragment.places(matrix.start, matrix.stop).start)
            for matrix in mine
        ]
        fragment.matrices = Matrices(places, self.weights.device)
        return fragment

    def apply(self, fragment: Fragment) -> None:
        """Take the outer step that has been pending longest."""
        with self.lock:
            pending = fragment.pending.pop(0)
            self._take(
                pending, fragment.anchor, fragment.momentum, pending.gradient, fragment.matrices
            )
            if fragment.residual is not None and pending.residual is not None:
                fragment.residual.copy_(pending.residual)
            elif fragment.residual is not None and pending.replaces:
                fragment.residual.zero_()  # what was left out so far belonged to the old anchor
            fragment.version = pending.number

    def _take(
        self,
        pending: Pending,
        anchor: torch.Tensor,
        momentum: torch.Tensor | None,
        gradient: torch.Tensor,
        matrices: Matrices,
    ) -> None:
        """The step on anchor and momentum, in place; `gradient` (of the same elements) is overwritten."""
        if not pending.replaces:
            self.algorithm.step(anchor, momentum, gradient, pending.mu, pending.gap, matrices)
            return
        anchor.copy_(gradient)
        if momentum is not None and pending.momentum is not None:
            momentum.copy_(pending.momentum)

    def copy_of(
        self, fragment: Fragment, start: int, stop: int
    ) -> tuple[int, torch.Tensor, torch.Tensor | None]:
        """Version (Fragment.given), anchor, momentum of [start, stop), what is pending applied where it can
        be: for another job."""
        with self.lock:
            wanted = fragment.places(start, stop)
            steps = [] if fragment.matrices.needs_others else fragment.pending
            place = slice(None) if steps and fragment.matrices.places else wanted
            anchor = fragment.anchor[place].clone()
            momentum = None if fragment.momentum is None else fragment.momentum[place].clone()
            for pending in steps:
                part = pending
                if pending.momentum is not None:
                    part = replace(pending, momentum=pending.momentum[place])
                self._take(
                    part, anchor, momentum, pending.gradient[place].clone(), fragment.matrices
                )
            if place is not wanted:
                anchor, momentum = anchor[wanted], None if momentum is None else momentum[wanted]
            return fragment.given, anchor, momentum

    def replace(
        self, fragment: Fragment, version: int, anchor: torch.Tensor, momentum: torch.Tensor | None
    ) -> None:
        """What another job has takes the place of ours, and of what is pending."""
        with self.lock:
            fragment.pending.clear()
        self.promise(fragment, version, anchor, momentum)
        self.apply(fragment)

    def promise(
        self, fragment: Fragment, version: int, anchor: torch.Tensor, momentum: torch.Tensor | None
    ) -> None:
        """What another job has will take the place of ours, after what is pending."""
        with self.lock:
            fragment.pending.append(Pending(version, anchor, replaces=True, momentum=momentum))

    @property
    def host_bytes(self) -> int:
        """What all of it takes."""
        tensors = (tensor for f in self.fragments for tensor in (f.anchor, f.momentum, f.residual))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def to_dict(self, pending: bool = True) -> dict[str, Any]:
        """For a checkpoint (saved.py). pending: with what is committed and not applied yet."""
        fragments = []
        for f in self.fragments:
            content: dict[str, Any] = {
                "ranges": [list(pair) for pair in f.ranges],
                "version": f.version,
            }
            content |= {
                name: value.clone() for name in _SAVED if (value := getattr(f, name)) is not None
            }
            content["pending"] = [_copied(step) for step in f.pending] if pending else []
            fragments.append(content)
        return {
            "position": self.weights.position,
            "digest": self.weights.digest,
            "fragments": fragments,
        }

    def load(self, saved: dict[str, Any], source: str) -> None:
        """HolmesError when it is another model's, or was saved with other shards or settings."""
        if saved["digest"] != self.weights.digest or saved["position"] != self.weights.position:
            raise HolmesError(
                f"{source}: the outer state is that of another model or place ({saved['position']}); load the"
                " checkpoint it came with"
            )
        if len(saved["fragments"]) != len(self.fragments):
            raise HolmesError(
                f"{source}: the outer state has {len(saved['fragments'])} fragments, --holmes-outer says"
                f" {len(self.fragments)}"
            )
        for mine, theirs in zip(self.fragments, saved["fragments"]):
            if [list(pair) for pair in mine.ranges] != theirs["ranges"]:
                raise HolmesError(
                    f"{source}: the outer state was saved with other data-parallel sizes; resume with those, "
                    f"or omit the outer state to take it from another job"
                )
            for name in _SAVED:
                if getattr(mine, name) is not None and name in theirs:
                    getattr(mine, name).copy_(theirs[name])
            mine.version = theirs["version"]
            mine.pending = [Pending(**step) for step in theirs["pending"]]


def _copied(pending: Pending) -> dict[str, Any]:
    """For a checkpoint: tensors that stay as they are."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in vars(pending).items()
    }
