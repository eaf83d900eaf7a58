"""Flags and configuration that start a planned job, for each framework, or the reason why it cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches.traits import ENGINES
from holmes_ext.plan.cost.model import Model, precision_of
from holmes_ext.plan.cost.reductions import ZERO_WEIGHTS
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.sizes import PIPELINES_FIRST
from holmes_ext.planner.command_edit import CommandEdit
from holmes_ext.planner.search.result import Candidate
from holmes_ext.planner.search.space import Limits


def limited(
    limits: Limits, engine: EngineTraits, framework: str, has_experts: bool = False
) -> Limits:
    """Return limits on the search space that allow only what both the user and the framework allow.

    Example: the user allows the tensor-parallel sizes 4 and 8, the framework 1, 2 and 4 -> only 4.

    The field `hierarchical` of the result says whether holmes or the framework reduces gradients
    hierarchically (inside clusters, then across them):

        None         holmes does, and the search chooses the reduction of each pipeline stage
        (1,), ...    the framework does, at these ZeRO stages only, and on all pipeline stages alike

    Args:
        limits: Limits of the user on the search space.
        engine: Properties of the framework, with the values of each limit that it allows.
        framework: Name of the framework, for the error message.
        has_experts: Whether the model has experts (mixture of experts).

    Raises:
        HolmesError: For some limit, no value is allowed by both.
    """
    allowed = dict(limits.allowed)
    for name, values in engine.limits_for(has_experts).items():
        # Without a limit of the user, all values of the framework are allowed.
        allowed[name] = tuple(
            value for value in limits.allowed.get(name, values) if value in values
        )
        if not allowed[name]:
            limit = f"--limit {name}={','.join(map(str, limits.allowed[name]))}"
            raise HolmesError(f"{limit}: {framework} can only {', '.join(map(str, values))}")
    return replace(limits, allowed=allowed, hierarchical=engine.hierarchical_zero)


@dataclass(frozen=True)
class Launch:
    """Command line and configuration with which a framework runs a plan."""

    #: Flags for the script's command line.
    flags: tuple[str, ...]
    #: DeepSpeed's configuration; {} for other frameworks.
    config: dict[str, Any] = field(default_factory=dict)
    #: Properties of the plan that the framework does not support.
    lacks: tuple[str, ...] = ()
    #: Code that the script itself needs, in words: its mesh, its schedule.
    script: str = ""
    #: Environment variables that the framework needs for the plan, in words.
    environment: str = ""
    #: Changes to the user's command that have the same effect; None without such a command.
    edit: CommandEdit | None = None
    #: Predicted step of the job that these flags start, in seconds. Without a plan file the job orders its
    #: nodes itself, so its step may be longer than the plan's. 0: not predicted.
    step_s: float = 0.0


def launches(
    candidate: Candidate,
    model: Model,
    global_batch: int,
    overlap: bool,
    cluster: str,
    plan: str,
    options: Options = Options(),
) -> dict[str, Launch]:
    """Return, for each framework, the flags and configuration files that start a planned job.

    Args:
        candidate: Plan to start.
        model: Model to train.
        global_batch: Sequences of a step.
        overlap: Gradient reductions overlap with the backward pass.
        cluster: File of the cluster description.
        plan: File of the plan; "" if none is written.
        options: Options of the user with which the plan was made.

    Returns:
        Name of the framework -> Launch.
    """
    shape = candidate.shape
    # Flags of holmes itself. The scripts of torch and torchtitan divide the layers into stages
    # themselves, so their flags do not name the layers of the stages.
    holmes_flags = added(candidate, cluster, plan, options=options)
    holmes_flags_without_layers = added(candidate, cluster, plan, layers=False, options=options)
    overlap_flags = ["--holmes-overlap", "on" if overlap else "off"]
    lm_flags, lm_unsupported = _megatron_lm(candidate, model, global_batch)
    lm_flags += ["--overlap-grad-reduce"] if overlap else overlap_flags
    config = _ds_config(candidate, model, global_batch)
    ds_unsupported = _unsupported(candidate, "deepspeed")
    pipeline_config = {}
    if shape.pipeline > 1:
        # DeepSpeed's PipelineModule takes these two numbers as arguments: the user's script passes them
        # on. At the start of the job, holmes compares the number of stages with the plan.
        checkpoint_interval = int(shape.recompute == "full")
        pipeline_config["pipeline"] = {
            "stages": shape.pipeline,
            "activation_checkpoint_interval": checkpoint_interval,
        }
    sizes = f"pipeline={shape.pipeline},tensor={shape.tensor}"
    ds_flags = ["--deepspeed_config", "ds_config.json", *holmes_flags]
    ds_flags += ["--holmes-sizes", sizes, *overlap_flags]
    megatron_ds_flags = _megatron_deepspeed(candidate, model, global_batch)
    megatron_ds_flags += [*overlap_flags, *holmes_flags]
    megatron_ds_unsupported = _unsupported(candidate, "megatron-deepspeed", bool(model.experts))
    return {
        "megatron-lm": Launch(
            (*lm_flags, *holmes_flags),
            lacks=tuple(lm_unsupported),
            environment=_megatron_lm_environment(candidate),
        ),
        "deepspeed": Launch(tuple(ds_flags), {**config, **pipeline_config}, ds_unsupported),
        "megatron-deepspeed": Launch(tuple(megatron_ds_flags), config, megatron_ds_unsupported),
        "ddp": Launch(tuple(holmes_flags), lacks=_unsupported(candidate, "ddp")),
        "fsdp2": _fsdp2(candidate, holmes_flags),
        "torch": Launch(
            tuple(holmes_flags_without_layers),
            lacks=_unsupported(candidate, "torch"),
            script=_torch_script(candidate),
        ),
        "torchtitan": _torchtitan(candidate, global_batch, holmes_flags_without_layers),
    }


def added(
    candidate: Candidate,
    cluster: str,
    plan: str,
    layers: bool = True,
    options: Options = Options(),
) -> list[str]:
    """Return the --holmes flags with which a training command follows a plan.

    A job with a plan file follows it. A job without one makes a plan when it starts. For that plan
    the flags name the layers of the stages, so that they are those of the candidate.

    Args:
        candidate: The plan.
        cluster: File of the cluster description.
        plan: File of the plan; "" for none.
        layers: The flags name the layers of the stages; False if the script itself divides them.
        options: Options of the user with which the plan was made.
    """
    split = candidate.split
    flags = ["--holmes", "--holmes-cluster", cluster]
    is_uneven = candidate.shape.virtual == 1 and len(set(split)) > 1
    if plan:
        flags += ["--holmes-plan", plan]
    elif layers and is_uneven:
        flags += ["--holmes-partition", ",".join(map(str, split))]
    if candidate.schedule:
        flags += ["--holmes-schedule", "auto"]
    if options.inflight == "off":
        flags += ["--holmes-inflight", "off"]
    return flags


def _sizes(candidate: Candidate, model: Model, global_batch: int) -> list[str]:
    """Return the flags that Megatron-LM and Megatron-DeepSpeed have in common: sizes and batch.

    Args:
        candidate: The plan.
        model: The model, with its batch and precision.
        global_batch: Sequences of a step.
    """
    shape = candidate.shape
    values = {
        "--tensor-model-parallel-size": shape.tensor,
        "--pipeline-model-parallel-size": shape.pipeline,
        "--micro-batch-size": shape.micro_batch,
        "--global-batch-size": global_batch,
    }
    flags = []
    for name, value in values.items():
        flags += [name, str(value)]
    if model.sequence_parallel and shape.tensor > 1:
        flags.append("--sequence-parallel")
    return flags


def _megatron_lm(
    candidate: Candidate, model: Model, global_batch: int
) -> tuple[list[str], list[str]]:
    """Return Megatron-LM's flags for a plan, and the properties of the plan that it does not support.

    Args:
        candidate: The plan.
        model: The model, with its batch and precision.
        global_batch: Sequences of a step.
    """
    shape = candidate.shape
    flags = _sizes(candidate, model, global_batch)
    flags += _megatron_lm_model_flags(candidate, model)
    lacks = []
    if shape.zero == 1:
        flags.append("--use-distributed-optimizer")
    if shape.zero > 1:
        lacks.append(f"ZeRO {shape.zero} (its FSDP is another optimizer; limit zero=0,1)")
    if candidate.placement.sizes.order == PIPELINES_FIRST:
        flags.append("--use-tp-pp-dp-mapping")
    reduction_flags, reduction_lacks = _megatron_lm_reduction(candidate)
    return flags + reduction_flags, lacks + reduction_lacks


def _megatron_lm_model_flags(candidate: Candidate, model: Model) -> list[str]:
    """Return Megatron-LM's flags for recomputation and for interleaved, context and expert parallelism.

    Args:
        candidate: The plan.
        model: The model, which may have experts.
    """
    shape = candidate.shape
    flags = []
    if shape.context > 1:
        flags += ["--context-parallel-size", str(shape.context)]
    if model.experts:
        flags += ["--num-experts", str(model.experts)]
        flags += ["--moe-router-topk", str(model.experts_per_token)]
        flags += ["--expert-model-parallel-size", str(shape.expert)]
    if shape.virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(shape.virtual)]
    if shape.recompute in ("selective", "full"):
        flags += ["--recompute-granularity", shape.recompute]
    if shape.recompute == "full":
        flags += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return flags


def _megatron_lm_reduction(candidate: Candidate) -> tuple[list[str], list[str]]:
    """Return Megatron-LM's flags for the plan's hierarchical reductions, and what it does not support.

    Megatron-LM reduces hierarchically if its distributed optimizer has several instances, one in each
    cluster. All stages have the same number of instances.

    Args:
        candidate: The plan.
    """
    # Number of clusters of each stage that reduces hierarchically.
    cluster_counts = set()
    for content, reduction in zip(candidate.placement.stages, candidate.reductions):
        if reduction == "hierarchical":
            cluster_counts.add(len(content))
    if not cluster_counts:
        return [], []
    all_hierarchical = set(candidate.reductions) == {"hierarchical"}
    if candidate.shape.zero == 1 and len(cluster_counts) == 1 and all_hierarchical:
        instances = cluster_counts.pop()
        return ["--num-distributed-optimizer-instances", str(instances)], []
    return [], [
        "hierarchical reduction without the distributed optimizer, or of some stages only (limit "
        "reduction=flat, or zero=1)"
    ]


def _megatron_lm_environment(candidate: Candidate) -> str:
    """Return the environment variable that Megatron-LM needs for a plan, in words; "" for none."""
    shape = candidate.shape
    if shape.tensor == 1 and shape.context == 1:
        return ""
    return (
        "CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron-LM requires with tensor or context parallelism on "
        "GPUs before Blackwell"
    )


def _ds_config(candidate: Candidate, model: Model, global_batch: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration (ds_config.json), without its section on the pipeline.

    Args:
        candidate: The plan.
        model: The model, with its batch and precision.
        global_batch: Sequences of a step.
    """
    shape = candidate.shape
    config: dict[str, Any] = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.micro_batches,
        "zero_optimization": {"stage": shape.zero},
    }
    precision = precision_of(model)
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return config


