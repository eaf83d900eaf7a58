"""A data-parallel job whose clusters go on as joined jobs for a while (--holmes-apart), in one process group.

    together   gradients are summed over all ranks in each step
    apart      gradients are summed inside each cluster; what the weights have moved since the last round is
               averaged across, fragment by fragment, as between joined jobs (join/algorithms.py)
    back       one more round of all fragments: every rank gets the anchors; the optimizer's state is averaged

Rounds begin and end where nothing reads the weights: after the last gradient's sum and before the optimizer's
step, or before a forward pass. All ranks come there in the same step, whether their optimizer steps or not.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from holmes_ext.join.settings import OuterSettings
from holmes_ext.plan.cost.buckets import cut
from holmes_ext.runtime.groups.callbacks import before_exit
from holmes_ext.runtime.reduce.flat_bucket import DEFAULT_BYTES

Sum = Callable[[torch.Tensor], Any]


class ApartFragment:
    """Of the weights. anchor, momentum: flat, float32, on the host, alike on all ranks. sent: the weights as
    they were when the pseudo-gradient left, for mix=keep."""

    def __init__(self, weights: Sequence[torch.Tensor]):
        self.weights = weights
        self.anchor = self.local().cpu().clone()
        self.momentum = torch.zeros_like(self.anchor)
        self.sent: torch.Tensor | None = None
        self.gradient = torch.empty(0)
        self.work: Any = None
        self.seconds: Callable[[], float] = float  # that the sum took

    def local(self) -> torch.Tensor:
        return torch.cat([weight.detach().float().flatten() for weight in self.weights])

    def write(self, flat: torch.Tensor) -> None:
        parts = flat.split([weight.numel() for weight in self.weights])
        for weight, part in zip(self.weights, parts):
            weight.copy_(part.view_as(weight))


class ApartRounds:
    """Outer steps of one job's clusters: an algorithms.Schedule. total: sums a flat tensor over all ranks;
    ranks: of each cluster. Every rank makes it in the same step, when all weights are alike."""

    def __init__(self, weights: Sequence[torch.Tensor], total: Sum, ranks: Sequence[int],
                 settings: OuterSettings):
        self.algorithm = settings.outer_algorithm()
        self._total, self._ranks = total, ranks
        self._mu = self.algorithm.momentum_of(ranks)
        self._keeps = settings.mix == "keep" and settings.delay > 0 and self.algorithm.keeps_progress
        sizes = [weight.numel() * 4 for weight in weights]
        pieces = cut(sizes, sum(sizes) / settings.fragments, exceed=True)
        self.fragments = [ApartFragment([weights[index] for index in piece]) for piece in pieces]
        self.period, self.in_period, self._number = settings.every // len(self.fragments), 0, 0
        self._submitted: list[int] = []
        self.seconds = 0.0  # that a sum of all weights across takes, by the last round

    def after_step(self) -> None:
        self.in_period += 1
        self.algorithm.after_step(self)

    @torch.no_grad()
    def capture(self) -> int:
        index = self._number % len(self.fragments)
        self._number += 1
        fragment = self.fragments[index]
        local = fragment.local()
        fragment.gradient = fragment.anchor.to(local.device) - local
        fragment.sent = local if self._keeps else None
        return index

    def submit(self, index: int) -> None:
        fragment = self.fragments[index]
        begun = _Since(fragment.gradient)
        fragment.work = self._total(fragment.gradient)
        fragment.seconds = begun.until(fragment.work)
        self._submitted.append(index)

    @torch.no_grad()
    def settle(self, index: int, keep: bool = True) -> None:
        """keep: what was trained since it was sent stays."""
        if index not in self._submitted:
            return
        self._submitted.remove(index)
        fragment = self.fragments[index]
        fragment.work.wait()
        fragment.work = None
        gradient = fragment.gradient.div_(sum(self._ranks)).cpu()
        self.seconds = fragment.seconds() * sum(map(_numel, self.fragments)) / _numel(fragment)
        momentum = fragment.momentum if self.algorithm.keeps_momentum else None
        squares = (0.0, 0.0)
        if self.algorithm.needs_gap and momentum is not None:
            squares = float(momentum @ momentum), float(gradient @ gradient)
        self.algorithm.step(fragment.anchor, momentum, gradient, self._mu, self.algorithm.gap_of(*squares))
        anchor = fragment.anchor.to(fragment.gradient.device)
        fragment.write(self.algorithm.mixed(fragment.local(), fragment.sent, anchor) if keep else anchor)
        fragment.sent, fragment.gradient = None, torch.empty(0)

    def submitted(self) -> list[int]:
        return list(self._submitted)

    def new_period(self) -> None:
        self.in_period = 0

    def end(self) -> None:
        """All ranks have the anchors afterwards, the same bits."""
        for index in self.submitted():
            self.settle(index)
        for _ in self.fragments:
            index = self.capture()
            self.submit(index)
            self.settle(index, keep=False)


def _numel(fragment: ApartFragment) -> int:
    return fragment.anchor.numel()


class _Since:
    """Now, for what is done to `tensor` next."""

    def __init__(self, tensor: torch.Tensor):
        self._at, self._end = time.perf_counter(), 0.0
        self._event = torch.cuda.Event(enable_timing=True) if tensor.is_cuda else None
        if self._event is not None:
            self._event.record()

    def until(self, work: Any) -> Callable[[], float]:
        """Seconds until its end, asked for after work.wait()."""
        if self._event is None:
            work.get_future().add_done_callback(before_exit(lambda _: setattr(self, "_end",
                                                                              time.perf_counter())))
            return lambda: (self._end or time.perf_counter()) - self._at
        side, begun, ended = torch.cuda.Stream(), self._event, torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(side):
            getattr(work, "arrived", work.wait)()
            ended.record()
        return lambda: begun.elapsed_time(ended) / 1e3


# --------------------------------------------------------------------------- whether, and by whose optimizer

class Apart:
    """One model's weights, which can go apart. settings: --holmes-outer; None: nobody asks for it."""

    _every: weakref.WeakSet[Apart] = weakref.WeakSet()

    def __init__(self, weights: Sequence[torch.Tensor], settings: OuterSettings | None):
        self.weights, self.settings = weights, settings
        self.rounds: ApartRounds | None = None
        self.refusal = ""  # why the program cannot
        self._ends = False
        if settings is not None:
            if not Apart._every:
                register_optimizer_step_post_hook(_stepped)
            Apart._every.add(self)

    def why_not(self) -> str:
        """Why the weights cannot be averaged; "" where they can. The same on all ranks."""
        known = {id(weight) for optimizer in _known() for group in optimizer.param_groups
                 for weight in group["params"]}
        reasons = {
            self.refusal: bool(self.refusal),
            "several models are trained": len(Apart._every) > 1,
            "no optimizer of torch's own kind steps these weights": not known.issuperset(map(id,
                                                                                             self.weights)),
            "the weights are on several devices": len({weight.device for weight in self.weights}) > 1,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def seconds(self) -> float:
        """That a sum of all weights across takes, by the last round; 0: there was none."""
        return self.rounds.seconds if self.rounds is not None else 0.0

    def begin(self, total: Sum, ranks: Sequence[int], flat: Sum | None = None) -> None:
        """From this step on gradients are a cluster's. total, ranks: see ApartRounds; flat: where replicas
        may differ already, which sums a tensor over all of them."""
        assert self.settings is not None
        self.rounds, self._ends = ApartRounds(self.weights, total, ranks, self.settings), False
        if flat is not None:
            anchors = [fragment.anchor for fragment in self.rounds.fragments]
            _average(anchors, self.weights[0].device, flat, sum(ranks))

    def end(self) -> None:
        """From this step on gradients are everybody's."""
        self._ends = True

    def step(self, flat: Sum, world: int) -> None:
        """Once in each step, where nothing reads the weights. flat: sums a tensor over the world's ranks."""
        if self.rounds is None:
            return
        if not self._ends:
            self.rounds.after_step()
            return
        self.rounds.end()
        self.rounds, self._ends = None, False
        _average(self._states(), self.weights[0].device, flat, world)

    def _states(self) -> list[torch.Tensor]:
        """The optimizer's, of these weights: moments, and how many steps it has made."""
        of = [optimizer.state.get(weight, {}) for optimizer in _known() for weight in self.weights]
        return [value for state in of for value in state.values()
                if isinstance(value, torch.Tensor) and value.is_floating_point()]


#: In the order in which they stepped first, which is the same on all ranks.
_optimizers: list[weakref.ref[Any]] = []


def _known() -> list[Any]:
    return [optimizer for reference in _optimizers if (optimizer := reference()) is not None]


def _stepped(optimizer: Any, *_: Any) -> None:
    """Remember it, unless it is one of torch.distributed's, which keep or send weights in their own way."""
    of_distributed = type(optimizer).__module__.startswith("torch.distributed")
    if not of_distributed and not any(optimizer is known for known in _known()):
        _optimizers.append(weakref.ref(optimizer))


@torch.no_grad()
def _average(tensors: Sequence[torch.Tensor], device: torch.device, flat: Sum, world: int) -> None:
    for places in cut([4 * tensor.numel() for tensor in tensors], DEFAULT_BYTES):
        some = [tensors[place] for place in places]
        mean = torch.cat([tensor.to(device, torch.float32).flatten() for tensor in some])
        flat(mean).wait()
        for tensor, part in zip(some, mean.div_(world).split([tensor.numel() for tensor in some])):
            tensor.copy_(part.view_as(tensor))
