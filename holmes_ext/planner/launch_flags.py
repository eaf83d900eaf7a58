"""The flags that start a planned job with each framework, and what of the plan a framework cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from holmes_ext.errors import HolmesError
from holmes_ext.patches.traits import ENGINES
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.sizes import PIPELINES_FIRST
from holmes_ext.planner.search.result import Candidate
from holmes_ext.planner.search.space import Limits


def limited(limits: Limits, engine: EngineTraits, framework: str) -> Limits:
    """`limits` and those of the engine; HolmesError where they leave nothing."""
    allowed = dict(limits.allowed)
    for name, values in engine.limits.items():
        allowed[name] = tuple(
            value for value in limits.allowed.get(name, values) if value in values
        )
        if not allowed[name]:
            said = f"--limit {name}={','.join(map(str, limits.allowed[name]))}"
            raise HolmesError(f"{said}: {framework} can only {', '.join(map(str, values))}")
    return replace(limits, allowed=allowed, hierarchical=engine.hierarchical_zero)


@dataclass(frozen=True)
class Launch:
    """flags: for the script's command line. config: the ds_config, if there is one. lacks: what it cannot do.
    script: what the script itself must do: its mesh, its schedule."""

    flags: tuple[str, ...]
    config: dict = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    script: str = ""


def launches(
    candidate: Candidate, model: Model, global_batch: int, overlap: bool, cluster: str, plan: str
) -> dict[str, Launch]:
    """How to start `candidate`, by framework; cluster, plan: files' names, plan "" where none is written."""
    shape, holmes = candidate.shape, added(candidate, cluster, plan)
    own_layers = added(candidate, cluster, plan, layers=False)
    overlapped = ["--holmes-overlap", "on" if overlap else "off"]
    lm_flags, lm_lacks = _megatron_lm(candidate, model, global_batch)
    lm_flags += ["--overlap-grad-reduce"] if overlap else []
    config, lacks = _ds_config(candidate, model, global_batch), _limited(candidate, "deepspeed")
    # read by PipelineModule's user, and by holmes to compare it with the plan
    pipe = {
        "stages": shape.pipeline,
        "activation_checkpoint_interval": int(shape.recompute == "full"),
    }
    extra_config = {"pipeline": pipe} if shape.pipeline > 1 else {}
    ds_flags = ["--deepspeed_config", "ds_config.json", *holmes, "--holmes-sizes"]
    ds_flags += [f"pipeline={shape.pipeline},tensor={shape.tensor}", *overlapped]
    both = [*_megatron_deepspeed(candidate, model, global_batch), *overlapped, *holmes]
    return {
        "megatron-lm": Launch((*lm_flags, *holmes), lacks=tuple(lm_lacks)),
        "deepspeed": Launch(tuple(ds_flags), {**config, **extra_config}, lacks),
        "megatron-deepspeed": Launch(tuple(both), config, lacks),
        "ddp": Launch(tuple(holmes), lacks=_limited(candidate, "ddp")),
        "fsdp2": _fsdp2(candidate, holmes),
        "torch": Launch(
            tuple(own_layers), {}, _limited(candidate, "torch"), _torch_script(candidate)
        ),
        "torchtitan": _torchtitan(candidate, global_batch, own_layers),
    }


def added(candidate: Candidate, cluster: str, plan: str, layers: bool = True) -> list[str]:
    """What holmes needs on the command line. Without a plan the job makes one when it starts, for the same
    layers, unless (not layers) the script alone says which a stage has."""
    split = candidate.split
    uneven = layers and candidate.shape.virtual == 1 and split != uniform(sum(split), len(split))
    partition = ["--holmes-partition", ",".join(map(str, split))] if uneven else []
    passes = ["--holmes-schedule", "auto"] if candidate.schedule else []
    planned = ["--holmes-plan", plan] if plan else partition
    return ["--holmes", "--holmes-cluster", cluster, *planned, *passes]


def _sizes(candidate: Candidate, model: Model, global_batch: int) -> list[str]:
    """What both Megatrons call the same."""
    shape = candidate.shape
    values = {
        "--tensor-model-parallel-size": shape.tensor,
        "--pipeline-model-parallel-size": shape.pipeline,
        "--micro-batch-size": shape.micro_batch,
        "--global-batch-size": global_batch,
    }
    sequence = ["--sequence-parallel"] if model.sequence_parallel and shape.tensor > 1 else []
    return [text for name, value in values.items() for text in (name, str(value))] + sequence


