"""model: against the published formulas, the examples, and bad files."""

from dataclasses import replace
from pathlib import Path

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Gpu, Model, load_model
from holmes_ext.plan.sizes import Sizes

EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
SMALL = Model(layers=4, hidden=64, heads=4, sequence=32, vocabulary=100, micro_batches=2)


def total(model, name):
    return sum(getattr(layer, name) for layer in model.costs())


def test_parameters_are_narayanans_and_the_final_norm():
    model = load_model(EXAMPLES / "gpt_7.5b.toml")
    layers, h, v, s = 36, 4096, 51200, 2048
    # arXiv 2104.04473, equation 2
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert model.parameters == round(formula) + 2 * h
    assert model.parameters == pytest.approx(7.5e9, rel=0.01)


def test_flops_are_narayanans():
    """Equation 3 of arXiv 2104.04473: 96 B s l h^2 (1 + s/6h + V/16lh) with every block recomputed.

    The look-up is left out there.
    """
    model = replace(load_model(EXAMPLES / "gpt_7.5b.toml"), recompute="full", micro_batch=4)
    b, layers, h, v, s = 4, 36, 4096, 51200, 2048
    formula = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert total(model, "forward_flops") + total(model, "backward_flops") == pytest.approx(
        formula, rel=1e-5
    )


def test_memory_is_korthikantis():
    """Table 2 of arXiv 2205.05198 gives the bytes of a block and micro-batch.

    The GPT has hidden size 64, 4 heads and sequences of 32.
    """
    sbh, scores = 32 * 64, 5 * 4 * 32 / 64

    def kept(tensor, recompute):
        return replace(SMALL, recompute=recompute).costs(tensor)[1].kept_bytes

    assert kept(1, "none") == pytest.approx(sbh * (34 + scores))
    assert kept(4, "none") == pytest.approx(sbh * (10 + 24 / 4 + scores / 4))
    assert kept(4, "selective") == pytest.approx(sbh * (10 + 24 / 4))
    assert kept(4, "full") == 2 * sbh


def test_the_demos_model_has_the_parameters_that_torch_counts():
    assert load_model(EXAMPLES / "deepspeed_demo.toml").parameters == 6_147_072  # README: 6.15 M


def test_parameters_against_the_examples_own_layers():
    pytest.importorskip("deepspeed")
    import sys

    folder = str(EXAMPLES.parent / "deepspeed_pipeline")
    sys.path.insert(0, folder)
    try:
        from model import count_parameters, layer_specs
    finally:
        sys.path.remove(folder)
    for tied in (False, True):
        model = Model(
            layers=3, hidden=64, heads=4, sequence=32, vocabulary=256, tied=tied, micro_batches=1
        )
        assert model.parameters == count_parameters(layer_specs(3, 64, 4, 32, tied))


def test_embedding_and_output_cost_what_they_cost():
    embedding, block, *_, output = SMALL.costs()
    assert embedding.parameters == (100 + 32) * 64 and output.parameters == 100 * 64 + 2 * 64
    assert 0 < embedding.forward_flops < 0.01 * block.forward_flops
    assert (
        output.forward_flops == 2 * 32 * 64 * 100
        and output.backward_flops == 2 * output.forward_flops
    )
    assert (
        output.activation_bytes == 0
        and embedding.activation_bytes == block.activation_bytes == 32 * 64 * 2
    )


def test_tied_counts_once_in_the_model_and_twice_in_the_stages():
    untied = replace(SMALL, tied=False)
    assert untied.parameters - SMALL.parameters == 100 * 64
    assert untied.costs() == SMALL.costs()


def test_llama_like_block():
    """SwiGLU, grouped queries, no biases: 2 h^2 + 2 h h/2 + 3 h ffn weights and two norms."""
    model = replace(SMALL, gated=True, groups=2, bias=False, ffn=172, positions="none", tied=False)
    assert model.costs()[1].parameters == 2 * 64**2 + 64**2 + 3 * 64 * 172 + 2 * 64
    assert model.costs()[0].parameters == 100 * 64


