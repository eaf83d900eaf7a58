"""FLOP/s of a GPU's kernels, computed from the FLOP/s that whole training steps reach.

Two kinds of figures are published for a GPU:

    kernels        the FLOPs of a step / the time in which its kernels run
    whole steps    the FLOPs of a step / the time of the step, including pipeline bubbles and exposed
                   communication. Training logs and papers give this figure, often as MFU (part of the peak)

The cost model adds bubbles and communication to the time of kernels, so it needs the first figure. With the
second figure it would count them twice: BLOOM-176B on 384 A100 reached 150 TFLOP/s in whole steps of 105 s,
and kernels of 150 TFLOP/s give steps of 129 s.

This module finds the FLOP/s of kernels with which the predicted step of a job without holmes, on a single
cluster, takes as long as the given figure of whole steps means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from holmes_ext.cluster.gpus import Accelerator
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import ClusterSpec, SiteSpec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.arrange.orders import launched
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import Network, stock_fabric
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.price import price
from holmes_ext.plan.cost.stages import RankModel, predict
from holmes_ext.plan.engine import Rules
from holmes_ext.plan.sizes import Sizes

#: Largest ratio of the FLOP/s of kernels to those of whole steps that is looked for.
_LARGEST_RATIO = 8.0
#: Halvings of the interval that holds the ratio: the result is exact to 0.1 %.
_HALVINGS = 12
#: FLOPs of the forward and backward pass, as a multiple of those of the forward pass.
_BOTH_PASSES = 3


class KernelFlops(NamedTuple):
    """Model whose GPUs have the FLOP/s of kernels, and lines for the user on the origin of these figures."""

    model: Model  # model.gpus: cluster -> GPU, with its FLOP/s
    lines: list[str]  # a line for each cluster whose FLOP/s were computed or assumed here


def with_kernel_flops(model: Model, spec: SiteSpec, sizes: Sizes | None) -> KernelFlops:
    """Return the model with FLOP/s of kernels, also for clusters that give only those of whole steps.

    cluster.toml gives the latter as gpu_model_flops or gpu_hardware_flops. It is assumed that they
    were measured with the user's parallel sizes, in a job on all nodes of this cluster and no others. If
    these sizes do not fit the cluster, the given FLOP/s count as those of kernels, and a line says so.

    Args:
        model: The model with the GPU of each cluster.
        spec: The clusters.
        sizes: Parallel sizes of the user's layout; None: not known.

    Raises:
        HolmesError: communication alone takes longer than the step that the given FLOP/s mean.
    """
    gpus = dict(model.gpus)
    lines = []
    for cluster in spec.clusters:
        key = _key_of(cluster.accelerator)
        if not key:
            continue
        try:
            flops = _kernel_flops(model, spec, cluster, sizes)
        except _LayoutUnknown as error:
            lines.append(
                f"assumed: {key} of cluster {cluster.name} is that of kernels (gpu_flops), because {error}"
            )
            continue
        gpus[cluster.name] = replace(gpus[cluster.name], flops=flops)
        lines.append(
            f"cluster {cluster.name}: kernels at {flops / 1e12:.4g} TFLOP/s, with which this layout alone "
            f"there, without holmes, reaches {key} = {cluster.accelerator.any_flops / 1e12:.4g}e12"
        )
    return KernelFlops(replace(model, gpus=gpus), lines)


class _LayoutUnknown(Exception):
    """The layout of the job that reached a cluster's FLOP/s of whole steps is not known.

    The text is the reason, such as "the parallel sizes are not known".
    """


def _key_of(accelerator: Accelerator) -> str:
    """Return the key of cluster.toml that gives FLOP/s of whole steps, "" if none does."""
    if accelerator.hardware_flops:
        return "gpu_hardware_flops"
    return "gpu_model_flops" if accelerator.model_flops else ""


def _kernel_flops(model: Model, spec: SiteSpec, cluster: ClusterSpec, sizes: Sizes | None) -> float:
    """Return the FLOP/s of a cluster's kernels, from its FLOP/s of whole steps.

    Args:
        model: The model with the GPU of each cluster.
        spec: The clusters.
        cluster: The cluster.
        sizes: Parallel sizes of the user's layout; None: not known.

    Raises:
        _LayoutUnknown: the sizes are not known, or do not fit the cluster alone.
        HolmesError: communication alone takes longer than the whole step.
    """
    if sizes is None:
        raise _LayoutUnknown("the parallel sizes are not known")
    alone = spec.only(cluster.nodes)
    site = site_from_spec(alone)
    links = Links.of_spec(alone)
    try:
        # The user's data size is for all clusters. 0: it follows from the number of this cluster's GPUs.
        complete = replace(sizes, data=0).complete(site.world_size, site.processes)
        micro_batches = model.micro_batches_of(complete.data)
        # Network and placement of a job without holmes: a single fabric, ranks in the launcher's order.
        network = Network(site, links, single_fabric=stock_fabric(site))
        placement = launched(network, complete)
    except HolmesError as error:
        raise _LayoutUnknown(f"the layout does not fit it alone: {error}") from None

    whole_steps = cluster.accelerator.any_flops
    counts_recomputation = bool(cluster.accelerator.hardware_flops)
    step_flops = _flops_of_step(model, micro_batches * complete.data, counts_recomputation)
    target_s = step_flops / site.world_size / whole_steps

    rules = Rules(hide_stage_links=False)  # the framework's own schedule

    def step_s(kernel_flops: float) -> float:
        """Return the predicted seconds of the model's step on this cluster, for kernels of this speed.

        The step is that of a job without holmes: no hidden stage links, and a uniform partition.
        """
        gpu = replace(model.gpus[cluster.name], flops=kernel_flops)
        on_cluster = replace(model, gpu=gpu, gpus={cluster.name: gpu})
        costs = price(network, placement, RankModel.of(on_cluster, complete), rules)
        return predict(costs, uniform(costs.blocks, costs.stages)).step_s

    return whole_steps * _ratio(lambda ratio: step_s(whole_steps * ratio), target_s, cluster.name)


def _flops_of_step(model: Model, micro_batches: int, counts_recomputation: bool) -> float:
    """Return the FLOPs of a training step of all ranks together.

    Args:
        model: The model.
        micro_batches: Micro-batches of all data-parallel ranks together.
        counts_recomputation: Whether to count the FLOPs of forward passes that run again (recomputation).
    """
    # FlashAttention computes attention scores again inside of its backward kernel. Published FLOP/s (MFU and
    # HFU in training logs) do not count that.
    published = replace(model, flash=False)
    if counts_recomputation:
        # backward_flops has the forward passes that activation checkpointing runs again.
        layers = published.costs()
        flops = sum(layer.forward_flops + layer.backward_flops for layer in layers)
    else:
        layers = replace(published, recompute="none").costs()
        flops = _BOTH_PASSES * sum(layer.forward_flops for layer in layers)
    return flops * micro_batches


def _ratio(step_s: Callable[[float], float], target_s: float, cluster: str) -> float:
    """Return the ratio of the FLOP/s of kernels to those of whole steps, by bisection.

    Args:
        step_s: Returns the predicted seconds of a step for a ratio. A larger ratio never makes the step
            longer.
        target_s: Seconds that the step should take.
        cluster: Name of the cluster, for the error message.

    Raises:
        HolmesError: no ratio up to _LARGEST_RATIO makes the step so short.
    """
    low = 1 / _LARGEST_RATIO
    high = _LARGEST_RATIO
    shortest_s = step_s(high)
    if shortest_s > target_s:
        raise HolmesError(
            f"cluster {cluster!r}: its FLOP/s of whole steps mean a step of {target_s:.4g} s, but with "
            f"the rates in cluster.toml communication alone takes {shortest_s:.4g} s; check the rates, "
            "or give gpu_flops"
        )
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if step_s(middle) > target_s:
            low = middle
        else:
            high = middle
    return high
