"""A MoE layer of megatron-core whose experts change places computes what it did."""

import importlib
import importlib.util
import os
import sys

import pytest
from ranks import run_ranks, seeded

from holmes_ext.errors import HolmesError
from holmes_ext.patches.megatron.experts import place
from holmes_ext.plan.experts import ExpertOrder

#: Not imported here: megatron_cpu_shim comes first.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
ORDER = (5, 0, 7, 2, 1, 6, 3, 4)


def of_rank(rank, ranks, seed):
    """Move the experts of one rank's layer to other places, and compare the layer before and after.

    Returns:
        (largest difference of outputs, of the router's gradient, what is refused), and the experts'
        first numbers
    """
    sys.path[:0] = [
        os.path.join(ROOT, "integration_tests", "scripts"),
        os.path.join(ROOT, "integration_tests"),
    ]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    import torch

    experts = importlib.import_module("experts")  # integration_tests/scripts
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    layer = experts.layer_of(ranks)
    with torch.no_grad():
        for parameter in layer.experts.parameters():  # on CPUs all ranks draw the same
            parameter.mul_(1 + 0.1 * rank)
    tokens = torch.randn(64, 1, experts.HIDDEN, generator=seeded(rank))

    def run():
        layer.zero_grad()
        output, _ = layer(tokens)
        output.square().sum().backward()
        return output.detach().clone(), layer.router.weight.grad.clone()

    def first():
        return [one.linear_fc1.weight.flatten()[0].item() for one in layer.experts.local_experts]

    (before, gradient), named = run(), first()
    place(layer, ORDER, ExpertOrder(ranks, {0: ORDER}), "order.json")
    (after, placed), now = run(), first()
    with pytest.raises(
        HolmesError,
        match="order.json, MoE layer 1: it is for 8 experts on 4 ranks, this layer has 8",
    ):
        place(layer, ORDER, ExpertOrder(4, {0: ORDER}), "order.json")
    layer.config.moe_router_num_groups = 2
    with pytest.raises(HolmesError, match="groups of experts"):
        place(layer, ORDER, ExpertOrder(ranks, {0: ORDER}), "order.json")
    return (
        (after - before).abs().max().item(),
        (placed - gradient[list(ORDER)]).abs().max().item(),
        named,
        now,
    )


def test_a_placed_layer_computes_what_it_did():
    results = run_ranks(of_rank, 2, 2, 3)
    before = [value for _, _, named, _ in results for value in named]
    after = [value for _, _, _, now in results for value in now]
    assert after == [before[expert] for expert in ORDER] and len(set(before)) == 8
    assert max(difference for difference, *_ in results) < 1e-6
    assert max(difference for _, difference, *_ in results) < 1e-5
