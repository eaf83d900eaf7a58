"""Outer state of a rank, in host memory: for each fragment, the elements that this rank exchanges.

    anchor      float32: weights after the fragment's last outer step, with the same bits in every job
    momentum    of the outer optimizer, if it has a momentum: float32 (bfloat16 beside a residual)
    residual    rounding errors of the codec, added to its next input: bfloat16 (int8 and 2bit)

So an element takes 4 + 4 bytes, with int8 and 2bit 4 + 2 + 2. The training thread changes fragments, and
other threads copy them for jobs with outdated weights; a lock protects them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.join.codecs import residual_dtype
from holmes_ext.join.orthogonal import Matrices
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.ownership import Range, RankRange, fragment_cuts, owned_ranges
from holmes_ext.join.shards.weights import CHECKSUM_MASK, Weights, checksum
from holmes_ext.words import counted

#: Attributes of a fragment whose tensors are saved in a checkpoint.
_SAVED = ("anchor", "momentum", "residual")


@dataclass
class Pending:
    """Prepared change of a part of the model (fragment) that training has not applied yet.

    It is the outer step of a committed round whose delay is not over; or, with `replaces`, a copy of another
    job's anchor and momentum that this job takes instead of its own.
    """

    number: int  # of the round; the fragment's version afterwards
    #: Aggregated pseudo-gradient; with `replaces`, the other job's anchor. (The name is part of the format of
    #: checkpoints.)
    gradient: torch.Tensor
    mu: float = 0.0  # momentum of the step
    gap: float = 1.0  # divisor of the aggregate because it is stale (CO2)
    residual: torch.Tensor | None = None  # new residual of the codec; None: unchanged
    replaces: bool = False  # no step: anchor and momentum are replaced by those of another job
    momentum: torch.Tensor | None = None  # with `replaces`, the new momentum


@dataclass
class Fragment:
    """A part of the model that is exchanged in a single round, with this rank's outer optimizer state.

    A fragment is elements [start, stop) of the flat weights. Its anchor is the weights after the
    last outer step. Anchor, momentum and residual (rounding errors of the codec) have only the
    elements that this rank exchanges.
    """

    start: int
    stop: int
    ranges: list[Range]  # elements that this rank exchanges
    anchor: torch.Tensor  # flat: the elements of all ranges, one after the other
    momentum: torch.Tensor | None  # of the same elements
    residual: torch.Tensor | None  # of the same elements
    matrices: Matrices = Matrices()  # weight matrices in the anchor, for algorithms that need them
    version: int = 0  # round of the last outer step
    pending: list[Pending] = field(default_factory=list)  # steps to take, oldest first
    #: The anchor is another job's, and its momentum has not arrived yet.
    lacks_momentum: bool = False

    @property
    def copy_version(self) -> int:
        """Return the version of a copy that this rank can give to another job now.

        A version is the round of the last outer step. The copy also gets the pending steps: training has not
        applied them yet. Steps that are collectives of several ranks (needs_others) cannot be applied to a
        copy; then the copy has the current version. 0: there is nothing to give.
        """
        if self.lacks_momentum:
            return 0
        if self.matrices.needs_others:
            return self.version
        return self.version_after_pending  # the current version if no step is pending

    @property
    def version_after_pending(self) -> int:
        """Return the version (round of the last outer step) that the fragment has after all pending steps."""
        return self.pending[-1].number if self.pending else self.version

    def checksum(self, position: str, salt: str = "") -> int:
        """Return this rank's part of the checksum of anchor and momentum; parts add up modulo 2^64.

        Args:
            position: Position of the rank in the model-parallel grid.
            salt: Random text of the coordinator. A job without these weights cannot compute the
                checksum with a new salt, and cannot copy it from another job's earlier report.
        """
        total = 0
        for start, stop in self.ranges:
            place = self.places(start, stop)
            total += checksum(self.anchor[place], start, f"anchor {position} {salt}")
            if self.momentum is not None:
                total += checksum(self.momentum[place], start, f"momentum {position} {salt}")
        return total & CHECKSUM_MASK

    def places(self, start: int, stop: int) -> slice:
        """Return the slice of `anchor` that has elements [start, stop) of the flat weights.

        `anchor` has the elements of all ranges of this rank, one after the other. Example: with the
        ranges (10, 20) and (50, 60), start=52 and stop=55 give slice(12, 15).

        Raises:
            KeyError: No single range contains all these elements.
        """
        offset = 0  # index in `anchor` of the range's first element
        for range_start, range_stop in self.ranges:
            if range_start <= start <= stop <= range_stop:
                return slice(offset + start - range_start, offset + stop - range_start)
            offset += range_stop - range_start
        raise KeyError((start, stop))


class FragmentCopy(NamedTuple):
    """Version, anchor (weights after the last outer step) and momentum of a range of elements.

    The copy is sent to another job with outdated weights.
    """

    version: int
    anchor: torch.Tensor
    momentum: torch.Tensor | None


class OuterState:
    """Outer optimizer state of a rank: anchor, momentum and pending steps of each part of the model.

    The anchor is the weights after the last outer step. A rank has only the elements that it
    exchanges.
    """

    def __init__(
        self, settings: OuterSettings, weights: Weights, owned: Sequence[RankRange], rank: int
    ):
        """Divide the model into fragments, each with the current weights and momentum and residual 0.

        Args:
            settings: The --holmes-outer settings.
            weights: Weights of this rank.
            owned: Elements that each rank of the job exchanges with other jobs; only ranks at this
                rank's position of the model-parallel grid.
            rank: This rank.
        """
        self.settings = settings
        self.weights = weights
        self.lock = threading.Lock()  # held while a fragment is changed, or copied for another job
        self.algorithm = settings.outer_algorithm()
        # of_matrices: outer steps need whole matrices (Muon). But each fragment is stepped in a
        # round of its own. So no border between two fragments may cut a matrix.
        self.matrices = weights.matrices if self.algorithm.of_matrices else []
        indivisible = [(matrix.start, matrix.stop) for matrix in self.matrices]
        cuts = fragment_cuts(weights.total, settings.fragments, indivisible)
        self.fragments = [
            self._fragment(start, stop, owned_ranges(owned, rank, start, stop))
            for start, stop in zip(cuts, cuts[1:])
        ]

    def _fragment(self, start: int, stop: int, ranges: list[Range]) -> Fragment:
        """Return a part of the model with its outer state before the first outer step.

        On the host, an element takes

            anchor      4 bytes (float32)
            momentum    4 bytes (float32); 2 bytes (bfloat16) beside a residual
            residual    2 bytes (bfloat16): rounding errors of the codec, if it keeps them

        that is 8 bytes at most, twice the float32 weights.

        Args:
            start: First element of the fragment in the flat weights.
            stop: Element after the last.
            ranges: Elements of the fragment that this rank exchanges; it keeps outer state only for these.
        """
        count = sum(range_stop - range_start for range_start, range_stop in ranges)
        residual_kind = residual_dtype(self.settings)
        residual = None
        if residual_kind is not None:
            residual = torch.zeros(count, dtype=residual_kind, device="cpu")
        momentum = None
        if self.algorithm.keeps_momentum:
            has_short_momentum = residual_kind == torch.bfloat16  # to make room for the residual
            momentum_dtype = torch.bfloat16 if has_short_momentum else torch.float32
            momentum = torch.zeros(count, dtype=momentum_dtype, device="cpu")
        anchor = self.weights.read(ranges, torch.empty(count, device="cpu"))
        fragment = Fragment(start, stop, ranges, anchor, momentum, residual)
        # Matrices (for Muon) that this rank has as a whole, with their positions in the anchor. A
        # matrix divided among ranks (ZeRO, FSDP) is left out here: the outer step will gather it from
        # these ranks first (join._gather_what_is_cut).
        places = []
        for matrix in self.matrices:
            is_whole_here = any(
                range_start <= matrix.start and matrix.stop <= range_stop
                for range_start, range_stop in ranges
            )
            if is_whole_here:
                # The same matrix, with the index of its first element in the anchor as start.
                place = fragment.places(matrix.start, matrix.stop)
                places.append(replace(matrix, start=place.start))
        fragment.matrices = Matrices(places, self.weights.device)
        return fragment

    def apply(self, fragment: Fragment) -> None:
        """Take the oldest pending outer step of a fragment (part of the model).

        The anchor is the weights after the last outer step, the residual the rounding errors of the
        codec. replace() may have made another job's weights pending instead of a step. Then anchor and
        momentum are replaced by those of the other job.
        """
        with self.lock:
            pending = fragment.pending.pop(0)
            self._step(
                pending,
                anchor=fragment.anchor,
                momentum=fragment.momentum,
                values=pending.gradient,
                matrices=fragment.matrices,
            )
            if fragment.residual is not None and pending.residual is not None:
                fragment.residual.copy_(pending.residual)
            elif fragment.residual is not None and pending.replaces:
                fragment.residual.zero_()  # the rounding errors belonged to the old anchor
            fragment.version = pending.number
            # Anchor and momentum are of the same version now. (Not if replace_anchor() has called this
            # method with an anchor alone. It sets the flag to True again.)
            fragment.lacks_momentum = False

    def _step(
        self,
        pending: Pending,
        anchor: torch.Tensor,
        momentum: torch.Tensor | None,
        values: torch.Tensor,
        matrices: Matrices,
    ) -> None:
        """Apply a pending outer step, or replace the weights by another job's; in place.

        Args:
            pending: The step; if `pending.replaces`, the weights of another job.
            anchor: Elements of the anchor (weights after the last outer step).
            momentum: The same elements of the momentum; None: the algorithm has none.
            values: Aggregated pseudo-gradient of these elements; it is overwritten. If
                `pending.replaces`, the other job's anchor.
            matrices: Matrices in these elements.
        """
        if not pending.replaces:
            self.algorithm.step(anchor, momentum, values, pending.mu, pending.gap, matrices)
            return
        anchor.copy_(values)
        if momentum is not None and pending.momentum is not None:
            momentum.copy_(pending.momentum)

    def copy_of(self, fragment: Fragment, start: int, stop: int) -> FragmentCopy:
        """Return a copy of elements [start, stop) for another job, after the pending steps.

        Pending steps belong to committed rounds, but training has not taken them yet. They are
        applied to the copy only. That is impossible if a step is a collective of several ranks (a
        matrix is divided among them), as the others do not take part here: then no step is applied,
        and the copy has the current version.

        Returns:
            Anchor and momentum of the elements, with their version (round of the last outer step).

        Raises:
            KeyError: This rank does not exchange all these elements.
        """
        with self.lock:
            wanted = fragment.places(start, stop)
            steps = [] if fragment.matrices.needs_others else fragment.pending
            # A step on matrices needs the whole of them, so the whole fragment is stepped.
            needs_all = bool(steps) and bool(fragment.matrices.places)
            place = slice(None) if needs_all else wanted
            anchor = fragment.anchor[place].clone()
            momentum = None
            if fragment.momentum is not None:
                momentum = fragment.momentum[place].clone()
            for pending in steps:
                # A pending step is an outer step, or replaces anchor and momentum by another job's.
                # Its `gradient` is the aggregate, or the other job's anchor; `momentum` is the
                # other job's.
                step = pending
                if pending.momentum is not None:
                    step = replace(pending, momentum=pending.momentum[place])
                values = pending.gradient[place].clone()  # an outer step overwrites it
                self._step(step, anchor, momentum, values, fragment.matrices)
            if needs_all:  # of the whole fragment, keep the wanted elements
                anchor = anchor[wanted]
                momentum = None if momentum is None else momentum[wanted]
            # copy_version: the version after the pending steps, or the current version if no step was
            # applied.
            return FragmentCopy(fragment.copy_version, anchor, momentum)

    def replace_anchor(
        self,
        fragment: Fragment,
        version: int,
        anchor: torch.Tensor | None,
        momentum: torch.Tensor | None = None,
    ) -> None:
        """Replace a fragment's anchor by that of another job; the momentum follows with add_momentum().

        The anchor is the weights after the last outer step: training can begin with it. No outer step may
        be taken before the momentum has arrived.

        Args:
            fragment: The fragment: a part of the model.
            version: Version of the other job's fragment: the round of its last outer step.
            anchor: This rank's elements of the other job's anchor; never None here.
            momentum: Always None here. (A parameter so that this method has the signature take.Store.)
        """
        self.replace(fragment, version, anchor, momentum)  # keeps the old momentum for now
        fragment.lacks_momentum = True

    def add_momentum(
        self,
        fragment: Fragment,
        version: int,
        anchor: torch.Tensor | None,
        momentum: torch.Tensor | None,
    ) -> None:
        """Store another job's outer momentum, after replace_anchor() has stored that job's anchor (weights).

        If the momentum has another version than that anchor, it is dropped: the other job has taken an
        outer step between sending both.

        Args:
            fragment: The fragment: a part of the model.
            version: Version of the other job's fragment when it sent the momentum.
            anchor: Not used. (A parameter so that this method has the signature take.Store.)
            momentum: This rank's elements of the momentum; None only if the algorithm has none.
        """
        with self.lock:
            if version == fragment.version and fragment.momentum is not None:
                assert momentum is not None
                fragment.momentum.copy_(momentum)
                fragment.lacks_momentum = False

    def give_up_incomplete(self) -> None:
        """Set version and momentum to 0 in fragments whose momentum could not be taken from another job.

        Version 0 means: no outer step yet. So the coordinator finds these fragments outdated, and lets the
        job take them again. If no other job is left to give them, the job trains on with the weights that
        it has taken, as if they were the initial weights of a new run.
        """
        with self.lock:
            for fragment in self.fragments:
                if fragment.lacks_momentum and fragment.momentum is not None:
                    fragment.momentum.zero_()
                    fragment.version = 0
                    fragment.lacks_momentum = False

    def replace(
        self,
        fragment: Fragment,
        version: int,
        anchor: torch.Tensor | None,
        momentum: torch.Tensor | None,
    ) -> None:
        """Replace a fragment's anchor and momentum by those of another job, immediately.

        Prepared outer steps that training has not applied yet (pending steps) are dropped.

        Args:
            fragment: The fragment: a part of the model.
            version: Version of the other job's fragment: the round of its last outer step.
            anchor: This rank's elements of the other job's anchor; never None here.
            momentum: The same elements of the other job's momentum; None: keep the current momentum, or
                the algorithm has none.
        """
        with self.lock:
            fragment.pending.clear()
        self.add_replacement(fragment, version, anchor, momentum)
        self.apply(fragment)

    def add_replacement(
        self,
        fragment: Fragment,
        version: int,
        anchor: torch.Tensor | None,
        momentum: torch.Tensor | None,
    ) -> None:
        """Queue another job's weights and momentum, by which training later replaces those of a fragment.

        The rounds thread calls this while training runs. Training applies the replacement when its turn in
        the fragment's queue of pending steps comes.

        Args:
            fragment: The fragment: a part of the model.
            version: Version of the other job's fragment: the round of its last outer step.
            anchor: This rank's elements of the other job's anchor; never None here.
            momentum: The same elements of the other job's momentum; None: keep the current momentum, or
                the algorithm has none.
        """
        assert anchor is not None
        with self.lock:
            fragment.pending.append(Pending(version, anchor, replaces=True, momentum=momentum))

    @property
    def host_bytes(self) -> int:
        """Return the size of the outer state in bytes, without pending steps."""
        total = 0
        for fragment in self.fragments:
            for tensor in (fragment.anchor, fragment.momentum, fragment.residual):
                if tensor is not None:
                    total += tensor.nbytes
        return total

    def to_dict(self, pending: bool = True) -> dict[str, Any]:
        """Return a copy of this rank's anchors, momenta and residuals for a checkpoint.

        Args:
            pending: Also include the outer steps that are prepared but not applied yet.

        Returns:
            Nested dicts and lists of tensors, for load().
        """
        fragments = []
        for fragment in self.fragments:
            # Elements that this rank exchanges, and the round of the last outer step.
            content: dict[str, Any] = {
                "ranges": [list(pair) for pair in fragment.ranges],
                "version": fragment.version,
            }
            for name in _SAVED:  # the anchor, and, if the fragment has them, momentum and residual
                value = getattr(fragment, name)
                if value is not None:
                    content[name] = value.clone()
            content["pending"] = [_copied(step) for step in fragment.pending] if pending else []
            fragments.append(content)
        return {
            "position": self.weights.position,
            "digest": self.weights.digest,
            "fragments": fragments,
        }

    def load(self, saved: dict[str, Any], source: str) -> None:
        """Load this rank's anchors, momenta, residuals and pending steps from a checkpoint.

        Args:
            saved: Result of to_dict().
            source: Name of the checkpoint in error messages.

        Raises:
            HolmesError: The state belongs to another model, or was saved with other shards or settings.
        """
        if saved["digest"] != self.weights.digest or saved["position"] != self.weights.position:
            raise HolmesError(
                f"{source}: the outer state is that of another model or place ({saved['position']}); load the"
                " checkpoint it came with"
            )
        if len(saved["fragments"]) != len(self.fragments):
            raise HolmesError(
                f"{source}: the outer state has {counted(len(saved['fragments']), 'fragment')}, "
                f"--holmes-outer says {len(self.fragments)}"
            )
        for fragment, content in zip(self.fragments, saved["fragments"]):
            if [list(pair) for pair in fragment.ranges] != content["ranges"]:
                raise HolmesError(
                    f"{source}: the outer state was saved with other data-parallel sizes; resume with those, "
                    f"or omit the outer state to take it from another job"
                )
            for name in _SAVED:
                tensor = getattr(fragment, name)
                if tensor is not None and name in content:
                    tensor.copy_(content[name])
            fragment.version = content["version"]
            fragment.pending = [Pending(**step) for step in content["pending"]]


def _copied(pending: Pending) -> dict[str, Any]:
    """Return the fields of a pending step for a checkpoint, with copies of its tensors."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in vars(pending).items()
    }
