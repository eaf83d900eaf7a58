"""The flags that start a planned job with each framework, and what of the plan a framework cannot do.

tests/patches/test_launch_flags.py parses them with the two Megatrons' own parsers where their checkouts are at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.search.arrangement import PIPELINES_FIRST
from holmes_ext.plan.search.result import Candidate

#: Limits of the search (plan/search/space.py) under which each framework can run the winner.
_DEEPSPEED: dict[str, tuple] = {
    "virtual": (1,), "context": (1,), "expert": (1,), "reduction": ("flat",), "recompute": ("none", "full"),
}  # fmt: skip
_DATA_ONLY: dict[str, tuple] = {
    **dict.fromkeys(("pipeline", "tensor", "context", "expert", "virtual"), (1,)), "recompute": ("none", "full"),
}  # fmt: skip
LIMITS = {
    "megatron-lm": {"zero": (0, 1)}, "deepspeed": _DEEPSPEED, "megatron-deepspeed": _DEEPSPEED,
    "ddp": {**_DATA_ONLY, "zero": (0,)}, "fsdp2": {**_DATA_ONLY, "zero": (3,)},
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """flags: for the script's command line. config: the ds_config, if there is one. lacks: what it cannot do."""

    flags: tuple[str, ...]
    config: dict = field(default_factory=dict)
    lacks: tuple[str, ...] = ()


def launches(
    candidate: Candidate, model: Model, global_batch: int, overlap: bool, cluster: str, plan: str
) -> dict[str, Launch]:
    """How to start `candidate`, by framework; cluster and plan: the files' names, plan "" where none is written."""
    shape, holmes = candidate.shape, added(candidate, cluster, plan)
    overlapped = ["--holmes-overlap", "on" if overlap else "off"]
    lm_flags, lm_lacks = _megatron_lm(candidate, model, global_batch)
    lm_flags += ["--overlap-grad-reduce"] if overlap else []
    config, lacks = _ds_config(candidate, model, global_batch), _deepspeed_lacks(candidate)
    own = {}  # read by PipelineModule's user, and by holmes to compare it with the plan
    if shape.pipeline > 1:
        interval = int(shape.recompute == "full")
        own["pipeline"] = {"stages": shape.pipeline, "activation_checkpoint_interval": interval}
    ds_flags = ["--deepspeed_config", "ds_config.json", *holmes, "--holmes-sizes"]
    ds_flags += [f"pipeline={shape.pipeline},tensor={shape.tensor}", *overlapped]
    both = [*_megatron_deepspeed(candidate, model, global_batch), *overlapped, *holmes]
    return {
        "megatron-lm": Launch((*lm_flags, *holmes), lacks=tuple(lm_lacks)),
        "deepspeed": Launch(tuple(ds_flags), {**config, **own}, lacks),
        "megatron-deepspeed": Launch(tuple(both), config, lacks),
        **{name: Launch(tuple(holmes), lacks=_data_only_lacks(candidate, name)) for name in ("ddp", "fsdp2")},
    }


def added(candidate: Candidate, cluster: str, plan: str) -> list[str]:
    """What holmes needs on the command line. Without a plan the job makes one when it starts, for the same layers."""
    split = candidate.split
    uneven = candidate.shape.virtual == 1 and split != uniform(sum(split), len(split))
    layers = ["--holmes-partition", ",".join(map(str, split))] if uneven else []
    return ["--holmes", "--holmes-cluster", cluster, *(["--holmes-plan", plan] if plan else layers)]


def _sizes(candidate: Candidate, model: Model, global_batch: int) -> list[str]:
    """What both Megatrons call the same."""
    shape = candidate.shape
    values = {
        "--tensor-model-parallel-size": shape.tensor, "--pipeline-model-parallel-size": shape.pipeline,
        "--micro-batch-size": shape.micro_batch, "--global-batch-size": global_batch,
    }  # fmt: skip
    sequence = ["--sequence-parallel"] if model.sequence_parallel and shape.tensor > 1 else []
    return [text for name, value in values.items() for text in (name, str(value))] + sequence


def _megatron_lm(candidate: Candidate, model: Model, global_batch: int) -> tuple[list[str], list[str]]:
    """(flags, what it lacks)"""
    shape, lacks = candidate.shape, []
    flags = _sizes(candidate, model, global_batch)
    if shape.context > 1:
        flags += ["--context-parallel-size", str(shape.context)]
    if model.experts:
        flags += ["--num-experts", str(model.experts), "--moe-router-topk", str(model.experts_per_token)]
        flags += ["--expert-model-parallel-size", str(shape.expert)]
    if shape.virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(shape.virtual)]
    if shape.recompute in ("selective", "full"):
        flags += ["--recompute-granularity", shape.recompute]
    if shape.recompute == "full":
        flags += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    if shape.zero == 1:
        flags.append("--use-distributed-optimizer")
    if shape.zero > 1:
        lacks.append(f"ZeRO {shape.zero} (its FSDP is another optimizer; limit zero=0,1)")
    if candidate.arrangement.order == PIPELINES_FIRST:
        flags.append("--use-tp-pp-dp-mapping")
    ways = list(zip(candidate.arrangement.contents, candidate.reductions))
    clusters = {len(content) for content, how in ways if how == "two-level"}
    if clusters and shape.zero == 1 and len(clusters) == 1 and set(candidate.reductions) == {"two-level"}:
        flags += ["--num-distributed-optimizer-instances", str(clusters.pop())]
    elif clusters:
        lacks.append(
            "two-level reduction without the distributed optimizer, or of some stages only (limit reduction=flat, or"
            " zero=1)"
        )
    return flags, lacks


def _ds_config(candidate: Candidate, model: Model, global_batch: int) -> dict:
    shape = candidate.shape
    config: dict = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.micro_batches,
        "zero_optimization": {"stage": shape.zero},
    }
    return config | ({"bf16": {"enabled": True}} if model.activation_width == 2 else {})


def _deepspeed_lacks(candidate: Candidate) -> tuple[str, ...]:
    shape = candidate.shape
    values = (("virtual", shape.virtual), ("context", shape.context), ("expert", shape.expert))
    lacks = [f"{name} size {value} (limit {name}=1)" for name, value in values if value > 1]
    if "two-level" in candidate.reductions:
        lacks.append("two-level reduction (limit reduction=flat)")
    if shape.recompute == "selective":
        lacks.append("selective recomputation (limit recompute=none,full)")
    if candidate.arrangement.order == PIPELINES_FIRST:
        lacks.append("pipelines one after the other (limit clusters=pipeline)")
    return tuple(lacks)


def _data_only_lacks(candidate: Candidate, name: str) -> tuple[str, ...]:
    """What DistributedDataParallel ("ddp": Hugging Face's Trainer, Lightning) or "fsdp2" cannot do of the plan."""
    shape, limits = candidate.shape, LIMITS[name]
    return tuple(
        f"{axis} {value} (limit {axis}={','.join(map(str, limits[axis]))})"
        for axis in limits if (value := getattr(shape, axis)) not in limits[axis]
    )  # fmt: skip


def _megatron_deepspeed(candidate: Candidate, model: Model, global_batch: int) -> list[str]:
    shape = candidate.shape
    flags = [*_sizes(candidate, model, global_batch), "--deepspeed", "--deepspeed_config", "ds_config.json"]
    flags += ["--zero-stage", str(shape.zero)]
    if shape.pipeline == 1:
        flags.append("--no-pipeline-parallel")
    if shape.recompute == "full":
        flags += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    return flags
