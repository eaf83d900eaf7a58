"""Where DeepSpeed's optimizers read their gradients: what reduce.py reduces, and how it must divide.

    ZeRO 0           .grad
    BF16_Optimizer   its high-precision buffer, into which every micro-batch's .grad is folded
    ZeRO 1           the accumulated gradient; its reduce_gradients then puts the partition together, unsent
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holmes_ext.patches.deepspeed.versions import read_by_version


def gradients_of(engine: Any) -> PlainGradients:
    kinds = {"BF16_Optimizer": Bf16Gradients, "DeepSpeedZeroOptimizer": ZeroGradients}
    return kinds.get(type(engine.optimizer).__name__, PlainGradients)(engine)


class PlainGradients:
    """ZeRO 0: the optimizer reads .grad."""

    def __init__(self, engine: Any):
        self.engine, self.optimizer = engine, engine.optimizer
        self.communication_dtype = engine.communication_data_type
        self.given: Any = None  # by id: the optimizer's parameters, where stock reduces no others

    def gradient(self, parameter: Any) -> Any:
        return parameter.grad

    def reduces(self, parameter: Any) -> bool:
        return self.given is None or id(parameter) in self.given

    def predivide(self, ranks: int) -> float:
        """What gradients are divided by before the sum (DeepSpeedEngine.allreduce_bucket)."""
        if not self.engine.gradient_average:
            return 1.0
        return float(self.engine.gradient_predivide_factor() if self.engine.postscale_gradients() else ranks)

    @contextmanager
    def folding(self) -> Iterator[None]:
        """Around the last backward pass."""
        yield

    def after(self) -> None:
        """All gradients are averaged."""

    def owners(self) -> Callable[[Any], list[tuple[int, int]]] | None:
        """Who needs which part of a gradient (GradientReducer); None: every rank all of it."""
        return None


class Bf16Gradients(PlainGradients):
    """BF16_Optimizer: stock folds .grad after a backward pass, in update_hp_grads (or, with
    immediate_grad_update, in a hook before ours). In the last one each parameter is folded when its bucket
    leaves, once, and update_hp_grads finds nothing to do."""

    def __init__(self, engine: Any):
        super().__init__(engine)
        groups = self.optimizer.bf16_groups
        self.given = {id(p): (i, j) for i, group in enumerate(groups) for j, p in enumerate(group)}
        self.folded: set[int] = set()

    def gradient(self, parameter: Any) -> Any:
        i, j = self.given[id(parameter)]
        self._fold(parameter, i, j)
        return self.optimizer.fp32_groups_gradients[i][j]

    def _fold(self, parameter: Any, i: int, j: int) -> None:
        if id(parameter) not in self.folded and not read_by_version("immediate_grad_update", self.engine):
            self.optimizer._update_hp_grad(parameter, i, j, clear_lp_grads=False)
        self.folded.add(id(parameter))

    @contextmanager
    def folding(self) -> Iterator[None]:
        self.folded.clear()
        before = self.optimizer.immediate_grad_update
        self.optimizer.immediate_grad_update = True  # update_hp_grads returns at once
        try:
            yield
        finally:
            self.optimizer.immediate_grad_update = before
        # ReduceTiedGrads reads the buffer of tied weights
        for i, group in enumerate(self.optimizer.bf16_groups):
            for j, parameter in enumerate(group):
                self._fold(parameter, i, j)


class ZeroGradients(PlainGradients):
    """ZeRO 1: reduced in place where the optimizer collects its partition from."""

    def __init__(self, engine: Any):
        super().__init__(engine)
        self.communication_dtype = self.optimizer.communication_data_type
        self.given = {id(parameter): i for i, group in enumerate(self.optimizer.bit16_groups)
                      for parameter in group}

    def gradient(self, parameter: Any) -> Any:
        return self.optimizer.get_gradient_for_reduction(parameter)

    def owners(self) -> Callable[[Any], list[tuple[int, int]]] | None:
        if not self.optimizer.reduce_scatter:
            return None
        if read_by_version("muon", self.optimizer):
            # Muon updates a matrix as a whole: every rank that holds a part of it needs all of its gradient.
            return None
        return self._owners

    def _owners(self, parameter: Any) -> list[tuple[int, int]]:
        """The slices that average_tensor sends to their partitions' ranks."""
        from torch.distributed import get_process_group_ranks

        optimizer, i = self.optimizer, self.given[id(parameter)]
        key = optimizer.get_param_id(parameter)
        ranks = get_process_group_ranks(optimizer.real_dp_process_group[i])
        parts, offsets = optimizer.param_to_partition_ids[i][key], optimizer.grad_start_offset[i]
        starts = sorted((int(offsets[part][key]), ranks[part]) for part in parts)  # a float at times
        ends = [start for start, _ in starts[1:]] + [parameter.numel()]
        return [(end - start, rank) for (start, rank), end in zip(starts, ends)]

    def predivide(self, ranks: int) -> float:
        # average_tensor divides before the sum with reduce_scatter (the default), else as the engine does
        before = self.optimizer.reduce_scatter and self.engine.gradient_average
        return float(ranks) if before else super().predivide(ranks)

    def after(self) -> None:
        """Put the partition together, as stock does, but for the communication."""
        names = ("average_tensor", "buffered_reduce_fallback")  # with and without contiguous_gradients
        for name in names:
            setattr(self.optimizer, name, lambda *args, **kwargs: None)
        try:
            self.engine._force_grad_boundary = True
            self.engine.allreduce_gradients()
        finally:
            self.engine._force_grad_boundary = False
            for name in names:
                delattr(self.optimizer, name)
