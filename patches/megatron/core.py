"""megatron-core under a plan: sizes that agree with it, layers for each stage.

    initialize_model_parallel    the job's sizes, order and instances are checked before any group is made
    TransformerConfig            the plan's layers, by the public pipeline_model_parallel_layout (before 0.13:
                                 by num_layers_in_first_pipeline_stage and ..._last_...); a user's split wins

Where groups land is settled before: RANK is renumbered, patches/torch/groups.py gives each its transport."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.call import arguments_of
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.megatron import p2p as megatron_p2p
from holmes_ext.patches.megatron.features import GROUPS, LAYERS
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backends, timeout_of
from holmes_ext.runtime.groups.grid import check_grid, say, tell
from holmes_ext.runtime.start import launcher
from holmes_ext.runtime.start.refusal import told_once
from holmes_ext.runtime.start.store import until_gone


class _Job:
    """What initialize_model_parallel was called with last; None: not yet, or no plan describes it."""

    sizes: Sizes | None = None


job = _Job()


def sizes_of(arguments: Mapping[str, Any], world_size: int) -> Sizes:
    """Complete, of initialize_model_parallel's `arguments` (bound); HolmesError when they cannot be."""
    sizes = Sizes(
        pipeline=arguments["pipeline_model_parallel_size"],
        tensor=arguments["tensor_model_parallel_size"],
        context=arguments["context_parallel_size"],
        expert=arguments["expert_model_parallel_size"],
        order=arguments["order"].lower(),
    ).complete(world_size)
    virtual = arguments["virtual_pipeline_model_parallel_size"]
    if virtual is not None and sizes.pipeline == 1:
        raise HolmesError(f"virtual_pipeline_model_parallel_size is {virtual}, which needs "
                          "pipeline_model_parallel_size 2 or more")
    instances = arguments["num_distributed_optimizer_instances"]
    if instances < 1 or (sizes.data * sizes.context) % instances:
        raise HolmesError(f"num_distributed_optimizer_instances is {instances}, which does not divide "
                          f"data {sizes.data} x context {sizes.context}")
    stage = sizes.data * sizes.tensor * sizes.context
    tensor = arguments["expert_tensor_parallel_size"] or sizes.tensor
    product = f"expert_model_parallel_size {sizes.expert} x expert_tensor_parallel_size {tensor}"
    if stage % (tensor * sizes.expert):
        raise HolmesError(f"{product} does not divide the {stage} ranks of a stage")
    other_data = stage // (tensor * sizes.expert) != sizes.data
    if not sizes.order.endswith("pp") and sizes.pipeline > 1 and other_data:
        raise HolmesError(f"order {sizes.order!r} does not end in pp: {product} must be tensor "
                          f"{sizes.tensor} x context {sizes.context}, or let pp stand last")
    return sizes


def _plan_describes(arguments: Mapping[str, Any]) -> bool:
    """Return whether a plan can describe the grid that initialize_model_parallel's arguments give.

    Some arguments exist only in some versions of megatron-core.
    """
    shares_world = arguments.get("rank_offset") or arguments.get("local_world_size") is not None
    if shares_world:  # several models in one job
        return False
    # An encoder with stages of its own (before 0.14).
    if any(arguments.get(f"encoder_{name}_model_parallel_size") for name in ("tensor", "pipeline")):
        return False
    # Tensors that are rematerialized over a further axis.
    return arguments.get("gtp_remat_size", 1) == arguments.get("expert_gtp_remat_size", 1) == 1


@with_session
@by_name
def _initialize(current, call, instance):
    """Compare the job's sizes with the plan, then make megatron-core's groups and those of stage pairs.

    megatron-core's initialize_model_parallel receives the sizes and makes all process groups. The comparison
    comes first, so that a job which does not fit the plan ends before any group exists.

    Raises:
        HolmesError: the sizes cannot be combined, or the plan was made for others.
    """
    arguments = call.arguments()
    job.sizes = None
    if _plan_describes(arguments):
        try:
            sizes = sizes_of(arguments, current.plan.world_size)
        except HolmesError as error:
            raise told_once(error) from None
        check_grid(current, sizes, arguments["num_distributed_optimizer_instances"])
        job.sizes = sizes
    result = call()
    if arguments["pipeline_model_parallel_size"] > 1:
        from megatron.core import parallel_state

        groups = parallel_state.get_pipeline_model_parallel_group()
        for group in groups if isinstance(groups, list) else [groups]:
            megatron_p2p.pairs_of(group)
    return result


