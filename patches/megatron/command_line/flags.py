"""What each flag of Megatron-LM and Megatron-DeepSpeed says of a job: one table, flag -> (setting, value).

A value is a type (int, float, str: what follows the flag; list: all whole numbers that follow), a dictionary
that translates what follows, or what the flag alone means. Settings are those of Sizes and Model (plan/), and
those that describe.py makes them from. Sources: megatron/training/arguments.py and
megatron/core/transformer/transformer_config.py (Megatron-LM), megatron/arguments.py (Megatron-DeepSpeed)."""

from __future__ import annotations

from typing import Any

_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def _table(*rows: tuple[Any, ...]) -> dict[str, tuple[str, Any]]:
    """Of (setting, value, its flags: Megatron-LM's, then Megatron-DeepSpeed's or an older one)."""
    return {name: (setting, value) for setting, value, *names in rows for name in names}


SIZES = _table(
    ("pipeline", int, "--pipeline-model-parallel-size"),
    ("tensor", int, "--tensor-model-parallel-size"),
    ("context", int, "--context-parallel-size", "--ds-sequence-parallel-size"),
    ("expert", int, "--expert-model-parallel-size", "--moe-expert-parallel-size"),
    ("pipeline", 1, "--no-pipeline-parallel"),  # Megatron-DeepSpeed without its pipeline engine
    ("order", "tp-cp-ep-pp-dp", "--use-tp-pp-dp-mapping"),  # data-parallel ranks outermost
    ("instances", int, "--num-distributed-optimizer-instances"),  # each sums inside first
)

MODEL = _table(
    ("layers", int, "--num-layers"),
    ("hidden", int, "--hidden-size"),
    ("heads", int, "--num-attention-heads"),
    ("sequence", int, "--seq-length"),
    ("ffn", int, "--ffn-hidden-size"),
    ("head_size", int, "--kv-channels"),
    ("query_groups", int, "--num-query-groups"),  # counts with --group-query-attention
    ("grouped", True, "--group-query-attention"),
    ("groups", int, "--num-key-value-heads"),  # Megatron-DeepSpeed's
    ("max_positions", int, "--max-position-embeddings"),
    ("vocabulary", int, "--vocab-size"),
    ("padded_vocabulary", int, "--padded-vocab-size"),
    ("divisible", int, "--make-vocab-size-divisible-by"),
    ("divisible", 0, "--no-pad-vocab-size"),
    ("tokenizer", str, "--tokenizer-type"),
    ("gated", True, "--swiglu"),
    ("geglu", True, "--quick-geglu"),
    ("bias", False, "--disable-bias-linear"),
    ("tied", False, "--untie-embeddings-and-output-weights"),
    ("positions", {"learned_absolute": "learned", "": "none"}, "--position-embedding-type"),
    ("positions", "none", "--use-rotary-position-embeddings", "--no-position-embedding"),
    ("experts", list, "--num-experts"),  # Megatron-DeepSpeed's may differ from layer to layer
    ("experts_per_token", int, "--moe-router-topk", "--topk"),
    ("expert_ffn", int, "--moe-ffn-hidden-size"),
    ("shared_ffn", int, "--moe-shared-expert-intermediate-size"),
    ("expert_frequency", str, "--moe-layer-freq", "--expert-interval"),
    ("residual", {"residual": True, "": False}, "--mlp-type"),  # an MLP beside the experts
)

