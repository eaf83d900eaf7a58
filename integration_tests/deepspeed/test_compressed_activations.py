"""Tests --holmes-compress-activations with DeepSpeed's pipeline engine, in 2 processes on loopback.

Fewer bytes must be sent, the losses must be close to those without compression, and int8 must refuse messages
that are no floating-point numbers.
"""

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
def counted_bytes(total):
    """Count the bytes that isend and send transfer while the context lasts.

    Messages of type int32, which describe shapes, are not counted.

    Args:
        total: A list with one number, to which the bytes are added.
    """
    isend, send = torch.distributed.isend, torch.distributed.send

    def counting(original):
        def call(tensor, *args, **kwargs):
            if tensor.dtype != torch.int32:
                total[0] += tensor.nbytes
            return original(tensor, *args, **kwargs)

        return call

    torch.distributed.isend = counting(isend)
    torch.distributed.send = counting(send)
    try:
        yield
    finally:
        torch.distributed.isend, torch.distributed.send = isend, send


def train_all_ways(rank):
    """Train with each combination of compression and schedule in WAYS.

    Returns:
        (compression, in flight) -> (losses, bytes sent); and the error for a message of booleans under int8.
    """
    sys.path.insert(0, str(examples() / "deepspeed_pipeline"))
    on_cpu.prepare()
    site = clusters.site("a ib 1Gb/s a0", "b roce 1Gb/s b0", ethernet="1Gb/s")
    results = {}
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
        with contextlib.redirect_stdout(io.StringIO()), counted_bytes(sent):
            engine = overlap.engine_for(config={}, options={})
            data = overlap.batches(0, overlap.STEPS)
            losses = [engine.train_batch(data).item() for _ in range(overlap.STEPS)]
        results[compression, inflight] = (losses, sent[0])
        message = torch.zeros(2, 2, dtype=torch.bool)
        try:
            deepspeed_stage_links._wire_to(1 - rank).outgoing(message)
            refusal = ""
        except HolmesError as error:
            refusal = str(error)
        session.set_active(None)
        registry.undo()
    return results, refusal  # the refusal under the last way, which is int8


@over_nccl
def test_fewer_bytes_and_losses_that_are_near():
    # GPUs draw other weights, with which rounding changes the losses more.
    tolerances = {"off": 0, "bf16": 2e-3, "int8": 2e-2}
    if ON_GPUS:
        tolerances = {"off": 0, "bf16": 1e-2, "int8": 5e-2}
    # int8: one byte for each number of 4 bytes, and a scale of 4 bytes for each row of 32 numbers
    shares = {"off": 1, "bf16": 0.5, "int8": (1 + 4 / 32) / 4}
    for results, refusal in run_ranks(train_all_ways, 2, timeout_s=120):
        full_losses, full_bytes = results["off", "off"]
        for way, (losses, sent_bytes) in results.items():
            compression, _ = way
            largest_difference = max(abs(a - b) for a, b in zip(full_losses, losses))
            assert largest_difference <= tolerances[compression], (way, full_losses, losses)
            # abs=8: a loss of 4 bytes is sent, too
            assert sent_bytes == pytest.approx(shares[compression] * full_bytes, abs=8), way
            assert compression == "off" or losses != full_losses
        assert "int8: stage " in refusal and "sends bool" in refusal and "\n" not in refusal
