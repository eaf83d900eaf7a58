"""arguments: parallel sizes and the model from Megatron's flags."""

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.patches.megatron.command_line.describe import (
    model_from_arguments,
    overlaps,
    sizes_from_arguments,
)
from holmes_ext.plan.sizes import Sizes

GPT = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2".split()
GPT += ["--global-batch-size=16", "--bf16"]


@pytest.mark.parametrize(
    "line, sizes",
    [
        ("train.py --lr 1", None),
        (
            "p.py --pipeline-model-parallel-size 4 --tensor-model-parallel-size=2",
            Sizes(pipeline=4, tensor=2),
        ),
        (
            "p.py --context-parallel-size 2 --expert-model-parallel-size 4",
            Sizes(context=2, expert=4),
        ),
        (
            "p.py --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping",
            Sizes(pipeline=2, order="tp-cp-ep-pp-dp"),
        ),
        ("p.py --pipeline-model-parallel-size 2 --no-pipeline-parallel", Sizes(pipeline=1)),
        ("p.py --no-pipeline-parallel --ds-sequence-parallel-size 2", Sizes(context=2)),
        ("p.py --pipeline-model-parallel-size two", None),
        ("p.py --pipeline-model-parallel-size", None),
    ],
)
def test_megatrons_flags(line, sizes):
    assert sizes_from_arguments(line.split()) == sizes


def test_gpt():
    model = model_from_arguments(GPT)
    assert (
        model.layers,
        model.hidden,
        model.heads,
        model.sequence,
        model.micro_batch,
        model.global_batch,
    ) == (
        4,
        64,
        4,
        32,
        2,
        16,
    )
    assert (
        model.tied
        and model.positions == "learned"
        and model.recompute == "none"
        and model.vocabulary == 50304
    )
    assert (model.activation_width, model.state_bytes, model.sharded_bytes) == (2, 18, 0)


def test_megatron_deepspeeds_own_names():
    more = "--use-rotary-position-embeddings --num-key-value-heads 2 --zero-stage 1 --checkpoint-activations"
    model = model_from_arguments(GPT + more.split())
    assert (
        model.positions == "none"
        and model.groups == 2
        and model.sharded_bytes == 12
        and model.recompute == "full"
    )
    assert (
        model_from_arguments([*GPT, "--no-position-embedding", "--zero-stage", "0"]).positions
        == "none"
    )


def test_llama():
    more = (
        "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type "
        "rope"
    )
    more += " --group-query-attention --num-query-groups 2"
    more += " --ffn-hidden-size 172 --use-distributed-optimizer --recompute-activations --vocab-size 1000"
    model = model_from_arguments(GPT + more.split())
    assert (
        model.gated
        and not model.bias
        and not model.tied
        and model.positions == "none"
        and model.groups == 2
    )
    assert (
        model.ffn,
        model.vocabulary,
        model.recompute,
        model.state_bytes,
        model.sharded_bytes,
    ) == (
        172,
        1024,
        "selective",
        6,
        12,
    )


def test_no_model():
    assert model_from_arguments(["--steps", "6", "--micro-batch-size", "2"]) is None


def test_half_a_model():
    with pytest.raises(
        HolmesError, match="but not --seq-length; add it, or give the model with --holmes-model"
    ):
        model_from_arguments(
            ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"]
        )


@pytest.mark.parametrize(
    "option, text, expected",
    [
        ("on", "", True),
        ("off", "--num-layers 4", False),
        ("auto", "--num-layers 4", True),
        ("auto", "--num-layers=4 --deepspeed", True),
        ("auto", "--deepspeed --no-pipeline-parallel", False),
    ],
)
def test_whether_gradients_are_reduced_under_the_last_backward(option, text, expected):
    assert overlaps(option, text.split()) is expected
