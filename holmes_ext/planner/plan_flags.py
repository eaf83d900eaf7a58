"""Flags of Megatron-LM and Megatron-DeepSpeed that a plan decides, or that only some plans allow.

A suggestion must not leave a flag of the old layout in the command. `--recompute-granularity full`, for
example, slows the new plan down, and `--overlap-param-gather` without the distributed optimizer is an error.
The tables name such flags, and how many words follow each flag:

    DECIDED     The plan decides the values of these flags: a plan that needs another value changes the
                flag, and a plan that does not need the flag removes it.
    NEEDS       These flags are the user's choice, but the framework refuses them, or ignores them, unless
                the plan has the property named. Then they are removed.

Sources: megatron/training/arguments.py and megatron/core/transformer/transformer_config.py (Megatron-LM),
megatron/arguments.py (Megatron-DeepSpeed).
"""

from __future__ import annotations

from collections.abc import Callable

from holmes_ext.plan.shape import Shape

#: Number of words after a flag that takes all words up to the next flag.
ANY_WORDS = -1

#: Parallel sizes, order of the ranks, and batch.
SIZES = {
    "--tensor-model-parallel-size": 1,
    "--model-parallel-size": 1,  # old name of the tensor-parallel size
    "--pipeline-model-parallel-size": 1,
    "--no-pipeline-parallel": 0,
    "--context-parallel-size": 1,
    "--ds-sequence-parallel-size": 1,
    "--expert-model-parallel-size": 1,
    "--moe-expert-parallel-size": 1,
    "--use-tp-pp-dp-mapping": 0,
    "--micro-batch-size": 1,
    "--batch-size": 1,  # old name of the micro-batch size
    "--global-batch-size": 1,
}
#: Recomputation of activations in the backward pass.
RECOMPUTE = {
    "--recompute-granularity": 1,
    "--recompute-method": 1,
    "--recompute-num-layers": 1,
    "--recompute-activations": 0,
    "--recompute-modules": ANY_WORDS,
    "--activations-checkpoint-method": 1,
    "--activations-checkpoint-granularity": 1,
    "--activations-checkpoint-num-layers": 1,
    "--checkpoint-activations": 0,
    "--checkpoint-num-layers": 1,
    "--deepspeed-activation-checkpointing": 0,
    "--distribute-saved-activations": 0,
    "--distribute-checkpointed-activations": 0,
    "--moe-layer-recompute": 0,
    "--partition-activations": 0,
    "--contigious-checkpointing": 0,
    "--checkpoint-in-cpu": 0,
    "--synchronize-each-layer": 0,
    "--profile-backward": 0,
}
#: Layers of each stage, and chunks of layers (interleaved schedule).
LAYERS = {
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--microbatch-group-size-per-virtual-pipeline-stage": 1,
    "--pipeline-model-parallel-layout": 1,
    "--pipeline-model-parallel-split-rank": 1,
    "--standalone-embedding-stage": 0,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--account-for-embedding-in-pipeline-split": 0,
    "--account-for-loss-in-pipeline-split": 0,
    "--holmes-partition": 1,
}
#: State that the data-parallel ranks share out: optimizer, gradients, weights.
SHARDING = {
    "--use-distributed-optimizer": 0,
    "--num-distributed-optimizer-instances": 1,
    "--zero-stage": 1,
    "--use-torch-fsdp2": 0,
    "--torch-fsdp2-no-reshard-after-forward": 0,
    "--use-megatron-fsdp": 0,
    "--use-custom-fsdp": 0,
    "--data-parallel-sharding-strategy": 1,
    "--outer-dp-sharding-strategy": 1,
    "--enable-full-sharding-in-hsdp": 0,
    "--init-model-with-meta-device": 0,
    "--suggested-communication-unit-size": 1,
    "--keep-fp8-transpose-cache": 0,
    "--keep-fp8-transpose-cache-when-using-custom-fsdp": 0,
    "--fsdp-double-buffer": 0,
    "--fsdp-manual-registration": 0,
    "--fsdp-db-use-persist-buf-on-alloc-fail": 0,
    "--megatron-fsdp-version": 1,
    "--megatron-fsdp-main-params-dtype": 1,
    "--megatron-fsdp-main-grads-dtype": 1,
    "--megatron-fsdp-grad-comm-dtype": 1,
    "--megatron-fsdp-enable-fine-grained-param-gather": 0,
    "--megatron-fsdp-max-pool-double-buffer": 0,
}
#: Flags of holmes that name a plan or a part of it.
HOLMES = {"--holmes-plan": 1, "--holmes-sizes": 1}
DECIDED = {**SIZES, **RECOMPUTE, **LAYERS, **SHARDING, **HOLMES}

