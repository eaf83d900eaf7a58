"""--holmes-compress-activations under DeepSpeed's real pipeline engine, 2 processes on loopback:
bytes, losses near stock's, and what int8 refuses."""

import contextlib
import io
import sys

import clusters
import pytest
import torch
from carriers import ON_GPUS
from ranks import run_ranks

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches import Registry
from holmes_ext.patches.deepspeed import stage_links as deepspeed_stage_links
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.samples import examples
from integration_tests.jobs import over_nccl

pytest.importorskip("deepspeed")
on_cpu = pytest.importorskip("integration_tests.deepspeed.on_cpu")
overlap = pytest.importorskip("integration_tests.deepspeed.test_overlap")
WAYS = [("off", "off"), ("bf16", "off"), ("int8", "off"), ("int8", "auto")]


@contextlib.contextmanager
def counting(sent):
    """Floating-point bytes that isend and send carry meanwhile, and int8's."""
    isend, send = torch.distributed.isend, torch.distributed.send

    def count(original):
        def call(tensor, *args, **kwargs):
            sent[0] += tensor.nbytes if tensor.dtype != torch.int32 else 0
            return original(tensor, *args, **kwargs)

        return call

    torch.distributed.isend, torch.distributed.send = count(isend), count(send)
    try:
        yield
    finally:
        torch.distributed.isend, torch.distributed.send = isend, send


def all_ways(rank):
    sys.path.insert(0, str(examples() / "deepspeed_pipeline"))
    on_cpu.prepare()
    site, found = clusters.site("a ib 1Gb/s a0", "b roce 1Gb/s b0", ethernet="1Gb/s"), {}
    for compression, inflight in WAYS:
        options = Options(compress_activations=compression, inflight=inflight)
        plan = build_plan(site, Sizes(2), options=options)
        registry = Registry(deepspeed_stage_links.PATCHES)
        registry.enable(
            ["deepspeed-stage-links", "deepspeed-compression"],
            required=True,
            disabled=frozenset(),
        )
        session.set_active(on_cpu.session_of(rank, site, plan, options))
        sent = [0]
        with contextlib.redirect_stdout(io.StringIO()), counting(sent):
            engine = overlap.engine_for({}, {})
            data = overlap.batches(0, overlap.STEPS)
            found[compression, inflight] = (
                [engine.train_batch(data).item() for _ in range(overlap.STEPS)],
                sent[0],
            )
        try:
            deepspeed_stage_links._wire_to(1 - rank).outgoing(torch.zeros(2, 2, dtype=torch.bool))
            refused = ""
        except HolmesError as error:
            refused = str(error)
        session.set_active(None)
        registry.undo()
    return found, refused


@over_nccl
def test_fewer_bytes_and_losses_that_are_near():
    for found, refused in run_ranks(all_ways, 2, timeout_s=120):
        losses, sent = found["off", "off"]
        for (compression, inflight), (others, bytes_) in found.items():
            # other weights are drawn on a GPU, whose losses the rounding changes more
            limit = {
                "off": 0,
                "bf16": 1e-2 if ON_GPUS else 2e-3,
                "int8": 5e-2 if ON_GPUS else 2e-2,
            }[compression]
            assert max(abs(a - b) for a, b in zip(losses, others)) <= limit, (
                compression,
                losses,
                others,
            )
            share = {"off": 1, "bf16": 0.5, "int8": (1 + 4 / 32) / 4}[compression]
            assert bytes_ == pytest.approx(share * sent, abs=8), (
                compression,
                inflight,
            )  # and a loss, of 4 bytes
            assert compression == "off" or others != losses
        assert "int8: stage " in refused and "sends bool" in refused and "\n" not in refused
