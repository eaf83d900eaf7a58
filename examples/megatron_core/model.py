"""A byte-level GPT (megatron-core's GPTModel) with initial weights that do not depend on the split.

megatron-core draws each rank's weights from that rank's random generator, so another pipeline or tensor size
results in another model. Here a weight's values depend on its name in a checkpoint, its layer and the seed,
and each rank keeps its part of them.
"""

import hashlib
import importlib.util
import inspect
import re

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import TransformerConfig

VOCABULARY = 256  # bytes
INIT_STD = 0.02
HAVE_TE = importlib.util.find_spec("transformer_engine") is not None


def on_gpu() -> bool:
    """Return whether the model runs on a GPU; False with on_cpu/megatron_cpu_shim.py."""
    return torch.cuda.is_available() and not getattr(torch.cuda, "_on_cpu", False)


def transformer_config(args) -> TransformerConfig:
    """Return megatron-core's description of the model and of the way in which it is split.

    `args` are the options of the script. args.layout, if given, is megatron-core's text for the
    layers of each pipeline stage, such as "Et*2|t*2L" (E: embedding, t: a block, L: loss).
    """
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    interleaved = args.virtual_pipeline > 1
    recomputes_whole_layers = args.recompute in ("uniform", "block")
    layout = {}
    if args.layout:  # needs megatron-core 0.13 or newer
        layout["pipeline_model_parallel_layout"] = args.layout
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=args.tensor,
        pipeline_model_parallel_size=args.pipeline,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline if interleaved else None,
        context_parallel_size=args.context,
        expert_model_parallel_size=args.expert,
        num_moe_experts=args.experts or None,
        moe_router_topk=min(2, args.experts or 2),
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=not args.experts,
        **layout,
        recompute_granularity="full" if recomputes_whole_layers else args.recompute,
        recompute_method=args.recompute if recomputes_whole_layers else None,
        recompute_num_layers=args.recompute_layers if recomputes_whole_layers else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=args.dtype == "bf16",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,  # initialize() replaces the weights
        # Without these, the interleaved schedule computes wrong results at pipeline size 2.
        # Megatron-LM requires them, too.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # True would free an output while it is being sent. Neither gloo nor torch 2.15's NCCL backend
        # keeps its memory until then.
        deallocate_pipeline_outputs=False,
        # Most fused kernels need Apex or CUDA. This example must run without both.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
    )


def build_chunk(config: TransformerConfig, args, vp_stage: int | None) -> GPTModel:
    """Return this rank's part of the model, with its initial weights.

    Args:
        config: megatron-core's description of the model.
        args: The script's options.
        vp_stage: Number of the rank's chunk under the interleaved schedule; None under other schedules.
    """
    if HAVE_TE:
        make_spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    else:
        make_spec = gpt_layer_specs.get_gpt_layer_local_spec
    spec = make_spec(num_experts=args.experts or None, moe_grouped_gemm=False)
    # megatron-core before 0.13 reads the number of the chunk from its global state.
    parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
    chunk = {}
    if "vp_stage" in inspect.signature(GPTModel.__init__).parameters:  # since 0.13
        chunk["vp_stage"] = vp_stage
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        args.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **chunk),
        share_embeddings_and_output_weights=args.tied,
        **chunk,
    )
    initialize(model, args.seed, args.layers)
    return model


@torch.no_grad()
def initialize(model: GPTModel, seed: int, layers: int) -> None:
    """Set every weight to values that depend on its name and the seed only.

    As in GPT-2, weights are drawn from a normal distribution with the deviation INIT_STD, smaller for outputs
    that are added to the residual stream. Weights of norms are 1, biases are 0.

    Args:
        model: This rank's part of the model.
        seed: Seed of the weights.
        layers: Layers of the whole model.
    """
    for tensor in nested_values(model.sharded_state_dict()):
        if not isinstance(tensor, ShardedTensor):
            continue
        # In a checkpoint, the same weight of all layers is one tensor. Its first axes select the layer.
        layer_axes = tensor.prepend_axis_num
        shape = tensor.global_shape[layer_axes:]
        offset = tensor.global_offset[layer_axes:]
        name = f"{seed} {tensor.key} {tensor.global_offset[:layer_axes]}"
        if re.search(r"norm[^.]*[._]weight$", tensor.key):
            values = torch.ones(shape)
        elif tensor.key.endswith("bias"):
            values = torch.zeros(shape)
        else:
            digest = hashlib.sha256(name.encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            std = INIT_STD
            if re.search(
                r"(linear_proj|linear_fc2)\.weight$", tensor.key
            ):  # added to the residual stream
                std = INIT_STD / (2 * layers) ** 0.5
            values = torch.randn(shape, generator=generator) * std
        local_shape = tensor.data.shape[-len(shape) :]
        part = tuple(slice(start, start + size) for start, size in zip(offset, local_shape))
        tensor.data.copy_(values[part].view_as(tensor.data))