#: Formats of checkpoints that only an FSDP has: (flag, its value). The default format replaces them.
FSDP_CHECKPOINTS = (("--ckpt-format", "fsdp_dtensor"), ("--ckpt-format", "torch_dcp"))


def _has_tensor(shape: Shape) -> bool:
    return shape.tensor > 1


def _has_pipeline(shape: Shape) -> bool:
    return shape.pipeline > 1


def _has_no_pipeline(shape: Shape) -> bool:
    return shape.pipeline == 1


def _has_context(shape: Shape) -> bool:
    return shape.context > 1


def _has_chunks(shape: Shape) -> bool:
    """Return whether stages have several chunks of layers (interleaved schedule)."""
    return shape.virtual > 1


def _has_sharded_optimizer(shape: Shape) -> bool:
    """Return whether ranks share the optimizer state (ZeRO 1 to 3)."""
    return shape.zero > 0


def _hides_expert_traffic(shape: Shape) -> bool:
    """Return whether Megatron-LM can run all-to-alls of experts beside another chunk's computation."""
    has_schedule = shape.pipeline == 1 or shape.virtual > 1
    return shape.expert > 1 and has_schedule and shape.recompute != "full"


def _gathers_under_optimizer(shape: Shape) -> bool:
    """Return whether weights can be gathered while the optimizer runs: sharded, and with chunks."""
    return shape.zero > 0 and shape.virtual > 1


#: Property of a plan -> flags that need it, with the number of words that follow each flag.
_NEEDS: dict[Callable[[Shape], bool], dict[str, int]] = {
    _has_tensor: {
        "--sequence-parallel": 0,
        "--tp-comm-overlap": 0,
        "--tp-comm-overlap-cfg": 1,
        "--expert-tensor-parallel-size": 1,
    },
    _has_pipeline: {
        "--defer-embedding-wgrad-compute": 0,
        "--wgrad-deferral-limit": 1,
        "--overlap-p2p-communication": 0,
    },
    _has_no_pipeline: {"--hybrid-context-parallel": 0},
    _has_context: {
        "--cp-comm-type": ANY_WORDS,
        "--hierarchical-context-parallel-sizes": ANY_WORDS,
        "--force-ds-sequence-parallel": 0,
    },
    _has_chunks: {"--overlap-p2p-communication-warmup-flush": 0},
    _has_sharded_optimizer: {
        "--overlap-param-gather": 0,
        "--fp8-param-gather": 0,
        "--fp4-param-gather": 0,
        "--reuse-grad-buf-for-mxfp8-param-ag": 0,
    },
    _gathers_under_optimizer: {"--overlap-param-gather-with-optimizer-step": 0},
    _hides_expert_traffic: {"--overlap-moe-expert-parallel-comm": 0},
}
#: Flag -> the property of a plan that the flag needs; without it the flag is removed.
NEEDS = {flag: is_met for is_met, flags in _NEEDS.items() for flag in flags}
#: Flag -> number of words that follow it.
WORDS_AFTER = {
    **DECIDED,
    **{flag: count for flags in _NEEDS.values() for flag, count in flags.items()},
    **{flag: 1 for flag, _ in FSDP_CHECKPOINTS},
}
