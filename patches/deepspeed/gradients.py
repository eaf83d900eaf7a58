"""Finds the gradients that an optimizer of DeepSpeed reads, so that reduce.py can reduce exactly these.

    optimizer        reads gradients from
    ZeRO 0           the attribute .grad of each parameter
    BF16_Optimizer   float32 sums, to which it adds .grad after each micro-batch
    ZeRO 1           sums over the micro-batches; it reads only the part of them that this rank updates

A class for each of them says where the gradients are, what they are divided by, and what remains to do after
the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from holmes_ext.patches.deepspeed.versions import read_by_version


class PartOfGradient(NamedTuple):
    """Consecutive elements of a gradient, and the rank that needs them."""

    elements: int
    rank: int


def gradients_of(engine: Any) -> PlainGradients:
    """Return the object that finds the gradients which the optimizer of a DeepSpeed engine reads."""
    optimizer_name = type(engine.optimizer).__name__
    if optimizer_name == "BF16_Optimizer":
        return Bf16Gradients(engine)
    if optimizer_name == "DeepSpeedZeroOptimizer":
        return ZeroGradients(engine)
    return PlainGradients(engine)


class PlainGradients:
    """Gradients of ZeRO 0, whose optimizer reads .grad. Base class for other optimizers of DeepSpeed."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.optimizer = engine.optimizer
        self.communication_dtype = engine.communication_data_type
        # id of a parameter -> its position in the optimizer. DeepSpeed reduces no other parameters. None if
        # it reduces all.
        self.positions: Any = None

    def gradient(self, parameter: Any) -> Any:
        """Return the tensor that the optimizer reads as the gradient of a parameter."""
        return parameter.grad

    def reduces(self, parameter: Any) -> bool:
        """Return whether DeepSpeed reduces the gradient of a parameter."""
        return self.positions is None or id(parameter) in self.positions

    def predivide(self, ranks: int) -> float:
        """Return by what DeepSpeedEngine.allreduce_bucket divides gradients before it sums them.

        Args:
            ranks: The data-parallel size.
        """
        if not self.engine.gradient_average:
            return 1.0
        if self.engine.postscale_gradients():
            return float(self.engine.gradient_predivide_factor())
        return float(ranks)

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Do what the optimizer needs during the last backward pass, which runs inside this context."""
        yield

    def after_reduction(self) -> None:
        """Do what the optimizer needs after all gradients have been averaged."""

    def owners(self) -> Callable[[Any], list[PartOfGradient]] | None:
        """Return a function that divides a gradient among the ranks that need its parts, or None.

        The function takes a parameter, and returns the parts in the order of the elements. None means that
        every rank needs all gradients.
        """
        return None


class Bf16Gradients(PlainGradients):
    """Gradients of BF16_Optimizer, which adds the bf16 gradients of each micro-batch to float32 sums.

    DeepSpeed adds them after a backward pass, in update_hp_grads. The last backward pass differs: gradients
    are sent while it runs, so each is added to its float32 sum just before it is sent. update_hp_grads then
    adds nothing.

    With DeepSpeed's setting immediate_grad_update, a hook of DeepSpeed adds each gradient at once.
    """

    def __init__(self, engine: Any):
        super().__init__(engine)
        # id of a parameter -> (index of its parameter group, index in the group)
        self.positions = {}
        for i, group in enumerate(self.optimizer.bf16_groups):
            for j, parameter in enumerate(group):
                self.positions[id(parameter)] = (i, j)
        self.added: set[int] = set()  # ids of the parameters whose gradients have been added

    def gradient(self, parameter: Any) -> Any:
        """Return the float32 sum of a parameter's gradients, with that of the last micro-batch added."""
        i, j = self.positions[id(parameter)]
        self._add_to_sum(parameter, i, j)
        return self.optimizer.fp32_groups_gradients[i][j]

    def _add_to_sum(self, parameter: Any, i: int, j: int) -> None:
        """Add the bf16 gradient of parameter j in group i to its float32 sum, once in a backward pass."""
        # With this setting, a hook of DeepSpeed has added the gradient already.
        adds_at_once = read_by_version("immediate_grad_update", self.engine)
        if id(parameter) not in self.added and not adds_at_once:
            self.optimizer._update_hp_grad(parameter, i, j, clear_lp_grads=False)
        self.added.add(id(parameter))

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Keep DeepSpeed from adding gradients after the pass, and add those that were not sent during it."""
        self.added.clear()
        previous_setting = self.optimizer.immediate_grad_update
        self.optimizer.immediate_grad_update = True  # with it, update_hp_grads does nothing
        try:
            yield  # here the last backward pass runs
        finally:
            self.optimizer.immediate_grad_update = previous_setting
        # Add the gradients that were not sent during the pass, too. ReduceTiedGrads reads the float32 sums of
        # tied weights.
        for i, group in enumerate(self.optimizer.bf16_groups):
            for j, parameter in enumerate(group):
                self._add_to_sum(parameter, i, j)


class ZeroGradients(PlainGradients):
    """Gradients of ZeRO 1, whose optimizer collects those of its own partition from the averages of all."""

    def __init__(self, engine: Any):
        super().__init__(engine)
        self.communication_dtype = self.optimizer.communication_data_type
        self.positions = {}  # id of a parameter -> index of its parameter group
        for i, group in enumerate(self.optimizer.bit16_groups):
            for parameter in group:
                self.positions[id(parameter)] = i

    def gradient(self, parameter: Any) -> Any:
        """Return the tensor with the gradient of a parameter that ZeRO's optimizer reduces."""
        return self.optimizer.get_gradient_for_reduction(parameter)

    def owners(self) -> Callable[[Any], list[PartOfGradient]] | None:
        """Return the function that divides a gradient among the ranks that need its parts, or None.

        None means that every rank needs all gradients.
        """
        if not self.optimizer.reduce_scatter:
            return None
        if read_by_version("muon", self.optimizer):
            # Muon updates a matrix as a whole: every rank that holds a part of it needs all of its gradient.
            return None
        return self._parts_of

    def _parts_of(self, parameter: Any) -> list[PartOfGradient]:
        """Return which rank updates which elements of a parameter, in the order of the elements.

        DeepSpeed's average_tensor sends each rank the gradient of its elements only.
        """
        from torch.distributed import get_process_group_ranks

        optimizer = self.optimizer
        group = self.positions[id(parameter)]  # index of the parameter group
        key = optimizer.get_param_id(parameter)
        ranks = get_process_group_ranks(optimizer.real_dp_process_group[group])
        partitions = optimizer.param_to_partition_ids[group][key]  # with elements of the parameter
        # Partition -> parameter -> the first element of the parameter that is in the partition.
        first_elements = optimizer.grad_start_offset[group]
        rank_of_start = []  # pairs (first element, rank)
        for partition in partitions:
            start = int(first_elements[partition][key])  # DeepSpeed stores some of them as floats
            rank_of_start.append((start, ranks[partition]))
        rank_of_start.sort()

        later_starts = [start for start, _ in rank_of_start[1:]]
        ends = [*later_starts, parameter.numel()]
        parts = []
        for (start, rank), end in zip(rank_of_start, ends):
            parts.append(PartOfGradient(elements=end - start, rank=rank))
        return parts

    def predivide(self, ranks: int) -> float:
        """Return by what ZeRO's optimizer divides gradients before it sums them.

        Args:
            ranks: The data-parallel size.
        """
        # With reduce_scatter, the default, ZeRO's average_tensor divides before the sum.
        divides_before = self.optimizer.reduce_scatter and self.engine.gradient_average
        return float(ranks) if divides_before else super().predivide(ranks)

    def after_reduction(self) -> None:
        """Collect the gradients of this rank's partition, as DeepSpeed does after its own reduction.

        DeepSpeed's allreduce_gradients reduces and collects. Here it runs with empty functions in place of
        those that reduce, because all gradients have been reduced.
        """
        # The functions that reduce: with DeepSpeed's setting contiguous_gradients, and without it.
        names = ("average_tensor", "buffered_reduce_fallback")
        for name in names:
            # An attribute of the object hides the method of its class.
            setattr(self.optimizer, name, lambda *args, **kwargs: None)
        try:
            # The gradients of all micro-batches are complete. DeepSpeed's _exec_reduce_grads sets this, too.
            self.engine._force_grad_boundary = True
            self.engine.allreduce_gradients()
        finally:
            self.engine._force_grad_boundary = False
            for name in names:
                delattr(self.optimizer, name)  # the method of the class is in effect again
