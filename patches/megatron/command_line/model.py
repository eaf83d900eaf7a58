"""Makes the model that the flags of Megatron-LM or Megatron-DeepSpeed describe.

The input is a dictionary of settings, such as {"layers": 24, "precision": "bf16"}, as settings.py reads it
from the flags. The result is a Model. holmes predicts the time and memory of a training step from it. A value
that no flag gives is the default of the framework, or is assumed; each assumption becomes a line for the
user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import gcd
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.optimizers import (
    WIDTHS,
    TrainingTypes,
    optimizer_of,
    release,
    state_of_mode,
)
from holmes_ext.patches.engine.patch import installed_version
from holmes_ext.patches.megatron.command_line.expert_layers import count_expert_layers
from holmes_ext.patches.megatron.command_line.hybrid import hybrid_model
from holmes_ext.patches.megatron.command_line.other_models import (
    refuse_other_models,
    sequence_of_language_model,
    with_task_of_script,
)
from holmes_ext.patches.megatron.command_line.vocabulary import (
    padded_vocabulary,
    padding_fields,
    vocabulary_tokens,
)
from holmes_ext.plan.cost.model import Mode, Model, StateBytes, sharded_by

#: Setting -> its flag, for settings that every model needs.
REQUIRED_FLAGS = {
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "heads": "--num-attention-heads",
    "sequence": "--seq-length",
    "micro_batch": "--micro-batch-size",
}
#: Settings that are fields of Model, under the same name and with the same value.
MODEL_FIELDS = (
    "groups",
    "head_size",
    "max_positions",
    "bias",
    "tied",
    "expert_ffn",
    "shared_ffn",
    "sequence_parallel",
)
#: Megatron rounds the width of a gated MLP down to a multiple of this number.
GATED_FFN_MULTIPLE = 64
#: Bytes of the moments that an optimizer keeps for one parameter. ADAM_MOMENT_BYTES for all other optimizers.
MOMENT_BYTES = {"sgd": 4.0, "lion": 4.0, "muon": 4.0}
ADAM_MOMENT_BYTES = 8.0
#: Values of --attention-backend with which attention keeps its scores for the backward pass.
UNFUSED_ATTENTION = ("unfused", "local")
#: Megatron-LM's defaults for multi-head latent attention: setting -> value.
LATENT_DEFAULTS = {
    "query_rank": 0,  # the query is not compressed
    "key_value_rank": 32,
    "latent_head_size": 128,
    "rotary_size": 64,
    "value_size": 128,
}


def model_of(
    settings: Mapping[str, Any],
    flags: Mapping[str, Sequence[str]],
    script: str,
    zero_stage: int,
    is_deepspeed: bool,
    assumed: list[str],
) -> Model:
    """Return the model that the settings of a command line describe.

    Args:
        settings: Name of a setting -> value, such as "layers" -> 24. flags.py has the names.
        flags: Flag of the command line -> the words that follow it.
        script: File name of the training script, "" if it is not known.
        zero_stage: ZeRO stage of the job, 0 to 3.
        is_deepspeed: Whether the framework is Megatron-DeepSpeed, whose defaults differ from
            Megatron-LM's.
        assumed: Lines for the user. For each value that no flag gives and that is assumed here, a
            line is appended, such as "vocabulary 50257 (GPT-2's)".

    Raises:
        HolmesError: A flag that every model needs is missing, the model is no stack of equal
            transformer blocks, or Model refuses the values.
    """
    # The message that refuses a hybrid model says how large it is. Its vocabulary is assumed silently.
    vocabulary = padded_vocabulary(settings, vocabulary_tokens(settings, assumed=[]))
    refuse_other_models(flags, script, hybrid_model(flags, settings, vocabulary))
    settings = with_task_of_script(settings, script, assumed)  # pretrain_bert.py: BERT's vocabulary
    settings = sequence_of_language_model(settings, assumed)
    for name, flag in REQUIRED_FLAGS.items():
        if name not in settings:
            way_out = "add it, or give the model with --holmes-model FILE"
            raise HolmesError(f"the command line describes a model, but not {flag}; {way_out}")

    # Fields of Model -> value.
    values: dict[str, Any] = {name: settings[name] for name in REQUIRED_FLAGS}
    values |= {name: settings[name] for name in MODEL_FIELDS if name in settings}

    if "query_groups" in settings and settings.get("grouped"):
        values["groups"] = settings["query_groups"]  # key-value heads
    elif "query_groups" in settings:
        assumed.append(
            "as many key-value heads as heads: --num-query-groups needs --group-query-attention"
        )
    if settings.get("latent"):
        values |= _latent_fields(settings)
    values["ffn"] = _ffn_width(settings)
    values["gated"] = settings.get("gated", False) or settings.get("geglu", False)
    values["positions"] = settings.get("positions", "learned")
    values |= _batch_fields(settings, assumed)

    # Bytes of each activation, gradient and parameter: engines keep different numbers.
    if is_deepspeed:
        values |= _deepspeed_byte_fields(settings, zero_stage, assumed)
    else:
        values |= _byte_fields(settings, zero_stage)
    values["precision"] = settings.get("precision", "fp32")

    # --num-experts takes a list: Megatron-DeepSpeed's layers may have different numbers of experts.
    has_experts = max(settings.get("experts", [0])) > 1
    if has_experts:
        values |= _expert_fields(settings, is_deepspeed, assumed)
    tokens = vocabulary_tokens(settings, assumed)
    values["vocabulary"] = padded_vocabulary(settings, tokens)
    values |= padding_fields(settings, tokens)

    # With a fused attention kernel, no attention scores are kept for the backward pass.
    values["flash"] = _is_attention_fused(settings, is_deepspeed, assumed)
    # Layers that DeepSpeed's pipeline engine recomputes together in the backward pass; 0: none. A
    # flag for recomputing ("recompute") takes precedence.
    checkpoint_interval = settings.get("checkpoint_interval", 0)
    default_recompute = "full" if checkpoint_interval else "none"
    values["recompute"] = settings.get("recompute", default_recompute)
    return Model(**values, source="the command line")


def _latent_fields(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields of Model for multi-head latent attention, with Megatron-LM's defaults."""
    sizes = {name: settings.get(name, default) for name, default in LATENT_DEFAULTS.items()}
    sizes["head_size"] = sizes.pop("latent_head_size")  # without the part for positions
    return sizes


