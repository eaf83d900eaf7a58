"""Parameters and FLOPs of Megatron's hybrid models: megatron-core's, Megatron-LM's and published ones."""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkouts import checkout_or_skip

from holmes_ext.patches.megatron.command_line.describe import describe
from holmes_ext.patches.megatron.command_line.hybrid import HybridModel, layers_of_kinds

#: Flags of Nemotron-H (arXiv 2504.03624, table 1), and its published number of parameters.
NEMOTRON = (
    "--micro-batch-size 1 --seq-length 8192 --global-batch-size 768 --vocab-size 131072 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type none "
    "--normalization RMSNorm --is-hybrid-model"
)
MODELS = {
    "Nemotron-H-8B": (
        "--num-layers 52 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 21504 "
        "--hybrid-override-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        8.1e9,
        "24 Mamba, 4 attention, 24 MLP layers",
    ),
    "Nemotron-H-56B": (
        "--num-layers 118 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 32768 "
        "--mamba-state-dim 256 --mamba-num-heads 256 --hybrid-override-pattern "
        + "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-"
        "M-M-M-M-M*-M-M-M-M-M-",
        56.3e9,
        "54 Mamba, 10 attention, 54 MLP layers",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_published_sizes_are_in_the_message(name):
    """The model is refused with its size, so that one of about the same size can be given."""
    flags, parameters, layers = MODELS[name]
    trouble = describe([*flags.split(), *NEMOTRON.split()]).trouble
    assert layers in trouble and "is not predicted" in trouble and "FLOPs a step" in trouble
    counted = float(trouble.partition(" parameters")[0].rpartition(" ")[2])
    assert counted == pytest.approx(parameters, rel=0.01)


#: Two small models: as HybridModel, as TransformerConfig, and as arguments of MambaModel.
LAYERS = {"M": 3, "-": 2, "*": 1}
PLAIN = HybridModel(
    LAYERS,
    hidden=64,
    ffn=96,
    heads=4,
    key_value_heads=2,
    head_size=16,
    vocabulary=512,
    bias=False,
    tied=False,
    norm_vectors=1,
    state=16,
    mamba_head_size=16,
    mamba_groups=2,
)
GATED = replace(
    PLAIN,
    ffn=128,
    key_value_heads=4,
    bias=True,
    tied=True,
    gated=True,
    norm_vectors=2,
    mamba_heads=4,
    max_positions=32,
)
SIZES = {"num_layers": 6, "hidden_size": 64, "num_attention_heads": 4}
SCAN = {"mamba_state_dim": 16, "mamba_head_dim": 16, "mamba_num_groups": 2}
MODEL = {"vocab_size": 512, "max_sequence_length": 32, "hybrid_override_pattern": "M-M*-M"}
CASES = [
    {
        "config": {
            **SIZES,
            **SCAN,
            "num_query_groups": 2,
            "ffn_hidden_size": 96,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
        },
        "model": MODEL,
    },
    {
        "config": {
            **SIZES,
            **SCAN,
            "ffn_hidden_size": 128,
            "gated_linear_unit": True,
            "mamba_num_heads": 4,
        },
        "model": {
            **MODEL,
            "share_embeddings_and_output_weights": True,
            "position_embedding_type": "learned_absolute",
        },
    },
]


@pytest.mark.full
def test_parameters_are_those_of_megatron_core():
    """hybrid_model_of_core.py builds both models on the CPU, and prints their numbers of parameters."""
    pytest.importorskip("megatron.core")
    script = Path(__file__).with_name("hybrid_model_of_core.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", script, json.dumps(CASES)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [int(line) for line in result.stdout.split()] == [PLAIN.parameters, GATED.parameters]


def test_flops_are_those_of_megatron_lm():
    """The functions inside of num_floating_point_operations() are taken out of Megatron-LM's source."""
    path = checkout_or_skip("Megatron-LM") / "megatron" / "training" / "training.py"
    tree = ast.parse(path.read_text())
    (function,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "num_floating_point_operations"
    )
    inner = [node for node in function.body if isinstance(node, ast.FunctionDef)]
    functions = {}
    exec(compile(ast.Module(inner, type_ignores=[]), str(path), "exec"), functions)
    model = replace(
        PLAIN, gated=True, sequences=8, tokens_of_sequence=128, layers={**LAYERS, "E": 2}
    )
    model = replace(model, experts=4, experts_per_token=2, expert_ffn=48, shared_ffn=32)
    expected = functions["hybrid_flops"](
        total_tokens=8 * 128,
        seqlen_squared_sum=8 * 128**2,
        hidden_size=64,
        num_attn_layers=1,
        num_mamba_layers=3,
        num_mlp_layers=2,
        num_moe_layers=2,
        gdp_num_householder=0,
        mamba_state_dim=16,
        mamba_head_dim=16,
        mamba_num_groups=2,
        mamba_num_heads=None,
        num_attn_heads=4,
        gqa_groups=2,
        kv_channels=16,
        mlp_expansion=96 / 64,
        swiglu=True,
        moe_ffn_hidden_size=48,
        shared_expert_ffn_hidden_size=32,
        num_experts_routed_to=2,
        vocab_size=512,
    )
    assert model.flops_of_step == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "layers, attention, mlp", [(52, 0.08, 0.46), (24, 0.1, 0.3), (7, 0.5, 0.5)]
)
def test_ratios_divide_the_layers_as_in_megatron_core(layers, attention, mlp):
    core = pytest.importorskip("megatron.core.ssm.mamba_hybrid_layer_allocation")
    kinds = core.allocate_layers(layers, attention, mlp)
    flags = {"--hybrid-attention-ratio": [str(attention)], "--hybrid-mlp-ratio": [str(mlp)]}
    assert layers_of_kinds(flags, layers) == {kind: kinds.count(kind) for kind in set(kinds)}


@pytest.mark.parametrize(
    "words", ["--hybrid-layer-pattern MG*-", "--is-hybrid-model", "--hybrid-attention-ratio x"]
)
def test_other_layers_are_refused_without_numbers(words):
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1"
    trouble = describe([*sizes.split(), *words.split()]).trouble
    assert "several kinds of layers (Mamba, attention, MLP) is not predicted" in trouble
