"""What crosses in fewer bytes: the codecs alone, and in the hierarchical all-reduce in several processes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from carriers import ON_GPUS, gloo_only
from clusters import site
from prices import sums_on_site
from ranks import run_ranks, seeded

from holmes_ext.cluster.wan import Wan
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.traffic import ReductionSpec
from holmes_ext.runtime import session
from holmes_ext.runtime.compress import BLOCK, PLAIN, Bf16, Int8, Residuals, codec, residual_of
from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce
from holmes_ext.runtime.reduce.hierarchical_nccl import HierarchicalCollectives
from holmes_ext.runtime.reduce.planned import hierarchical_for


def randoms(numel, seed=0):
    return torch.randn(numel, generator=seeded(seed))


@pytest.mark.parametrize("numel", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
def test_int8_is_off_by_half_a_step_of_its_block_at_most(numel):
    x = randoms(numel) * torch.linspace(0.001, 10, numel)
    wire = Int8().encode(x, None)
    assert wire.dtype == torch.uint8 and len(wire) == 4 * (
        -(-numel // 4) + -(-numel // BLOCK)
    ) == len(Int8().buffer(x))
    for block, got in zip(x.split(BLOCK), Int8().decode(wire, x).split(BLOCK)):
        assert (block - got).abs().max() <= block.abs().max() / 127 / 2 * 1.0001


def test_bf16_is_torch_s_rounding_and_leaves_16_bit_gradients_alone():
    x = randoms(100)
    assert torch.equal(Bf16().decode(Bf16().encode(x, None), x), x.bfloat16().float())
    assert (
        Bf16().applies(torch.float64)
        and not Bf16().applies(torch.float16)
        and not Bf16().applies(torch.int64)
    )
    assert Int8().applies(torch.bfloat16) and not Int8().applies(torch.int64)


def test_zeros_stay_zeros():
    zeros = torch.zeros(300)
    assert torch.equal(Int8().decode(Int8().encode(zeros, torch.zeros(300)), zeros), zeros)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_neither_hidden_nor_remembered(value):
    x, residual = randoms(2 * BLOCK), torch.zeros(2 * BLOCK)
    x[3] = value
    got = Int8().decode(Int8().encode(x, residual), x)
    assert not got[:BLOCK].isfinite().any() and got[BLOCK:].isfinite().all()
    assert residual.isfinite().all() and not Bf16().decode(Bf16().encode(x, None), x)[3].isfinite()


def test_error_feedback_sends_in_time_what_rounding_left_out():
    x = torch.full(
        (BLOCK,), 0.001
    )  # less than half a step beside the 1.0: rounded to nothing every time
    x[0] = 1.0
    residual, total, lost = torch.zeros(BLOCK), torch.zeros(BLOCK), torch.zeros(BLOCK)
    for _ in range(100):
        total += Int8().decode(Int8().encode(x, residual), x)
        lost += Int8().decode(Int8().encode(x, None), x)
    assert lost[1:].abs().max() == 0
    assert (
        total - 100 * x
    ).abs().max() <= 1 / 127 / 2 * 1.0001  # never more than one rounding behind


def test_residuals_live_as_long_as_their_tensor():
    known, tensor = Residuals(), torch.zeros(4)
    residual_of(known.of(tensor), (2, 0), tensor).fill_(1.0)
    assert (
        residual_of(known.of(tensor), (2, 0), tensor).sum() == 4
        and residual_of(None, (2, 0), tensor) is None
    )
    assert known.of(torch.zeros(4)) == {}


def test_codecs_by_name():
    assert (
        codec("off") is PLAIN
        and isinstance(codec("bf16"), Bf16)
        and isinstance(codec("int8"), Int8)
    )
    for wrong in (lambda: codec("int4"), lambda: Options(compress_gradients="int4")):
        with pytest.raises(HolmesError, match="'int4' is not one of off, bf16, int8"):
            wrong()


def test_prediction_counts_fewer_bytes_across():
    four = site("a ib 2Gb/s a[0-3]", "b ib 2Gb/s b[0-3]", ethernet="250Mb/s")
    whole, compressed = (
        sums_on_site(four, compress=how).hierarchical.seconds(1e7) for how in ("off", "int8")
    )
    assert compressed < 0.7 * whole  # then the fabric is the busier network


def sums(rank, kind, clusters, compress, steps=3, numel=5001):
    """Sum with compression for some steps.

    Returns:
        (largest error relative to the largest sum, same on all ranks, the mean's error over the
        steps, bytes this rank sent across)
    """
    reduction = kind(clusters, chunk_bytes=4096, compress=compress)
    x = randoms(numel, 100 + rank)
    wanted = x.clone()
    dist.all_reduce(wanted)
    flat, mean, worst, same = torch.empty(numel), torch.zeros(numel), 0.0, True
    for _ in range(steps):
        flat.copy_(x)  # the same tensor object every time, as a bucket's
        reduction.all_reduce(flat).wait()
        mean += flat / steps
        worst = max(worst, ((flat - wanted).abs().max() / wanted.abs().max()).item())
        everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, flat)
        same &= all(torch.equal(flat, other) for other in everywhere)
    reduction.close()
    return (
        worst,
        same,
        ((mean - wanted).abs().max() / wanted.abs().max()).item(),
        getattr(reduction, "bytes_across", 0) / steps,
    )


@gloo_only
@pytest.mark.parametrize(
    "clusters", [[[0, 1], [2, 3]], [[0, 1], [2, 3, 4]], [[0, 2], [1], [4, 3]]], ids=str
)
def test_compressed_sums_are_close_and_the_same_bits_everywhere(clusters):
    count = sum(map(len, clusters))
    for compress, tolerance in (("bf16", 0.02), ("int8", 0.04)):
        results = run_ranks(sums, count, HierarchicalAllReduce, clusters, compress, 8)
        for worst, same, mean, _ in results:
            assert same and 0 < worst < tolerance
            assert compress == "bf16" or mean < worst / 3, "errors of different steps cancel"


@gloo_only
def test_the_bytes_that_cross():
    """Each rank of two clusters sends half its quarter to scatter and half to gather.

    That is 4, 2, or 1 + 4/256 bytes an element.
    """
    numel = 1024 * 8
    for compress, of_element in (("off", 4.0), ("bf16", 2.0), ("int8", 1 + 4 / BLOCK)):
        for *_, sent in run_ranks(
            sums, 4, HierarchicalAllReduce, [[0, 1], [2, 3]], compress, 2, numel
        ):
            assert sent == numel / 2 * of_element


@pytest.mark.parametrize("clusters", [[[0, 1], [2, 3]], [[0], [1], [2]]], ids=str)
def test_collectives_of_nccl_s_kind_compress_alike(clusters):
    for compress, tolerance in (("bf16", 0.02), ("int8", 0.03)):
        for worst, same, mean, _ in run_ranks(
            sums, sum(map(len, clusters)), HierarchicalCollectives, clusters, compress, 8
        ):
            assert same and 0 < worst < tolerance
            assert compress == "bf16" or mean < worst / 3


def chosen(rank):
    """Return the codecs of a group that spans clusters, for three specs of the plan."""
    plan = SimpleNamespace(by_cluster=lambda ranks: {"a": [0], "b": [1]}, wan=Wan())
    session.set_active(SimpleNamespace(plan=plan))
    ways = [ReductionSpec(False, 1, ("a", "b"), compress=kind) for kind in ("bf16", "off", "int8")]
    reduces = [hierarchical_for(dist.group.WORLD, 1000, way) for way in ways]
    session.set_active(None)
    return [type(reduce._codec if ON_GPUS else reduce._across.codec).__name__ for reduce in reduces]


def test_what_the_plan_compresses_reaches_the_hierarchical_all_reduce():
    assert run_ranks(chosen, 2) == [["Bf16", "Codec", "Int8"]] * 2


def trained(codecs):
    """Return the loss of a least-squares problem after 200 steps of SGD on two workers' gradients.

    The columns of the problem differ by 30 in scale.
    """
    scale = torch.logspace(0, -1.5, 64)
    inputs, wanted = randoms(512 * 64).view(512, 64) * scale, randoms(64, 1)
    weights = torch.zeros(64)
    residuals = [torch.zeros(64), torch.zeros(64)]
    for _ in range(200):
        total = torch.zeros(64)
        for part, residual in zip(inputs.split(256), residuals):
            gradient = part.T @ (part @ (weights - wanted)) / 256
            total += (
                codecs.decode(codecs.encode(gradient, residual), gradient) if codecs else gradient
            )
        weights -= 0.3 * total
    return (inputs @ (weights - wanted)).square().mean().item()


def test_training_with_int8_ends_where_training_without_does():
    assert trained(Int8()) == pytest.approx(trained(None), rel=0.02)
