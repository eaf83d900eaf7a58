"""Averages the gradient buckets of a DistributedDataParallel (DDP) as the plan of the job says.

DDP copies gradients into buckets (flat tensors), and calls its comm hook for each bucket that is full. The
comm hook of holmes (ddp.py) calls the method `reduce` of a `BucketReducer`. It starts the sum over the ranks,
by hierarchical all-reduce if the plan says so, and returns a future of the averaged bucket:

    on the CPU                     A callback completes the future when the sum has ended.
    on a GPU                       A side stream waits for the sum and completes the future, so neither the
                                   backward pass nor the host waits.
    in a pipeline's training step  The future is complete at once. `finish` waits for the sums of all buckets
                                   at the end of the step.

The wire dtype is the dtype of a bucket as it is sent, e.g. float16 if the program uses fp16_compress_hook.

All ranks start the same buckets in the same order, so no rank waits for a sum that another rank never starts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, group_ranks
from holmes_ext.runtime.groups.callbacks import before_exit
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.watch.failure import describe_failure


class AwaitedGradient(NamedTuple):
    """Gradient in a bucket whose sum over the ranks has not ended."""

    parameter: Any  # the parameter; its `.grad` is `view` until the sum has ended
    gradient: Any  # the tensor that was the parameter's `.grad` before; None if there was none
    view: Any  # the gradient's part of the bucket, in the shape of the parameter


class StartedBucket(NamedTuple):
    """Bucket of gradients whose sum over the ranks has started.

    `BucketReducer.finish` waits for the sum.
    """

    number: int  # index of the bucket in its DistributedDataParallel
    work: Any  # the operation that sums `sent`; its wait() returns when the sum has ended
    sent: Any  # the tensor that is summed: `flat`, or a copy of it in the wire dtype
    flat: Any  # DDP's tensor with the gradients of the bucket
    awaited: list[AwaitedGradient]  # empty with gradient_as_bucket_view=True


class ProgramHook(NamedTuple):
    """Comm hook that the training program has registered with its DistributedDataParallel."""

    state: Any  # the hook's first argument
    hook: Any  # function (state, bucket) that returns a future of the reduced bucket


class BucketReducer:
    """State of holmes's comm hook. The hook averages the buckets of a DistributedDataParallel (DDP).

    On a GPU, DDP calls the comm hook on the stream of the backward pass. The sums run on other streams. One
    more stream waits for the sums and completes the hook's future. (This was read in torch's source, not run
    on GPUs.)
    """

    def __init__(self, ddp: Any, reduction: Any, planned: Any = None):
        """Prepare the state of the comm hook that averages the gradient buckets of a DDP module.

        Args:
            ddp: The DistributedDataParallel.
            reduction: The Reduction that sums the buckets over the process group.
            planned: The PlannedReduction that has chosen `reduction` by the plan, or None. On the CPU, the
                plan may choose another reduction while the job runs (_follow_plan).
        """
        self._ddp = weakref.ref(ddp)
        self._group = ddp.process_group
        self.reduction = reduction
        self._planned = planned

        # ddp.py sets these attributes when the program registers a comm hook or uses join().
        # Comm hook of the program that reduces instead of this object.
        self.program_hook: ProgramHook | None = None

        # Whether the program has registered a comm hook: DDP allows one.
        self.has_registered_hook = False
        # The dtype of buckets as they are sent; None: the gradients' dtype.
        self.wire_dtype: Any = None

        # Under join(), torch's Work that counts the ranks that still have inputs.
        self.ranks_with_inputs: Any = None

        # In a pipeline's training step: the buckets so far. finish() waits for them at the end of
        # the step. The step sets an empty list first. None, outside of such a step: DDP waits for
        # each bucket.
        self.unfinished_buckets: list[StartedBucket] | None = None
        self._wire_tensors: dict[int, Any] = {}  # index of a bucket -> its copy in the wire dtype
        self._side_stream: Any = None  # CUDA stream that waits for sums

    def reduce(self, bucket: Any) -> Any:
        """Start to average a bucket over the ranks; called by DDP's comm hook for each full bucket.

        Args:
            bucket: A torch.distributed.GradBucket.

        Returns:
            A future of the bucket's tensor. In a pipeline's training step (self.unfinished_buckets
            is a list) the future is complete at once, and finish() waits for the average.
        """
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        ddp = self._ddp()
        assert ddp is not None, "DistributedDataParallel called its comm hook after it was deleted"
        flat = bucket.buffer()
        index = bucket.index()

        # The group differs after DDP's _update_process_group(); the plan's choice is for the first group.
        if flat.is_sparse or ddp.process_group is not self._group:
            return allreduce_hook(ddp.process_group, bucket)

        # On the CPU, the extension holmes_ext/adapt measures the reductions, and may change the plan while
        # the job runs. A new plan takes effect at the first bucket of a step.
        follows_plan = self._planned is not None and not flat.is_cuda
        if follows_plan and index == 0:
            self._follow_plan()  # may replace self.reduction
        sent = self._tensor_to_send(index, flat)  # `flat`, or a copy of it in another dtype
        sent.div_(self._divisor(ddp))  # so the sum over the ranks is the average
        span: AbstractContextManager[Any] = nullcontext()
        if follows_plan and bucket.is_last():
            # adapt reads from this span when the last reduction of the backward pass was started.
            span = telemetry.span(telemetry.LAST_BUCKET)
        with self._network_errors_of_bucket(index), span:
            work = self.reduction.all_reduce(sent)

        # The future tells DDP when it may read the average from `flat`.
        if self.unfinished_buckets is not None:
            # A pipeline's step: finish() waits for the bucket, so DDP must not. It goes on at once.
            awaited = _replace_gradients_by_views(bucket)
            self.unfinished_buckets.append(StartedBucket(index, work, sent, flat, awaited))
            future: Any = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
            future.set_result(flat)
            return future
        if flat.is_cuda:
            return self._complete_on_side_stream(work, sent, flat)
        return self._complete_in_callback(index, work, sent, flat)

    def _complete_in_callback(self, index: int, work: Any, sent: Any, flat: Any) -> Any:
        """Return a future of a bucket on the CPU. A callback completes it after the sum.

        reduce() has divided `sent` by the number of ranks before the sum, so the sum is the average. (On a
        GPU, _complete_on_side_stream() is used instead: there a stream can wait in place of a callback.)

        Args:
            index: Index of the bucket.
            work: The operation that sums `sent`.
            sent: The tensor that is summed: `flat`, or a copy of it in another dtype.
            flat: The tensor of the bucket.
        """

        def finish_bucket(summed: Any) -> Any:
            """Return the averaged bucket; called when the sum has ended."""
            with self._network_errors_of_bucket(index):
                summed.value()  # raises the error of a failed sum
            if sent is not flat:  # it was sent in another dtype
                flat.copy_(sent)
            return flat

        # before_exit() lets the interpreter wait at its exit for callbacks that still run.
        return work.get_future().then(before_exit(finish_bucket))

    def _complete_on_side_stream(self, work: Any, sent: Any, flat: Any) -> Any:
        """Return a future of a bucket on a GPU. A side stream completes it after the sum.

        Args:
            work: The operation that sums `sent`.
            sent: The tensor that is summed: `flat`, or a copy of it in another dtype.
            flat: The tensor of the bucket.
        """
        import torch

        future: Any = torch.futures.Future(devices=[flat.device])
        if self._side_stream is None:  # this is the first bucket
            self._side_stream = torch.cuda.Stream(flat.device)
        with torch.cuda.stream(self._side_stream):
            work.wait()  # the side stream waits, not the host
            if sent is not flat:  # it was sent in another dtype
                flat.copy_(sent)
            # The future remembers the stream: a stream that asks for the value waits for it.
            future.set_result(flat)
        return future

    def _tensor_to_send(self, index: int, flat: Any) -> Any:
        """Return the tensor that is summed for a bucket: its own tensor, or a copy of it in the wire dtype.

        The wire dtype is e.g. float16 if the program compresses gradients by torch's fp16_compress_hook, else
        None. The copy of a bucket is the same tensor object in every step. If self.reduction further
        compresses tensors to int8, it keeps the rounding error of each tensor object, and adds it in the
        next step.

        Args:
            index: Index of the bucket.
            flat: The tensor of the bucket.
        """
        import torch

        if self.wire_dtype is None:
            return flat
        sent = self._wire_tensors.get(index)
        # DDP makes new buckets, of other sizes, after the first step.
        if sent is None or sent.numel() != flat.numel():
            sent = torch.empty_like(flat, dtype=self.wire_dtype)
            self._wire_tensors[index] = sent
        sent.copy_(flat)
        return sent

    def _follow_plan(self) -> None:
        """Switch to another reduction if the plan for the gradients has changed.

        A reduction sums a bucket over the ranks, e.g. hierarchically: inside each cluster, then
        between clusters. holmes may change the plan while the job runs. This method is called at
        the first bucket of a step, so that all ranks switch together.
        """
        has_changed = self._planned.follow_plan()
        if has_changed:
            self.reduction = self._planned.reduction
        # The job's report compares this note with the plan.
        session.note_reduction(
            self._planned.ranks,
            self._planned.spec,
            self._planned.size,
            hierarchical=self._planned.hierarchical is not None,
            overlap=True,  # DDP always reduces during the backward pass
            follows_plan=True,  # this reduction changes when the plan does
        )

    def finish(self) -> None:
        """Wait for the sums of a pipeline's training step, and store the averages as gradients.

        During the backward pass, reduce() has divided each bucket by the number of ranks and
        started its sum over the ranks, so the sum is the average. It has also replaced the `.grad`
        of each parameter by a view of its bucket (`flat`). Here the former tensor receives the
        average, and becomes the parameter's `.grad` again.
        """
        for bucket in self.unfinished_buckets or ():
            with self._network_errors_of_bucket(bucket.number):
                bucket.work.wait()
            if bucket.sent is not bucket.flat:  # a copy in another dtype has been summed
                bucket.flat.copy_(bucket.sent)
            for parameter, gradient, view in bucket.awaited:
                if gradient is None:  # there was none before: make one outside the bucket
                    parameter.grad = view.clone()
                else:
                    parameter.grad = gradient.copy_(view)

    def _divisor(self, ddp: Any) -> int:
        """Return the divisor that turns a sum of gradients into their average.

        This is the number of ranks in the group. The exception is a step under
        DistributedDataParallel.join(divide_by_initial_world_size=False), where some ranks may have
        no inputs left: it is the number of ranks that still have inputs.
        """
        # self.ranks_with_inputs is the Work of an all-reduce that counts ranks with inputs; None
        # without join(). The other attribute is join()'s argument.
        counts_all_ranks = self.ranks_with_inputs is None or ddp._divide_by_initial_world_size
        if not counts_all_ranks:
            self.ranks_with_inputs.wait()
            (count,) = self.ranks_with_inputs.result()  # one tensor with one number
            return int(count)
        return self._group.size()

    @contextmanager
    def _network_errors_of_bucket(self, index: int) -> Iterator[None]:
        """Convert a network error to a HolmesError that names the bucket, ranks and network.

        Args:
            index: Index of the bucket that is reduced within the context.

        Raises:
            HolmesError: torch raised a RuntimeError within the context.
        """
        try:
            yield
        except RuntimeError as error:
            ranks = group_ranks(self._group)
            network = session.require().fabric_of(ranks, backend_of(self._group))
            bucket_name = f"DistributedDataParallel's bucket {index}"
            message = describe_failure(bucket_name, ranks, network, str(error))
            raise HolmesError(message) from error


def _replace_gradients_by_views(bucket: Any) -> list[AwaitedGradient]:
    """Set the `.grad` of each parameter to its part of the bucket, until the bucket is summed.

    DistributedDataParallel (DDP) copies the bucket to every `.grad` as soon as the comm hook's future is
    complete. Here that is before the sum has ended. On a GPU this copy would read memory that the sum
    writes. torch skips the copy of a tensor to itself.

    Returns:
        The gradients that were replaced, with the tensors that were `.grad` before. When the sum has ended,
        BucketReducer.finish() copies the average into these tensors, and makes them `.grad` again. With
        gradient_as_bucket_view=True the list is empty, because the gradients always are views of the bucket.
    """
    awaited = []
    for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
        view = _in_layout_of(parameter, part)
        gradient = parameter.grad
        is_view_already = gradient is not None and gradient.data_ptr() == view.data_ptr()
        if not is_view_already:
            parameter.grad = view
            awaited.append(AwaitedGradient(parameter, gradient, view))
    return awaited


def _in_layout_of(parameter: Any, part: Any) -> Any:
    """Return a view of a gradient in a bucket, with the strides with which the bucket stores it.

    These are the strides of the gradient's parameter, e.g. channels_last. But GradBucket.gradients()
    returns a contiguous view for every parameter. The exception is a parameter with gaps or
    overlaps in memory: DistributedDataParallel stores its gradient contiguously.

    Args:
        part: The parameter's tensor of GradBucket.gradients().

    Returns:
        A view of the same memory as `part`: with the parameter's strides, or `part` itself.
    """
    import torch

    # empty_like() keeps the strides of a tensor, unless the tensor has gaps or overlaps.
    dense_strides = torch.empty_like(parameter, device="meta").stride()
    if parameter.stride() == dense_strides:
        return part.as_strided(parameter.size(), parameter.stride())
    return part
