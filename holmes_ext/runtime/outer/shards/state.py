"""The outer state of one rank: of every fragment the elements that it exchanges (elements.owners), on the
host.

    anchor      float32: as they were after their last outer step; the same bits in every job
    momentum    float32 (bfloat16 beside int8's residual), where the outer step has one
    residual    bfloat16: what int8 has left out so far, this job's own

Anchor and momentum: 2 x the rank's own elements of float32; with int8 4 + 2 + 2 bytes an element, the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.rounds.codecs import residual_dtype
from holmes_ext.runtime.outer.settings import OuterSettings
from holmes_ext.runtime.outer.shards.ownership import Range, RankRange, fragment_cuts, owned_ranges
from holmes_ext.runtime.outer.shards.weights import Weights, checksum


@dataclass
class Pending:
    """A round that is committed, and whose outer step is still to be taken: by this job when its delay is
    over. gradient: the aggregate; mu, gap: as the algorithm's step() takes them."""

    number: int
    gradient: torch.Tensor
    mu: float
    gap: float
    residual: torch.Tensor | None


@dataclass
class Fragment:
    """Elements [start, stop) of the row; ranges: what this rank exchanges of them. version: the round of its
    last outer step."""

    start: int
    stop: int
    ranges: list[Range]
    anchor: torch.Tensor
    momentum: torch.Tensor | None
    residual: torch.Tensor | None
    version: int = 0
    pending: Pending | None = None

    @property
    def promised(self) -> int:
        """The version that it has, or will have when what is pending has been applied."""
        return self.pending.number if self.pending is not None else self.version

    def checksum(self, position: str, salt: str = "") -> int:
        """Of anchor and momentum at this position; the ranks' add up."""
        total, place = 0, 0
        for start, stop in self.ranges:
            there = slice(place, place + stop - start)
            total += checksum(self.anchor[there], start, f"anchor {position} {salt}")
            if self.momentum is not None:
                total += checksum(self.momentum[there], start, f"momentum {position} {salt}")
            place += stop - start
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

    def __init__(self, settings: OuterSettings, weights: Weights, owned: Sequence[RankRange], rank: int):
        self.settings, self.weights, self.lock = settings, weights, threading.Lock()
        self.algorithm = settings.outer_algorithm()
        cuts = fragment_cuts(weights.total, settings.fragments)
        self.fragments = [
            self._fragment(start, stop, owned_ranges(owned, rank, start, stop))
            for start, stop in zip(cuts, cuts[1:])
        ]

    def _fragment(self, start: int, stop: int, ranges: list[Range]) -> Fragment:
        count = sum(b - a for a, b in ranges)
        residual_kind = residual_dtype(self.settings)
        # Beside a residual of two bytes momentum has two as well: all of it is twice the weights at most.
        kind = torch.bfloat16 if residual_kind == torch.bfloat16 else torch.float32
        momentum = torch.zeros(count, dtype=kind) if self.algorithm.keeps_momentum else None
        residual = torch.zeros(count, dtype=residual_kind) if residual_kind is not None else None
        anchor = self.weights.read(ranges, torch.empty(count))
        return Fragment(start, stop, ranges, anchor, momentum, residual)

    def apply(self, fragment: Fragment) -> None:
        """Take the outer step that is pending."""
        with self.lock:
            pending = fragment.pending
            assert pending is not None
            self.algorithm.step(fragment.anchor, fragment.momentum, pending.gradient, pending.mu, pending.gap)
            if fragment.residual is not None and pending.residual is not None:
                fragment.residual.copy_(pending.residual)
            fragment.version, fragment.pending = pending.number, None

    def copy_of(
        self, fragment: Fragment, start: int, stop: int
    ) -> tuple[int, torch.Tensor, torch.Tensor | None]:
        """Version, anchor and momentum of elements [start, stop), with what is pending applied: for another
        job."""
        with self.lock:
            place, pending = fragment.places(start, stop), fragment.pending
            anchor = fragment.anchor[place].clone()
            momentum = None if fragment.momentum is None else fragment.momentum[place].clone()
            if pending is not None:
                self.algorithm.step(
                    anchor, momentum, pending.gradient[place].clone(), pending.mu, pending.gap
                )
            return fragment.promised, anchor, momentum

    def replace(
        self, fragment: Fragment, version: int, anchor: torch.Tensor, momentum: torch.Tensor | None
    ) -> None:
        """What another job has takes the place of ours; what int8 left out so far belonged to the old."""
        with self.lock:
            fragment.anchor.copy_(anchor)
            if fragment.momentum is not None and momentum is not None:
                fragment.momentum.copy_(momentum)
            if fragment.residual is not None:
                fragment.residual.zero_()
            fragment.version, fragment.pending = version, None

    @property
    def host_bytes(self) -> int:
        """What all of it takes."""
        tensors = [
            one for f in self.fragments for one in (f.anchor, f.momentum, f.residual) if one is not None
        ]
        return sum(one.numel() * one.element_size() for one in tensors)

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint (saved.py)."""
        fragments = []
        for f in self.fragments:
            one: dict[str, Any] = {
                "ranges": [list(pair) for pair in f.ranges],
                "version": f.version,
                "anchor": f.anchor.clone(),
            }
            one |= {
                name: value.clone()
                for name, value in (("momentum", f.momentum), ("residual", f.residual))
                if value is not None
            }
            if (pending := f.pending) is not None:
                left = None if pending.residual is None else pending.residual.clone()
                one["pending"] = {**vars(pending), "gradient": pending.gradient.clone(), "residual": left}
            fragments.append(one)
        return {"position": self.weights.position, "digest": self.weights.digest, "fragments": fragments}

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
                    f"{source}: the outer state was saved with other data-parallel sizes; resume with those, or"
                    " leave the outer state away to take it from another job"
                )
            for name in ("anchor", "momentum", "residual"):
                if getattr(mine, name) is not None and name in theirs:
                    getattr(mine, name).copy_(theirs[name])
            mine.version = theirs["version"]
            mine.pending = Pending(**theirs["pending"]) if "pending" in theirs else None