_EARLIER = "call holmes_ext.enable() before init_process_group, or start with --holmes"


@functools.cache
def drop_in(enable: Callable[..., None]):
    """Return holmes_ext.initialize_model_parallel, with the signature of megatron-core's installed function.

    Args:
        enable: holmes_ext.enable, called if holmes has not been switched on yet.

    Raises:
        HolmesError: megatron-core cannot be imported.
    """
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        raise HolmesError("initialize_model_parallel needs megatron-core, which cannot be imported here "
                          f"({error})") from None

    @functools.wraps(parallel_state.initialize_model_parallel)
    def initialize_model_parallel(*args, **kwargs):
        if session.active() is None:
            arguments = arguments_of(parallel_state.initialize_model_parallel, args, kwargs)
            _take_over(arguments, enable)
        return parallel_state.initialize_model_parallel(*args, **kwargs)

    return initialize_model_parallel


def _take_over(asked: Mapping[str, Any], enable: Callable[..., None]) -> None:
    """Although torch.distributed is initialized: the default group is made anew, under the planned ranks."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        raise HolmesError("initialize_model_parallel: call torch.distributed.init_process_group first")
    if len(distributed_c10d._world.pg_map) > 1:
        raise HolmesError(
            "initialize_model_parallel comes too late: the program has made process groups already, and "
            f"ranks cannot change under them; {_EARLIER}")
    sizes = sizes_of(asked, dist.get_world_size())
    # no name for the old group: what holds it keeps its listeners, which ranks of the new one would meet
    arguments = _init_arguments(dist.group.WORLD)
    with until_gone(launcher.detect(os.environ), distributed_c10d._get_default_store()):
        dist.destroy_process_group()
    several = asked["num_distributed_optimizer_instances"] > 1  # see sizes_from_arguments
    enable(**({} if several else {"sizes": say(sizes).replace(" ", "")}))
    dist.init_process_group(**arguments)


def _init_arguments(world: Any) -> dict[str, Any]:
    """Of init_process_group, for a default group like `world`; HolmesError where NCCL has made its
    communicator: by then it has read which HCAs and interface it may use, once for the process."""
    import torch
    import torch.distributed as dist

    backend = dist.get_backend(world)
    arguments: dict[str, Any] = {"backend": backend}
    if "nccl" in backends(backend).values():
        nccl = world._get_backend(torch.device("cuda"))
        if world.bound_device_id is not None or nccl._is_initialized():
            raise HolmesError(
                "initialize_model_parallel comes too late: NCCL has made a communicator already (by "
                "device_id of init_process_group, or for a collective since), and chosen its devices for the "
                f"whole process; {_EARLIER}")
        arguments["pg_options"] = nccl.options
    if (timeout := timeout_of(world)) is not None:
        arguments["timeout"] = timeout
    if world.bound_device_id is not None:
        arguments["device_id"] = world.bound_device_id
    return arguments


#: Other ways in which a user splits layers; any of them wins over the plan.
_OWN_SPLITS = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


def layout_of(layers: tuple[int, ...], mtp_layers: int = 0) -> str:
    """megatron-core's notation for `layers` of each stage (chunk by chunk under the interleaved schedule):
    "Ettt|tL". Multi-token prediction and the loss, which read the last layer, stand at the end."""
    entries = ["t" * count for count in layers]
    entries[0] = "E" + entries[0]
    entries[-1] += "m" * mtp_layers + "L"
    return "|".join(entries)


def _refusal(plan: Plan, text: str) -> HolmesError:
    return told_once(HolmesError(f"{plan.source}: key 'stage_layers'{text}"))


def ends_of(current: session.Session, layers: tuple[int, ...], pipeline: int) -> dict[str, int]:
    """TransformerConfig's fields for `layers` of each stage where it takes no layout; HolmesError when the
    stages between the ends are not alike, or there are several chunks of layers on each stage."""
    first, *between, last = layers
    if len(layers) != pipeline or len(set(between)) > 1:
        split = "+".join(map(str, layers))
        raise _refusal(current.plan, f": {split}, but this megatron-core lets only the first and the last "
                       "stage have layers of their own; install 0.13 or newer, or plan with equal stages "
                       "between them and one chunk on each stage")
    ends = {"num_layers_in_first_pipeline_stage": first}
    if between:  # else it divides what is left among the stages that are left, and must have one
        ends["num_layers_in_last_pipeline_stage"] = last
    return ends


def planned_layout(
    current: session.Session, pipeline: int, virtual: int, layers: int, mtp_layers: int, own_split: str
) -> str | None:
    """The layout string of the plan; None when it leaves the layers to megatron-core or the user splits them
    (`own_split`); HolmesError when its stages are not the job's or its layers not the model's."""
    plan = current.plan
    if not plan.stage_layers or pipeline == 1:
        return None
    layout = layout_of(plan.stage_layers, mtp_layers)
    if own_split:
        if own_split != layout:
            text = f"your own ({own_split}) wins over the plan's ({'+'.join(map(str, plan.stage_layers))})"
            tell(current, f"layers for each stage: {text}", once=f"layers {own_split}")
        return None
    if (entries := len(plan.stage_layers)) != pipeline * virtual:
        raise _refusal(plan, f" has {entries} entries, but the job runs pipeline {pipeline} x virtual "
                       f"pipeline {virtual}; make the plan for these sizes or give a layout of your own")
    if (total := sum(plan.stage_layers)) != layers:
        raise _refusal(plan, f" adds up to {total} layers, but the model has {layers}; make the plan for "
                       "this model")
    return layout


def refuse_cut_units(plan: Plan, config: Any, cuts: bool) -> None:
    """HolmesError when a stage is not whole units of recomputed layers, unless megatron-core `cuts` them."""
    if config.recompute_granularity != "full" or config.recompute_method != "uniform" or cuts:
        return
    unit = config.recompute_num_layers or 1
    if any(layers % unit for layers in plan.stage_layers):
        split = "+".join(map(str, plan.stage_layers))
        raise _refusal(plan, f": stages of {split} layers are not whole units of the {unit} layers that are "
                       "recomputed together; this megatron-core needs that: recompute_num_layers 1, or "
                       "recompute_method block")


@with_session
@by_name
def _layers_as_planned(current, call, instance):
    """Set the plan's layers for each stage in a TransformerConfig, unless the program splits them itself.

    TransformerConfig.__post_init__ checks the fields and derives others. Before it every field is as the
    program gave it, so that the plan's layers can still be set. Hybrid models have a pattern of layers of
    their own.

    Raises:
        HolmesError: the plan's stages or layers are not the model's, or this megatron-core cannot run them.
    """
    if getattr(instance, "is_hybrid_model", False):
        return call()
    has_layout = hasattr(instance, "pipeline_model_parallel_layout")  # from 0.13 on
    own_layout = getattr(instance, "pipeline_model_parallel_layout", None)
    if own_layout is not None:
        own_split = str(own_layout)
    else:
        own_split = ", ".join(name for name in _OWN_SPLITS if getattr(instance, name))
    pipeline = instance.pipeline_model_parallel_size
    virtual = instance.virtual_pipeline_model_parallel_size or 1
    mtp_layers = getattr(instance, "mtp_num_layers", None) or 0
    stage_layers = current.plan.stage_layers

    layout = planned_layout(current, pipeline, virtual, instance.num_layers, mtp_layers, own_split)
    if layout is not None and has_layout:
        instance.pipeline_model_parallel_layout = layout
    elif layout is not None:
        vars(instance).update(ends_of(current, stage_layers, pipeline))
    # Checked too when the program's own layout is the plan's, as Megatron-LM sets it (megatron_lm.py).
    if stage_layers and layout_of(stage_layers, mtp_layers) in (layout, own_split):
        refuse_cut_units(current.plan, instance, _last_unit_ends_with_stage())
    return call()


@functools.cache
def _last_unit_ends_with_stage() -> bool:
    """Return whether a stage's last unit of uniform recomputation may have fewer layers.

    Older versions look for layers that are not on the stage. The module is searched once: Megatron-LM's
    get_batch makes a TransformerConfig in every micro-batch.
    """
    return find_spec("megatron.core.recompute") is not None


PATCHES = (
    Patch(
        GROUPS, "megatron.core.parallel_state:initialize_model_parallel",
        "here the job's sizes become known, before any group is made", _initialize,
        parameters=(
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "virtual_pipeline_model_parallel_size", "expert_model_parallel_size",
            "expert_tensor_parallel_size", "num_distributed_optimizer_instances", "order",
        ),
    ),
    Patch(LAYERS, "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
          "the plan's layers for each stage go in as the public pipeline_model_parallel_layout",
          _layers_as_planned),
)  # fmt: skip
