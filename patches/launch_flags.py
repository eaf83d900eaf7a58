"""The flags that start a planned job with each framework, and what of the plan a framework cannot do.

tests/test_launch_flags.py parses them with Megatron-LM's and Megatron-DeepSpeed's own parsers where their checkouts are at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.search.arrangement import PIPELINES_FIRST
from holmes_ext.plan.search.result import Candidate

#: Limits of the search (plan/search/space.py) under which each framework can run the winner.
LIMITS = {
    "megatron-lm": {"zero": (0, 1)},
    "deepspeed": {"virtual": (1,), "context": (1,), "expert": (1,), "reduction": ("flat",), "recompute": ("none", "full")},
    "megatron-deepspeed": {"virtual": (1,), "context": (1,), "expert": (1,), "reduction": ("flat",), "recompute": ("none", "full")},
}


@dataclass(frozen=True)
class Launch:
    """flags: for the script's command line. config: the ds_config, if the framework has one. lacks: what it cannot do, () when it can all."""

    flags: tuple[str, ...]
    config: dict = field(default_factory=dict)
    lacks: tuple[str, ...] = ()


def launches(candidate: Candidate, model: Model, global_batch: int, overlap: bool, cluster: str, plan: str) -> dict[str, Launch]:
    """How to start `candidate`, by framework; cluster and plan: the files' names."""
    holmes = ("--holmes", "--holmes-cluster", cluster, "--holmes-plan", plan)
    return {
        "megatron-lm": _megatron_lm(candidate, model, global_batch, overlap, holmes),
        "deepspeed": _deepspeed(candidate, model, global_batch, overlap, holmes),
        "megatron-deepspeed": _megatron_deepspeed(candidate, model, global_batch, overlap, holmes),
    }


def _sizes(candidate: Candidate, global_batch: int) -> list[str]:
    """What both Megatrons call the same."""
    shape = candidate.shape
    values = {"tensor-model-parallel-size": shape.tensor, "pipeline-model-parallel-size": shape.pipeline}
    values.update({"micro-batch-size": shape.micro_batch, "global-batch-size": global_batch})
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def _megatron_lm(candidate: Candidate, model: Model, global_batch: int, overlap: bool, holmes: tuple[str, ...]) -> Launch:
    shape, lacks = candidate.shape, []
    flags = _sizes(candidate, global_batch)
    if shape.context > 1:
        flags += ["--context-parallel-size", str(shape.context)]
    if model.experts:
        flags += ["--num-experts", str(model.experts), "--moe-router-topk", str(model.experts_per_token)]
        flags += ["--expert-model-parallel-size", str(shape.expert)]
    if shape.virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(shape.virtual)]
    if shape.recompute == "selective":
        flags += ["--recompute-granularity", "selective"]
    if shape.recompute == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    if shape.zero == 1:
        flags.append("--use-distributed-optimizer")
    if shape.zero > 1:
        lacks.append(f"ZeRO {shape.zero} (its FSDP is another optimizer; limit zero=0,1)")
    if candidate.arrangement.order == PIPELINES_FIRST:
        flags.append("--use-tp-pp-dp-mapping")
    if model.sequence_parallel and shape.tensor > 1:
        flags.append("--sequence-parallel")
    clusters = {len(content) for content, how in zip(candidate.arrangement.contents, candidate.reductions) if how == "two-level"}
    if clusters:
        if shape.zero == 1 and len(clusters) == 1 and set(candidate.reductions) == {"two-level"}:
            flags += ["--num-distributed-optimizer-instances", str(clusters.pop())]
        else:
            lacks.append("two-level reduction without the distributed optimizer, or of some stages only (limit reduction=flat, or zero=1)")
    if overlap:
        flags += ["--overlap-grad-reduce"]
    return Launch((*flags, *holmes), lacks=tuple(lacks))


def _ds_config(candidate: Candidate, model: Model, global_batch: int) -> dict:
    shape = candidate.shape
    config: dict = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.micro_batches,
        "zero_optimization": {"stage": shape.zero},
    }
    if model.activation_width == 2:
        config["bf16"] = {"enabled": True}
    return config


def _of_deepspeed(candidate: Candidate) -> list[str]:
    shape, lacks = candidate.shape, []
    for name, value in (("virtual", shape.virtual), ("context", shape.context), ("expert", shape.expert)):
        if value > 1:
            lacks.append(f"{name} size {value} (limit {name}=1)")
    if "two-level" in candidate.reductions:
        lacks.append("two-level reduction (limit reduction=flat)")
    if shape.recompute == "selective":
        lacks.append("selective recomputation (limit recompute=none,full)")
    if candidate.arrangement.order == PIPELINES_FIRST:
        lacks.append("pipelines one after the other (limit clusters=pipeline)")
    return lacks


def _deepspeed(candidate: Candidate, model: Model, global_batch: int, overlap: bool, holmes: tuple[str, ...]) -> Launch:
    shape = candidate.shape
    flags = ["--deepspeed_config", "ds_config.json", *holmes, "--holmes-sizes", f"pipeline={shape.pipeline},tensor={shape.tensor}"]
    flags += ["--holmes-overlap", "on" if overlap else "off"]
    config = _ds_config(candidate, model, global_batch)
    if shape.pipeline > 1:  # read by PipelineModule's user, and by holmes to compare it with the plan
        config["pipeline"] = {"stages": shape.pipeline, "activation_checkpoint_interval": int(shape.recompute == "full")}
    return Launch(tuple(flags), config, tuple(_of_deepspeed(candidate)))


def _megatron_deepspeed(candidate: Candidate, model: Model, global_batch: int, overlap: bool, holmes: tuple[str, ...]) -> Launch:
    shape = candidate.shape
    flags = _sizes(candidate, global_batch) + ["--deepspeed", "--deepspeed_config", "ds_config.json", "--zero-stage", str(shape.zero)]
    if shape.pipeline == 1:
        flags.append("--no-pipeline-parallel")
    if shape.recompute == "full":
        flags += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    if model.sequence_parallel and shape.tensor > 1:
        flags.append("--sequence-parallel")
    flags += ["--holmes-overlap", "on" if overlap else "off"]
    return Launch((*flags, *holmes), _ds_config(candidate, model, global_batch), tuple(_of_deepspeed(candidate)))