def _unsupported(candidate: Candidate, name: str, has_experts: bool = False) -> tuple[str, ...]:
    """Return the properties of a plan that a framework does not support, in words for the user.

    Each text ends with the limit that excludes such plans from the search, for example "zero 3 (limit
    zero=0,1)".

    Args:
        candidate: The plan.
        name: Name of the framework in ENGINES.
        has_experts: Whether the model has experts (mixture of experts).
    """
    shape = candidate.shape
    order = candidate.placement.sizes.order
    limits = ENGINES[name].limits_for(has_experts)
    lacks = []

    # Limits on the fields of Shape. That on "order", which is none of them, follows below.
    for axis, allowed in limits.items():
        value = getattr(shape, axis, None)
        if value is not None and value not in allowed:
            lacks.append(f"{axis} {value} (limit {axis}={','.join(map(str, allowed))})")

    # Without a limit on the order of the axes, the framework supports every order.
    # With the order PIPELINES_FIRST, each pipeline has consecutive ranks. The search chooses it if
    # stages cannot have whole nodes of each cluster. Then data-parallel groups cross clusters. The
    # limit `--limit clusters=pipeline` forbids that (only pipelines cross clusters).
    allowed_orders = limits.get("order")
    is_refused = allowed_orders is not None and order not in allowed_orders
    if order == PIPELINES_FIRST and is_refused:
        lacks.append("pipelines one after the other (limit clusters=pipeline)")
    return tuple(lacks)


