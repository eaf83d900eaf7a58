"""Experts of megatron-core's MoE layers live where `holmes plan --experts` placed them (--holmes-experts
FILE).

    stock    expert e: rank e // n of its expert-parallel group, slot e % n       n experts on each rank
    placed   slot s of all ranks, one after the other, holds expert order[s]

Once a layer is made, its router's rows and its experts' weights change places: what a token's expert
computes, and what it is trained with, is what it was; only the number it goes by is another. Checkpoints hold
the placed order; one that was saved without it is trained on in its own order, which costs traffic and
changes nothing else.

Each slot's weights are gathered over the expert-parallel group, once, a slot at a time: (ranks of the group)
x (an expert's bytes) beside the model. All of its ranks make their layers in the same order. Over NCCL: read,
not run.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.megatron.features import EXPERTS
from holmes_ext.plan.experts.traffic import ExpertOrder, load_order
from holmes_ext.runtime import session

#: Of TEGroupedMLP's linear layers: weight3, bias3 are those of its slot 3.
_GROUPED = re.compile(r"(.*\.)(?:weight|bias)(\d+)$")
#: Buffers and parameters of a router that have a row for each expert.
_ROWS = ("weight", "bias", "expert_bias", "local_tokens_per_expert")

_load = cache(load_order)


def _layer_numbered(wrapped, instance, args, kwargs):
    """BaseMoELayer.set_layer_number, the last thing that a transformer layer does to its experts."""
    wrapped(*args, **kwargs)
    current = session.active()
    if current is not None and not hasattr(instance, "holmes_placed"):
        path = current.options.experts
        if (order := _load(path).of(instance.layer_number)) is not None:
            place(instance, order, _load(path), path)
            instance.holmes_placed = True


def place(layer: Any, order: tuple[int, ...], given: ExpertOrder, path: str) -> None:
    """Give the slots of a MoELayer the weights of the experts in `order`. Collective over its expert-parallel
    group; HolmesError on all of its ranks where the order does not fit."""
    import torch
    import torch.distributed as dist

    ranks, per_rank = dist.get_world_size(layer.ep_group), layer.num_local_experts
    reason = None
    if (given.ranks, len(order)) != (ranks, ranks * per_rank):
        reason = (f"it is for {len(order)} experts on {given.ranks} ranks, "
                  f"this layer has {ranks * per_rank} on {ranks}")
    elif layer.config.moe_router_num_groups:
        reason = "the router chooses among groups of experts that are neighbours (moe_router_num_groups)"
    slots = _slots(layer.experts, per_rank)
    if reason is None and slots is None:
        reason = (f"experts of {type(layer.experts).__name__} are not supported; use moe_grouped_gemm with "
                  "Transformer Engine, or no grouped GEMM")
    if reason is not None:
        raise HolmesError(f"{path}, MoE layer {layer.layer_number}: {reason}")
    assert slots is not None
    mine = order[dist.get_rank(layer.ep_group) * per_rank :][:per_rank]
    with torch.no_grad():
        flat = [_for_group(torch.cat([p.detach().flatten() for p in slot]), layer.ep_group) for slot in slots]
        for source in range(per_rank):
            gathered = [torch.empty_like(flat[source]) for _ in range(ranks)]
            dist.all_gather(gathered, flat[source], group=layer.ep_group)
            for slot, expert in zip(slots, mine):
                if expert % per_rank == source:
                    _fill(slot, gathered[expert // per_rank])
        for name in _ROWS:
            rows = getattr(layer.router, name, None)
            if rows is not None:
                rows.data.copy_(rows.data[torch.tensor(order, device=rows.device)])


def _for_group(values: Any, group: Any) -> Any:
    """On a device of the group's backend: use_cpu_initialization makes weights on the CPU, which NCCL
    cannot read."""
    import torch

    here = values.device.type in {device.type for device in group._device_types}
    return values if here else values.to(torch.device("cuda", torch.cuda.current_device()))


def _slots(experts: Any, count: int) -> list[list[Any]] | None:
    """The parameters of each local expert, in one order; None where they cannot be told apart."""
    if hasattr(experts, "local_experts"):
        return [list(expert.parameters()) for expert in experts.local_experts]
    slots: list[list[Any]] = [[] for _ in range(count)]
    for name, parameter in experts.named_parameters():
        match = _GROUPED.match(f".{name}")
        if match is None:
            return None
        slots[int(match[2])].append(parameter)
    return slots


def _fill(slot: list[Any], flat: Any) -> None:
    for parameter, piece in zip(slot, flat.split([p.numel() for p in slot])):
        parameter.data.copy_(piece.view_as(parameter))


PATCHES = (
    Patch(EXPERTS, "megatron.core.transformer.moe.moe_layer:BaseMoELayer.set_layer_number",
          "a layer's experts are made", _layer_numbered, parameters=("layer_number",)),
)  # fmt: skip
