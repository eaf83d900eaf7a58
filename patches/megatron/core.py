"""Compares megatron-core's parallel sizes with the plan, and sets the plan's layers for each pipeline stage.

A plan has holmes's decisions for a job: the node of each rank, the number of layers of each pipeline stage,
and how groups of ranks communicate. The sizes are the numbers of pipeline stages, tensor-parallel ranks and
so on. This module wraps two functions of megatron-core:

    initialize_model_parallel          makes all process groups. Before, the wrapper compares the program's
                                       sizes with the plan's, and ends the job if they differ.
    TransformerConfig.__post_init__    checks the model's configuration. Before, the wrapper sets the plan's
                                       layers, unless the program itself splits the layers over the stages.

Other modules renumber the ranks, choose the network of each group (patches/torch/groups.py), and make
holmes_ext.initialize_model_parallel, which a program can call instead of starting with --holmes (drop_in.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.megatron import p2p as megatron_p2p
from holmes_ext.patches.megatron.features import GROUPS, LAYERS
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.deadline import told_once
from holmes_ext.runtime.groups import communicators
from holmes_ext.runtime.groups.grid import check_grid
from holmes_ext.runtime.session import Session, tell
from holmes_ext.words import counted


class _Job:
    """Parallel sizes of the running job (pipeline stages, tensor-parallel ranks, ...), for other modules."""

    #: Sizes that the last call of initialize_model_parallel received. None: it has not been called, or a plan
    #: cannot describe its arguments.
    sizes: Sizes | None = None


job = _Job()


def sizes_of(arguments: Mapping[str, Any], world_size: int) -> Sizes:
    """Return the parallel sizes (numbers of pipeline stages, tensor-parallel ranks, ...) of a job.

    The number of data-parallel ranks is computed from the world size.

    Args:
        arguments: Arguments of megatron-core's initialize_model_parallel, by name.

    Raises:
        HolmesError: megatron-core could not make groups of these sizes.
    """
    sizes = Sizes(
        pipeline=arguments["pipeline_model_parallel_size"],
        tensor=arguments["tensor_model_parallel_size"],
        context=arguments["context_parallel_size"],
        expert=arguments["expert_model_parallel_size"],
        order=arguments["order"].lower(),
    ).complete(world_size)
    virtual = arguments["virtual_pipeline_model_parallel_size"]
    if virtual is not None and sizes.pipeline == 1:
        raise HolmesError(
            f"virtual_pipeline_model_parallel_size is {virtual}, which needs "
            "pipeline_model_parallel_size 2 or more"
        )
    instances = arguments["num_distributed_optimizer_instances"]
    if instances < 1 or (sizes.data * sizes.context) % instances:
        raise HolmesError(
            f"num_distributed_optimizer_instances is {instances}, which does not divide "
            f"data {sizes.data} x context {sizes.context}"
        )

    # The experts of a stage can have parallel sizes of their own: the same ranks, divided into
    # expert-parallel, tensor-parallel and data-parallel groups in another way.
    ranks_of_stage = sizes.data * sizes.tensor * sizes.context
    expert_tensor = arguments["expert_tensor_parallel_size"] or sizes.tensor
    expert_sizes = (
        f"expert_model_parallel_size {sizes.expert} x expert_tensor_parallel_size {expert_tensor}"
    )
    if ranks_of_stage % (expert_tensor * sizes.expert):
        raise HolmesError(
            f"{expert_sizes} does not divide the {counted(ranks_of_stage, 'rank')} of a stage"
        )
    expert_data = ranks_of_stage // (expert_tensor * sizes.expert)

    # megatron-core computes the ranks of each stage twice: from the sizes of the experts, and from
    # the other sizes. Both give the same ranks if a stage has consecutive ranks ("pp" is last in
    # the order), or if the data-parallel sizes are equal.
    stages_are_contiguous = sizes.order.endswith("pp") or sizes.pipeline == 1
    if expert_data != sizes.data and not stages_are_contiguous:
        raise HolmesError(
            f"order {sizes.order!r} does not end in pp: {expert_sizes} must be tensor "
            f"{sizes.tensor} x context {sizes.context}, or let pp stand last"
        )
    return sizes


def _is_plannable(arguments: Mapping[str, Any]) -> bool:
    """Return whether holmes can plan a job with these arguments of initialize_model_parallel.

    holmes plans jobs in which one model uses all ranks, and whose parallel axes are tensor, context, expert,
    data and pipeline. Some versions of megatron-core have arguments for several models or for further axes.
    """
    has_several_models = (
        arguments.get("rank_offset") or arguments.get("local_world_size") is not None
    )
    if has_several_models:
        return False

    # megatron-core before 0.14: an encoder with pipeline stages of its own.
    if arguments.get("encoder_tensor_model_parallel_size"):
        return False
    if arguments.get("encoder_pipeline_model_parallel_size"):
        return False

    # A further axis, over which tensors are rematerialized (recomputed instead of kept); 1: not used.
    return (
        arguments.get("gtp_remat_size", 1) == 1 and arguments.get("expert_gtp_remat_size", 1) == 1
    )


@with_session
@by_name
def _initialize(current: Session, call: Call, instance: Any) -> Any:
    """Compare the job's parallel sizes with those of holmes's plan, then let megatron-core make its groups.

    This wrapper runs in place of megatron-core's initialize_model_parallel. call() runs that function: it
    receives the sizes (numbers of pipeline stages, tensor-parallel ranks, ...) and makes all process groups.
    A job whose sizes differ from the plan's ends before any group exists.

    In a job with several pipeline stages, also make holmes's own groups for the messages between neighbouring
    stages.

    Raises:
        HolmesError: the sizes cannot be combined, or the plan was made for others (raised by _checked_sizes).
    """
    arguments = call.arguments()
    job.sizes = None  # forget the sizes of an earlier call
    if _is_plannable(arguments):
        job.sizes = _checked_sizes(current, arguments)  # read by other modules of patches/megatron
    # Megatron makes many groups and uses few of them. A communicator occupies memory of the GPU. Therefore
    # each group makes its communicator when the group is first used.
    with communicators.postponed():
        result = call()
    if arguments["pipeline_model_parallel_size"] > 1:
        _make_neighbour_groups()
    return result


def _checked_sizes(current: Session, arguments: Mapping[str, Any]) -> Sizes:
    """Return the parallel sizes in initialize_model_parallel's arguments, if holmes's plan has the same.

    The sizes are the numbers of pipeline stages, tensor-parallel ranks and so on. The plan has holmes's
    decisions for the job, such as the node of each rank.

    Raises:
        HolmesError: the sizes cannot be combined (raised by sizes_of), or the plan was made for other sizes
            (raised by check_grid).
    """
    try:
        sizes = sizes_of(arguments, current.plan.world_size)
    except HolmesError as error:
        # All ranks raise this error. told_once() prints it on one rank, and returns one that prints nothing.
        raise told_once(error) from None
    # Raise an error if the plan's sizes differ; warn if groups would have ranks in several clusters.
    check_grid(current, sizes, arguments["num_distributed_optimizer_instances"])
    return sizes


def _make_neighbour_groups() -> None:
    """Make a process group for each pair of neighbouring pipeline stages, for the messages between them.

    All ranks of a pipeline must call this function.
    """
    from megatron.core import parallel_state

    pipeline_groups = parallel_state.get_pipeline_model_parallel_group()
    if not isinstance(pipeline_groups, list):  # a list: the rank is in several pipelines
        pipeline_groups = [pipeline_groups]
    for pipeline_group in pipeline_groups:
        megatron_p2p.neighbour_groups_of(pipeline_group)


#: Fields of TransformerConfig, besides the layout, by which a program splits the layers over the stages. Each
#: takes precedence over the plan.
_SPLIT_FIELDS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def layout_of(layers: tuple[int, ...], mtp_layers: int = 0) -> str:
    """Return a value of megatron-core's pipeline_model_parallel_layout, such as "Ettt|tL".

    The letters are "E" for the embedding, "t" for a transformer layer, "m" for a multi-token-prediction layer
    and "L" for the loss. "|" stands between two stages. Multi-token prediction and the loss come last,
    because they read the output of the last transformer layer.

    Args:
        layers: Number of transformer layers of each stage; with the interleaved schedule, of each chunk.
        mtp_layers: Number of multi-token-prediction layers.
    """
    entries = ["t" * count for count in layers]
    entries[0] = "E" + entries[0]
    entries[-1] += "m" * mtp_layers + "L"
    return "|".join(entries)


def _stage_layers_error(plan: Plan, text: str) -> HolmesError:
    """Return an error about the plan's key 'stage_layers'. Of all ranks that raise it, only one prints it."""
    return told_once(HolmesError(f"{plan.source}: key 'stage_layers'{text}"))


