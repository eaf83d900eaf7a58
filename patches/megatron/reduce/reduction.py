"""megatron-core's gradient reductions under a plan: buckets and overlap on every stage that the plan says.

megatron-core buckets and overlaps on the first pipeline stage only, which is right where all stages have one
network; later ones have one all-reduce after their last backward. Here the plan says which stages overlap and
how large a bucket suits their fabric; buckets, hooks, handles and schedules are megatron-core's own.

The distributed optimizer is never turned on: that changes what checkpoints look like. Where a program runs it
its buckets stay under --holmes-overlap auto, since checkpoints may depend on them (megatron_lm.py knows when
not); with `on` they are the plan's too, and weights travel during the forward pass (gather.py)."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.megatron.core import job
from holmes_ext.patches.megatron.features import REDUCTION
from holmes_ext.patches.megatron.reduce import buckets as megatron_buckets
from holmes_ext.patches.megatron.reduce import gather as megatron_gather
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks
from holmes_ext.runtime.groups.grid import tell

#: Elements of a bucket of the DistributedDataParallel that is being constructed; None: megatron-core's.
_bucket: ContextVar[int | None] = ContextVar("planned bucket", default=None)
#: True once megatron_lm.py has found that no checkpoint depends on the distributed optimizer's buckets.
checkpoints_allow_buckets = False


def may_bucket_optimizer(current: session.Session) -> bool:
    """Return whether the plan may change the distributed optimizer's buckets."""
    return checkpoints_allow_buckets or current.options.overlap == "on"


def tell_that_buckets_stay(current: session.Session, way: str = "") -> None:
    """Print once that the distributed optimizer's buckets are not changed, and what the user can do.

    Args:
        way: A further way out, followed by ", or ".
    """
    tell(current, "the distributed optimizer's buckets stay as they are, since checkpoints may depend on "
         f"them; {way}--holmes-overlap on from the first checkpoint lets them, and weights, travel while the "
         "job computes", once="distributed optimizer's buckets")


