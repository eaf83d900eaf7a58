"""megatron-core's experts (MoE) live where `holmes plan --experts` placed them (--holmes-experts FILE).

    stock    expert e: rank e // n of its expert-parallel group, slot e % n       n experts on each rank
    placed   slot s of all ranks, one after the other, holds expert order[s]

Once a layer is made, its router's rows and its experts' weights change places: only an expert's number is
another. Checkpoints hold the placed order; one saved without it is trained on in its own, which costs traffic
and changes nothing else. A slot's weights at a time are gathered over the expert-parallel group: (its ranks)
x (an expert's bytes) beside the model. Over NCCL: read, not run."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.megatron.features import EXPERTS
from holmes_ext.plan.experts.traffic import ExpertOrder, load_order
from holmes_ext.runtime import session

#: Of TEGroupedMLP's linear layers: weight3, bias3 are those of its slot 3.
_GROUPED = re.compile(r"(.*\.)(?:weight|bias)(\d+)$")
#: Buffers and parameters of a router that have a row for each expert.
_ROWS = ("weight", "bias", "expert_bias", "local_tokens_per_expert")

_load = cache(load_order)


@by_name
def _layer_numbered(call, instance):
    """Place the experts of a MoE layer as planned, once its number is known.

    BaseMoELayer.set_layer_number is the last step in which a transformer layer constructs its experts. The
    file of --holmes-experts has an order for each layer number. A layer whose number is set again is not
    placed a second time.
    """
    call()
    current = session.active()
    if current is None or hasattr(instance, "holmes_placed"):
        return
    path = current.options.experts
    placement = _load(path)
    order = placement.of(instance.layer_number)
    if order is not None:
        place(instance, order, placement, path)
        instance.holmes_placed = True


def place(layer: Any, order: tuple[int, ...], given: ExpertOrder, path: str) -> None:
    """Move the weights of a MoE layer's experts to the slots that `order` gives them.

    This is a collective over the layer's expert-parallel group.

    Args:
        order: The expert of each slot, counted over all ranks of the group.
        given: The whole placement, for how many ranks it was made.
        path: Its file, for messages.

    Raises:
        HolmesError: the order does not fit the layer; raised on all ranks of the group.
    """
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size(layer.ep_group)
    per_rank = layer.num_local_experts
    slots = _slots(layer.experts, per_rank)
    where = f"{path}, MoE layer {layer.layer_number}"
    if (given.ranks, len(order)) != (ranks, ranks * per_rank):
        raise HolmesError(f"{where}: it is for {len(order)} experts on {given.ranks} ranks, this layer has "
                          f"{ranks * per_rank} on {ranks}")
    if layer.config.moe_router_num_groups:
        raise HolmesError(f"{where}: the router chooses among groups of experts that are neighbours "
                          "(moe_router_num_groups)")
    if slots is None:
        raise HolmesError(f"{where}: experts of {type(layer.experts).__name__} are not supported; use "
                          "moe_grouped_gemm with Transformer Engine, or no grouped GEMM")
    mine = order[dist.get_rank(layer.ep_group) * per_rank :][:per_rank]
    with torch.no_grad():
        flat = [_for_group(torch.cat([p.detach().flatten() for p in slot]), layer.ep_group) for slot in slots]
        for source in range(per_rank):
            gathered = [torch.empty_like(flat[source]) for _ in range(ranks)]
            dist.all_gather(gathered, flat[source], group=layer.ep_group)
            for slot, expert in zip(slots, mine):
                if expert % per_rank == source:
                    pieces = gathered[expert // per_rank].split([p.numel() for p in slot])
                    for parameter, piece in zip(slot, pieces):
                        parameter.data.copy_(piece.view_as(parameter))
        for name in _ROWS:
            rows = getattr(layer.router, name, None)
            if rows is not None:
                rows.data.copy_(rows.data[torch.tensor(order, device=rows.device)])


def _for_group(values: Any, group: Any) -> Any:
    """On a device of the group's backend: NCCL cannot read those of use_cpu_initialization."""
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


PATCHES = (
    Patch(EXPERTS, "megatron.core.transformer.moe.moe_layer:BaseMoELayer.set_layer_number",
          "a layer's experts are made", _layer_numbered, parameters=("layer_number",)),
)  # fmt: skip
