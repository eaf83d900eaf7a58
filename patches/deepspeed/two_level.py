"""DeepSpeed's own gradient reduction in two levels, where a data-parallel group straddles clusters.

    engine                 its buckets are averaged by                                    in two levels
    ZeRO 0, BF16_Optimizer DeepSpeedEngine.allreduce_bucket                               yes
    ZeRO 1 and 2           DeepSpeedZeroOptimizer's, an all-reduce too (0.19.8)           yes
    ZeRO 3                 reduce_scatter_coalesced, one partition for each rank          no

Which gradients travel together, when, in which dtype and divided by what stays DeepSpeed's; only the sum of a
bucket takes another way. ZeRO 3 keeps stock collectives: it gathers every layer's parameters over the whole
group in each forward and backward pass, twice the bytes of its gradients; zero_hpz_partition_size (ZeRO++)
keeps the backward pass's inside clusters. One line says what that takes, predicted.

Gradients of tied layers (TiedLayerSpec) cross once for a stage instead of once for each of its data-parallel
ranks, when the engine would reduce them and from where it would:

    engine   every rank all-reduces the whole gradient with its twin of the other stage
    here     the sum over all ranks of both stages, in two levels, divided by the data-parallel ranks: what
             the average that follows (ReduceGrads) would make of it (runtime/reduce/tied.py)
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import TIED, TWO_LEVEL
from holmes_ext.patches.deepspeed.p2p import grid_sizes
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Running, by_name, with_session
from holmes_ext.plan.sharding import ShardedWeights, sharded_seconds, straddling_rows
from holmes_ext.plan.traffic import SOCKETS, Reduction
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.runtime.watch.failure import describe_failure
from holmes_ext.units import format_bytes

#: Not empty while DeepSpeed averages a bucket of gradients: an all-reduce is then one of gradients.
_averaging = Running()
#: Not empty while DeepSpeed reduces tied gradients: an all-reduce is then one of those.
_reducing_tied = Running()
#: Process group -> the reduction that is planned for it (plan.traffic.Reduction).
_ways: weakref.WeakKeyDictionary[Any, Reduction] = weakref.WeakKeyDictionary()
#: Process group -> its two-level all-reduce.
_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@by_name
def _all_reduce(call, instance, tensor, op, group, async_op):
    """Sum a bucket of gradients in two levels, inside each cluster and then between clusters.

    DeepSpeed averages gradients with deepspeed.comm.all_reduce, over the whole group at once. All other
    all-reduces, those that are no blocking sum, and buckets for which the plan has torch's all-reduce are
    left to DeepSpeed.

    Raises:
        HolmesError: the all-reduce failed; the error names the bucket, the ranks and their network.
    """
    if not _averaging.instances or session.active() is None:
        return call()
    import torch.distributed as dist

    is_sum = getattr(op, "name", "") == "SUM"  # of DeepSpeed's ReduceOp or torch's
    if not is_sum or async_op or call.unread_arguments() or not tensor.is_contiguous():
        return call()
    group = group or dist.group.WORLD
    two_level_all_reduce = _two_level(group, tensor.nbytes)
    if two_level_all_reduce is None:
        return call()
    try:
        two_level_all_reduce(tensor.view(-1)).wait()
    except RuntimeError as error:
        bucket = f"a bucket of {tensor.numel()} elements"
        ranks = group_ranks(group)
        fabric = session.require().fabric_of(ranks, backend_of(group))
        raise HolmesError(describe_failure(bucket, ranks, fabric, str(error))) from error


def _two_level(group: Any, size: int) -> Any:
    """Return the group's two-level all-reduce, or None if the plan has torch's for this size.

    The answer is the same on all ranks of the group. The first call makes the groups of the two levels, which
    is a collective.

    Args:
        size: Bytes of the tensor.

    Raises:
        HolmesError: --holmes-compress int8, which DeepSpeed's buckets do not allow.
    """
    # Imported here, where torch has been loaded already.
    from holmes_ext.runtime.reduce.straddling import planned, two_level_for

    reduction = _ways.get(group)
    if reduction is None:
        reduction = planned(group)
        assert reduction is not None  # all callers have a session
        _ways[group] = reduction
    two_levels = bool(reduction.clusters) and size >= reduction.two_level_from
    # reported: reduce.py has printed already why a pipeline engine's reduction is not overlapped.
    session.note_reduction(group_ranks(group), _planned_here(reduction), size, two_levels=two_levels,
                           overlap=False, reported=True)
    if not two_levels:
        return None
    if group not in _made:
        if reduction.compress == "int8":
            raise HolmesError(
                "--holmes-compress int8 carries rounding errors on to the next step, which DeepSpeed's "
                "buckets, new at every step, do not allow: use bf16, or the pipeline engine with "
                "--holmes-overlap on")
        _made[group] = two_level_for(group, size, reduction)
    return _made[group]


def _planned_here(reduction: Reduction) -> Reduction:
    """Return the planned reduction, without overlap if the engine is no pipeline engine.

    The plain engine's reductions cannot overlap, whatever the plan has for a pipeline engine.
    """
    from deepspeed.runtime.pipe import p2p

    has_pipeline_engine = p2p._grid is not None  # set when a pipeline engine sets up its p2p
    if has_pipeline_engine:
        return reduction
    return replace(reduction, overlap=False)


@with_session
@by_name
def _tell_stage_3(current, call, instance):
    """Print once how long ZeRO 3 gathers weights between clusters, after DeepSpeed set ZeRO up.

    ZeRO 3 keeps DeepSpeed's own collectives, which are not planned.
    """
    result = call()
    if instance.zero_optimization_stage() == 3:
        tell(current, _stage_3(current, instance))
    return result


def _stage_3(current: session.Session, engine: Any) -> str:
    """The line; "" where the weights are sharded inside one cluster."""
    plan, group = current.plan, engine.seq_data_parallel_group
    ranks, backend, size = group_ranks(group), backend_of(group), engine.zero_hpz_partition_size()
    clusters, network_api = plan.by_cluster(ranks), network_api_of(backend) or SOCKETS
    if len(clusters) < 2:
        return ""
    weights = float(sum(getattr(p, "ds_numel", p.numel()) * p.itemsize for p in engine.module.parameters()))
    units = sum(bool(module._parameters) for module in engine.module.modules())
    once, least = ShardedWeights(units, weights, weights, again=0), min(map(len, clusters.values()))
    seconds = sharded_seconds(plan, ranks, once if size > 1 else replace(once, again=1), network_api)
    text = (f"ZeRO 3 gathers {format_bytes(weights)} of weights across clusters {', '.join(clusters)} in "
            f"every micro-batch, {seconds:.3g} s of it (predicted)")
    crossing = straddling_rows(plan, [range(rank, rank + size) for rank in range(0, plan.world_size, size)])
    if size > 1 and crossing:
        return f"{text}; zero_hpz_partition_size {size} crosses in the backward pass too: {crossing}"
    if size > 1 or least < 2:
        return text
    return (f"{text}; with zero_hpz_partition_size {least} the backward pass gathers inside clusters:"
            f" {sharded_seconds(plan, ranks, once, network_api):.3g} s; ZeRO 1 and 2 send less still")


@with_session
@by_name
def _all_reduce_tied(current, call, instance, tensor, group):
    """Sum the gradient of a weight that two stages share, over all data-parallel ranks of both stages.

    In DeepSpeed every rank all-reduces the whole gradient with one rank of the other stage, so that each of
    them sends it to another cluster. The two-level sum over all ranks crosses once for each stage. It is
    divided by the data-parallel size, which gives the average that DeepSpeed would compute next.
    """
    if not _reducing_tied.instances or call.unread_arguments():
        return call()
    # Imported here, where torch has been loaded already.
    from holmes_ext.runtime.reduce.tied import tied_sum_of

    engine = _reducing_tied.instances[-1]
    sizes = grid_sizes(current, engine.grid)
    tied_sum = tied_sum_of(group, sizes, tensor.device.type)
    if tied_sum is None or not tied_sum.takes(tensor):
        return call()
    tied_sum(tensor, tied_sum.twins)


_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"

PATCHES = (
    Patch(TWO_LEVEL, "deepspeed.comm.comm:all_reduce",
          "the sum of a bucket of gradients, for a group that straddles clusters", _all_reduce),
    *(Patch(TWO_LEVEL, target, "tells the all-reduces of gradients from others", _averaging)
      for target in (f"{_ENGINE}.allreduce_bucket", f"{_ZERO}.allreduce_bucket",
                     f"{_ZERO}.gradient_reduction_w_predivide")),
    Patch(TWO_LEVEL, f"{_ENGINE}._configure_zero_optimizer",
          "says that ZeRO 3 over several clusters is not helped", _tell_stage_3),
    Patch(TIED, "deepspeed.runtime.pipe.engine:PipelineEngine._exec_reduce_tied_grads",
          "tells the all-reduces of tied gradients from others", _reducing_tied),
    Patch(TIED, "deepspeed.comm.comm:all_reduce",
          "every data-parallel rank would send the whole gradient to another cluster", _all_reduce_tied),
)  # fmt: skip