def _ffn_width(settings: Mapping[str, Any]) -> int:
    """Return the width inside the MLP, or 0 for Model's default (4 x the hidden size).

    With --swiglu, Megatron's default is 8/3 x the hidden size, rounded down to a multiple of 64.
    """
    if settings.get("ffn"):
        return settings["ffn"]
    if not settings.get("gated"):
        return 0
    exact_width = 4 * settings["hidden"] * 2 / 3
    return int(exact_width / GATED_FFN_MULTIPLE) * GATED_FFN_MULTIPLE


def _batch_fields(settings: Mapping[str, Any], assumed: list[str]) -> dict[str, int]:
    """Return the field of Model with the batch size, as a dictionary with one entry.

    The entry is "global_batch" (sequences of all ranks in a step) if the command line gives that number.
    Otherwise it is "micro_batches" (of each data-parallel rank in a step), by default 1.

    Args:
        assumed: Lines for the user about assumptions; a line is appended if the default is used.

    Raises:
        HolmesError: The number is 0.
    """
    for name, flag in (
        ("global_batch", "--global-batch-size"),
        ("micro_batches", "gradient_accumulation_steps"),
    ):
        if settings.get(name) == 0:
            raise HolmesError(f"{flag} is 0; it must be 1 or more")
    if "global_batch" in settings:
        return {"global_batch": settings["global_batch"]}
    if "micro_batches" not in settings:
        assumed.append("one micro-batch a step, as Megatron does without --global-batch-size")
    return {"micro_batches": settings.get("micro_batches", 1)}


def _is_attention_fused(
    settings: Mapping[str, Any], is_deepspeed: bool, assumed: list[str]
) -> bool:
    """Return whether a fused kernel computes the attention.

    A fused kernel (as in FlashAttention) keeps no attention scores for the backward pass. If no
    flag names the kernel, one is assumed for Megatron-LM with transformer_engine, its default. None
    is assumed for Megatron-DeepSpeed.

    Args:
        assumed: Lines for the user about assumptions; a line is appended if a fused kernel is assumed.
    """
    if "attention" in settings:
        return settings["attention"] not in UNFUSED_ATTENTION
    uses_transformer_engine = (
        not is_deepspeed and settings.get("implementation", "transformer_engine") != "local"
    )
    if uses_transformer_engine:
        assumed.append(
            "attention keeps no scores (transformer_engine; --attention-backend unfused changes that)"
        )
    return uses_transformer_engine


