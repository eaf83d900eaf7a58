"""Sums DeepSpeed's gradients hierarchically if a data-parallel group has ranks in several clusters.

A hierarchical all-reduce first sums the gradients inside each cluster, over the fast network there. Then it
sums the results between clusters, so that each gradient crosses the slow network once for each cluster.

DeepSpeed collects gradients in buckets and sums each bucket with an all-reduce over the whole group. A patch
of deepspeed.comm.all_reduce makes this sum hierarchically. It does not change the buckets, their dtype and
their divisor.

    optimizer               summed in                                  hierarchically
    ZeRO 0, BF16_Optimizer  DeepSpeedEngine.allreduce_bucket           yes
    ZeRO 1 and 2            DeepSpeedZeroOptimizer                     yes
    ZeRO 3                  reduce_scatter_coalesced                   no

ZeRO 3 also gathers all weights in each forward and backward pass. A message says how long that takes between
clusters, as predicted from the networks of the job.

Tied layers (TiedLayerSpec) are on two pipeline stages. In DeepSpeed each data-parallel rank sums the whole
gradient with one rank of the other stage. Another patch sums it hierarchically over all ranks of both stages
(runtime/reduce/tied.py). If these are in two clusters, each stage sends the gradient to the other cluster
once, and not once for each of its ranks.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import HIERARCHICAL, TIED
from holmes_ext.patches.deepspeed.p2p import grid_sizes
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, Running, by_name, with_session
from holmes_ext.plan.sharding import ShardedWeights, sharded_seconds, spanning_rows
from holmes_ext.plan.traffic import SOCKETS, ReductionSpec
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.session import Session, tell
from holmes_ext.runtime.watch.failure import describe_failure
from holmes_ext.units import format_bytes

ZERO_3 = 3  # ZeRO stage that shards weights, too

#: Its list `instances` is not empty while DeepSpeed averages a bucket of gradients. An all-reduce is then one
#: of gradients.
_averaging = Running()
#: Its list `instances` has the engines that reduce the gradients of tied layers now. An all-reduce is then
#: one of these gradients.
_reducing_tied = Running()
#: Process group -> how the plan of the job reduces its gradients.
_planned_specs: weakref.WeakKeyDictionary[Any, ReductionSpec] = weakref.WeakKeyDictionary()
#: Process group -> its hierarchical Reduction; None if the plan's clusters turn out to be one.
_hierarchical_reductions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@by_name
def _all_reduce(call: Call, instance: Any, tensor: Any, op: Any, group: Any, async_op: Any) -> Any:
    """Sum a bucket of gradients hierarchically: inside each cluster, and then between clusters.

    The patched function is deepspeed.comm.all_reduce. DeepSpeed calls it for gradients and for other tensors.
    call() runs DeepSpeed's own function:

    - for other tensors than gradients
    - if the call is asynchronous, or no sum
    - if the plan of the job has no hierarchical sum for this group and size

    Raises:
        HolmesError: The hierarchical sum failed. The message has the bucket, the ranks and their network.
    """
    is_gradient = bool(_averaging.instances)  # DeepSpeed averages a bucket of gradients now
    holmes_is_off = session.active() is None
    if not is_gradient or holmes_is_off:
        return call()  # deepspeed.comm.all_reduce
    import torch.distributed as dist

    is_sum = getattr(op, "name", "") == "SUM"  # op is DeepSpeed's ReduceOp or torch's
    # Arguments that this wrapper does not read. A later DeepSpeed may pass some, and call() handles them.
    has_other_arguments = call.unread_arguments()
    if not is_sum or async_op or has_other_arguments or not tensor.is_contiguous():
        return call()
    group = group or dist.group.WORLD
    reduction = _hierarchical_reduction_of(group, tensor.nbytes)
    if reduction is None:
        return call()
    try:
        reduction.all_reduce(tensor.view(-1)).wait()  # in place
    except RuntimeError as error:  # gloo and NCCL raise it, e.g. if another rank has died
        bucket = f"a bucket of {tensor.numel()} elements"
        ranks = group_ranks(group)
        network = session.require().fabric_of(ranks, backend_of(group))  # between these ranks
        raise HolmesError(describe_failure(bucket, ranks, network, str(error))) from error
    return None  # like deepspeed.comm.all_reduce


def _hierarchical_reduction_of(group: Any, size: int) -> Any:
    """Return the Reduction that sums a tensor over a group hierarchically, inside and between clusters.

    Return None if the group is in one cluster, or the tensor is so small that torch's all-reduce is faster.
    All ranks of the group get the same answer. The first call makes process groups, so all ranks must make
    it.

    Args:
        size: Bytes of the tensor.

    Raises:
        HolmesError: The option --holmes-compress-gradients int8 is set. It does not work with DeepSpeed's
            buckets.
    """
    # Imported here, where torch has been loaded already.
    from holmes_ext.runtime.reduce.planned import hierarchical_for

    spec = _planned_specs.get(group)
    if spec is None:
        spec = session.require().reduction(group_ranks(group), backend_of(group))
        _planned_specs[group] = spec
    spans_clusters = bool(spec.clusters)  # the clusters of the ranks; empty if they are in one
    is_large_enough = size >= spec.hierarchical_from  # bytes
    hierarchical = spans_clusters and is_large_enough

    # Record how the gradients were reduced. The job's report compares this with the plan. The plan may
    # assume an overlap with the backward pass that holmes cannot make in an engine without a pipeline.
    session.note_reduction(
        group_ranks(group),
        _spec_that_engine_can_run(spec),
        size,
        hierarchical=hierarchical,
        overlap=False,  # this is DeepSpeed's own reduction: it runs after the backward pass
        # The report need not warn of a missing overlap: reduce.py has printed the reason already.
        reported=True,
    )
    if not hierarchical:
        return None
    if group not in _hierarchical_reductions:
        if spec.compress == "int8":
            raise HolmesError(
                "--holmes-compress-gradients int8 adds the rounding errors of a step to the next step, which "
                "is not possible with DeepSpeed's buckets: they are new at every step; use bf16, or the "
                "pipeline engine with --holmes-overlap on"
            )
        # Makes process groups, so all ranks of `group` must get here.
        _hierarchical_reductions[group] = hierarchical_for(group, size, spec)
    return _hierarchical_reductions[group]


def _spec_that_engine_can_run(spec: ReductionSpec) -> ReductionSpec:
    """Return the planned gradient reduction, without overlap if the engine is no pipeline engine.

    The plan assumes a pipeline engine. holmes can overlap the reduction of such an engine with its
    last backward pass, but not that of a plain DeepSpeedEngine. The job's report compares the
    result with the reduction that has run.
    """
    from deepspeed.runtime.pipe import p2p

    has_pipeline_engine = p2p._grid is not None  # DeepSpeed sets it when it makes a pipeline engine
    if has_pipeline_engine:
        return spec
    return replace(spec, overlap=False)


@with_session
@by_name
def _report_zero_3(current: Session, call: Call, instance: Any) -> Any:
    """Print how long ZeRO 3 will gather weights between clusters, if the engine uses ZeRO 3.

    This wrapper runs in place of DeepSpeedEngine._configure_zero_optimizer; call() runs the original. ZeRO
    3 uses DeepSpeed's own collectives, over all ranks at once. holmes does not change these.
    """
    result = call()  # DeepSpeedEngine._configure_zero_optimizer
    if instance.zero_optimization_stage() == ZERO_3:
        tell(current, _zero_3_message(current, instance))  # prints on rank 0; "" prints nothing
        # The report at the job's end compares the reductions with the plan. It reads this, and then
        # does not report that ZeRO 3 reduces otherwise than planned.
        current.keeps_own_reduction = True
    return result


def _zero_3_message(current: Session, engine: Any) -> str:
    """Return a message with the time that ZeRO 3 takes to gather weights between clusters.

    The time is predicted from the networks of the plan. If all ranks that share the weights are in one
    cluster, the message is "".
    """
    plan = current.plan
    group = engine.seq_data_parallel_group
    ranks = group_ranks(group)
    network_api = network_api_of(backend_of(group)) or SOCKETS
    clusters = plan.by_cluster(ranks)  # name of a cluster -> its ranks
    if len(clusters) <= 1:
        return ""
    weight_bytes = 0.0
    for parameter in engine.module.parameters():
        # ds_numel is the number of elements before ZeRO 3 shards the parameter.
        elements = getattr(parameter, "ds_numel", parameter.numel())
        weight_bytes += elements * parameter.itemsize

    # ZeRO 3 makes one gather for each module that has parameters of its own.
    gathers = sum(bool(module._parameters) for module in engine.module.modules())
    # `again` is the part of the weights that the backward pass gathers over all ranks, too.
    forward_only = ShardedWeights(
        units=gathers, weight_bytes=weight_bytes, gradient_bytes=weight_bytes, regathered_share=0
    )
    in_both_passes = replace(forward_only, regathered_share=1)

    # With ZeRO++'s zero_hpz_partition_size above 1, the backward pass gathers inside groups of this size.
    hpz_size = engine.zero_hpz_partition_size()
    gathered_weights = forward_only if hpz_size > 1 else in_both_passes
    seconds = sharded_seconds(plan, ranks, gathered_weights, network_api)
    text = (
        f"ZeRO 3 gathers {format_bytes(weight_bytes)} of weights across clusters {', '.join(clusters)} "
        f"in every micro-batch, {seconds:.3g} s of it (predicted)"
    )
    if hpz_size > 1:
        hpz_groups = [range(rank, rank + hpz_size) for rank in range(0, plan.world_size, hpz_size)]
        crossing = spanning_rows(plan, hpz_groups)  # names a group with ranks in several clusters
        if crossing:
            return f"{text}; zero_hpz_partition_size {hpz_size} crosses in the backward pass too: {crossing}"
        return text

    # Suggest groups that fit into each cluster.
    smallest_cluster = min(map(len, clusters.values()))  # ranks
    if smallest_cluster <= 1:
        return text
    hpz_seconds = sharded_seconds(plan, ranks, forward_only, network_api)
    return (
        f"{text}; with zero_hpz_partition_size {smallest_cluster} the backward pass gathers inside "
        f"clusters: {hpz_seconds:.3g} s; ZeRO 1 and 2 send less still"
    )


@with_session
@by_name
def _all_reduce_tied(current: Session, call: Call, instance: Any, tensor: Any, group: Any) -> Any:
    """Average the gradient of a weight that two pipeline stages share, over all ranks of both stages.

    In DeepSpeed this takes two steps. First each rank sums the whole gradient with one rank of the other
    stage, maybe in another cluster. Then DeepSpeed averages the sums over the data-parallel ranks of each
    stage.

    This function replaces the first step, and computes the final average already, hierarchically: inside each
    cluster, and then between clusters. That sends less between clusters. The second step still runs, but it
    averages equal values, and so changes nothing.

    Args:
        current: Session of holmes in this process, with the plan.
        call: Runs deepspeed.comm.all_reduce.
        tensor: The gradient.
        group: The two ranks that share the weight, one on each stage.
    """
    engines_with_tied_reduction = _reducing_tied.instances  # those in _exec_reduce_tied_grads now
    if not engines_with_tied_reduction:
        return call()  # deepspeed.comm.all_reduce, here of another tensor

    # Arguments that this wrapper does not read. A later DeepSpeed may pass some, and call() handles them.
    if call.unread_arguments():
        return call()

    # Imported here, where torch has been loaded already.
    from holmes_ext.runtime.reduce.tied import tied_sum_of

    engine = engines_with_tied_reduction[-1]  # the innermost: it calls this all-reduce
    sizes = grid_sizes(current, engine.grid)
    tied_sum = tied_sum_of(group, sizes, tensor.device.type)
    if tied_sum is None:  # the plan has no hierarchical sum for these ranks
        return call()
    if not tied_sum.takes(tensor):  # the tensor is small or not contiguous
        return call()

    # DeepSpeed averages the gradients over the ranks of each stage, and adds the two averages. The
    # hierarchical sum adds the gradients of all ranks of both stages. Divided by the ranks of one stage, it
    # is the same.
    data_parallel_size = tied_sum.ranks_per_stage  # number of ranks of one stage
    tied_sum(tensor, data_parallel_size)  # in place: sums and divides
    return None  # like deepspeed.comm.all_reduce


_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"

PATCHES = (
    Patch(
        HIERARCHICAL,
        "deepspeed.comm.comm:all_reduce",
        "the sum of a bucket of gradients, for a group that spans clusters",
        _all_reduce,
    ),
    *(
        Patch(
            HIERARCHICAL,
            target,
            "distinguishes the all-reduces of gradients from others",
            _averaging,
        )
        for target in (
            f"{_ENGINE}.allreduce_bucket",
            f"{_ZERO}.allreduce_bucket",
            f"{_ZERO}.gradient_reduction_w_predivide",
        )
    ),
    Patch(
        HIERARCHICAL,
        f"{_ENGINE}._configure_zero_optimizer",
        "prints how long ZeRO 3 gathers weights between clusters",
        _report_zero_3,
    ),
    Patch(
        TIED,
        "deepspeed.runtime.pipe.engine:PipelineEngine._exec_reduce_tied_grads",
        "distinguishes the all-reduces of tied gradients from others",
        _reducing_tied,
    ),
    Patch(
        TIED,
        "deepspeed.comm.comm:all_reduce",
        "every data-parallel rank would send the whole gradient to another cluster",
        _all_reduce_tied,
    ),
)
