"""Trains one MoE layer of megatron-core, whose experts are divided over all ranks.

    experts.py OUT     writes {"losses", "counts"} to OUT

The tokens of a rank resemble each other, so most of them go to few experts. "counts" has the number of
tokens of each rank that go to each expert.
"""

import json
import os
import sys

import megatron_cpu_shim  # noqa: F401
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

# The router of megatron-core 0.16 reads this name, which does not exist without Transformer Engine.
vars(moe_utils).setdefault("te_general_gemm", None)
EXPERTS = 8
HIDDEN = 32
TOKENS = 2048  # of each rank in each step
STEPS = 4


def layer_of(ranks):
    """Return an MoE layer whose experts are divided over this number of ranks."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        expert_model_parallel_size=ranks,
        num_moe_experts=EXPERTS,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    return build_module(spec, config=config, layer_number=1).mlp


def main():
    on_gpus = not getattr(torch.cuda, "_on_cpu", False)  # megatron_cpu_shim.py
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    layer = layer_of(ranks).to(device)
    counts = torch.zeros(ranks, EXPERTS, device=device)
    original_forward = layer.router.forward

    def counting_forward(*args, **more):
        probabilities, routing_map = original_forward(*args, **more)
        counts[rank] += routing_map.sum(0)
        return probabilities, routing_map

    layer.router.forward = counting_forward
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    # All tokens of a rank are near this one.
    center = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(100 + rank))
    losses = []
    for _ in range(STEPS):
        tokens = (center + 0.2 * torch.randn(TOKENS, 1, HIDDEN, generator=generator)).to(device)
        optimizer.zero_grad()
        output, _ = layer(tokens)
        loss = (output - tokens).square().mean()
        loss.backward()
        dist.all_reduce(layer.router.weight.grad)
        optimizer.step()
        loss_sum = loss.detach().clone()
        dist.all_reduce(loss_sum)
        losses.append(loss_sum.item() / ranks)
    dist.all_reduce(counts)
    if rank == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({"losses": losses, "counts": counts.tolist()}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
