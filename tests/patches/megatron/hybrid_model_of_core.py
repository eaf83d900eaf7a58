"""Builds hybrid models of megatron-core on the CPU, and prints their numbers of parameters.

    python hybrid_model_of_core.py '[{"config": {...}, "model": {...}}, ...]'

Kernels that only GPUs have are replaced by stand-ins with the same parameters, which is all that is counted.
"""

# ruff: noqa: E402

import json
import sys
from unittest import mock

# It needs triton, which is for GPUs.
TRITON_MODULE = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
sys.modules[TRITON_MODULE] = mock.MagicMock()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.ssm import mamba_block, mamba_mixer
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)


class GatedNorm(torch.nn.Module):
    """The parameters of mamba_ssm's gated RMSNorm."""

    def __init__(self, size, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))


def use_stand_ins():
    """Replace what needs a GPU, mamba_ssm or transformer_engine."""
    mamba_mixer.ExtendedRMSNorm = GatedNorm
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.get_cuda_rng_tracker = lambda: mock.MagicMock()
    mamba_block.TENorm = WrappedTorchNorm
    torch.cuda.current_device = lambda: "cpu"


def stack_spec():
    """Return mamba_stack_spec of megatron-core without transformer_engine: norms are modules of their own."""
    mixer = ModuleSpec(
        module=MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    mamba = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    attention_layer = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    mlp_layer = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
    )
    return ModuleSpec(
        module=MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention_layer),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp_layer),
        ),
    )


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    use_stand_ins()
    for case in json.loads(sys.argv[1]):
        config = TransformerConfig(use_cpu_initialization=True, **case["config"])
        model = MambaModel(config, stack_spec(), **case["model"])
        print(sum(parameter.numel() for parameter in model.parameters()))
