"""A byte-level GPT of megatron-core's GPTModel, whose initial weights do not depend on how it is split.

megatron-core draws each rank's weights from that rank's generator: another pipeline or tensor size is another
model. Here a weight's values come from its name in a checkpoint, its layer and the seed; each rank keeps its
part of them.
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
    """False where on_cpu/megatron_cpu_shim.py answers for CUDA, whatever torch was built for."""
    return torch.cuda.is_available() and not getattr(torch.cuda, "_on_cpu", False)


def transformer_config(args) -> TransformerConfig:
    """megatron-core's description of the model and of the way in which it is split."""
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    interleaved = args.virtual_pipeline > 1
    whole = args.recompute in ("uniform", "block")
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
        # megatron-core 0.13 and newer
        **({"pipeline_model_parallel_layout": args.layout} if args.layout else {}),
        recompute_granularity="full" if whole else args.recompute,
        recompute_method=args.recompute if whole else None,
        recompute_num_layers=args.recompute_layers if whole else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=args.dtype == "bf16",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,  # what it draws, initialize() replaces
        # What the interleaved schedule needs to be right at pipeline size 2 (Megatron-LM's arguments demand
        # the same).
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Frees an output that is being sent: safe on a CUDA stream, not while gloo reads it.
        deallocate_pipeline_outputs=on_gpu(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
    )


def build_chunk(config: TransformerConfig, args, vp_stage: int | None) -> GPTModel:
    """The part of the model that this rank holds (of its chunk `vp_stage` under the interleaved schedule),
    initialized.
    """
    make = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        if HAVE_TE
        else gpt_layer_specs.get_gpt_layer_local_spec
    )
    spec = make(num_experts=args.experts or None, moe_grouped_gemm=False)
    # From 0.13 on the chunk is named; before, megatron-core asks which one is being built.
    parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
    chunk = (
        {"vp_stage": vp_stage}
        if "vp_stage" in inspect.signature(GPTModel.__init__).parameters
        else {}
    )
    where = {"ignore_virtual": False, **chunk}
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        args.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=args.tied,
        **chunk,
    )
    initialize(model, args.seed, args.layers)
    return model


@torch.no_grad()
def initialize(model: GPTModel, seed: int, layers: int) -> None:
    """Set every weight from its name: normal with INIT_STD, residual outputs smaller (GPT-2), norms 1, biases
    0."""
    for tensor in nested_values(model.sharded_state_dict()):
        if not isinstance(tensor, ShardedTensor):
            continue
        axes = (
            tensor.prepend_axis_num
        )  # layers of one kind are slices of one tensor in the checkpoint
        shape, offset = tensor.global_shape[axes:], tensor.global_offset[axes:]
        name = f"{seed} {tensor.key} {tensor.global_offset[:axes]}"
        if re.search(r"norm[^.]*[._]weight$", tensor.key):
            values = torch.ones(shape)
        elif tensor.key.endswith("bias"):
            values = torch.zeros(shape)
        else:
            generator = torch.Generator().manual_seed(
                int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
            )
            residual = re.search(r"(linear_proj|linear_fc2)\.weight$", tensor.key)
            values = torch.randn(shape, generator=generator) * (
                INIT_STD / (2 * layers) ** 0.5 if residual else INIT_STD
            )
        part = tuple(
            slice(start, start + size)
            for start, size in zip(offset, tensor.data.shape[-len(shape) :])
        )
        tensor.data.copy_(values[part].view_as(tensor.data))
