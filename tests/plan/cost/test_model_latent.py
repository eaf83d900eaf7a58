"""Tests the FLOPs, traffic and memory of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

from dataclasses import replace

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Model

LATENT = Model(
    layers=2,
    hidden=256,
    heads=8,
    sequence=64,
    vocabulary=1000,
    head_size=32,
    bias=False,
    positions="none",
    micro_batches=1,
    flash=True,
    query_rank=48,
    key_value_rank=24,
    rotary_size=16,
    value_size=40,
)
#: The same widths of query, keys and values, without compressing.
PLAIN = replace(LATENT, query_rank=0, key_value_rank=0, rotary_size=0, value_size=0, head_size=44)


def attention_parameters(query_rank):
    """Return the parameters of attention's matrices, term by term as the paper has them."""
    query_width = 8 * (32 + 16)
    if query_rank:
        query = 256 * query_rank + query_rank * query_width
    else:
        query = 256 * query_width
    latent = 256 * (24 + 16)
    keys_and_values = 24 * 8 * (32 + 40)
    output = 8 * 40 * 256
    return query + latent + keys_and_values + output


@pytest.mark.parametrize("query_rank", [0, 48])
def test_parameters_and_flops_are_those_of_the_compressed_matrices(query_rank):
    model = replace(LATENT, query_rank=query_rank)
    block = model.costs()[1]
    mlp = 2 * 256 * 1024
    norms = 2 * 256 + query_rank + 24
    assert block.parameters == attention_parameters(query_rank) + mlp + norms
    # 2 FLOPs for each parameter and token; scores of width 48, and scores times values of width 40.
    scores = 2 * 64 * 64 * 8 * (48 + 40)
    matrices = 2 * 64 * (attention_parameters(query_rank) + query_rank + 24 + mlp)
    assert block.forward_flops == pytest.approx(matrices + scores)


def test_what_is_kept_and_sent_is_that_of_heads_of_the_mean_width():
    latent, plain = LATENT.costs(context=2)[1], PLAIN.costs(context=2)[1]
    assert latent.kept_bytes == plain.kept_bytes
    assert latent.context_bytes == plain.context_bytes


def test_shared_heads_are_refused_in_latent_attention():
    with pytest.raises(HolmesError, match="latent attention .* has no shared heads"):
        replace(LATENT, groups=2)
