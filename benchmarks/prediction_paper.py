"""Predicts the hybrid setting of the Holmes paper (arXiv 2312.03549), and compares it with the paper's bars.

GPT 7.5B trains on 4 RoCE and 4 InfiniBand nodes of 8 A100s, with Ethernet of 25 Gb/s between the clusters.

The paper lacks some facts. These assumptions replace them. Nothing is fitted to the bars:

    all                 tensor 1, pipeline 2, data 32, micro-batch 4, global batch 1536;
                        examples/models/gpt_7.5b.toml and examples/clusters/paper_4_roce_4_ib.toml as they
                        are: 150 TFLOP/s of an A100, nominal rates, no probe; 32-bit gradients, 16-bit weights
                        and activations; uniform stages; nodes in the file's order, so data-parallel groups
                        lie inside the clusters for everybody
    Megatron-DeepSpeed  all over Ethernet (NCCL finds no network that all nodes share); ZeRO-1 by
                        BF16_Optimizer: one all-reduce after the last backward, weights gathered after the
                        optimizer; sends and receives of DeepSpeed's pipeline engine; nothing overlaps
    Megatron-LM         all over Ethernet; 1F1B of 2023, one all-reduce after the last backward, nothing
                        overlaps
    Megatron-LLaMA      all over Ethernet; OverlappedDistributedOptimizer: reduce-scatter in buckets under the
                        last backward, weights gathered under the next forward
    Holmes              as Megatron-LLaMA, but each data-parallel group on its cluster's own fabric; only the
                        pipeline crosses Ethernet

Two rows each show, without a target, how much depends on the assumptions: RoCE at 0.30 of InfiniBand's rate
(as the paper's own TFLOP/s of homogeneous clusters suggest), and micro-batches of 1.
"""

from __future__ import annotations

from dataclasses import replace

from harness import Row

from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.patches.deepspeed.features import DEEPSPEED
from holmes_ext.patches.megatron.features import MEGATRON
from holmes_ext.plan.cost.model import Model, load_model, on_clusters
from holmes_ext.plan.cost.network import stock_fabric
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate
from holmes_ext.samples import examples

CASE = "paper: 4 RoCE + 4 InfiniBand, GPT 7.5B"
BARS = {"Megatron-DeepSpeed": 1.66, "Megatron-LM": 1.38, "Megatron-LLaMA": 1.14}
# the paper has no cuts
OVERLAPPED = Execution(
    engine=MEGATRON, overlap="on", zero=1, gather_overlap=True, cut=False, tied=False
)
FRAMEWORKS = {
    "Megatron-DeepSpeed": Execution(engine=DEEPSPEED, zero=1, cut=False, tied=False),
    "Megatron-LM": Execution(engine=MEGATRON, cut=False, tied=False),
    "Megatron-LLaMA": OVERLAPPED,
}
WITHIN = 0.15  # largest relative deviation from a bar of the paper


def steps(site: Site, model: Model) -> dict[str, float]:
    """Return the predicted seconds of a step, by the name of the framework, with "Holmes" as the last."""
    order = [node.name for node in site.nodes]
    sizes = Sizes(pipeline=2)
    seconds = {
        name: simulate(site, order, sizes, model, options, only=stock_fabric(site)).step_s
        for name, options in FRAMEWORKS.items()
    }
    return {**seconds, "Holmes": simulate(site, order, sizes, model, OVERLAPPED).step_s}


def paper_rows() -> list[Row]:
    """Return rows with predicted speed-ups of holmes over other frameworks, and the published ones.

    The paper is that of Holmes (arXiv 2312.03549), with GPT 7.5B on 4 RoCE and 4 InfiniBand nodes.
    Further rows change two assumptions: RoCE has 0.3 of its rate, or a micro-batch has one sequence
    instead of four.
    """
    spec = load_spec(examples() / "clusters" / "paper_4_roce_4_ib.toml")
    model = replace(
        on_clusters(load_model(examples() / "models" / "gpt_7.5b.toml"), spec), micro_batch=4
    )
    site = site_from_spec(spec)
    slow = tuple(
        replace(fabric, rate_bps=int(0.3 * fabric.rate_bps)) if fabric.kind == "roce" else fabric
        for fabric in site.fabrics
    )
    predicted = steps(site, model)
    rows = [
        Row.median(
            CASE,
            f"predicted step, {name}",
            [seconds],
            unit="s",
            emulated=True,
        )
        for name, seconds in predicted.items()
    ]
    for name, bar in BARS.items():
        ratio = predicted[name] / predicted["Holmes"]
        rows.append(
            Row.median(
                CASE,
                f"Holmes : {name}, predicted (paper {bar})",
                [ratio],
                unit="x",
                emulated=True,
            )
        )
        miss = abs(ratio / bar - 1)
        rows.append(
            Row.median(
                CASE,
                f"Holmes : {name}, off the paper's bar by",
                [miss],
                unit="of the bar",
                emulated=True,
                target=f"<= {WITHIN}",
            )
        )
    others = {
        "RoCE at 0.30 of its rate": (replace(site, fabrics=slow), model),
        "micro-batches of 1": (site, replace(model, micro_batch=1)),
    }
    for what, (other_site, other_model) in others.items():
        other = steps(other_site, other_model)
        for name, bar in BARS.items():
            ratio = other[name] / other["Holmes"]
            rows.append(
                Row.median(
                    CASE,
                    f"Holmes : {name}, {what} (paper {bar})",
                    [ratio],
                    unit="x",
                    emulated=True,
                )
            )
    return rows
