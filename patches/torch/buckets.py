"""How the buckets of a DistributedDataParallel are averaged: its comm hook's state (ddp.py puts it there)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks
from holmes_ext.runtime.groups.callbacks import before_exit
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.watch.failure import describe_failure


class Buckets:
    """all_reduce: what sums a flat tensor; sums: the plan's way that it comes from, which changes when the
    plan does (on the CPU; buckets stay as they are cut). user: (state, hook) that the program registered, and
    that reduces instead. wire: dtype that travels, None: the gradients'.

    CUDA (read, not run): buckets are launched on autograd's stream, in DDP's order: the same on all ranks.
    The two levels run on streams of their own; a side stream waits for them and completes the future, so that
    neither the backward pass nor the host does. What travels (DDP's buffer, `_sent`'s) lives as long as DDP.
    """

    def __init__(self, ddp: Any, all_reduce: Any, sums: Any = None):
        self._ddp, self._group = weakref.ref(ddp), ddp.process_group
        self.all_reduce, self._sums = all_reduce, sums
        self._summed = False  # in this step, as the plan says
        if sums is not None and sums.apart.settings is not None:
            ddp.register_forward_pre_hook(self.before_forward)
        self.user: tuple[Any, Any] | None = None
        self.registered = False  # the program has registered its hook
        self.wire: Any = None
        self.joining: Any = None  # the count of ranks that still have inputs, under join()
        self.later: list[tuple[Any, ...]] | None = None  # of a pipeline's step: what finish() ends
        self._sent: dict[int, Any] = {}
        self._side: Any = None

    def reduce(self, bucket: Any) -> Any:
        """Start the average of `bucket`; the future of its buffer."""
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        ddp, flat, index = self._ddp(), bucket.buffer(), bucket.index()
        assert ddp is not None, "its reducer has called"
        # another group: after _update_process_group()
        if flat.is_sparse or ddp.process_group is not self._group:
            return allreduce_hook(ddp.process_group, bucket)
        follows = self._sums is not None and not flat.is_cuda
        if follows and index == 0:
            self._follow()
        sent = flat
        if self.wire is not None:  # the same buffer at every step: int8's residuals belong to a buffer
            sent = self._sent.get(index)
            if sent is None or sent.numel() != flat.numel():
                sent = self._sent[index] = torch.empty_like(flat, dtype=self.wire)
            sent.copy_(flat)
        sent.div_(self._divisor(ddp))
        last = follows and bucket.is_last()
        with self._named(index), telemetry.span(telemetry.LAST_BUCKET) if last else nullcontext():
            work = self.all_reduce(sent)

        def store(done: Any) -> Any:
            with self._named(index):
                done.value()
            return flat if sent is flat else flat.copy_(sent)

        if self.later is None and not flat.is_cuda:
            return work.get_future().then(before_exit(store))
        future: Any = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        if self.later is not None:
            self.later.append((index, work, sent, flat, bucket.parameters(), bucket.gradients()))
            future.set_result(flat)
            return future
        self._side = self._side or torch.cuda.Stream(flat.device)
        with torch.cuda.stream(self._side):  # the stream that asks for the value waits for this one
            work.wait()
            future.set_result(flat if sent is flat else flat.copy_(sent))
        return future

    def _follow(self) -> None:
        """A step's first bucket, on all ranks: the plan's way by now."""
        if self.joining is not None:
            self._sums.apart.refusal = "DistributedDataParallel.join()"
        if self._sums.follow():
            self.all_reduce = self._sums.all_reduce
        self._sums.note(self._sums.size, overlap=True, follows=True)
        self._summed = True

    def before_forward(self, ddp: Any, _: Any) -> None:
        """Clusters that are apart average the weights once in each step, before they are read again."""
        import torch

        if self._summed and ddp.training and torch.is_grad_enabled():
            self._summed = False
            self._sums.step()

    def finish(self) -> None:
        """End what a pipeline's step has begun, and copy anew what DDP took from its buckets meanwhile."""
        for index, work, sent, flat, parameters, gradients in self.later or ():
            with self._named(index):
                work.wait()
            if sent is not flat:
                flat.copy_(sent)
            for parameter, gradient in zip(parameters, gradients):
                if parameter.grad is not None and parameter.grad.data_ptr() != gradient.data_ptr():
                    parameter.grad.copy_(gradient)

    def _divisor(self, ddp: Any) -> int:
        """The group's ranks; under join(divide_by_initial_world_size=False) those that have inputs."""
        if self.joining is None or ddp._divide_by_initial_world_size:
            return self._sums.count if self._sums is not None else self._group.size()
        self.joining.wait()
        return int(self.joining.result()[0])

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        """An error of the transport says which bucket failed, and where."""
        try:
            yield
        except RuntimeError as error:
            ranks = group_ranks(self._group)
            fabric = session.require().fabric_of(ranks, backend_of(self._group))
            what = f"DistributedDataParallel's bucket {index}"
            raise HolmesError(describe_failure(what, ranks, fabric, str(error))) from error
