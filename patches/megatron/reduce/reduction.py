"""Overlaps megatron-core's gradient reductions with the backward pass, on every pipeline stage that needs it.

megatron-core's DistributedDataParallel can cut gradients into buckets, and reduce each bucket while the
backward pass goes on. It does so on the first pipeline stage only. That suits stages with equal networks. The
plan (holmes's decisions for a job) has the stages that overlap, and the bucket size that suits the network of
each stage. This module passes these values to megatron-core:

    DistributedDataParallel.__init__                         overlap and bucket size, in its ddp_config
    _ParamAndGradBuffer.__init__                             the bucket size, on later stages too
    DistributedOptimizer._compute_per_buffer_param_layout    a bucket size that needs no padding (0.18, 0.19)

Checkpoints can depend on the distributed optimizer's buckets. These are changed only under --holmes-overlap
on, or if megatron_lm.py has found that no checkpoint of the job depends on them. Under --holmes-overlap on,
updated weights are also gathered during the next forward pass (gather.py). The distributed optimizer itself
is never switched on, because checkpoints would then have another format.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.megatron.core import job
from holmes_ext.patches.megatron.features import REDUCTION
from holmes_ext.patches.megatron.reduce import buckets as megatron_buckets
from holmes_ext.patches.megatron.reduce import gather as megatron_gather
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, group_ranks
from holmes_ext.runtime.session import Session, tell

FLOAT32_BYTES = 4
#: Elements of a bucket of the DistributedDataParallel whose constructor runs now; None: megatron-core's size.
#: The constructor's wrapper sets it. The wrappers of functions that the constructor calls read it.
_planned_bucket_size: ContextVar[int | None] = ContextVar("planned bucket size", default=None)
#: True once megatron_lm.py has found that no checkpoint depends on the distributed optimizer's buckets.
checkpoints_allow_buckets = False


def may_change_optimizer_buckets(current: Session) -> bool:
    """Return whether holmes may set another bucket size for the distributed optimizer.

    It may if no checkpoint of the job depends on the buckets, or if the user gave the option
    `--holmes-overlap on`.
    """
    return checkpoints_allow_buckets or current.options.overlap == "on"


def warn_that_buckets_stay(current: Session, other_option: str = "") -> None:
    """Print once that the distributed optimizer's bucket size stays, and how to change that.

    The format of this optimizer's checkpoints depends on the bucket size. The size must therefore
    be the same in all checkpoints of a job. With the option `--holmes-overlap on`, the user allows
    holmes to set another size. The option must be given before the first checkpoint. Then the
    buckets are reduced during the backward pass, and updated weights are gathered during the next
    forward pass.

    Args:
        other_option: An option of Megatron-LM that makes checkpoints independent of the buckets, so
            that their size may change. The message names it, too. "" if there is none.
    """
    alternative = f"{other_option}, or " if other_option else ""
    tell(
        current,
        "the distributed optimizer's buckets stay as they are, since checkpoints may depend on "
        f"them; {alternative}--holmes-overlap on from the first checkpoint lets them, and weights, travel "
        "while the job computes",
        once="distributed optimizer's buckets",
    )


@with_session
@by_name
def _reduce_as_planned(current: Session, call: Call, instance: Any) -> Any:
    """Construct a DistributedDataParallel that overlaps its gradient reductions, if holmes planned it so.

    This wrapper runs in place of DistributedDataParallel.__init__; call() runs the original. megatron-core
    overlaps gradient reductions with the backward pass, in buckets, on the first pipeline stage only. The
    constructor reads overlap and bucket size from its argument `ddp_config`. It is changed before the call.
    The plan (holmes's decisions for this job) has a bucket size for the network of each stage.
    """
    sizes = job.sizes or current.plan.sizes  # parallel sizes
    if sizes is None:
        return call()
    arguments = call.arguments()
    ddp_config = arguments["ddp_config"]
    group = _reduction_group(arguments)
    ranks = group_ranks(group)
    backend = backend_of(group)
    stage = sizes.stage(current.rank)
    planned = current.stages(sizes, backend)[stage]  # the planned gradient reduction of this stage
    network = current.fabric_of(ranks, backend)  # None: inside one node, or the backend chooses it
    if not planned.overlap or network is None:
        return call()
    if ddp_config.use_distributed_optimizer and not may_change_optimizer_buckets(current):
        warn_that_buckets_stay(current)
        # For the job's report: it compares the reductions with the plan. reported: the user has
        # been warned already, so the report says no more about this one, and its size is not
        # needed.
        overlap = ddp_config.overlap_grad_reduce
        session.note_reduction(
            ranks, planned, size=0, hierarchical=False, overlap=overlap, reported=True
        )
        return call()

    parameter_count = sum(p.numel() for p in arguments["module"].parameters() if p.requires_grad)
    gradient_bytes = FLOAT32_BYTES * parameter_count
    bucket_bytes = current.reduction(ranks, backend, gradient_bytes).bucket_bytes
    bucket_elements = max(1, bucket_bytes // FLOAT32_BYTES)
    _set_overlap_and_buckets(ddp_config, bucket_elements, rank_count=len(ranks))

    # _set_overlap_and_buckets() sets this attribute.
    overlap_was_switched_on = getattr(ddp_config, "overlap_by_plan", False)
    if overlap_was_switched_on:
        _no_sync_between_micro_batches(arguments["config"], instance)

    # Under --holmes-overlap on, updated weights are gathered during the next forward pass.
    # set_gather_overlap() sets that in ddp_config, if this model allows it.
    gathers_weights = megatron_gather.set_gather_overlap(ddp_config)
    result = _construct(call, arguments)
    if gathers_weights:
        megatron_gather.finish_gathers_before_state_dict(instance)

    # For the job's report. This is megatron-core's own reduction: it is not hierarchical.
    overlap = ddp_config.overlap_grad_reduce
    session.note_reduction(ranks, planned, gradient_bytes, hierarchical=False, overlap=overlap)
    return result


def _set_overlap_and_buckets(ddp_config: Any, elements: int, rank_count: int) -> None:
    """Set overlap and bucket size in a DistributedDataParallelConfig, unless the program has chosen them.

    The configuration is changed in place, as megatron-core itself does for its defaults. The chunks
    of a model normally share one configuration object, so the change holds for later chunks, too.
    The attributes buckets_by_plan and overlap_by_plan are holmes's own: they mark values that this
    function has set.

    Args:
        elements: Planned number of elements of a bucket.
        rank_count: Number of ranks that reduce the gradients.
    """
    default_size = max(40_000_000, 1_000_000 * rank_count)  # megatron-core's, in elements
    # megatron-core writes its default into the configuration, so that value is no choice of the
    # program.
    program_has_chosen_size = ddp_config.bucket_size not in (None, default_size)
    if not program_has_chosen_size:
        # Never above megatron-core's default: the reduction of a larger bucket would start later.
        ddp_config.bucket_size = min(elements, default_size)
        ddp_config.buckets_by_plan = True
    if not ddp_config.overlap_grad_reduce:
        ddp_config.overlap_grad_reduce = True
        ddp_config.overlap_by_plan = True


def _construct(call: Call, arguments: Mapping[str, Any]) -> Any:
    """Run DistributedDataParallel's constructor with the bucket size of its ddp_config on every stage.

    megatron-core's constructor uses that size on the first pipeline stage only. On later stages it
    makes a single bucket. That cannot be reduced before the backward pass has ended.

    Args:
        call: Runs the constructor.
        arguments: The constructor's arguments, by name.
    """
    ddp_config = arguments["ddp_config"]
    if arguments["disable_bucketing"]:  # the program itself wants a single bucket, on every stage
        bucket_size = None
    else:
        bucket_size = ddp_config.bucket_size

    # Since megatron-core 0.18, the layout of the distributed optimizer's buckets is an argument.
    takes_layout = "full_param_layout" in arguments and ddp_config.use_distributed_optimizer
    # The constructor calls functions of megatron-core that make buffers and layouts. holmes has
    # wrapped them. The wrappers, _bucket_as_planned and _lay_out_unpadded, read this ContextVar and
    # pass its bucket size on in place of megatron-core's.
    token = _planned_bucket_size.set(bucket_size)
    try:
        if takes_layout and bucket_size is not None:
            # The argument is a layout in buckets of that size, by megatron-core's own function.
            return call(full_param_layout=_distributed_layout(arguments, bucket_size))
        return call()
    finally:
        _planned_bucket_size.reset(token)


def _reduction_group(arguments: Mapping[str, Any]) -> Any:
    """Return the process group that reduces the gradients of a DistributedDataParallel.

    Args:
        arguments: Arguments of its constructor, by name.
    """
    from megatron.core import parallel_state

    # A program can pass its groups. The argument's name differs between versions of megatron-core.
    program_groups = arguments.get("pg_collection") or arguments.get("grad_comm_pgs")
    group = getattr(program_groups, "dp_cp", None)  # data-parallel and context-parallel ranks
    return group or parallel_state.get_data_parallel_group(with_context_parallel=True)


def _no_sync_between_micro_batches(config: Any, ddp: Any) -> None:
    """Make megatron-core's schedules reduce gradients only in the last micro-batch of a step.

    The schedules run all other micro-batches inside the context config.no_sync_func(). A program
    that overlaps reductions sets this attribute. This function sets it if holmes has switched the
    overlap on in a program that does not overlap.

    Args:
        config: Configuration of the model.
        ddp: The DistributedDataParallel of this chunk of the model.
    """
    if config.virtual_pipeline_model_parallel_size:
        # Interleaved schedule: the attribute is a list with one function for each chunk of the
        # model. The caller runs once for each chunk, in order, and each time one is appended.
        config.no_sync_func = [*(config.no_sync_func or []), ddp.no_sync]
    elif config.no_sync_func is None:
        config.no_sync_func = ddp.no_sync


def _distributed_layout(arguments: Mapping[str, Any], elements: int) -> Any:
    """Return a layout of the distributed optimizer's gradients in buckets of the given size.

    DistributedDataParallel of megatron-core 0.18 and later takes such a layout as an argument. On
    later pipeline stages, megatron-core passes a layout with a single bucket. Such a bucket cannot
    be reduced before the backward pass has ended. Therefore holmes passes this layout instead, on
    every stage.

    Args:
        arguments: Arguments of DistributedDataParallel's constructor, by name.
        elements: Number of elements of a bucket.

    Returns:
        The result of megatron-core's own function, DistributedOptimizer.compute_full_param_layout.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    ddp_config = arguments["ddp_config"]
    parameters = [p for p in arguments["module"].parameters() if p.requires_grad]
    groups = ProcessGroupCollection.setup_process_groups_for_ddp(
        arguments["pg_collection"], arguments["config"], ddp_config
    )
    reducing_ranks = groups["intra_dp_cp_group"].size()  # data-parallel x context-parallel ranks
    return DistributedOptimizer.compute_full_param_layout(
        parameters,
        elements,
        reducing_ranks,
        ddp_config,
        expert_data_parallel_world_size=groups["intra_expt_dp_group"].size(),
    )


@by_name
def _bucket_as_planned(
    call: Call,
    instance: Any,
    bucket_size: Any,
    ddp_config: Any,
    data_parallel_group: Any,
    params: Any = None,
    params_with_names: Any = (),
    param_layout: Any = None,
) -> Any:
    """Construct a _ParamAndGradBuffer with the planned bucket size, on later pipeline stages too.

    This wrapper runs in place of _ParamAndGradBuffer.__init__; call() runs the original. That constructor
    cuts the gradients into buckets. Its argument bucket_size is replaced by the planned size in two
    cases:

    - It is None, a single bucket. megatron-core passes None on all stages but the first.
    - It is a size that holmes has put into ddp_config. A size that the program has chosen stays.

    In megatron-core before 0.18 this constructor also cuts the distributed optimizer's buckets, and
    pads them. Checkpoints of these versions are wrong with padded buckets. Therefore the
    distributed optimizer gets the size nearest to the planned one that needs no padding.
    """
    # _construct() sets this ContextVar while DistributedDataParallel's constructor runs. None:
    # holmes has not planned this buffer, or the program wants a single bucket.
    elements = _planned_bucket_size.get()
    if elements is None:
        return call()

    # _set_overlap_and_buckets() has marked ddp_config if holmes has chosen the size in it.
    is_size_of_holmes = getattr(ddp_config, "buckets_by_plan", False)
    if bucket_size is not None and not is_size_of_holmes:
        return call()
    if ddp_config.use_distributed_optimizer and param_layout is None:  # megatron-core before 0.18
        if not params:  # megatron-core 0.17 has params_with_names in place of params
            params = [param for param, _ in params_with_names]
        rank_count = data_parallel_group.size()
        # None, a single bucket, if no size near the planned one needs no padding.
        elements = megatron_buckets.unpadded_size_for_buffer(
            params, rank_count, ddp_config, elements
        )
    return call(bucket_size=elements)


@by_name
def _lay_out_unpadded(
    call: Call,
    instance: Any,
    params: Any,
    bucket_size: Any,
    data_parallel_world_size: Any,
    ddp_config: Any,
) -> Any:
    """Lay out the distributed optimizer's buckets with a bucket size that needs no padding.

    This wrapper runs in place of DistributedOptimizer._compute_per_buffer_param_layout; call() runs the
    original. It pads buckets. In megatron-core 0.18 and 0.19, fully reshardable checkpoints are wrong if
    buckets are padded. Of the sizes without padding, the one nearest to the planned bucket size is used.

    Args:
        params: Parameters whose gradients are laid out.
        bucket_size: megatron-core's size. It is replaced without being read.
        data_parallel_world_size: Number of ranks that reduce the gradients.
        ddp_config: DistributedDataParallelConfig.
    """
    # _construct() sets this ContextVar while DistributedDataParallel's constructor runs. None:
    # holmes has not planned these buckets, or the program wants a single one.
    elements = _planned_bucket_size.get()
    if elements is None:
        return call()
    # None, a single bucket, if no size near the planned one needs no padding.
    unpadded_size = megatron_buckets.unpadded_size_for_buffer(
        params, data_parallel_world_size, ddp_config, elements
    )
    return call(bucket_size=unpadded_size)


PATCHES = (
    Patch(
        REDUCTION,
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
        "megatron-core makes buckets on the first stage only; later stages on slow networks need them, too",
        _reduce_as_planned,
        parameters=("config", "ddp_config", "module", "disable_bucketing"),
    ),
    Patch(
        REDUCTION,
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
        "megatron-core passes no bucket size on later stages",
        _bucket_as_planned,
    ),
    Patch(
        REDUCTION,
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._compute_per_buffer_param_layout",
        "checkpoints of these versions are wrong if buckets are padded",
        _lay_out_unpadded,
        only=">=0.18,<0.20",
    ),
)