def test_tensor_and_context_share_the_work():
    one, shared = SMALL.costs()[1], SMALL.costs(tensor=2, context=2)[1]
    assert shared.forward_flops == one.forward_flops / 4
    assert shared.activation_bytes == one.activation_bytes / 2
    assert shared.tensor_bytes == 4 * 16 * 64 * 2 and one.tensor_bytes == one.context_bytes == 0


@pytest.mark.parametrize("recompute, tensors", [("none", 4), ("selective", 6), ("full", 6)])
def test_recomputed_attention_sends_keys_and_values_around_the_context_ring_again(
    recompute, tensors
):
    """Keys and values, both gradients; and keys and values once more if the forward pass runs again."""
    block = replace(SMALL, recompute=recompute).costs(context=2)[1]
    tokens_of_rank = SMALL.sequence / 2 * SMALL.micro_batch
    assert block.context_bytes == tensors * tokens_of_rank * SMALL.hidden * SMALL.activation_width


def test_micro_batches():
    model = replace(SMALL, micro_batches=0, global_batch=48, micro_batch=2)
    assert model.micro_batches_of(4) == 6
    with pytest.raises(
        HolmesError, match="'global_batch': 48 is not divisible by micro_batch 2 x data 5"
    ):
        model.micro_batches_of(5)


def test_workload_of_the_average_stage():
    work = SMALL.workload(Sizes(2).complete(8))
    assert work.gradient_bytes == pytest.approx(
        sum(layer.parameters for layer in SMALL.costs()) * 4 / 2
    )
    assert work.forward_s == pytest.approx(total(SMALL, "forward_flops") / 150e12 / 2)
    assert work.micro_batches == 2 and work.tensor_bytes == 0


TEXT = """version = 1
layers = 4
hidden = 64
heads = 4
sequence = 32
vocabulary = 100
[training]
micro_batches = 2
[gpu]
flops = 1e12
[gpu.cluster.b]
flops = 5e11
memory_bytes = 1e9
"""


def test_file(tmp_path):
    (tmp_path / "m.toml").write_text(TEXT)
    model = load_model(tmp_path / "m.toml")
    assert (model.layers, model.hidden, model.gpu) == (4, 64, Gpu(1e12))
    assert model.gpu_of("b") == Gpu(5e11, 1e9) and model.gpu_of("a") == Gpu(1e12)


def test_every_example_is_read():
    assert len([load_model(path) for path in EXAMPLES.glob("*.toml")]) >= 3


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("layers = 4", "layer = 4", "key 'layers' is missing; is 'layer' a misspelling"),
        ("layers = 4", "layers = 0", "key 'layers': 0 is not 1 or more"),
        ("heads = 4", "heads = 5", "key 'heads': 5 heads must divide hidden 64"),
        ("version = 1", "version = 2", "key 'version' is 2"),
        ("micro_batches = 2", "", "give one of the keys 'micro_batches' and 'global_batch'"),
        (
            "micro_batches = 2",
            "micro_batches = 2\nrecompute = 'some'",
            "'recompute': 'some' is not one of none",
        ),
        ("micro_batches = 2", "micro_batches = 2\nbatch = 2", "key 'training.batch' is not known"),
        ("flops = 1e12", "flops = nan", "key 'gpu.flops'"),
        ("flops = 5e11", "flops = -1.0", "key 'gpu.cluster.b': gpu: flops is -1.0"),
        ("[gpu]", "[gpu", "not valid TOML"),
    ],
)
def test_bad_file(tmp_path, old, new, message):
    (tmp_path / "m.toml").write_text(TEXT.replace(old, new, 1))
    with pytest.raises(HolmesError) as error:
        load_model(tmp_path / "m.toml")
    assert (
        message in str(error.value)
        and "m.toml" in str(error.value)
        and "\n" not in str(error.value)
    )


def test_missing_file():
    with pytest.raises(HolmesError, match="/nonexistent.toml: cannot be read"):
        load_model("/nonexistent.toml")
