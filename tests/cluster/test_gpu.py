"""GPUs of cluster.toml: known names, own numbers, who wins, and bad keys; the model's new terms."""

from dataclasses import replace

import clusters
import pytest

from holmes_ext.cluster.gpus import Accelerator, accelerator_of
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Gpu, Model, on_clusters

TEXT = clusters.toml(
    "a ib 200Gb/s a[0-1] gpu=A100",
    "b roce 200Gb/s b[0-1] gpu_flops=5e13 gpu_memory_bytes=24e9 nvlink=64Gb/s",
    ethernet="25Gb/s",
)
MODEL = Model(layers=4, hidden=64, heads=4, sequence=32, vocabulary=100, micro_batches=2)


def test_names_and_numbers():
    model = on_clusters(MODEL, parse_spec(TEXT))
    assert model.gpu_of("a") == Gpu(180e12, 80e9, 2400e9) and model.gpu_of("b") == Gpu(
        5e13, 24e9, 64e9
    )


def test_numbers_of_the_cluster_then_the_models_cluster_then_the_name_then_the_models():
    given = replace(MODEL, gpu=Gpu(1e12, 1e9), gpus={"a": Gpu(2e12, 3e9), "b": Gpu(7e12, 7e9)})
    model = on_clusters(
        given, parse_spec(TEXT.replace('gpu = "A100"', 'gpu = "A100"\ngpu_memory_bytes = 40e9'))
    )
    assert model.gpu_of("a") == Gpu(2e12, 40e9, 2400e9) and model.gpu_of("b").flops == 5e13
    unknown = on_clusters(
        replace(MODEL, gpu=Gpu(1e12, 1e9)), parse_spec(TEXT.replace("A100", "Abacus"))
    )
    assert unknown.gpu_of("a") == Gpu(1e12, 1e9)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("A100-80GB", Accelerator(180e12, 80e9, 2400e9)),
        ("NVIDIA A100-SXM4-40GB", Accelerator(180e12, 40e9, 2400e9)),
        ("NVIDIA H100 PCIe", Accelerator(302e12, 80e9, 0.0)),
        ("Abacus", None),
        ("", None),
    ],
)
def test_a_drivers_name(name, expected):
    assert accelerator_of(name) == expected


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "gpu_flops = 5e13",
            "gpu_flop = 5e13",
            "key 'cluster.b.gpu_flop' is not known; did you mean 'gpu_flops'?",
        ),
        ("gpu_flops = 5e13", "gpu_flops = 0.0", "key 'cluster.b.gpu_flops': 0.0 must be above 0"),
        (
            "gpu_memory_bytes = 24e9",
            "gpu_memory_bytes = '24GB'",
            "key 'cluster.b.gpu_memory_bytes': '24GB' is not a number",
        ),
        ('nvlink = "64Gb/s"', "nvlink = 64", "key 'cluster.b.nvlink': 64 is not a text"),
        (
            'nvlink = "64Gb/s"',
            'nv_link = "64Gb/s"',
            "key 'cluster.b.nv_link' is not known; did you mean 'nvlink'?",
        ),
    ],
)
def test_bad_keys(old, new, message):
    with pytest.raises(HolmesError) as error:
        parse_spec(TEXT.replace(old, new))
    assert message in str(error.value)


def test_sequence_parallelism_divides_what_is_sent_and_kept():
    """Korthikanti et al. 2022, table 2: s b h (34 + 5 a s / h) / t."""
    block = replace(MODEL, sequence_parallel=True).costs(tensor=4)[1]
    assert block.kept_bytes == pytest.approx(32 * 64 * (34 + 5 * 4 * 32 / 64) / 4)
    assert block.activation_bytes == 32 * 64 * 2 / 4


def test_experts():
    dense, moe = MODEL.costs()[1], replace(MODEL, experts=8, experts_per_token=2)
    mlp, biases = 8 * 64**2, 5 * 64
    one, shared = moe.costs()[1], moe.costs(expert=4)[1]
    assert one.parameters == dense.parameters + 7 * (mlp + biases) + 8 * 64  # and the router
    assert one.expert_parameters == 8 * (mlp + biases) and shared.expert_parameters == 2 * (
        mlp + biases
    )
    assert one.forward_flops == dense.forward_flops + 2 * 32 * mlp
    assert one.expert_bytes == 0 and shared.expert_bytes == 4 * 32 * 64 * 2 * 2 * 3 / 4
    with pytest.raises(HolmesError, match="'experts_per_token': 9 is not 1 to 8"):
        replace(moe, experts_per_token=9)
