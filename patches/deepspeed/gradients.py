"""Finds the gradients that an optimizer of DeepSpeed reads, so that reduce.py can reduce exactly these.

    optimizer        reads gradients from
    ZeRO 0           the attribute .grad of each parameter
    BF16_Optimizer   float32 sums; it adds .grad to them after each micro-batch
    ZeRO 1           sums over the micro-batches; it reads only the part of them that this rank updates

A class for each of them finds the gradients, knows their divisor, and does the work that remains after the
reduction.
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
    """Return the object that finds the gradients for the optimizer of a DeepSpeed engine.

    The class of the object depends on the optimizer: BF16_Optimizer, ZeRO 1, or any other.
    """
    optimizer_name = type(engine.optimizer).__name__
    if optimizer_name == "BF16_Optimizer":
        return Bf16Gradients(engine)
    if optimizer_name == "DeepSpeedZeroOptimizer":
        return ZeroGradients(engine)
    return PlainGradients(engine)


class PlainGradients:
    """Access to the gradients of a DeepSpeed engine with ZeRO 0, where the optimizer reads .grad.

    gradients_of() makes one object for each engine. The reduction during the backward pass calls it
    to find each gradient and the divisor of the sum. It also returns the ranks that need the sum.
    The subclasses do the same for BF16_Optimizer and ZeRO 1: these read gradients from other
    tensors.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self.optimizer = engine.optimizer
        self.communication_dtype = engine.communication_data_type
        # id of each parameter whose gradient DeepSpeed reduces -> where the optimizer has the
        # parameter (see the subclasses). None: DeepSpeed reduces all gradients, and nothing needs
        # the position.
        self.positions: Any = None

    def gradient(self, parameter: Any) -> Any:
        """Return the tensor that the optimizer reads as the gradient of a parameter."""
        return parameter.grad

    def reduces(self, parameter: Any) -> bool:
        """Return whether DeepSpeed reduces the gradient of a parameter."""
        return self.positions is None or id(parameter) in self.positions

    def predivide(self, ranks: int) -> float:
        """Return the number by which each rank divides its gradients before they are summed.

        It is the divisor of DeepSpeedEngine.allreduce_bucket. If the sum is to be an average, the
        rest of the division follows after the sum.

        Args:
            ranks: The data-parallel size.
        """
        if not self.engine.gradient_average:
            return 1.0  # the user wants the sum, not the average
        if self.engine.postscale_gradients():
            # A factor from ds_config. The sum is divided by the rest, ranks / factor.
            return float(self.engine.gradient_predivide_factor())
        return float(ranks)  # nothing is divided after the sum

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Do nothing around a step's last backward pass; subclasses override this hook.

        Bf16Gradients overrides it: its gradients must be added to float32 sums during the pass.
        """
        yield

    def after_reduction(self) -> None:
        """Do nothing after all gradients have been averaged; subclasses override this hook.

        ZeroGradients overrides it: its optimizer must collect the gradients of the rank's own
        partition.
        """

    def owners(self) -> Callable[[Any], list[PartOfGradient]] | None:
        """Return a function that divides a gradient among the ranks that need its parts; None: all need all.

        The function takes a parameter, and returns the parts of its gradient in the order of the
        elements, each with the rank that needs it. None means that every rank needs all gradients,
        as here.
        """
        return None


class Bf16Gradients(PlainGradients):
    """Access to the gradients of BF16_Optimizer. It keeps float32 sums over the micro-batches.

    DeepSpeed adds the bf16 gradients to these sums after a backward pass, in update_hp_grads. In
    the last backward pass, gradients are sent while the pass runs. Therefore each gradient is added
    to its float32 sum just before the sum is sent, and update_hp_grads then adds nothing.

    With DeepSpeed's setting immediate_grad_update, a hook of DeepSpeed adds each gradient at once.
    """

    def __init__(self, engine: Any):
        super().__init__(engine)
        # id of a parameter -> (index of its parameter group, index in the group)
        self.positions = {}
        for i, group in enumerate(self.optimizer.bf16_groups):
            for j, parameter in enumerate(group):
                self.positions[id(parameter)] = (i, j)
        # ids of parameters: their bf16 gradients of this pass are in the float32 sums already
        self.in_float32_sum: set[int] = set()

    def gradient(self, parameter: Any) -> Any:
        """Return the float32 sum of a parameter's gradients, with that of the last micro-batch added."""
        group, index = self.positions[id(parameter)]
        self._add_to_float32_sum(parameter, group, index)
        return self.optimizer.fp32_groups_gradients[group][index]

    def _add_to_float32_sum(self, parameter: Any, group: int, index: int) -> None:
        """Add the bf16 gradient of a parameter to its float32 sum, once in a pass.

        Nothing is added if an earlier call in this pass, or a hook of DeepSpeed, has added it
        already.

        Args:
            group: Index of the parameter's group in the optimizer.
            index: Index of the parameter in the group.
        """
        if id(parameter) in self.in_float32_sum:
            return
        # With DeepSpeed's setting immediate_grad_update, a hook of DeepSpeed adds each gradient as soon as it
        # is computed. read_by_version() finds the setting where the installed release stores it.
        is_added_by_deepspeed = read_by_version("immediate_grad_update", self.engine)
        if not is_added_by_deepspeed:
            # "hp" is high precision (float32), "lp" low precision (bf16).
            self.optimizer._update_hp_grad(parameter, group, index, clear_lp_grads=False)
        # Now the sum has the gradient: it was added above or by the hook.
        self.in_float32_sum.add(id(parameter))

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Add each bf16 gradient of the last backward pass to its float32 sum exactly once.

        BF16_Optimizer keeps a float32 sum of each parameter's bf16 gradients over the
        micro-batches. The last backward pass of a step runs inside this context:

        1. During the pass, gradient() adds each gradient just before the sum is sent to the other
           ranks. The set in_float32_sum records the parameter.
        2. At the end of the pass, DeepSpeed calls update_hp_grads. Normally this adds all
           gradients. Here it is made to do nothing, or it would add those of step 1 twice.
        3. After the pass, this method adds the gradients that step 1 has not added.
        """
        self.in_float32_sum.clear()
        previous_setting = self.optimizer.immediate_grad_update
        # With this attribute, update_hp_grads does nothing. It does not switch on DeepSpeed's hooks
        # that add each gradient at once: they exist only if ds_config has the setting.
        self.optimizer.immediate_grad_update = True
        try:
            yield  # here the last backward pass runs
        finally:
            self.optimizer.immediate_grad_update = previous_setting

        # Gradients that were not sent during the pass. For example those of tied weights (shared by
        # two stages): they are sent after DeepSpeed's ReduceTiedGrads. That reads their float32
        # sums. _add_to_float32_sum() skips the parameters in in_float32_sum.
        for group, parameters in enumerate(self.optimizer.bf16_groups):
            for index, parameter in enumerate(parameters):
                self._add_to_float32_sum(parameter, group, index)


class ZeroGradients(PlainGradients):
    """Access to the gradients of ZeRO 1, where each rank updates only its own part of the weights.

    Such a part is called a partition. When all gradients have been averaged over the ranks, the
    optimizer copies the averages of the rank's own partition. It updates the weights from this
    copy.
    """

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
        """Return a function that divides a gradient among the ranks that need its parts; None: all need all.

        The function takes a parameter, and returns the parts of its gradient in the order of the
        elements, each with the rank that needs it. None means that every rank needs all gradients.
        """
        if not self.optimizer.reduce_scatter:
            return None  # the user's setting: all ranks get all averages, by an all-reduce
        if read_by_version("muon", self.optimizer):
            # Muon updates a matrix as a whole: every rank that holds a part of it needs all of its gradient.
            return None
        return self._parts_of

    def _parts_of(self, parameter: Any) -> list[PartOfGradient]:
        """Return the parts of a parameter with the rank that updates each, in the order of the elements.

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
        """Return the number by which each rank divides its gradients before they are summed.

        It is the divisor of ZeRO's optimizer in DeepSpeed.

        Args:
            ranks: The data-parallel size.
        """
        # With reduce_scatter, the default, ZeRO's average_tensor divides before the sum.
        divides_before = self.optimizer.reduce_scatter and self.engine.gradient_average
        return float(ranks) if divides_before else super().predivide(ranks)

    def after_reduction(self) -> None:
        """Copy this rank's part of the averaged gradients to where ZeRO's optimizer reads it.

        The part belongs to the weights that this rank updates (its partition). This method is
        called when all gradients have been averaged over the ranks.

        DeepSpeed's allreduce_gradients averages the gradients, and then makes the copy. This method
        calls allreduce_gradients while the averaging functions are replaced by functions that do
        nothing. So nothing is averaged twice.
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
