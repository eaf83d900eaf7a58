"""Places the experts of megatron-core's MoE layers as `holmes plan --experts` planned (--holmes-experts).

Each rank of an expert-parallel group has n slots, one for each of its experts:

    megatron-core    slot j of rank i holds expert i n + j
    placed           slot j of rank i holds expert order[i n + j], where `order` comes from the file

Once a layer has been constructed, the weights of its experts are moved to the planned slots, and the rows of
its router are reordered accordingly. The layer computes the same as before. Only the numbers of the experts
change, and thereby the ranks that receive the tokens.

Checkpoints contain the experts in the placed order. A job may resume from a checkpoint that was saved without
placing: its results are right, but it sends more between clusters.

Moving needs memory for one expert of each rank of the group. It has been tested over gloo; over NCCL it has
not run.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name
from holmes_ext.patches.megatron.features import EXPERTS
from holmes_ext.plan.experts import ExpertOrder, load_order
from holmes_ext.runtime import session

#: Names of parameters in TEGroupedMLP's linear layers, with the slot: weight3 and bias3 belong to slot 3.
_GROUPED = re.compile(r"(.*\.)(?:weight|bias)(\d+)$")
#: Buffers and parameters of a router that have a row for each expert.
_ROUTER_TENSORS = ("weight", "bias", "expert_bias", "local_tokens_per_expert")

_load_order_once = cache(load_order)


@by_name
def _place_experts_of_layer(call: Call, instance: Any) -> Any:
    """Place the experts of a MoE layer as planned, once the layer has its number.

    This wrapper runs in place of BaseMoELayer.set_layer_number; call() runs the original. It is the last step
    in the construction of a MoE layer. The file of --holmes-experts gives the order of the experts for each
    layer number. If the number is set again, the layer's experts stay where they are.
    """
    call()
    current = session.active()
    is_placed = hasattr(instance, "holmes_placed")
    if current is None or is_placed:
        return
    path = current.options.experts
    placement = _load_order_once(path)  # reads the file for the first layer only
    order = placement.of(instance.layer_number)  # the expert of each slot
    if order is not None:  # None: the file does not place the experts of this layer
        place(instance, order, placement, path)
        instance.holmes_placed = True  # read above, if the number is set again


def place(layer: Any, order: tuple[int, ...], placement: ExpertOrder, path: str) -> None:
    """Move the weights of a MoE layer's experts to the ranks and positions that `order` gives them.

    A slot is the place of one expert on a rank. All ranks of the layer's expert-parallel group must call this
    function.

    Args:
        layer: The MoE layer.
        order: The expert of each slot. Slots are counted over all ranks of the group.
        placement: The placement of all layers. It has the number of ranks that it was made for.
        path: File of the placement, for error messages.

    Raises:
        HolmesError: the order does not fit the layer; raised on all ranks of the group.
    """
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size(layer.ep_group)
    experts = ranks * layer.num_local_experts
    # The parameters in each slot of this rank.
    slots = _parameters_of_slots(layer.experts, layer.num_local_experts)
    source = f"{path}, MoE layer {layer.layer_number}"  # for error messages
    fits_layer = placement.ranks == ranks and len(order) == experts
    if not fits_layer:
        raise HolmesError(
            f"{source}: it is for {len(order)} experts on {placement.ranks} ranks, this layer "
            f"has {experts} on {ranks}"
        )
    if layer.config.moe_router_num_groups:  # another order would change the groups, and the results
        raise HolmesError(
            f"{source}: the router chooses among groups of experts that are neighbours "
            "(moe_router_num_groups)"
        )
    if slots is None:
        raise HolmesError(
            f"{source}: experts of {type(layer.experts).__name__} are not supported; use "
            "moe_grouped_gemm with Transformer Engine, or no grouped GEMM"
        )
    with torch.no_grad():
        _move_weights(slots, order, layer.ep_group)
        # The router has tensors with a row for each expert. Their rows get the same order.
        for name in _ROUTER_TENSORS:
            rows = getattr(layer.router, name, None)
            if rows is not None:
                row_indices = torch.tensor(order, device=rows.device)
                rows.data.copy_(rows.data[row_indices])


def _move_weights(slots: list[list[Any]], order: tuple[int, ...], group: Any) -> None:
    """Exchange weights in the expert-parallel group, so that each slot has those of its planned expert.

    Args:
        slots: The parameters in each slot (place of one expert) of this rank.
        order: The expert of each slot. Slots are counted over all ranks of the group.
        group: The expert-parallel group.
    """
    import torch
    import torch.distributed as dist

    per_rank = len(slots)
    first_slot = dist.get_rank(group) * per_rank
    planned_experts = order[first_slot : first_slot + per_rank]  # of this rank

    # Copies of the weights, because the loop below overwrites the parameters.
    weights_before = []  # of each slot, in one flat tensor
    for slot in slots:
        flat = torch.cat([parameter.detach().flatten() for parameter in slot])
        weights_before.append(_on_device_of(group, flat))

    # megatron-core has expert e in slot e % per_rank of rank e // per_rank. In each iteration, every rank
    # sends the expert of one slot to all ranks, and each rank keeps those that its slots need.
    for source_slot in range(per_rank):
        sent = weights_before[source_slot]
        gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, sent, group=group)
        for slot, expert in zip(slots, planned_experts):
            if expert % per_rank != source_slot:
                continue  # sent in another iteration
            weights = gathered[expert // per_rank]
            pieces = weights.split([parameter.numel() for parameter in slot])
            for parameter, piece in zip(slot, pieces):
                parameter.data.copy_(piece.view_as(parameter))


def _on_device_of(group: Any, values: Any) -> Any:
    """Return a tensor on a device that a process group can send from, copied to the GPU if necessary.

    NCCL cannot send tensors in the memory of the host. Parameters are there under use_cpu_initialization.
    """
    import torch

    device_types = {device.type for device in group._device_types}
    if values.device.type in device_types:
        return values
    return values.to(torch.device("cuda", torch.cuda.current_device()))


def _parameters_of_slots(experts: Any, count: int) -> list[list[Any]] | None:
    """Return the parameters of each local expert, in the same order for all experts.

    Args:
        experts: The module with all experts of this rank.
        count: Number of these experts.

    Returns:
        None if a parameter belongs to several experts.
    """
    if hasattr(experts, "local_experts"):
        return [list(expert.parameters()) for expert in experts.local_experts]
    # TEGroupedMLP: one module with the parameters of all experts, such as weight3.
    slots: list[list[Any]] = [[] for _ in range(count)]
    for name, parameter in experts.named_parameters():
        match = _GROUPED.match(f".{name}")  # the pattern needs a dot before "weight3"
        if match is None:
            return None
        slot = int(match[2])  # the number at the end of the name
        slots[slot].append(parameter)
    return slots


PATCHES = (
    Patch(
        EXPERTS,
        "megatron.core.transformer.moe.moe_layer:BaseMoELayer.set_layer_number",
        "the experts of a layer have been made, and the layer has its number",
        _place_experts_of_layer,
        parameters=("layer_number",),
    ),
)