def layer_fields_of_end_stages(
    current: Session, layers: tuple[int, ...], pipeline: int
) -> dict[str, int]:
    """Return the TransformerConfig fields that give the first and the last stage their planned layers.

    megatron-core before 0.13 has no pipeline_model_parallel_layout. These two fields are its only way to
    split layers unequally: all stages between the first and the last have the same number of layers.

    Args:
        layers: Planned number of layers of each stage.
        pipeline: Number of stages.

    Raises:
        HolmesError: the plan's stages between the first and the last have different numbers of layers, or a
            stage has several chunks of layers (interleaved schedule).
    """
    first, *middle, last = layers  # `middle`: of the stages between the first and the last
    has_chunks = len(layers) != pipeline
    middle_differs = len(set(middle)) > 1
    if has_chunks or middle_differs:
        split = "+".join(map(str, layers))
        raise _stage_layers_error(
            current.plan,
            f": {split}, but this megatron-core lets only the first and the last stage have layers of their "
            "own; install 0.13 or newer, or plan with equal stages between them and one chunk on each stage",
        )
    fields = {"num_layers_in_first_pipeline_stage": first}

    # megatron-core divides the other layers among the stages without a field, and there must be one. With
    # two stages that is the last stage: it gets the other layers without a field.
    if middle:
        fields["num_layers_in_last_pipeline_stage"] = last
    return fields