@with_session
@by_name
def _reduce_as_planned(current, call, instance):
    """Construct a DistributedDataParallel with overlap and buckets that suit the network of this stage.

    megatron-core overlaps the reduction with the backward pass, and cuts it into buckets, on the first stage
    only. Its constructor reads both from `ddp_config`, which is changed here if the plan has this stage
    overlap. While it runs, `_bucket` carries the bucket size to the wrappers below.
    """
    sizes = job.sizes or current.plan.sizes
    if sizes is None:
        return call()
    given = call.arguments()
    ddp_config = given["ddp_config"]
    group = _reduction_group(given)
    ranks = group_ranks(group)
    backend = backend_of(group)
    stage = current.stages(sizes, backend)[sizes.stage(current.rank)]
    if not stage.overlap or current.fabric_of(ranks, backend) is None:  # nothing to wait for, or in one node
        return call()
    if ddp_config.use_distributed_optimizer and not may_bucket_optimizer(current):
        tell_that_buckets_stay(current)
        overlap = ddp_config.overlap_grad_reduce
        session.note_reduction(ranks, stage, 0, two_levels=False, overlap=overlap, reported=True)
        return call()
    count = sum(param.numel() for param in given["module"].parameters() if param.requires_grad)
    gradient_bytes = 4 * count  # in float32
    elements = max(1, current.reduction(ranks, backend, gradient_bytes).bucket_bytes // 4)
    default = max(40_000_000, 1_000_000 * len(ranks))  # megatron-core's bucket size, in elements
    # In place, as megatron-core itself does it: all chunks of a model must have equal configurations.
    if ddp_config.bucket_size in (None, default):  # else the program's own bucket size wins
        ddp_config.bucket_size = min(elements, default)
        ddp_config.buckets_by_plan = True
    if not ddp_config.overlap_grad_reduce:
        ddp_config.overlap_grad_reduce = ddp_config.overlap_by_plan = True
    if getattr(ddp_config, "overlap_by_plan", False):
        _no_sync_between_micro_batches(given["config"], instance)
    gather = megatron_gather.turn_on(ddp_config)
    bucket_size = None if given["disable_bucketing"] else ddp_config.bucket_size
    takes_layout = "full_param_layout" in given and ddp_config.use_distributed_optimizer  # from 0.18 on
    token = _bucket.set(bucket_size)
    try:
        if takes_layout and bucket_size is not None:
            result = call(full_param_layout=_distributed_layout(given, bucket_size))
        else:
            result = call()
    finally:
        _bucket.reset(token)
    if gather:
        megatron_gather.prepare(instance)
    overlap = ddp_config.overlap_grad_reduce
    session.note_reduction(ranks, stage, gradient_bytes, two_levels=False, overlap=overlap)
    return result


def _reduction_group(given: Mapping[str, Any]) -> Any:
    """Return the group over which a DistributedDataParallel with these arguments reduces gradients."""
    from megatron.core import parallel_state

    pgs = given.get("pg_collection") or given.get("grad_comm_pgs")
    return getattr(pgs, "dp_cp", None) or parallel_state.get_data_parallel_group(with_context_parallel=True)


def _no_sync_between_micro_batches(config, ddp) -> None:
    """Let megatron-core's schedules suppress the reduction in all micro-batches but the last.

    A program that overlaps by itself sets no_sync_func of the config; for one that does not, it is set here.
    """
    if config.virtual_pipeline_model_parallel_size:
        config.no_sync_func = [*(config.no_sync_func or []), ddp.no_sync]
    elif config.no_sync_func is None:
        config.no_sync_func = ddp.no_sync


def _distributed_layout(given: Mapping[str, Any], elements: int):
    """Return the layout of the distributed optimizer's buckets with this number of elements in each.

    From 0.18 on megatron-core computes the layout before it constructs the buffers, on later stages with a
    single bucket.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    ddp_config = given["ddp_config"]
    params = [p for p in given["module"].parameters() if p.requires_grad]
    groups = ProcessGroupCollection.setup_process_groups_for_ddp(given["pg_collection"], given["config"],
                                                                 ddp_config)
    ranks = groups["intra_dp_cp_group"].size()
    experts = groups["intra_expt_dp_group"].size()
    layout = DistributedOptimizer.compute_full_param_layout
    return layout(params, elements, ranks, ddp_config, expert_data_parallel_world_size=experts)


@by_name
def _bucket_as_planned(
    call,
    instance,
    bucket_size,
    ddp_config,
    data_parallel_group,
    params=None,
    params_with_names=(),
    param_layout=None,
):
    """Construct a _ParamAndGradBuffer with the planned bucket size.

    DistributedDataParallel passes a bucket size on the first stage only; None means a single bucket. Before
    0.18 the distributed optimizer's buckets are cut here too. Those get the nearest size that needs no
    padding, because checkpoints of these versions are wrong with padded buckets.
    """
    elements = _bucket.get()
    if elements is None:
        return call()
    if bucket_size is not None and not getattr(ddp_config, "buckets_by_plan", False):
        return call()  # the program's own bucket size
    if ddp_config.use_distributed_optimizer and param_layout is None:  # before 0.18
        params = params or [param for param, _ in params_with_names]  # the parameter's name in 0.17
        ranks = data_parallel_group.size()
        elements = megatron_buckets.of_buffer(params, ranks, ddp_config, elements)
    return call(bucket_size=elements)


@by_name
def _lay_out_unpadded(call, instance, params, bucket_size, data_parallel_world_size, ddp_config):
    """Lay out the distributed optimizer's buckets with the size nearest to the plan's that needs no padding.

    DistributedOptimizer._compute_per_buffer_param_layout pads buckets. Before 0.20, fully reshardable
    checkpoints with padded buckets are wrong.
    """
    elements = _bucket.get()
    if elements is None:
        return call()
    unpadded = megatron_buckets.of_buffer(params, data_parallel_world_size, ddp_config, elements)
    return call(bucket_size=unpadded)


PATCHES = (
    Patch(REDUCTION, "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
          "a later stage on a slow fabric must overlap too; megatron-core buckets on the first stage only",
          _reduce_as_planned, parameters=("config", "ddp_config", "module", "disable_bucketing")),
    Patch(REDUCTION, "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
          "bucket_size is None on every stage but the first", _bucket_as_planned),
    Patch(REDUCTION,
          "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._compute_per_buffer_param_layout",
          "buckets that need no padding: checkpoints of these versions drop it", _lay_out_unpadded,
          only=">=0.18,<0.20"),
)  # fmt: skip