def _megatron_lm(
    candidate: Candidate, model: Model, global_batch: int
) -> tuple[list[str], list[str]]:
    """(flags, what it lacks)"""
    shape, lacks = candidate.shape, []
    flags = _sizes(candidate, model, global_batch)
    if shape.context > 1:
        flags += ["--context-parallel-size", str(shape.context)]
    if model.experts:
        flags += [
            "--num-experts",
            str(model.experts),
            "--moe-router-topk",
            str(model.experts_per_token),
        ]
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
    if candidate.placement.sizes.order == PIPELINES_FIRST:
        flags.append("--use-tp-pp-dp-mapping")
    stages = list(zip(candidate.placement.stages, candidate.reductions))
    clusters = {len(content) for content, how in stages if how == "hierarchical"}
    if (
        clusters
        and shape.zero == 1
        and len(clusters) == 1
        and set(candidate.reductions) == {"hierarchical"}
    ):
        flags += ["--num-distributed-optimizer-instances", str(clusters.pop())]
    elif clusters:
        lacks.append(
            "hierarchical reduction without the distributed optimizer, or of some stages only (limit "
            "reduction=flat, or zero=1)"
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


def _limited(candidate: Candidate, name: str) -> tuple[str, ...]:
    """What the framework of that name in ENGINES cannot do of the plan's shape and order."""
    shape, order, limits = candidate.shape, candidate.placement.sizes.order, ENGINES[name].limits
    lacks = [
        f"{axis} {value} (limit {axis}={','.join(map(str, limits[axis]))})"
        for axis in limits
        if (value := getattr(shape, axis, None)) is not None and value not in limits[axis]
    ]
    if order == PIPELINES_FIRST and order not in limits.get("order", [order]):
        lacks.append("pipelines one after the other (limit clusters=pipeline)")
    return tuple(lacks)


def _fsdp2(candidate: Candidate, holmes: Sequence[str]) -> Launch:
    replicas, data = candidate.shape.replicas, candidate.shape.data
    flags, script = list(holmes), ""
    if replicas > 1:
        flags += ["--holmes-fsdp", "hybrid"]
        mesh = f"(replicate {replicas}, shard {data // replicas})"
        script = f"one dimension of data parallelism; or a mesh {mesh}, without --holmes-fsdp"
    return Launch(tuple(flags), lacks=_limited(candidate, "fsdp2"), script=script)


def replicas_of(candidate: Candidate) -> int:
    """Clusters over which each stage's data-parallel groups lie, in equal parts; 0 where these differ."""
    contents = candidate.placement.stages
    counts = {
        len(content) if len({ranks for _, ranks in content}) == 1 else 0 for content in contents
    }
    return counts.pop() if len(counts) == 1 else 0


def schedule_of(candidate: Candidate) -> str:
    """torch.distributed.pipelining's."""
    if candidate.breadth_first:
        return "LoopedBFS"
    return "Interleaved1F1B" if candidate.shape.virtual > 1 else "1F1B"


def _torch_script(candidate: Candidate) -> str:
    shape = candidate.shape
    if shape.pipeline == 1:
        return ""
    sizes = [f"pp {shape.pipeline}", f"dp {shape.data}"]
    mesh = ", ".join(sizes[::-1] if candidate.placement.sizes.order == PIPELINES_FIRST else sizes)
    stages = f"{schedule_of(candidate)} with {shape.virtual} stage{'s' * (shape.virtual > 1)} on each rank"
    layers = (
        "" if len(set(candidate.split)) == 1 else f"; layers {' '.join(map(str, candidate.split))}"
    )
    return (
        f"a mesh ({mesh}), outermost first; {stages}, {shape.micro_batches} x {shape.micro_batch} "
        f"sequences{layers}"
    )


def _torchtitan(candidate: Candidate, global_batch: int, holmes: list[str]) -> Launch:
    """Version 0.3.0's names."""
    shape, lacks = candidate.shape, list(_limited(candidate, "torchtitan"))
    replicas = shape.replicas
    if "hierarchical" in candidate.reductions:
        replicas = replicas_of(candidate) if set(candidate.reductions) == {"hierarchical"} else 0
        if not replicas or shape.data % replicas:
            lacks.append(
                "hierarchical reduction over unequal clusters, or of some stages only (limit reduction=flat)"
            )
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": shape.data // max(1, replicas),
        "tensor_parallel_degree": shape.tensor,
        "context_parallel_degree": shape.context,
        "expert_parallel_degree": shape.expert,
        "pipeline_parallel_degree": shape.pipeline,
        "fsdp_reshard_after_forward": "always" if shape.zero == 3 else "never",
    }
    split, script, local = candidate.split, "", shape.micro_batch
    if shape.pipeline > 1:
        local *= shape.micro_batches
        pipe = {"schedule": schedule_of(candidate), "microbatch_size": shape.micro_batch}
        if len(set(split)) > 1:
            layers = " ".join(map(str, split))
            script = f"module_fqns_per_model_part in its config: {layers} layers in the stages"
        else:
            pipe["layers_per_stage"] = split[0] // shape.virtual
            pipe |= {"first_stage_less_layers": 0, "last_stage_less_layers": 0}
        parallelism |= {f"pipeline_parallel_{name}": value for name, value in pipe.items()}
    flags = [
        text
        for name, value in parallelism.items()
        for text in (f"--parallelism.{name}", str(value))
    ]
    flags += [
        "--training.local_batch_size",
        str(local),
        "--training.global_batch_size",
        str(global_batch),
    ]
    return Launch((*flags, *holmes), lacks=tuple(lacks), script=script)


def _megatron_deepspeed(candidate: Candidate, model: Model, global_batch: int) -> list[str]:
    shape = candidate.shape
    flags = [
        *_sizes(candidate, model, global_batch),
        "--deepspeed",
        "--deepspeed_config",
        "ds_config.json",
    ]
    flags += ["--zero-stage", str(shape.zero)]
    if shape.pipeline == 1:
        flags.append("--no-pipeline-parallel")
    if shape.recompute == "full":
        flags += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    return flags