def planned_layout(
    current: Session,
    pipeline: int,
    virtual: int,
    layers: int,
    mtp_layers: int,
    own_split: str,
) -> str | None:
    """Return the plan's split of the layers as megatron-core's layout string, such as "Ettt|tL".

    The plan has holmes's decisions for this job. It can give the number of layers of each pipeline stage.

    Args:
        pipeline: Number of stages.
        virtual: Number of chunks of layers on each stage (interleaved schedule), or 1.
        layers: Number of transformer layers of the model.
        mtp_layers: Number of multi-token-prediction layers.
        own_split: How the program itself splits the layers: its layout string, or, if it uses other
            arguments for that, their names; "" if it does not split them.

    Returns:
        None if the plan does not split the layers, or if the program does. If the two splits differ, a
        message says that the program's is used.

    Raises:
        HolmesError: the plan's number of stages or of layers is not the job's.
    """
    plan = current.plan
    if not plan.stage_layers or pipeline == 1:
        return None
    layout = layout_of(plan.stage_layers, mtp_layers)
    if own_split:  # the program's split is used
        if own_split != layout:
            text = f"your own ({own_split}) wins over the plan's ({'+'.join(map(str, plan.stage_layers))})"
            # Print it on rank 0, only once for each `own_split`.
            tell(current, f"layers for each stage: {text}", once=f"layers {own_split}")
        return None
    entries = len(plan.stage_layers)
    if entries != pipeline * virtual:
        raise _stage_layers_error(
            plan,
            f" has {entries} entries, but the job runs pipeline {pipeline} x virtual pipeline {virtual}; "
            "make the plan for these sizes or give a layout of your own",
        )
    total = sum(plan.stage_layers)
    if total != layers:
        raise _stage_layers_error(
            plan,
            f" adds up to {total} layers, but the model has {layers}; make the plan for this model",
        )
    return layout


def check_recompute_groups(plan: Plan, config: Any, last_may_be_shorter: bool) -> None:
    """Raise an error if a pipeline stage's planned layers cannot be divided into recompute groups.

    With full recomputation and recompute_method "uniform", megatron-core keeps the activations only
    at every recompute_num_layers-th layer. The layers between are recomputed together in the
    backward pass: they are a recompute group.

    Args:
        plan: The plan, with the number of layers of each stage.
        config: The TransformerConfig.
        last_may_be_shorter: Whether the installed megatron-core allows a shorter group at the end
            of a stage. If so, every plan fits.

    Raises:
        HolmesError: a stage's number of layers is not a multiple of recompute_num_layers.
    """
    recomputes_groups = (
        config.recompute_granularity == "full" and config.recompute_method == "uniform"
    )
    if last_may_be_shorter or not recomputes_groups:
        return
    group_size = config.recompute_num_layers or 1  # layers
    if any(layers % group_size for layers in plan.stage_layers):
        split = "+".join(map(str, plan.stage_layers))
        raise _stage_layers_error(
            plan,
            f": stages of {split} layers are not whole units of the {group_size} layers that are recomputed "
            "together; this megatron-core needs that: recompute_num_layers 1, or recompute_method block",
        )