def _byte_fields(settings: Mapping[str, Any], zero_stage: int) -> dict[str, Any]:
    """Return the fields of Model that count bytes under Megatron-LM: of activations, gradients and state.

    The state of a parameter is its weight, its gradient and its optimizer states. Megatron-LM's
    arguments.py keeps and sends gradients in 32 bits with --bf16, and in 16 bits with --fp16.

    Args:
        settings: Name of a setting -> value.
        zero_stage: ZeRO stage, 0 to 3.
    """
    precision = settings.get("precision", "fp32")
    weight_bytes = WIDTHS[precision]
    default_gradient_bytes = 4 if precision == "bf16" else weight_bytes

    # Two settings give bytes: "gradient_width" of a gradient as it is sent, "main_gradient_width"
    # of the sum that a rank keeps over the micro-batches. If only one is given, it holds for both.
    given_kept_bytes = settings.get("main_gradient_width")
    if given_kept_bytes is None:
        sent_gradient_bytes = settings.get("gradient_width", default_gradient_bytes)
        kept_gradient_bytes = sent_gradient_bytes
    else:
        sent_gradient_bytes = settings.get("gradient_width", given_kept_bytes)
        kept_gradient_bytes = given_kept_bytes

    # ZeRO 1 shards the optimizer, ZeRO 2 also the gradients, ZeRO 3 also the weights.
    bytes_in_zero_order = [
        _optimizer_bytes(settings, precision),
        float(kept_gradient_bytes),
        float(weight_bytes),
    ]
    sharded_bytes = sum(bytes_in_zero_order[:zero_stage])
    fields: dict[str, Any] = {
        "activation_width": weight_bytes,
        "gradient_width": sent_gradient_bytes,
        "state_bytes": sum(bytes_in_zero_order) - sharded_bytes,
        "sharded_bytes": sharded_bytes,
    }
    if settings.get("offloaded"):
        optimizer, gradients, weights = bytes_in_zero_order
        state = StateBytes(weights, gradients, optimizer)
        # The modes in this table are those that Megatron-LM accepts. It offloads optimizer states only
        # with its distributed optimizer, so ZeRO 0 is not among them. Without offload it accepts every
        # mode: then no table is needed, because the fields above give the bytes.
        fields["state_of_mode"] = {
            Mode(zero, has_pipeline): replace(state, sharded=sharded_by(zero))
            for zero, has_pipeline in product((1, 2, 3), (False, True))
        }
    return fields


def _deepspeed_byte_fields(
    settings: Mapping[str, Any], zero_stage: int, assumed: list[str]
) -> dict[str, Any]:
    """Return the fields of Model that count bytes under DeepSpeed: of activations, gradients and state.

    The bytes that DeepSpeed keeps for a parameter depend on the ZeRO stage and on whether there is a
    pipeline. The planner may change both, so the field `state_of_mode` is a table: (ZeRO stage, whether
    there is a pipeline) -> bytes. Modes that DeepSpeed refuses are missing in it. `state_bytes` and
    `sharded_bytes` are the bytes in the mode of the command line.

    Gradients are sent in the type of the weights unless communication_data_type is given.

    Args:
        settings: Name of a setting -> value.
        zero_stage: ZeRO stage, 0 to 3.
        assumed: Lines for the user; one is appended if releases of DeepSpeed differ for this job.
    """
    types = _deepspeed_types(settings)
    version = release()
    states = deepspeed_states(settings)
    mode = _mode_of(settings, zero_stage)

    # If DeepSpeed refuses the command line's mode, the table has no bytes for it, and those of the first
    # mode stand in. No plan depends on them: the error of refusal_by_framework() ends the planning.
    state = states.get(mode) or next(iter(states.values()))
    if types.precision == "bf16":
        origin = "installed here" if installed_version("deepspeed") else "none is installed here"
        assumed.append(f"DeepSpeed {version} ({origin}): releases differ in what they keep in bf16")
    weight_bytes = WIDTHS[types.precision]
    return {
        "activation_width": weight_bytes,
        "gradient_width": settings.get("communication_width", weight_bytes),
        "state_bytes": state.total - state.sharded_bytes,
        "sharded_bytes": state.sharded_bytes,
        "state_of_mode": states,
    }


def deepspeed_states(settings: Mapping[str, Any]) -> dict[Mode, StateBytes]:
    """Return the bytes per parameter that DeepSpeed keeps, for each ZeRO stage, with and without a pipeline.

    Args:
        settings: Name of a setting of the ds_config -> value.
    """
    return state_of_mode(_deepspeed_types(settings), release())


def refusal_by_framework(settings: Mapping[str, Any], zero_stage: int, is_deepspeed: bool) -> str:
    """Return why the framework refuses a job's precision, ZeRO stage or offload; "" if it accepts them."""
    if is_deepspeed:
        try:
            optimizer_of(_deepspeed_types(settings), _mode_of(settings, zero_stage), release())
        except HolmesError as error:
            return str(error)
        return ""
    if settings.get("offloaded") and zero_stage == 0:
        # Megatron-LM offloads in its precision-aware optimizer, and this is a distributed
        # optimizer.
        return (
            "--optimizer-cpu-offload needs --use-precision-aware-optimizer and "
            "--use-distributed-optimizer; add them, or remove it"
        )
    return ""


