"""What one rank of a pipeline stage holds at its fullest, term by term.

    weights, gradients, optimizer   by the ZeRO stage: 1 divides the optimizer by
                                    the data-parallel ranks, 2 gradients too, 3 all
    activations                     what each layer keeps of a micro-batch (plan/cost/model.py: Korthikanti et
                                    al. 2022, arXiv 2205.05198) x the micro-batches in flight on the stage
    working                         the layer that is recomputed right now, logits with their
                                    gradient, and the buckets of gradients that have memory
                                    of their own (plan/buckets.py)

Under way on stage s of p: min(p - s, m) under 1F1B; with v chunks a stage min(m, (2 (p - s - 1) + (v - 1) p +
1) / v), Megatron's warm-up (Narayanan et al. 2021, arXiv 2104.04473, section 2.2; the first stage's is the
paper's 1 + (p - 1) / (p v) of p). Not counted: the allocator's fragments, NCCL's buffers and the CUDA
context. tests/plan/cost/test_memory.py compares with the bytes that torch holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from holmes_ext.plan.cost.model import Layer, Model


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def terms(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def states(model: Model) -> dict[str, float]:
    """Bytes of one parameter when nothing is shared: their sum is the model's state_bytes + sharded_bytes."""
    total = model.state_bytes + model.sharded_bytes
    weights = min(float(model.activation_width), total)
    gradients = min(float(model.gradient_width), total - weights)
    return {"weights": weights, "gradients": gradients, "optimizer": total - weights - gradients}


def state_bytes(model: Model, layer: Layer, shards: int, expert_shards: int) -> float:
    """All three of a layer on one rank; what ZeRO divides is the model's sharded_bytes."""
    whole, shared = model.state_bytes, model.sharded_bytes
    dense = layer.parameters - layer.expert_parameters
    return dense * (whole + shared / shards) + layer.expert_parameters * (whole + shared / expert_shards)


def in_flight(stage: int, pipeline: int, virtual: int, micro_batches: int) -> float:
    """Micro-batches (of the whole stage) whose activations the stage keeps at most."""
    if virtual == 1:
        return min(pipeline - stage, micro_batches)
    return min(micro_batches, (2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1) / virtual)


def working_bytes(model: Model, tensor: int = 1, context: int = 1, expert: int = 1) -> float:
    """Of a block: all that its forward keeps while it is recomputed; 0 without recomputation."""
    if model.recompute == "none":
        return 0.0
    sizes = tensor, context, expert
    whole, kept = (replace(model, recompute=name).costs(*sizes)[1].kept_bytes
                   for name in ("none", model.recompute))
    return whole - kept


def stage_memory(
    model: Model, layers: Sequence[Layer], zero: int = 0, shards: int = 1, expert_shards: int = 0,
    in_flight: float = 1.0, working: float = 0.0,
) -> Memory:
    """A stage that holds `layers` (of model.costs()); shards, expert_shards: what ZeRO divides by."""
    experts = sum(layer.expert_parameters for layer in layers)
    rest = sum(layer.parameters for layer in layers) - experts
    parts = states(model)

    def share(name: str, from_stage: int) -> float:
        if zero < from_stage:
            return parts[name] * (rest + experts)
        return parts[name] * (rest / shards + experts / (expert_shards or shards))

    kept = in_flight * sum(layer.kept_bytes for layer in layers)
    return Memory(share("weights", 3), share("gradients", 2), share("optimizer", 1), kept, working)