def _fsdp2(candidate: Candidate, holmes: Sequence[str]) -> Launch:
    """Return the flags and the script settings with which PyTorch's FSDP2 runs a plan.

    With several replicas of the sharded model (hybrid sharding) there are two ways. The script has
    a device mesh with a single dimension of data parallelism, and --holmes-fsdp hybrid divides it into
    replicas and shards. Or the script has the mesh of two dimensions itself, and runs without
    --holmes-fsdp.

    Args:
        candidate: Plan to start.
        holmes: Flags of holmes.
    """
    replicas = candidate.shape.replicas
    flags = list(holmes)
    script = ""
    if replicas > 1:
        flags += ["--holmes-fsdp", "hybrid"]  # the first way; `script` names both
        shards = candidate.shape.data // replicas
        mesh = f"(replicate {replicas}, shard {shards})"
        script = f"one dimension of data parallelism; or a mesh {mesh}, without --holmes-fsdp"
    return Launch(tuple(flags), lacks=_unsupported(candidate, "fsdp2"), script=script)


def replicas_of(candidate: Candidate) -> int:
    """Return on how many clusters each pipeline stage lies, if all stages agree; else 0.

    A framework with hybrid sharding can keep a replica of the stage on each of these clusters. The
    result is 0 also if a stage has different numbers of ranks on its clusters.
    """
    counts = set()
    for clusters in candidate.placement.stages:  # (cluster, ranks on it)
        has_equal_parts = len({ranks for _, ranks in clusters}) == 1
        counts.add(len(clusters) if has_equal_parts else 0)
    return counts.pop() if len(counts) == 1 else 0