def _deepspeed_types(settings: Mapping[str, Any]) -> TrainingTypes:
    """Return the number formats and the offload of a DeepSpeed job. They decide on its optimizer."""
    # The flag --cpu-optimizer offloads to the CPU's memory, unless ds_config names another place.
    offload_by_flag = "cpu" if settings.get("offloaded") else ""
    return TrainingTypes(
        precision=settings.get("precision", "fp32"),
        sums=settings.get("sums", ""),  # type of the sums of gradients over micro-batches
        offload=settings.get("offload", offload_by_flag),
        moment_bytes=_moment_bytes(settings),
    )


def _mode_of(settings: Mapping[str, Any], zero_stage: int) -> Mode:
    return Mode(zero_stage, has_pipeline=settings.get("pipeline", 1) > 1)


def _optimizer_bytes(settings: Mapping[str, Any], precision: str) -> float:
    """Return the bytes of GPU memory that Megatron-LM's optimizer needs for one parameter.

    They are the moments, and a copy of the weight in 32 bits if the model has 16. The part of the optimizer
    that is offloaded to the host does not count.

    Args:
        precision: Type of the weights: "fp32", "bf16" or "fp16".
    """
    main_weight_bytes = 0.0
    if precision != "fp32":
        main_weight_bytes = float(settings.get("main_weight_width", 4))
    is_offloaded = settings.get("offloaded", 0.0)  # 1.0 or 0.0
    offloaded_share = min(1.0, is_offloaded * settings.get("offload_fraction", 1.0))
    return (main_weight_bytes + _moment_bytes(settings)) * (1 - offloaded_share)


def _moment_bytes(settings: Mapping[str, Any]) -> float:
    """Return the bytes of the moments that the optimizer keeps for one parameter."""
    if "first_moment_width" in settings or "second_moment_width" in settings:
        first_moment_bytes = settings.get("first_moment_width", 4)
        second_moment_bytes = settings.get("second_moment_width", 4)
        return float(first_moment_bytes + second_moment_bytes)
    optimizer = settings.get("optimizer", "adam").lower()
    return MOMENT_BYTES.get(optimizer, ADAM_MOMENT_BYTES)


def _expert_fields(
    settings: Mapping[str, Any], is_deepspeed: bool, assumed: list[str]
) -> dict[str, Any]:
    """Return the fields of Model about the number of experts, their layers, and experts per token.

    Model has a single number of experts for all layers with experts. If the settings give them
    different numbers, the mean is used. Every expert-parallel size must still divide each of these
    numbers, so it must divide their greatest common divisor ("expert_divisor"; 0 if they are equal).

    If only some layers have experts, Model gives every layer the same cost: the average cost of a layer.
    The user gets a line about each simplification.

    Args:
        settings: Name of a setting -> value. "experts" is a list with the number of experts of each
            layer that has experts, or with a single number for all these layers.
        is_deepspeed: Whether the framework is Megatron-DeepSpeed, whose defaults differ from
            Megatron-LM's.
        assumed: Lines for the user about assumptions. This function appends to them.
    """
    layers = settings["layers"]
    counts = settings["experts"]
    experts = round(sum(counts) / len(counts))
    if len(set(counts)) > 1:
        assumed.append(
            f"{experts} experts in each layer that has some: the mean of {', '.join(map(str, counts))}"
        )
    default_frequency = "2" if is_deepspeed else "1"
    frequency = settings.get("expert_frequency", default_frequency)
    expert_layers = count_expert_layers(frequency, layers, is_deepspeed)
    if expert_layers < layers:
        assumed.append(
            f"experts in {expert_layers} of {layers} layers: each layer counts as the mean"
        )
    default_per_token = 1 if is_deepspeed else 2
    fields = {
        "experts": experts,
        "experts_per_token": min(experts, settings.get("experts_per_token", default_per_token)),
        "expert_layers": expert_layers,
        "expert_divisor": gcd(*counts) if len(set(counts)) > 1 else 0,
    }
    if settings.get("residual"):  # DeepSpeed's --mlp-type residual
        # Width of the MLP that all tokens use, beside the experts; Megatron's default is 4 x hidden.
        fields["shared_ffn"] = settings.get("ffn") or 4 * settings["hidden"]
    return fields
