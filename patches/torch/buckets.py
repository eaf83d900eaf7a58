"""Averages the buckets of a DistributedDataParallel (DDP) as the plan says.

DDP copies gradients into buckets (flat tensors), and calls a comm hook for each bucket that is full. ddp.py
registers a hook whose state is a `BucketReducer`. Terms:

    two levels     hierarchical all-reduce: sums inside each cluster, then sums of those between clusters
    wire dtype     the dtype in which a bucket is sent, if it differs from the gradients' (fp16_compress_hook)
    apart          clusters train without each other for some steps, then average their weights
                   (--holmes-apart)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks
from holmes_ext.runtime.groups.callbacks import before_exit
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.watch.failure import describe_failure


class StartedBucket(NamedTuple):
    """A bucket whose sum has started, and which `BucketReducer.finish` will wait for."""

    number: int
    work: Any  # the operation that sums `sent`
    sent: Any  # the tensor that is summed: `flat`, or a copy of it in the wire dtype
    flat: Any  # DDP's tensor with the gradients of the bucket
    parameters: list[Any]
    gradients: list[Any]  # views of `flat`, one for each of the parameters


class BucketReducer:
    """Starts and finishes the averages of all buckets of one DistributedDataParallel.

    On a GPU, DDP calls the hook on the stream of the backward pass, for the same buckets in the same order on
    all ranks. The two levels run on streams of their own. A side stream waits for them and completes the
    future, so neither the backward pass nor the host waits. (This was read in torch's source, not run on
    GPUs.) The tensors that are sent are DDP's buckets or kept here, so they live as long as DDP.
    """

    def __init__(self, ddp: Any, all_reduce: Any, planned_sum: Any = None):
        self._ddp = weakref.ref(ddp)
        self._group = ddp.process_group
        self.all_reduce = all_reduce  # starts the sum of a flat tensor over the group
        # The plan's choice for these gradients (a GroupSum), which supplies all_reduce. On the CPU it may
        # change while the job runs; the size of the buckets does not. None: torch's all-reduce.
        self._planned_sum = planned_sum
        self._was_summed = False  # whether this step's buckets were summed as planned
        if planned_sum is not None and planned_sum.apart.settings is not None:
            ddp.register_forward_pre_hook(self.before_forward)
        self.program_hook: tuple[Any, Any] | None = None  # (state, hook) that reduces instead of this object
        self.has_registered_hook = False  # whether the program has registered its hook: DDP allows one
        self.wire_dtype: Any = None  # None: the gradients' dtype
        self.ranks_with_inputs: Any = None  # under join(): the Work that counts them
        # Buckets of a pipeline's training step that finish() waits for; None if DDP waits for each of them.
        self.postponed: list[StartedBucket] | None = None
        self._wire_tensors: dict[int, Any] = {}  # by bucket
        self._side_stream: Any = None

    def reduce(self, bucket: Any) -> Any:
        """Start the average of a bucket, and return the future of the bucket's tensor."""
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        ddp = self._ddp()
        assert ddp is not None, "its reducer has called"
        flat = bucket.buffer()
        index = bucket.index()
        # The group differs after DDP's _update_process_group(); the plan's choice is for the first group.
        if flat.is_sparse or ddp.process_group is not self._group:
            return allreduce_hook(ddp.process_group, bucket)

        follows_plan = self._planned_sum is not None and not flat.is_cuda
        if follows_plan and index == 0:
            self._follow_plan()
        sent = self._tensor_to_send(index, flat)
        sent.div_(self._divisor(ddp))
        ends_backward = follows_plan and bucket.is_last()
        span = telemetry.span(telemetry.LAST_BUCKET) if ends_backward else nullcontext()
        with self._named(index), span:
            work = self.all_reduce(sent)

        def store(done: Any) -> Any:
            with self._named(index):
                done.value()  # raises the error of a failed sum
            return flat if sent is flat else flat.copy_(sent)

        if self.postponed is None and not flat.is_cuda:
            return work.get_future().then(before_exit(store))
        future: Any = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        if self.postponed is not None:
            started = StartedBucket(index, work, sent, flat, bucket.parameters(), bucket.gradients())
            self.postponed.append(started)
            future.set_result(flat)
            return future
        self._side_stream = self._side_stream or torch.cuda.Stream(flat.device)
        with torch.cuda.stream(self._side_stream):  # a stream that asks for the value waits for this one
            work.wait()
            future.set_result(flat if sent is flat else flat.copy_(sent))
        return future

    def _tensor_to_send(self, index: int, flat: Any) -> Any:
        """Return the bucket's tensor, or a copy of it in the wire dtype.

        The copy is the same tensor in every step: compression to int8 keeps the rounding error of each tensor
        and adds it in the next step.
        """
        import torch

        if self.wire_dtype is None:
            return flat
        sent = self._wire_tensors.get(index)
        if sent is None or sent.numel() != flat.numel():
            sent = torch.empty_like(flat, dtype=self.wire_dtype)
            self._wire_tensors[index] = sent
        sent.copy_(flat)
        return sent

    def _follow_plan(self) -> None:
        """Reduce this step's buckets as the plan says now.

        The first bucket of a step, which is the same on all ranks, is the moment to change the way.
        """
        if self.ranks_with_inputs is not None:
            self._planned_sum.apart.refusal = "DistributedDataParallel.join()"
        if self._planned_sum.follow():
            self.all_reduce = self._planned_sum.all_reduce
        self._planned_sum.note(self._planned_sum.size, overlap=True, follows=True)
        self._was_summed = True

    def before_forward(self, ddp: Any, _: Any) -> None:
        """Let clusters that train apart average their weights, once a step, before the weights are read."""
        import torch

        if self._was_summed and ddp.training and torch.is_grad_enabled():
            self._was_summed = False
            self._planned_sum.step()

    def finish(self) -> None:
        """Wait for the postponed buckets of a pipeline's training step, and update the gradients.

        DDP took the buckets for reduced when they were started. Where a .grad is not a view of its bucket,
        DDP has copied the unreduced gradient by now, so it is copied again.
        """
        for bucket in self.postponed or ():
            with self._named(bucket.number):
                bucket.work.wait()
            if bucket.sent is not bucket.flat:
                bucket.flat.copy_(bucket.sent)
            for parameter, gradient in zip(bucket.parameters, bucket.gradients):
                if parameter.grad is not None and parameter.grad.data_ptr() != gradient.data_ptr():
                    parameter.grad.copy_(gradient)

    def _divisor(self, ddp: Any) -> int:
        """Return the number of ranks whose gradients are averaged.

        Under join(divide_by_initial_world_size=False) only ranks that still have inputs count.
        """
        if self.ranks_with_inputs is None or ddp._divide_by_initial_world_size:
            return self._planned_sum.count if self._planned_sum is not None else self._group.size()
        self.ranks_with_inputs.wait()
        return int(self.ranks_with_inputs.result()[0])

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        """Turn a transport error into one that names the bucket, the ranks and the network."""
        try:
            yield
        except RuntimeError as error:
            ranks = group_ranks(self._group)
            fabric = session.require().fabric_of(ranks, backend_of(self._group))
            what = f"DistributedDataParallel's bucket {index}"
            raise HolmesError(describe_failure(what, ranks, fabric, str(error))) from error