def schedule_of(candidate: Candidate) -> str:
    """Return the name that torch.distributed.pipelining has for a plan's pipeline schedule."""
    if candidate.breadth_first:
        return "LoopedBFS"
    return "Interleaved1F1B" if candidate.shape.virtual > 1 else "1F1B"


def _torch_script(candidate: Candidate) -> str:
    """Return the device mesh and the pipeline schedule that a PyTorch script needs for a plan, as text.

    The text is for scripts with torch.distributed.pipelining; "" if the plan has no pipeline.
    """
    shape = candidate.shape
    if shape.pipeline == 1:
        return ""
    sizes = [f"pp {shape.pipeline}", f"dp {shape.data}"]
    if candidate.placement.sizes.order == PIPELINES_FIRST:
        sizes.reverse()
    plural = "s" if shape.virtual > 1 else ""
    stages = f"{schedule_of(candidate)} with {shape.virtual} stage{plural} on each rank"
    layers = ""
    if len(set(candidate.split)) > 1:
        layers = f"; layers {' '.join(map(str, candidate.split))}"
    return (
        f"a mesh ({', '.join(sizes)}), outermost first; {stages}, {shape.micro_batches} x "
        f"{shape.micro_batch} sequences{layers}"
    )


def _torchtitan(candidate: Candidate, global_batch: int, holmes: list[str]) -> Launch:
    """Return the configuration with which torchtitan 0.3.0 runs a plan.

    A hierarchical reduction becomes hybrid sharding: replicas across clusters, shards inside them.

    Args:
        candidate: Plan to start.
        global_batch: Sequences of a step.
        holmes: Flags of holmes.
    """
    shape = candidate.shape
    lacks = list(_unsupported(candidate, "torchtitan"))
    replicas = shape.replicas
    if "hierarchical" in candidate.reductions:
        all_hierarchical = set(candidate.reductions) == {"hierarchical"}
        replicas = replicas_of(candidate) if all_hierarchical else 0
        if not replicas or shape.data % replicas:
            lacks.append(
                "hierarchical reduction over unequal clusters, or of some stages only (limit reduction=flat)"
            )
    values: dict[str, object] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": shape.data // max(1, replicas),
        "tensor_parallel_degree": shape.tensor,
        "context_parallel_degree": shape.context,
        "expert_parallel_degree": shape.expert,
        "pipeline_parallel_degree": shape.pipeline,
        "fsdp_reshard_after_forward": "always" if shape.zero == ZERO_WEIGHTS else "never",
    }
    split = candidate.split
    script = ""
    local_batch = shape.micro_batch
    if shape.pipeline > 1:
        # torchtitan's local batch is all micro-batches of a pipeline.
        local_batch *= shape.micro_batches
        values["pipeline_parallel_schedule"] = schedule_of(candidate)
        values["pipeline_parallel_microbatch_size"] = shape.micro_batch
        if len(set(split)) > 1:
            layers = " ".join(map(str, split))
            script = f"module_fqns_per_model_part in its config: {layers} layers in the stages"
        else:
            values["pipeline_parallel_layers_per_stage"] = split[0] // shape.virtual
            values["pipeline_parallel_first_stage_less_layers"] = 0
            values["pipeline_parallel_last_stage_less_layers"] = 0
    flags = []
    for name, value in values.items():
        flags += [f"--parallelism.{name}", str(value)]
    flags += ["--training.local_batch_size", str(local_batch)]
    flags += ["--training.global_batch_size", str(global_batch)]
    return Launch((*flags, *holmes), lacks=tuple(lacks), script=script)


def _megatron_deepspeed(candidate: Candidate, model: Model, global_batch: int) -> list[str]:
    """Return the command-line flags with which Megatron-DeepSpeed runs a plan."""
    shape = candidate.shape
    flags = _sizes(candidate, model, global_batch)
    flags += ["--deepspeed", "--deepspeed_config", "ds_config.json"]
    flags += ["--zero-stage", str(shape.zero)]
    if shape.pipeline == 1:
        flags.append("--no-pipeline-parallel")
    if model.experts:
        if not model.expert_divisor:  # all blocks have the same number of experts
            flags += ["--num-experts", str(model.experts)]
        flags += ["--moe-expert-parallel-size", str(shape.expert)]
    if model.experts and model.experts_per_token > 1:
        flags += ["--topk", str(model.experts_per_token)]
    if shape.recompute == "full":
        flags += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    return flags