TRAINING = _table(
    ("micro_batch", int, "--micro-batch-size", "--batch-size"),
    ("global_batch", int, "--global-batch-size"),
    ("precision", "bf16", "--bf16"),
    ("precision", "fp16", "--fp16"),
    ("gradient_width", 2, "--grad-reduce-in-bf16"),
    ("gradient_width", 4, "--accumulate-allreduce-grads-in-fp32"),
    ("main_gradient_width", _WIDTHS, "--main-grads-dtype"),
    ("main_weight_width", _WIDTHS, "--main-params-dtype"),
    ("first_moment_width", _WIDTHS, "--exp-avg-dtype"),
    ("second_moment_width", _WIDTHS, "--exp-avg-sq-dtype"),
    ("optimizer", str, "--optimizer"),
    ("offloaded", 1.0, "--optimizer-cpu-offload", "--cpu-optimizer"),
    ("offload_fraction", float, "--optimizer-offload-fraction"),
    ("sequence_parallel", True, "--sequence-parallel"),
    ("recompute", {"full": "full", "selective": "selective"}, "--recompute-granularity"),
    ("recompute", {"": "full"}, "--activations-checkpoint-method"),  # before there was a granularity
    ("recompute", "selective", "--recompute-activations"),
    ("recompute", "full", "--checkpoint-activations"),  # Megatron-DeepSpeed's, and Megatron-LM's before
    ("implementation", str, "--transformer-impl"),
    ("attention", str, "--attention-backend"),
    ("attention", "flash",
     "--use-flash-attn", "--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton",
     "--use-flash-attn-builder"),
    ("zero", 1, "--use-distributed-optimizer"),
    ("zero", 3, "--use-torch-fsdp2"),
    ("fsdp", True, "--use-megatron-fsdp", "--use-custom-fsdp"),
    ("fsdp_zero", {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3},
     "--data-parallel-sharding-strategy"),
    ("zero", int, "--zero-stage"),  # Megatron-DeepSpeed's; what ds_config says counts
    ("overlap", True, "--overlap-grad-reduce"),
    ("gather_overlap", True, "--overlap-param-gather"),
    ("virtual", int, "--num-virtual-stages-per-pipeline-rank"),
    ("layers_per_chunk", int, "--num-layers-per-virtual-pipeline-stage"),
    ("first_layers", int, "--decoder-first-pipeline-num-layers"),
    ("last_layers", int, "--decoder-last-pipeline-num-layers"),
    ("embedding_counts", True, "--account-for-embedding-in-pipeline-split"),
    ("loss_counts", True, "--account-for-loss-in-pipeline-split"),
    ("layout", str, "--pipeline-model-parallel-layout"),
    ("deepspeed", True, "--deepspeed"),
    ("ds_config", str, "--deepspeed_config", "--deepspeed-config"),
)

READ = {**SIZES, **MODEL, **TRAINING}
#: Flags that only Megatron-DeepSpeed has: its defaults differ from Megatron-LM's.
MEGATRON_DEEPSPEED = (
    "--deepspeed", "--no-pipeline-parallel", "--zero-stage", "--ds-sequence-parallel-size",
    "--num-key-value-heads", "--moe-expert-parallel-size", "--deepspeed-activation-checkpointing",
)
#: The same of ds_config's keys; those of tables within tables are joined by dots. "auto" is not said.
DS_CONFIG = _table(
    ("global_batch", int, "train_batch_size"),
    ("micro_batch", int, "train_micro_batch_size_per_gpu"),
    ("micro_batches", int, "gradient_accumulation_steps"),
    ("precision", {True: "bf16"}, "bf16.enabled", "bfloat16.enabled"),
    ("precision", {True: "fp16"}, "fp16.enabled"),
    ("gradient_width", _WIDTHS, "communication_data_type"),
    ("main_gradient_width", _WIDTHS | {"float32": 4}, "data_types.grad_accum_dtype"),
    ("optimizer", str, "optimizer.type"),
    ("zero", int, "zero_optimization.stage"),
    ("overlap", {True: True, False: False}, "zero_optimization.overlap_comm"),
    ("offloaded", {"cpu": 1.0, "nvme": 1.0, "none": 0.0}, "zero_optimization.offload_optimizer.device"),
    ("offloaded", {True: 1.0}, "zero_optimization.cpu_offload"),
    ("pipeline", int, "pipeline.stages"),
    ("checkpoint_interval", int, "pipeline.activation_checkpoint_interval"),
    ("tensor", int, "tensor_parallel.autotp_size"),
    ("context", int, "sequence_parallel_size"),
)