@with_session
@by_name
def _set_layers_before_checks(current: Session, call: Call, instance: Any) -> Any:
    """Set the layers that holmes planned for each pipeline stage in a TransformerConfig (`instance`).

    This wrapper runs in place of TransformerConfig.__post_init__. call() runs that method, which checks the
    fields and derives others from them. Until then each field has the program's value.

    Raises:
        HolmesError: the plan's stages or layers are not the model's, or this megatron-core cannot run them
            (raised by functions that _set_planned_layers calls).
    """
    is_hybrid_model = getattr(instance, "is_hybrid_model", False)
    if not is_hybrid_model:  # the layers of a hybrid model follow a pattern of the program's
        _set_planned_layers(current, instance)
    return call()


def _set_planned_layers(current: Session, config: Any) -> None:
    """Set the planned layers of each pipeline stage, unless the program splits the layers itself.

    If the split is the planned one, the settings for recomputing layers are checked against it.

    Args:
        config: TransformerConfig, before megatron-core has checked it.
    """
    own_split = _split_of_program(config)  # a layout such as "Ettt|tL", names of fields, or ""
    mtp_layers = getattr(config, "mtp_num_layers", None) or 0
    pipeline = config.pipeline_model_parallel_size
    virtual = config.virtual_pipeline_model_parallel_size or 1  # chunks of layers on each stage

    # None if the plan has no layers of stages, or if the program has split the layers already.
    layout = planned_layout(current, pipeline, virtual, config.num_layers, mtp_layers, own_split)
    stage_layers = current.plan.stage_layers
    if layout is not None:
        _set_split(current, config, layout)

    # In a job of Megatron-LM, megatron_lm.py has written the planned layout into the program's
    # arguments already. Megatron-LM has copied it into the config, so own_split has it.
    # layout_of() returns the planned layout as such a text, e.g. "Ettt|tL".
    has_planned_split = bool(stage_layers) and own_split == layout_of(stage_layers, mtp_layers)
    if layout is not None or has_planned_split:
        # megatron-core recomputes groups of recompute_num_layers layers. Before it had the module
        # megatron.core.recompute, each stage's number of layers must be a multiple of that.
        check_recompute_groups(
            current.plan, config, last_may_be_shorter=_last_recompute_group_may_be_shorter()
        )


def _split_of_program(config: Any) -> str:
    """Return how the program itself splits the layers over the pipeline stages.

    Returns:
        Its pipeline_model_parallel_layout; or the names of the other fields that it has set to split layers;
        or "".
    """
    # megatron-core before 0.13 has no such field.
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is not None:
        return str(layout)
    return ", ".join(name for name in _SPLIT_FIELDS if getattr(config, name))


def _set_split(current: Session, config: Any, layout: str) -> None:
    """Set the layers that holmes planned for each pipeline stage in a TransformerConfig.

    The fields depend on the installed version of megatron-core.

    Args:
        layout: The planned layers in the notation of pipeline_model_parallel_layout.
    """
    if hasattr(config, "pipeline_model_parallel_layout"):
        config.pipeline_model_parallel_layout = layout
        return
    # megatron-core before 0.13 only has fields for the first and the last stage.
    fields = layer_fields_of_end_stages(
        current, current.plan.stage_layers, config.pipeline_model_parallel_size
    )
    for name, value in fields.items():
        setattr(config, name, value)


@functools.cache
def _last_recompute_group_may_be_shorter() -> bool:
    """Return whether a pipeline stage's number of layers need not be a multiple of recompute_num_layers.

    megatron-core recomputes this number of layers together. Versions that have the module
    megatron.core.recompute make the last such group of a stage shorter. Older versions always
    recompute whole groups: they fail in a shorter one, whose missing layers are not on the stage.

    The search for the module reads folders. Its result is cached, because Megatron-LM's get_batch makes a
    TransformerConfig, which needs the answer, in every micro-batch.
    """
    return find_spec("megatron.core.recompute") is not None


PATCHES = (
    Patch(
        GROUPS,
        "megatron.core.parallel_state:initialize_model_parallel",
        "the parallel sizes of the job are known here, before any group is made",
        _initialize,
        parameters=(
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "num_distributed_optimizer_instances",
            "order",
        ),
    ),
    Patch(
        LAYERS,
        "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        "sets the planned layers of each stage in the public field pipeline_model_parallel_layout",
        _set_layers_before_checks,
    ),
)
