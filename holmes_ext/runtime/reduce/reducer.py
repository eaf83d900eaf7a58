"""Averages gradients in buckets while the backward pass still runs.

    micro-batch   1 .. m-1            m (the last: arm() stands before it)
    backward      accumulate only     layer n ... layer 2  layer 1 | finish() | optimizer.step()
    network                                  [bucket 0][bucket 1][..]  only this last part is exposed

A training step:

    1  arm()                 before the last backward pass: from now on, final gradients are reduced
    2  _gradient_arrived()   autograd's hook of each parameter: counts the gradient in its bucket
    3  _launch_ready()       launches the reductions of complete buckets, in the common order
    4  finish()              launches the remaining buckets, waits for all, and stores the averages

The first step with arm() only observes, and finish() launches all its buckets. It counts how often each
gradient is accumulated, to recognize the last time, and records the gradients' order (_reorder_buckets).

Invariant: all ranks of the group launch the same buckets in the same order. A bucket that is complete early
waits for the buckets before it; otherwise ranks would reduce different buckets with each other. The order is
the reverse order of the parameters in the first step, and afterwards the order that the first rank of the
group observed and broadcast.

No rank waits for ever: finish() launches all remaining buckets on every rank. A gradient that did not arrive
counts as zeros, so no bucket depends on the others' use of a parameter.
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
    from contextlib import AbstractContextManager

    from holmes_ext.cluster.fabric import Fabric
    from holmes_ext.runtime.reduce.flat_bucket import Gradient
    from holmes_ext.runtime.reduce.owned import Spans
    from holmes_ext.runtime.reduce.reduction import Reduction
    from holmes_ext.runtime.reduce.side_stream import StreamEvents

_NEVER_ARRIVED = -1


def _grad_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    return parameter.grad


class GradientReducer:
    """Averages gradients over a process group, overlapped with the backward pass of the last micro-batch.

        reducer = GradientReducer(model.named_parameters())
        for step in ...:
            for batch in micro_batches[:-1]:
                loss_of(batch).backward()                # gradients accumulate, nothing is sent
            with reducer.overlapped():                   # arm() before, finish() after
                loss_of(micro_batches[-1]).backward()
            optimizer.step()

    No rank waits for a gradient: a parameter that got none on this rank counts as zeros. Afterwards its .grad
    is the average on all ranks, or zeros if no rank used it (as with DeepSpeed, unlike
    DistributedDataParallel). NaN and infinity are sent like other numbers.

    A gradient that is accumulated several times in a step (reentrant activation checkpointing, several
    backward() calls) is final after as many times as in the first step. If it arrives once more, after its
    bucket was sent, a HolmesError is raised. Hooks of other libraries that change gradients must be
    registered before the reducer is made.

    All ranks of the group must make the reducer, with the same parameters.

    Args:
        parameters: Parameters, or (name, parameter) pairs. Those without requires_grad are left out.
        group: Process group; None for all ranks.
        bucket_bytes: Size of a bucket in bytes. None for the planned size, or a size that suits `fabric`, or
            25 MiB if neither is known.
        fabric: Network of the group; None for the planned network.
        average: Divide the sums by the number of ranks.
        predivide: Divide gradients by this number before the sum, and by ranks / predivide after it, against
            an overflow of float16.
        communication_dtype: Type of the sent gradients; None for their own.
        compress: Compression between clusters in a hierarchical all-reduce: "off", "bf16" or "int8"; None for
            --holmes-compress-gradients.
        deferred: Parameters whose gradients the engine still changes after the backward pass (tied weights).
            They get buckets of their own. Only finish() launches these.
        all_reduce: Starts the sum of a flat tensor and returns a work with wait() and get_future(). None for
            a hierarchical all-reduce if the plan has chosen it, else torch's all-reduce on `group`.
        gradient: Returns a parameter's final gradient, when its bucket is filled. None for .grad.
        owners: Returns the ranks that need the elements of a parameter's average, as (number of elements,
            rank) pairs in the order of the elements. On other ranks these elements are undefined afterwards.
            None if all ranks need all elements. Ignored if the group uses a hierarchical all-reduce.
    """

    armed: bool  # whether a step is between arm() and finish(): complete buckets are sent at once

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
        self._predivide = predivide
        self._average = average
        self._gradient = gradient or _grad_of
        self._items = [Item.of(name, parameter, communication_dtype) for name, parameter in named]
        device_type = self._parameters[0].device.type
        if bucket_bytes is not None:
            check_bucket_bytes(bucket_bytes)
        self._given_bucket_bytes = bucket_bytes
        self._planned: PlannedReduction | None = None  # None if the user gave all_reduce
        self._callers_reduction: CallersReduction | None = None
        self._owners_of = None
        if all_reduce is not None:
            self._callers_reduction = CallersReduction(all_reduce)
        else:
            self._planned = PlannedReduction(group, self._size, device_type, compress)
            self._owners_of = owners
        self._reduction_to_owners: ReduceToOwners | None = None
        self.fabric = fabric or planned_fabric(group, device_type)
        self.bucket_bytes = self._bucket_bytes()
        self._side_stream = SideStream() if device_type == "cuda" else None
        deferred_ids = {id(parameter) for parameter in deferred}
        indexed = enumerate(self._parameters)
        self._deferred = [index for index, parameter in indexed if id(parameter) in deferred_ids]
        #: Times of the last step; None before the first.
        self.times: ReductionTimes | None = None
        self._step = 0
        #: How often each gradient is accumulated in a step; None until the first step with arm() has ended.
        self._expected: list[int] | None = None
        #: Indices of the gradients that arrived in the first step with arm(), in their order.
        self._arrivals: list[int] = []
        device = self._parameters[0].device
        flat_bucket.check_same_layout(self._items, self.bucket_bytes, group, device)
        self._build_buckets(self._without_deferred(reversed(range(len(named)))))
        self._hook_handles = []
        for index, parameter in enumerate(self._parameters):
            hook = functools.partial(self._gradient_arrived, index)
            self._hook_handles.append(parameter.register_post_accumulate_grad_hook(hook))

    # Methods for training loops

    def covers(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Return whether the reducer was made for exactly these parameters, in this order."""
        given = [id(parameter) for parameter in parameters]
        reduced = [id(parameter) for parameter in self._parameters]
        return given == reduced

    def arm(self, hold: bool = False) -> None:
        """Reduce gradients as soon as they are final, from now until finish().

        Call this before the last backward pass of a step.

        Args:
            hold: Launch no reduction before release() is called.
        """
        if self.armed:
            raise HolmesError(
                "GradientReducer: arm() was called twice without finish() between; call each once a step"
            )
        self._follow_plan()
        self.armed = True
        self._held = hold
        if self._side_stream is not None:  # stream for reductions; None on the CPU
            self._side_stream.begin_step()

    def release(self) -> None:
        """Launch the reductions that arm(hold=True) has held back, and hold back no more in this step."""
        self._held = False
        self._launch_ready()

    def finish(self) -> ReductionTimes:
        """Launch the remaining reductions, wait for all, and store the averages in the gradients.

        If arm() was not called, all reductions remain, so nothing overlaps with the backward pass.

        Raises:
            HolmesError: a reduction failed; the message names the rank, the bucket and the network.
        """
        if not self.armed:
            self._follow_plan()
        began = time.perf_counter()
        launched_early = self._launched
        while self._launched < len(self._buckets):
            self._launch_next()
        with self._on_side_stream():
            for bucket in self._buckets:
                self._store(bucket)
        if self._side_stream is not None:
            with telemetry.span("reduce"):  # the compute stream waits
                self._side_stream.make_current_stream_wait()
        self.times = self._measured_times(launched_early, began, ended=time.perf_counter())
        if self._planned is not None:  # for the comparison of the job with its plan
            # If --holmes-adapt changes the plan, reducers follow, except those that sum to owners.
            sums_reach_all_ranks = self._owners_of is None
            session.note_reduction(
                self.ranks,
                self._planned.spec,
                self.times.bytes,
                hierarchical=self._planned.hierarchical is not None,
                overlap=self.armed,
                follows_plan=sums_reach_all_ranks,
            )
        self._step += 1
        if self.armed and self._expected is None:  # the first step with arm()
            self._reorder_buckets()
        self._reset()
        telemetry.reduction_done(self.times, on_host=self._parameters[0].device.type == "cpu")
        return self.times

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Call arm() before the `with` block and finish() after it, unless the block raises an exception."""
        self.arm()
        yield
        self.finish()

    def close(self) -> None:
        """Remove the hooks and end the threads that this reducer started; gradients stay as they are."""
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles = []
        if self._planned is not None:
            self._planned.close()
        if self._reduction_to_owners is not None:
            self._reduction_to_owners.close()

    # Making the buckets

    @property
    def _size(self) -> int:
        """Bytes of all gradients, in the type in which they are sent."""
        return sum(item.bytes for item in self._items)

    def _bucket_bytes(self) -> int:
        """Return the size of a bucket in bytes: the given, the planned or a default size."""
        if self._given_bucket_bytes is not None:
            return self._given_bucket_bytes
        return bucket_bytes_for(self._planned, self.fabric, len(self.ranks), self._size)

    def _without_deferred(self, indices: Iterable[int]) -> list[int]:
        """Return the indices in the given order, without parameters whose gradients only finish() sends."""
        deferred = set(self._deferred)
        return [index for index in indices if index not in deferred]

    def _chosen_reduction(self) -> Reduction:
        """Return the reduction that sums the buckets from now on.

            caller's function      if the caller has passed it
            planned all-reduce     if no owners are given, or if it is hierarchical
            ReduceToOwners         otherwise: only the owner of a sum, the rank that needs it, gets it
        All ranks must call this method: it may make process groups.
        """
        if self._planned is None:
            assert self._callers_reduction is not None
            return self._callers_reduction
        # A hierarchical all-reduce sends less between clusters than ReduceToOwners.
        if self._owners_of is None or self._planned.hierarchical is not None:
            return self._planned.reduction
        if self._reduction_to_owners is None:
            self._reduction_to_owners = ReduceToOwners(self.group, self._parameters[0].device.type)
        return self._reduction_to_owners

    def _build_buckets(self, order: Sequence[int]) -> None:
        """Choose the reduction algorithm, and divide the gradients into buckets.

        Args:
            order: Indices of parameters, in the order of their final gradients. Their
                buckets are reduced during the backward pass. Deferred parameters are missing: their
                gradients change after the backward pass (tied weights), so finish() reduces them.
        """
        self._order = tuple(order)
        # Hooks launch overlapped buckets during the backward pass. Only finish() launches deferred buckets:
        # the engine changes their gradients after the backward pass (tied weights).
        overlapped = flat_bucket.fill_buckets(self._items, order, self.bucket_bytes)
        deferred = flat_bucket.fill_buckets(self._items, self._deferred, self.bucket_bytes)
        self._buckets: list[FlatBucket] = []  # frees the old buffers before new ones are allocated
        self._reduction = self._chosen_reduction()
        keeps_buffers = self._side_stream is None
        multiple = self._reduction.multiple
        for indices in (*overlapped, *deferred):
            bucket = FlatBucket(indices, self._items, multiple, keeps_buffer=keeps_buffers)
            self._buckets.append(bucket)
        self._overlapped = len(overlapped)  # these buckets come first in self._buckets
        self._bucket_of = {}  # index of a parameter -> its bucket
        for bucket in self._buckets:
            for index in bucket.indices:
                self._bucket_of[index] = bucket
        if self._owners_of is not None and self._reduction is self._reduction_to_owners:
            # This reduction sends the sum of a span of elements only to the rank that needs it, its owner.
            for bucket in self._buckets:
                spans: list[tuple[int, int]] = []
                for index in bucket.indices:
                    spans += self._owners_of(self._parameters[index])
                bucket.spans = merge_spans(spans)
        self._reset()

    def _reset(self) -> None:
        """Mark all gradients as not arrived and not reduced, at the start of a training step."""
        self.armed = False
        self._held = False  # between arm(hold=True) and release()
        self._launched = 0  # number of buckets whose reductions were launched
        self._counts = [0] * len(self._parameters)  # how often each gradient has arrived
        self._first_launch_at = 0.0  # by time.perf_counter()
        for bucket in self._buckets:
            bucket.reset()

    def _follow_plan(self) -> None:
        """Make new buckets if the plan has changed; all ranks do so at the same step."""
        if self._planned is not None and self._planned.follow_plan():
            self.bucket_bytes = self._bucket_bytes()
            self._build_buckets(self._order)

    def _reorder_buckets(self) -> None:
        """Make the buckets again after the first step with arm(), in the order of the backward pass.

        The buckets get the order of the final gradients on the group's first rank. Gradients
        that some rank did not use come last. Each rank also records how often each gradient is accumulated.
        """
        self._expected = self._counts  # accumulations of each gradient in this step
        # _arrivals: indices of accumulated gradients, in order. The last position of each counts.
        position_of = {index: position for position, index in enumerate(self._arrivals)}
        own_positions = []
        for index in range(len(self._parameters)):
            own_positions.append(position_of.get(index, _NEVER_ARRIVED))
        device = self._parameters[0].device
        positions = torch.tensor(own_positions, device=device)
        dist.broadcast(positions, src=self.ranks[0], group=self.group)
        # A gradient that a rank did not use may never come again, and would hold up the buckets after it.
        own_unused = [position == _NEVER_ARRIVED for position in own_positions]
        unused = torch.tensor(own_unused, dtype=torch.int64, device=device)
        dist.all_reduce(unused, op=dist.ReduceOp.MAX, group=self.group)
        sort_keys = list(zip(unused.tolist(), positions.tolist()))  # unused (1) last, on all ranks
        self._arrivals = []
        order = sorted(range(len(sort_keys)), key=sort_keys.__getitem__)
        # Deferred gradients, of weights that two stages share, change later and have other buckets.
        self._build_buckets(self._without_deferred(order))

    # During and after the backward pass

    def _gradient_arrived(self, index: int, _: torch.Tensor) -> None:
        """Count an accumulated gradient, and launch complete buckets. This is a hook that autograd calls.

        A gradient is final after as many accumulations as in the first step. A bucket is complete
        when all its gradients are final (missing is 0), but arm(hold=True) holds it back (_held).

        Args:
            index: Index of the parameter.

        Raises:
            HolmesError: the bucket of the gradient has been sent already.
        """
        if not self.armed:
            return
        self._counts[index] += 1
        bucket = self._bucket_of[index]
        if self._side_stream is not None:
            self._side_stream.record_gradient(bucket.gradient_events)
        if self._expected is None:  # the first step with arm() only records the order
            self._arrivals.append(index)
            return
        if bucket.work is not None:
            raise HolmesError(
                f"GradientReducer: {self._items[index].name} got another gradient after its bucket was sent"
                f" ({self._counts[index]} in this step, {self._expected[index]} in the first one); call "
                f"finish() alone, without arm(), in loops whose backward passes differ"
            )
        is_final = self._counts[index] == self._expected[index]
        if is_final:
            bucket.missing -= 1
        if not self._held:
            self._launch_ready()

    def _launch_ready(self) -> None:
        """Launch complete buckets, in the same order on all ranks, up to the first incomplete bucket.

        A bucket is complete when all its gradients are final. In the first step with arm() none is: how often
        each gradient is accumulated is not known yet, so finish() launches all buckets.
        """
        while self._launched < self._overlapped and self._buckets[self._launched].missing == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        """Copy the gradients of the next bucket into its buffer and start the bucket's reduction.

        On GPUs this runs on a CUDA stream of its own, the side stream, after the events that mark the
        bucket's gradients as final. At most BUCKETS_IN_FLIGHT buckets have buffers at the same time.
        """
        bucket = self._buckets[self._launched]
        with self._on_side_stream(bucket.gradient_events):
            # _store() waits for a reduction, copies the averages back, and frees the buffer.
            if self._side_stream is not None and self._launched >= BUCKETS_IN_FLIGHT:
                self._store(self._buckets[self._launched - BUCKETS_IN_FLIGHT])
            # Divides by `predivide` on the way, so that sums do not overflow float16.
            bucket.fill(self._parameters, self._gradient, self._predivide)
            if self._launched == 0:
                self._first_launch_at = time.perf_counter()
            with self._naming_bucket(bucket):  # in the message of an error
                bucket.work = self._reduction.all_reduce(bucket.flat, bucket)
        if self._side_stream is None:

            def record_end(_: Any) -> None:
                bucket.done_at = time.perf_counter()

            # Python's exit waits for a callback in before_exit().
            bucket.work.get_future().add_done_callback(before_exit(record_end))
        self._launched += 1

    def _store(self, bucket: FlatBucket) -> None:
        """Wait for a bucket's reduction on the current stream, and write the averages to its gradients."""
        if bucket.stored:
            return
        with self._naming_bucket(bucket):
            bucket.work.wait()
        rank_count = len(self.ranks) if self._average else 1
        bucket.store(divisor=rank_count / self._predivide)

    def _on_side_stream(self, events: StreamEvents | None = None) -> AbstractContextManager[None]:
        """Return a context that launches operations on the side stream; on the CPU it has no effect.

        Args:
            events: The operations start after these events.
        """
        if self._side_stream is None:
            return nullcontext()
        return self._side_stream.launch_after(events or {})

    def _measured_times(self, launched_early: int, began: float, ended: float) -> ReductionTimes:
        """Return the times of the gradient reductions of this step.

        `seconds` runs from the first launch to the last end. `exposed_s` is the duration of
        finish(). On GPUs both are host times, and the host does not wait for the GPU.

        Args:
            launched_early: Number of buckets launched before finish().
            began, ended: Start and end of finish(), by time.perf_counter().
        """
        seconds = 0.0
        if self._buckets:
            # done_at is 0 on GPUs, and if the callback that sets it has not run yet.
            last_end = max(bucket.done_at or ended for bucket in self._buckets)
            seconds = last_end - self._first_launch_at
        return ReductionTimes(
            step=self._step,
            bytes=sum(bucket.bytes for bucket in self._buckets),
            buckets=len(self._buckets),
            early=launched_early,
            seconds=seconds,
            exposed_s=ended - began,
            fabric=self.fabric.name if self.fabric else "",
        )

    @contextmanager
    def _naming_bucket(self, bucket: FlatBucket) -> Iterator[None]:
        """Turn an error inside the `with` block into a HolmesError that names the bucket."""
        try:
            yield
        except RuntimeError as error:
            number = self._buckets.index(bucket)
            description = f"bucket {number} of {len(self._buckets)} ({bucket}) of step {self._step}"
            message = describe_failure(description, self.ranks, self.fabric, str(error))
            raise HolmesError(message) from error
