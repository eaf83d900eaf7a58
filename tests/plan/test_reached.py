"""FLOP/s of kernels from those of whole training steps, which logs and papers give."""

from dataclasses import replace

import clusters
import pytest

from holmes_ext.cluster.gpus import accelerator_of
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Model, on_clusters
from holmes_ext.plan.reached import with_kernel_flops
from holmes_ext.plan.sizes import Sizes

#: BLOOM-176B on 384 A100 (bigscience/train/tr11-176B-ml, chronicles): 150 TFLOP/s, steps of 105 s.
BLOOM = Model(
    layers=70,
    hidden=14336,
    heads=112,
    sequence=2048,
    vocabulary=250880,
    positions="none",
    micro_batch=2,
    global_batch=2048,
    recompute="full",
)
LAYOUT = Sizes(pipeline=12, tensor=4)


def spec_with(*keys, nodes="n[01-48]", rate="400Gb/s"):
    """Return a cluster of A100 whose [[cluster]] has further keys, such as gpu_flops=150e12."""
    return parse_spec(clusters.toml(f"jz ib {rate} {nodes} gpu=A100 {' '.join(keys)}", processes=8))


def kernels_of(spec, sizes=LAYOUT, model=BLOOM):
    """Return the FLOP/s of kernels in cluster "jz", and the lines for the user."""
    model, lines = with_kernel_flops(on_clusters(model, spec), spec, sizes)
    return model.gpu_of("jz").flops, lines


def test_a_log_that_counts_recomputation():
    flops, (line,) = kernels_of(spec_with("gpu_hardware_flops=150e12"))
    assert 175e12 < flops < 190e12, "bubbles and communication are 17 % of BLOOM's steps"
    assert line.startswith("cluster jz: kernels at 183.6 TFLOP/s")
    assert line.endswith("reaches gpu_hardware_flops = 150e12")


def test_a_log_that_does_not_count_recomputation_means_the_same_step():
    with_recomputation, _ = kernels_of(spec_with("gpu_hardware_flops=150e12"))
    # Of the four passes (forward, recomputation, backward twice as long), three count. The output layer is
    # not computed again.
    without, _ = kernels_of(spec_with("gpu_model_flops=112.9e12"))
    assert without == pytest.approx(with_recomputation, rel=0.01)


def test_flops_of_kernels_stay():
    assert kernels_of(spec_with("gpu_flops=170e12")) == (170e12, [])
    assert kernels_of(spec_with()) == (180e12, [])


def test_the_default_of_an_a100_is_that_of_kernels():
    """As the defaults of other GPUs are. BLOOM's whole steps reached 150 TFLOP/s, so kernels reached more."""
    kernels, _ = kernels_of(spec_with("gpu_hardware_flops=150e12"))
    assert accelerator_of("A100").flops == pytest.approx(kernels, rel=0.03)


def test_without_recomputation_both_keys_are_the_same():
    model = replace(BLOOM, recompute="none")
    hardware, _ = kernels_of(spec_with("gpu_hardware_flops=150e12"), model=model)
    assert kernels_of(spec_with("gpu_model_flops=150e12"), model=model)[0] == pytest.approx(
        hardware
    )


@pytest.mark.parametrize(
    "sizes, nodes, reason",
    [
        (None, "n[01-48]", "the parallel sizes are not known"),
        (LAYOUT, "n[01-05]", "the layout does not fit it alone: pipeline 12 x tensor 4"),
    ],
)
def test_a_layout_that_is_not_known_is_said(sizes, nodes, reason):
    flops, (line,) = kernels_of(spec_with("gpu_hardware_flops=150e12", nodes=nodes), sizes)
    assert flops == 150e12
    assert line.startswith("assumed: gpu_hardware_flops of cluster jz is that of kernels")
    assert reason in line


def test_rates_that_contradict_the_figure():
    with pytest.raises(
        HolmesError, match="cluster 'jz': .* communication alone takes .* check the rates"
    ):
        kernels_of(spec_with("gpu_hardware_flops=300e12", rate="10Mb/s"))


def test_each_cluster_has_its_own_figure():
    text = clusters.toml(
        "a ib 400Gb/s a[01-12] gpu=A100 gpu_hardware_flops=150e12",
        "b roce 400Gb/s b[01-12] gpu=H100 gpu_flops=400e12",
        processes=8,
    )
    spec = parse_spec(text)
    model, lines = with_kernel_flops(on_clusters(BLOOM, spec), spec, LAYOUT)
    assert model.gpu_of("b").flops == 400e12 and 150e12 < model.gpu_of("a").flops < 200e12
    assert len(lines) == 1


def test_one_key_for_the_speed_of_a_gpu():
    with pytest.raises(
        HolmesError, match="'cluster.jz.gpu_hardware_flops': gpu_flops gives the speed"
    ):
        spec_with("gpu_flops=150e12", "gpu_hardware_flops=150e12")
