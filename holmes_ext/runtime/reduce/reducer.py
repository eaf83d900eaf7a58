"""Gradients that travel while the backward pass still runs.

    micro-batch   1 .. m-1            m (the last one: arm() stands before it)
    backward      accumulate only     layer n ... layer 2  layer 1 | finish() | optimizer.step()
    network                                  [bucket 0][bucket 1][..]  only this last part is exposed

Buckets are launched in one fixed order on all ranks of the group: one that is complete early waits for those
before it, else ranks would reduce different buckets with each other. The order is the reverse of the
parameters' own in the first step, which only observes; then it is the order in which the group's first rank
saw its gradients become final.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.plan.buckets import BUCKETS_IN_FLIGHT
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.callbacks import before_exit
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.reduce import flat_bucket
from holmes_ext.runtime.reduce.flat_bucket import FlatBucket, Item
from holmes_ext.runtime.reduce.owned import ReduceToOwners, merge_spans
from holmes_ext.runtime.reduce.planned import (
    PlannedReduction,
    bucket_bytes_for,
    check_bucket_bytes,
    planned_fabric,
)
from holmes_ext.runtime.reduce.reduction import CallersReduction
from holmes_ext.runtime.reduce.side_stream import SideStream
from holmes_ext.runtime.reduce.steps import ReductionTimes
from holmes_ext.runtime.watch.failure import describe_failure

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric
    from holmes_ext.runtime.reduce.flat_bucket import Gradient
    from holmes_ext.runtime.reduce.owned import Spans
    from holmes_ext.runtime.reduce.reduction import Reduction


class GradientReducer:
    """Averages gradients over a process group, overlapped with the backward pass of the last micro-batch.

        reducer = GradientReducer(model.named_parameters())
        for step in ...:
            for batch in micro_batches[:-1]:
                loss_of(batch).backward()                # gradients accumulate, nothing is sent
            with reducer.overlapped():                   # arm() before, finish() after
                loss_of(micro_batches[-1]).backward()
            optimizer.step()

    A parameter that got no gradient on this rank counts as zeros, and its .grad is the average on all ranks
    afterwards (zeros where no rank used it, as DeepSpeed does and DistributedDataParallel does not): no rank
    waits for it. NaN and infinity travel like any number. A gradient that is accumulated several times in one
    backward (reentrant activation checkpointing, several backward() calls) is final at the last one: how many
    there are is learned in the first step, and HolmesError is raised when one more arrives after its bucket
    was sent. Hooks of other libraries that change gradients must be registered before.

    Args:
        parameters: Parameters, or (name, parameter) pairs; those without requires_grad are left out. The same
            on all ranks of `group`, which is checked once, here: construction is collective.
        group: None: all ranks.
        bucket_bytes: Of a bucket; None: the plan's where holmes is active, else by `fabric`, else 25 MiB.
        fabric: The group's; None: the plan's where holmes is active.
        average: Divide by the number of ranks; else the sum stays.
        predivide: Gradients are divided by it before the sum, by ranks / predivide after it (float16
            overflow).
        communication_dtype: What travels; None: the gradients'.
        compress: "off", "bf16" or "int8": what crosses where a hierarchical all-reduce are used; None:
        --holmes-compress-gradients.
        deferred: Their gradients are final after the backward pass only (tied weights): finish() sends them.
        all_reduce: all_reduce(flat tensor) -> a work with wait() and get_future(), in place of torch's on
            `group`; None: a hierarchical all-reduce where holmes is active and the plan has them for
            the group.
        gradient: gradient(parameter) -> its final gradient, called once a step when the bucket is filled;
            None: .grad.
        owners: owners(parameter) -> (elements, rank) one after the other: who needs which part of its
            average; on others that part is undefined afterwards. None: all need everything. Not used where
            a hierarchical all-reduce are.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int | None = None,
        fabric: Fabric | None = None,
        average: bool = True,
        predivide: float = 1.0,
        communication_dtype: torch.dtype | None = None,
        compress: str | None = None,
        deferred: Iterable[torch.nn.Parameter] = (),
        all_reduce: Callable[[torch.Tensor], Any] | None = None,
        gradient: Gradient | None = None,
        owners: Callable[[torch.nn.Parameter], Spans] | None = None,
    ):
        named = flat_bucket.named_parameters(parameters)
        self._parameters = [parameter for _, parameter in named]
        if group is None:
            group = dist.group.WORLD
        assert group is not None, "no process group: call init_process_group first"
        self.group = group
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
        self._predivide, self._average = predivide, average
        self._gradient = gradient or (lambda parameter: parameter.grad)
        self._items = [Item.of(name, parameter, communication_dtype) for name, parameter in named]
        device_type = self._parameters[0].device.type
        if bucket_bytes is not None:
            check_bucket_bytes(bucket_bytes)
        self._given_bucket_bytes = bucket_bytes
        self._planned: PlannedReduction | None = None
        self._callers: CallersReduction | None = None
        self._owners = None
        if all_reduce is not None:
            self._callers = CallersReduction(all_reduce)
        else:
            self._planned = PlannedReduction(group, self._size, device_type, compress)
            self._owners = owners
        self._to_owners: ReduceToOwners | None = None
        self.fabric = fabric or planned_fabric(group, device_type)
        self.bucket_bytes = self._bucket_bytes()
        self._side = SideStream() if device_type == "cuda" else None
        late = {id(parameter) for parameter in deferred}
        self._deferred = [
            i for i, parameter in enumerate(self._parameters) if id(parameter) in late
        ]
        self.times: ReductionTimes | None = None
        self._step = 0
        self._expected: list[int] | None = None
        self._seen: list[int] = []
        self._check_alike()
        self._build([i for i in reversed(range(len(named))) if i not in set(self._deferred)])
        self._handles = [
            parameter.register_post_accumulate_grad_hook(
                functools.partial(self._gradient_arrived, index)
            )
            for index, parameter in enumerate(self._parameters)
        ]

    @property
    def _size(self) -> int:
        """Bytes of all gradients on the wire."""
        return sum(item.bytes for item in self._items)

    def _bucket_bytes(self) -> int:
        if self._given_bucket_bytes is not None:
            return self._given_bucket_bytes
        return bucket_bytes_for(self._planned, self.fabric, len(self.ranks), self._size)

    def _chosen_reduction(self) -> Reduction:
        """Return what sums the buckets now. All ranks must call this: it may make process groups."""
        if self._planned is None:
            assert self._callers is not None
            return self._callers
        if self._owners is None or self._planned.hierarchical is not None:
            return self._planned.reduction
        if self._to_owners is None:
            self._to_owners = ReduceToOwners(self.group, self._parameters[0].device.type)
        return self._to_owners

    def _check_alike(self) -> None:
        """Ranks with different parameters would reduce different things with each other, or hang."""
        device = self._parameters[0].device
        mine = torch.tensor(
            [flat_bucket.layout_digest(self._items, self.bucket_bytes)], device=device
        )
        all_ = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(all_, mine, group=self.group)
        other = next(
            (rank for rank, digest in zip(self.ranks, all_) if int(digest) != int(all_[0])), None
        )
        if other is not None:
            raise HolmesError(
                f"GradientReducer: rank {other} has other parameters or another bucket size than rank "
                f"{self.ranks[0]}: names, shapes, dtypes, order and bucket_bytes must be the same in one "
                f"group"
            )

    def _build(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        groups = flat_bucket.fill_buckets(self._items, order, self.bucket_bytes)
        last = flat_bucket.fill_buckets(self._items, self._deferred, self.bucket_bytes)
        self._buckets = []  # the old ones' buffers go before there are new ones
        self._reduction = self._chosen_reduction()
        multiple, kept = self._reduction.multiple, self._side is None
        self._buckets = [
            FlatBucket(indices, self._items, multiple, kept) for indices in (*groups, *last)
        ]
        self._hooked = len(groups)  # buckets that the backward pass may launch
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.indices}
        if self._owners is not None and self._reduction is self._to_owners:
            for bucket in self._buckets:
                bucket.spans = merge_spans(
                    span for i in bucket.indices for span in self._owners(self._parameters[i])
                )
        self._reset()

    def _reset(self) -> None:
        self.armed = self._held = False  # arm() was called, and finish() not yet; release() neither
        self._next = 0
        self._counts = [0] * len(self._parameters)
        self._started_at = 0.0
        for bucket in self._buckets:
            bucket.reset()

    # What a training loop calls

    def covers(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether these parameters, in this order, are the ones that are reduced."""
        return [id(parameter) for parameter in parameters] == [
            id(parameter) for parameter in self._parameters
        ]

    def arm(self, hold: bool = False) -> None:
        """All backward passes until finish() are the step's last: send gradients as they become final; hold:
        none before release()."""
        if self.armed:
            raise HolmesError(
                "GradientReducer: arm() was called twice without finish() between; call each once a step"
            )
        self._begin_step()
        self.armed, self._held = True, hold
        if self._side is not None:
            self._side.armed()

    def release(self) -> None:
        """Send what is final, and no longer hold what becomes so."""
        self._held = False
        self._launch_ready()

    def _begin_step(self) -> None:
        """Where the plan was decided again of what the job measured, on all ranks at this step."""
        if self._planned is not None and self._planned.follow_plan():
            self.bucket_bytes = self._bucket_bytes()
            self._build(self._order)

    def finish(self) -> ReductionTimes:
        """Launch what is left, wait, and leave the averages in the gradients. HolmesError names rank, bucket
        and fabric where the reduction fails."""
        if not self.armed:
            self._begin_step()
        early, began = self._next, time.perf_counter()
        while self._next < len(self._buckets):
            self._launch()
        with (
            self._side.after({}) if self._side is not None else nullcontext()
        ):  # where they were launched
            for bucket in self._buckets:
                self._store(bucket)
        if self._side is not None:
            with telemetry.span("reduce"):  # the compute stream waits
                self._side.join()
        ended = time.perf_counter()
        last = max((bucket.done_at or ended for bucket in self._buckets), default=ended)
        self.times = ReductionTimes(
            step=self._step,
            bytes=sum(bucket.bytes for bucket in self._buckets),
            buckets=len(self._buckets),
            early=early,
            seconds=last - self._started_at if self._buckets else 0.0,
            exposed_s=ended - began,
            fabric=self.fabric.name if self.fabric else "",
        )
        if self._planned is not None:  # for the comparison of the job with its plan
            is_hierarchical = self._planned.hierarchical is not None
            session.note_reduction(
                self.ranks,
                self._planned.spec,
                self.times.bytes,
                hierarchical=is_hierarchical,
                overlap=self.armed,
                follows=self._owners is None,
            )
        self._step += 1
        if self.armed and self._expected is None:
            self._learn()
        self._reset()
        telemetry.reduction_done(self.times, on_host=self._parameters[0].device.type == "cpu")
        return self.times

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """arm() before the block, finish() after it; an exception inside goes on as it is."""
        self.arm()
        yield
        self.finish()

    def close(self) -> None:
        """Remove the hooks and end the threads that this reducer started. Gradients stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._planned is not None:
            self._planned.close()
        if self._to_owners is not None:
            self._to_owners.close()

    # Backward pass

    def _gradient_arrived(self, index: int, _: torch.Tensor) -> None:
        if not self.armed:
            return
        self._counts[index] += 1
        bucket = self._bucket_of[index]
        if self._side is not None:
            self._side.arrived(bucket.ready)
        if self._expected is None:
            self._seen.append(index)
            return
        if bucket.work is not None:
            raise HolmesError(
                f"GradientReducer: {self._items[index].name} got another gradient after its bucket was sent"
                f" ({self._counts[index]} in this step, {self._expected[index]} in the first one); call "
                f"finish() alone, without arm(), in loops whose backward passes differ"
            )
        if self._counts[index] == self._expected[index]:
            bucket.missing -= 1
        if not self._held:
            self._launch_ready()

    def _launch_ready(self) -> None:
        """In the first armed step, which observes, none is ready."""
        while self._next < self._hooked and self._buckets[self._next].missing == 0:
            self._launch()

    def _learn(self) -> None:
        """From the first armed step: how often each gradient is accumulated, and the first rank's order of
        the final ones; what any rank did not use goes last."""
        self._expected = self._counts
        last = {index: place for place, index in enumerate(self._seen)}
        mine = [last.get(index, -1) for index in range(len(self._parameters))]
        device = self._parameters[0].device
        places = torch.tensor(mine, device=device)
        dist.broadcast(places, src=self.ranks[0], group=self.group)
        unused = torch.tensor([place < 0 for place in mine], dtype=torch.int64, device=device)
        dist.all_reduce(unused, op=dist.ReduceOp.MAX, group=self.group)
        keys = list(zip(unused.tolist(), places.tolist()))
        late = set(self._deferred)
        self._seen = []
        self._build(sorted((i for i in range(len(keys)) if i not in late), key=keys.__getitem__))

    def _launch(self) -> None:
        """Copy the next bucket's gradients into its buffer and start its reduction."""
        bucket = self._buckets[self._next]
        with self._side.after(bucket.ready) if self._side is not None else nullcontext():
            if self._side is not None and self._next >= BUCKETS_IN_FLIGHT:
                self._store(self._buckets[self._next - BUCKETS_IN_FLIGHT])
            bucket.fill(self._parameters, self._gradient, self._predivide)
            if self._next == 0:
                self._started_at = time.perf_counter()
            with self._naming(bucket):
                bucket.work = self._reduction.all_reduce(bucket.flat, bucket)
        if self._side is None:
            bucket.work.get_future().add_done_callback(
                before_exit(lambda _: setattr(bucket, "done_at", time.perf_counter()))
            )
        self._next += 1

    def _store(self, bucket: FlatBucket) -> None:
        """Wait for a bucket on the current stream and leave its averages in the gradients; once."""
        if not bucket.stored:
            with self._naming(bucket):
                bucket.work.wait()
            bucket.store((len(self.ranks) if self._average else 1) / self._predivide)

    @contextmanager
    def _naming(self, bucket: FlatBucket) -> Iterator[None]:
        """What fails inside is this bucket's reduction."""
        try:
            yield
        except RuntimeError as error:
            what = (
                f"bucket {self._buckets.index(bucket)} of {len(self._buckets)} ({bucket}) of step "
                f"{self._step}"
            )
            raise HolmesError(
                describe_failure(what, self.ranks, self.fabric, str(error))
            ) from error
