"""How the buckets of a DistributedDataParallel are averaged: its comm hook's state (ddp.py puts it there)."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks
from holmes_ext.runtime.groups.callbacks import before_exit
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.watch.failure import describe_failure


class Buckets:
    """How the buckets of one DistributedDataParallel are averaged; its comm hook's state.

    all_reduce: what sums a flat tensor; sums: the plan's way that it comes from, which changes when the plan
    does (on the CPU; buckets stay as they are cut).
    user: (state, hook) that the program registered, and that reduces
    instead. wire: dtype that travels, None: the gradients'.

    CUDA (read, not run): buckets are launched from autograd's thread, on its stream, in the order in which
    DDP says that they are full: the same on all ranks. The two levels run on streams of their own; a side
    stream waits for them and completes the future, so that neither the backward pass nor the host does. What
    travels is DDP's own buffer or `_sent`'s, which live as long as the module.
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
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        ddp, flat = self._ddp(), bucket.buffer()
        assert ddp is not None, "its reducer has called"
        # another group: after _update_process_group()
        if flat.is_sparse or ddp.process_group is not self._group:
            return allreduce_hook(ddp.process_group, bucket)
        follows = self._sums is not None and not flat.is_cuda
        if follows and bucket.index() == 0:
            self._follow()
        sent = flat if self.wire is None else self._as_wire(bucket.index(), flat)
        sent.div_(self._divisor(ddp))
        try:
            with telemetry.span(telemetry.LAST_BUCKET) if follows and bucket.is_last() else nullcontext():
                work = self.all_reduce(sent)
        except RuntimeError as error:
            raise HolmesError(self._failed(bucket.index(), error)) from error
        if self.later is not None:
            self.later.append((bucket.index(), work, sent, flat, bucket.parameters(), bucket.gradients()))
            return _completed(flat)
        if flat.is_cuda:
            return self._completed_on_stream(work, sent, flat)

        def store(done: Any) -> Any:
            try:
                done.value()
            except RuntimeError as error:
                raise HolmesError(self._failed(bucket.index(), error)) from error
            return flat if sent is flat else flat.copy_(sent)

        return work.get_future().then(before_exit(store))

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
        """End what a pipeline's step has begun: DDP has gone on, and taken what it found in its buckets. On
        CUDA what it copied meanwhile is copied anew, by the stream that has waited."""
        for index, work, sent, flat, parameters, gradients in self.later or ():
            try:
                work.wait()
            except RuntimeError as error:
                raise HolmesError(self._failed(index, error)) from error
            if sent is not flat:
                flat.copy_(sent)
            for parameter, gradient in zip(parameters, gradients):
                if parameter.grad is not None and parameter.grad.data_ptr() != gradient.data_ptr():
                    parameter.grad.copy_(gradient)

    def _completed_on_stream(self, work: Any, sent: Any, flat: Any) -> Any:
        """A future whose value the stream that asks for it waits for."""
        import torch

        if self._side is None:
            self._side = torch.cuda.Stream(flat.device)
        future: Any = torch.futures.Future(devices=[flat.device])
        with torch.cuda.stream(self._side):
            work.wait()
            future.set_result(flat if sent is flat else flat.copy_(sent))
        return future

    def _as_wire(self, index: int, flat: Any) -> Any:
        """`flat` as it travels, in the same buffer at every step (int8's residuals belong to a buffer)."""
        import torch

        kept = self._sent.get(index)
        if kept is None or kept.numel() != flat.numel():
            kept = self._sent[index] = torch.empty_like(flat, dtype=self.wire)
        return kept.copy_(flat)

    def _divisor(self, ddp: Any) -> int:
        """The group's ranks; under join(divide_by_initial_world_size=False) those that have inputs."""
        if self.joining is None or ddp._divide_by_initial_world_size:
            return self._sums.count if self._sums is not None else self._group.size()
        self.joining.wait()
        return int(self.joining.result()[0])

    def _failed(self, index: int, error: RuntimeError) -> str:
        ranks = group_ranks(self._group)
        fabric = session.require().fabric_of(ranks, backend_of(self._group))
        return describe_failure(f"DistributedDataParallel's bucket {index}", ranks, fabric, str(error))


def _completed(flat: Any) -> Any:
    """A future that has its value."""
    import torch

    future: Any = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    future.set_result(flat)
    return future
