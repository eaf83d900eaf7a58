"""The job that a command line describes: sizes, model, how the framework runs it, what had to be assumed."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.megatron.command_line.flags import MEGATRON_DEEPSPEED, READ
from holmes_ext.patches.megatron.command_line.settings import read, settings_of, words
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.sizes import DEFAULT_ORDER, Sizes
from holmes_ext.words import some_of

#: Flags without which there is no model, by setting.
NEEDED = {
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "heads": "--num-attention-heads",
    "sequence": "--seq-length",
    "micro_batch": "--micro-batch-size",
}
#: What a command line can say of the step of a model that it does not describe.
STEP = ("micro_batch", "micro_batches", "global_batch", "recompute", "sequence_parallel")
#: GPT-2's vocabulary, when no flag names another; Megatron pads to a multiple of DIVISIBLE x tensor.
GPT2_VOCABULARY, DIVISIBLE = 50257, 128
#: Bytes of an optimizer's moments of one parameter; Adam's where another is used.
MOMENTS = {"sgd": 4.0, "lion": 4.0, "muon": 4.0}
#: Attention that keeps the scores.
UNFUSED = ("unfused", "local")


@dataclass(frozen=True)
class CommandLine:
    """sizes, model: None where nothing names them; trouble: why a model that is partly there could not be
    made. overlap: of reductions as the framework does it ("off", "first": of the first stage, "on");
    gather_overlap: updated weights travel under the next forward. stage_layers: () for even ones. framework:
    whose flags they are, "" unless Megatron's. assumed, not_read, unknown: for the user. training: what it
    says of a step, for a model that is known otherwise (fields of Model, and zero). backend: of
    torch.distributed, "" where no flag says it. instances: of the distributed optimizer."""

    sizes: Sizes | None = None
    model: Model | None = None
    trouble: str = ""
    zero: int = 0
    virtual: int = 1
    overlap: str = "off"
    gather_overlap: bool = False
    stage_layers: tuple[int, ...] = ()
    framework: str = ""
    assumed: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    training: dict[str, Any] = field(default_factory=dict)
    backend: str = ""
    instances: int = 1


def describe(argv: Sequence[str]) -> CommandLine:
    """Return what the command line of a script says about its job.

    No error is raised: if the model cannot be made, `trouble` of the result says why.
    """
    # The functions below append to `assumed` what they had to assume.
    said = read(argv)
    given, assumed = dict(said.values), list(said.overruled)
    deepspeed = "ds_config" in given or any(flag in said.flags for flag in MEGATRON_DEEPSPEED)
    framework = ""
    if {"layers", "hidden", "heads"} & set(given):  # settings whose flags only these two have
        framework = "megatron-deepspeed" if deepspeed else "megatron-lm"
    pipeline, zero = given.get("pipeline", 1), _zero(given, assumed)
    if deepspeed and "expert" in given:  # groups of a layer are no larger than its experts are many
        given["expert"] = min(given["expert"], *given.get("experts", [1]))
    model, trouble = None, ""
    if framework:
        try:
            model = _model(given, zero, deepspeed, assumed)
        except HolmesError as error:
            trouble = str(error)
    virtual, split = _stages(given, model.layers if model else 0, pipeline, assumed)
    # DeepSpeed's pipeline engine switches its overlap off.
    overlapped = given.get("overlap", False) and not (deepspeed and pipeline > 1)
    step = {name: given[name] for name in STEP if name in given}
    step |= {"zero": zero} if {"zero", "fsdp"} & set(given) else {}
    by_reason: dict[str, list[str]] = {}  # why flags are not read -> these flags
    for name, why in said.not_read.items():
        by_reason.setdefault(why, []).append(name)
    # In the order of the fields of CommandLine.
    return CommandLine(
        _sizes(given),
        model,
        trouble,
        zero,
        virtual,
        ("on" if pipeline == 1 else "first") if overlapped else "off",
        given.get("gather_overlap", False),
        split,
        framework,
        tuple(assumed),
        tuple(f"{some_of(names, 4)}: {why}" for why, names in by_reason.items()),
        said.unknown,
        step,
        "".join(said.flags.get("--distributed-backend", [])[:1]),
        given.get("instances", 1),
    )


def sizes_from_arguments(argv: Sequence[str]) -> Sizes | None:
    """Sizes alone; None when `argv` names none, and with several optimizer instances: a plan without sizes
    puts each cluster's nodes together, so that an instance is a cluster, while one with sizes sees that
    data-parallel groups cross anyway and leaves the launcher's order. What a ds_config says of sizes is for
    the script to follow or not: a job asks the framework, which tells when it starts."""
    given = settings_of(READ, words(argv))
    return None if given.get("instances", 1) > 1 else _sizes(given)


def model_from_arguments(argv: Sequence[str], needed: bool = True) -> Model | None:
    """The model that `argv` describes, on nominal GPUs (150 TFLOP/s, no memory limit); None when it describes
    none. HolmesError when some of it is lacking or fits together badly; None then where not `needed`."""
    said = describe(argv)
    if said.trouble and needed:
        raise HolmesError(said.trouble)
    return said.model


def overlaps(option: str, argv: Sequence[str]) -> bool:
    """Whether --holmes-overlap `option` reduces under the last backward; auto: where stages are."""
    return "--no-pipeline-parallel" not in argv if option == "auto" else option == "on"


def _sizes(given: dict[str, Any]) -> Sizes | None:
    named = {
        name: given[name]
        for name in ("pipeline", "tensor", "context", "expert")
        if given.get(name, 0) > 0
    }
    return Sizes(**named, order=given.get("order", DEFAULT_ORDER)) if named else None


def _zero(given: dict[str, Any], assumed: list[str]) -> int:
    zero = given.get("fsdp_zero", 0) if given.get("fsdp") else given.get("zero", 0)
    if zero > 1 and given.get("pipeline", 1) > 1:
        assumed.append(f"ZeRO 1: stage {zero} goes with no pipeline")
        return 1
    return min(int(zero), 3)


def _model(given: dict[str, Any], zero: int, deepspeed: bool, assumed: list[str]) -> Model:
    """Return the model that the settings of a command line describe.

    Args:
        given: The settings, by the names of flags.py.
        zero: ZeRO stage.
        deepspeed: Whether the framework is Megatron-DeepSpeed, whose defaults differ from Megatron-LM's.
        assumed: The function appends a line for each thing that it had to assume.

    Raises:
        HolmesError: A flag that every model needs is missing, or Model refuses the values.
    """
    for name, flag in NEEDED.items():
        if name not in given:
            way_out = "add it, or give the model with --holmes-model FILE"
            raise HolmesError(f"the command line describes a model, but not {flag}; {way_out}")
    values: dict[str, Any] = {name: given[name] for name in NEEDED}
    # Settings that are fields of Model without a conversion.
    plain = (
        "groups",
        "head_size",
        "max_positions",
        "bias",
        "tied",
        "expert_ffn",
        "shared_ffn",
        "sequence_parallel",
    )
    values |= {name: given[name] for name in plain if name in given}
    if "query_groups" in given and given.get("grouped"):
        values["groups"] = given["query_groups"]
    elif "query_groups" in given:
        assumed.append(
            "as many key-value heads as heads: --num-query-groups needs --group-query-attention"
        )
    # Megatron's default with --swiglu is 8 / 3 x hidden, in multiples of 64. 0: Model's default, 4 x hidden.
    values["ffn"] = given.get("ffn") or (
        int(4 * given["hidden"] * 2 / 3 / 64) * 64 if given.get("gated") else 0
    )
    values["gated"] = given.get("gated", False) or given.get("geglu", False)
    values["positions"] = given.get("positions", "learned")
    values |= _batch(given, assumed) | _widths(given, zero, deepspeed)
    values |= _experts(given, deepspeed, assumed) if max(given.get("experts", [0])) > 1 else {}
    values["vocabulary"] = _vocabulary(given, assumed)
    values["flash"] = _flash(given, deepspeed, assumed)
    values["recompute"] = given.get(
        "recompute", "full" if given.get("checkpoint_interval") else "none"
    )
    return Model(**values, source="the command line")


def _batch(given: dict[str, Any], assumed: list[str]) -> dict[str, int]:
    if "global_batch" in given:
        return {"global_batch": given["global_batch"]}
    if "micro_batches" not in given:
        assumed.append("one micro-batch a step, as Megatron does without --global-batch-size")
    return {"micro_batches": given.get("micro_batches", 1)}


def _vocabulary(given: dict[str, Any], assumed: list[str]) -> int:
    """Return the number of rows of the embedding: the vocabulary, padded as Megatron pads it."""
    if "padded_vocabulary" in given:
        return int(given["padded_vocabulary"])
    if "vocabulary" not in given:
        tokenizer = f"{given['tokenizer']}'s" if "tokenizer" in given else "the tokenizer's"
        assumed.append(
            f"vocabulary {GPT2_VOCABULARY} (GPT-2's): {tokenizer} is not looked up; --vocab-size tells it"
        )
    size = given.get("vocabulary", GPT2_VOCABULARY)
    # Each tensor-parallel rank gets a multiple of `divisible` rows; 0: no padding.
    unit = given.get("divisible", DIVISIBLE) * given.get("tensor", 1)
    return ceil(size / unit) * unit if unit else int(size)


def _flash(given: dict[str, Any], deepspeed: bool, assumed: list[str]) -> bool:
    """Whether attention keeps no scores."""
    if "attention" in given:
        return given["attention"] not in UNFUSED
    fused = not deepspeed and given.get("implementation", "transformer_engine") != "local"
    if fused:
        assumed.append(
            "attention keeps no scores (transformer_engine; --attention-backend unfused says otherwise)"
        )
    return fused


def _widths(given: dict[str, Any], zero: int, deepspeed: bool) -> dict[str, Any]:
    """Return the bytes of an activation's and a gradient's element, and of the state of one parameter.

    The state is weights, gradients and optimizer. Megatron-LM keeps and sends gradients in 32 bits with
    --bf16, unless --grad-reduce-in-bf16 is given, and in 16 bits with --fp16 (arguments.py). DeepSpeed does
    both in the model's type, unless data_types.grad_accum_dtype says otherwise (engine.get_data_types).
    """
    precision = given.get("precision", "fp32")
    weight = 4 if precision == "fp32" else 2
    gradient = 4 if precision == "bf16" and not deepspeed else weight
    gradient = given.get("gradient_width", given.get("main_gradient_width", gradient))
    kept = given.get(
        "main_gradient_width", gradient
    )  # bytes of a gradient in memory; `gradient`: as sent
    moments = MOMENTS.get(given.get("optimizer", "adam").lower(), 8.0)
    if {"first_moment_width", "second_moment_width"} & set(given):
        moments = float(given.get("first_moment_width", 4) + given.get("second_moment_width", 4))
    master = 0.0 if precision == "fp32" else float(given.get("main_weight_width", 4))
    optimizer = (master + moments) * (
        1 - min(1.0, given.get("offloaded", 0.0) * given.get("offload_fraction", 1.0))
    )
    # ZeRO 1 divides the optimizer's state among the ranks. ZeRO 2 also divides the gradients, and ZeRO 3 the
    # weights.
    parts = [optimizer, float(kept), float(weight)]
    shared = sum(parts[:zero])
    return {
        "activation_width": weight,
        "gradient_width": gradient,
        "state_bytes": sum(parts) - shared,
        "sharded_bytes": shared,
    }


def _experts(given: dict[str, Any], deepspeed: bool, assumed: list[str]) -> dict[str, Any]:
    """Return the fields of Model that describe the experts of its MoE layers."""
    counts = given["experts"]  # of each MoE layer; one number if all have equally many
    layers, experts = given["layers"], round(sum(counts) / len(counts))
    if len(set(counts)) > 1:
        assumed.append(
            f"{experts} experts in each layer that has some: the mean of {', '.join(map(str, counts))}"
        )
    routed = _routed(given.get("expert_frequency", "2" if deepspeed else "1"), layers, deepspeed)
    if routed < layers:
        assumed.append(f"experts in {routed} of {layers} layers: each layer counts as the mean")
    # The experts of one token. Megatron-DeepSpeed's default is 1, Megatron-LM's is 2.
    active = min(experts, given.get("experts_per_token", 1 if deepspeed else 2))
    values = {"experts": experts, "experts_per_token": active, "expert_layers": routed}
    return values | (
        {"shared_ffn": given.get("ffn") or 4 * given["hidden"]} if given.get("residual") else {}
    )


def _routed(text: str, layers: int, deepspeed: bool) -> int:
    """Layers with experts: every N-th, or those of a list such as ([0]+[1]*23)*2."""
    if text.isdecimal() and int(text):
        return max(1, layers // int(text) if deepspeed else ceil(layers / int(text)))
    try:
        pattern = _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        return layers
    return max(1, round(layers * sum(map(bool, pattern)) / len(pattern))) if pattern else layers


def _pattern(node: ast.expr) -> Any:
    """Numbers, lists, + and *: nothing else is worked out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < 10_000:
        return node.value
    if isinstance(node, ast.List):
        return [_pattern(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _pattern(node.left), _pattern(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise ValueError(ast.dump(node))


def _stages(
    given: dict[str, Any], layers: int, pipeline: int, assumed: list[str]
) -> tuple[int, tuple[int, ...]]:
    """Return the number of chunks of each stage, and the layers of each stage; () if all have equally many.

    The layers come from a layout, or from the first and the last stage, or from the embedding and the loss
    that count as layers. A split that holmes cannot count is taken as even, and noted in `assumed`.
    """
    if not layers or pipeline < 2:
        return 1, ()
    if "layout" in given:
        chunks = [stage.count("t") for stage in _layout(given["layout"])]
        virtual, rest = divmod(len(chunks), pipeline)
        fits = not rest and min(chunks) > 0 and sum(chunks) == layers
        if fits and (virtual == 1 or len(set(chunks)) == 1):
            return virtual, tuple(chunks) if virtual == 1 and len(set(chunks)) > 1 else ()
        what = f"--pipeline-model-parallel-layout {given['layout']:.40}"
        assumed.append(
            f"even layers: {what} cannot be counted (stages without layers, or uneven chunks)"
        )
        return (virtual if not rest and layers % (pipeline * virtual) == 0 else 1), ()
    # Chunks of each stage, by --num-layers-per-virtual-pipeline-stage.
    chunk = layers // pipeline // given["layers_per_chunk"] if given.get("layers_per_chunk") else 1
    virtual = given.get("virtual", chunk) or 1
    first, last = given.get("first_layers", 0), given.get("last_layers", 0)
    # Whether the embedding and the loss each take the place of one layer, on the first and the last stage.
    ends = given.get("embedding_counts", False), given.get("loss_counts", False)
    per_stage, rest = divmod(layers + sum(ends), pipeline)
    if any(ends) and not rest and virtual == 1:
        return 1, (per_stage - ends[0], *[per_stage] * (pipeline - 2), per_stage - ends[1])
    # The number of stages without a number of layers of their own. They share the other layers evenly.
    inner = pipeline - bool(first) - bool(last)
    if not (first or last) or inner < 1 or layers - first - last < inner:
        return virtual, ()
    middle = uniform(layers - first - last, inner)
    if virtual > 1:
        assumed.append(
            "even layers: an uneven first or last stage is not counted in an interleaved schedule"
        )
        return virtual, ()
    return 1, (*((first,) if first else ()), *middle, *((last,) if last else ()))


def _layout(text: str) -> list[str]:
    """Of a layout such as Et*3|(tt|)*2,m|L, each stage's letters (pipeline_parallel_layer_layout.py)."""
    text = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]*)\)\*(\d{1,4})", r"([A-Za-z|])\*(\d{1,4})"):
        while len(text) < 100_000 and (match := re.search(pattern, text)):
            text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
    return text.replace("(", "").replace(")", "").split("|")
