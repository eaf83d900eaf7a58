"""examples/doubling: an extension whose reduction sums across clusters by recursive doubling."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from carriers import gloo_only
from clusters import site
from ranks import run_ranks, seeded

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "doubling"))

from doubling.extension import EXTENSION  # noqa: E402
from doubling.options import on_options  # noqa: E402
from doubling.reduction import DoublingAllReduce, doubling_for, rounds_of  # noqa: E402

from holmes_ext import extensions  # noqa: E402
from holmes_ext.errors import HolmesError  # noqa: E402
from holmes_ext.options import Options, options_from  # noqa: E402
from holmes_ext.plan import maker  # noqa: E402
from holmes_ext.plan.build import build_plan  # noqa: E402
from holmes_ext.plan.sizes import Sizes  # noqa: E402
from holmes_ext.runtime import hooks, session  # noqa: E402
from holmes_ext.runtime.reduce.reducer import GradientReducer  # noqa: E402
from holmes_ext.runtime.start.launcher import Process  # noqa: E402


@pytest.mark.parametrize("clusters", range(2, 18))
def test_each_cluster_has_every_sum_once(clusters):
    held = [[number] for number in range(clusters)]
    tags = sorted({one.tag for number in range(clusters) for one in rounds_of(number, clusters)})
    for tag in tags:
        before = list(held)
        for number in range(clusters):
            for one in rounds_of(number, clusters):
                if one.tag == tag and one.receives:
                    partner = before[one.partner]
                    held[number] = before[number] + partner if one.adds else partner
                    (theirs,) = (r for r in rounds_of(one.partner, clusters) if r.tag == tag)
                    assert theirs.sends and theirs.partner == number
    assert all(sorted(sums) == list(range(clusters)) for sums in held)


def sums(rank, clusters, numels):
    """Return the largest difference from torch's all-reduce, and whether all ranks have the same bits."""
    reduction, worst, same = DoublingAllReduce(clusters, chunk_bytes=256), 0.0, True
    works = []
    for number, numel in enumerate(numels):  # all under way at once
        x = torch.randn(numel, generator=seeded(100 * rank + number))
        works.append((x, x.clone(), reduction.all_reduce(x)))
    for x, wanted, work in works:
        work.wait()
        dist.all_reduce(wanted)
        worst = max(worst, float((x - wanted).abs().max()))
        copies = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, x)
        same = same and all(torch.equal(copies[0], copy) for copy in copies)
    reduction.close()
    return worst, same


@gloo_only
@pytest.mark.parametrize(
    "clusters", [[[0, 1], [2, 3]], [[0, 1], [2], [3, 4, 5]], [[0], [1, 2], [3], [4], [5]]]
)
def test_sums_are_the_all_reduce_s_with_the_same_bits(clusters):
    ranks = sum(map(len, clusters))
    for worst, same in run_ranks(sums, ranks, clusters, [1, 2, 7, 1000, 4097]):
        assert same and worst < 1e-5


def model():
    torch.manual_seed(7)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))


def trained(rank, flag):
    """Return the reduction's class, the losses of each step, and those of stock's all-reduce."""
    extensions.found = lambda: extensions.Installed((EXTENSION,), ())
    where, options = site(), options_from(doubling=flag)
    plan = build_plan(where, Sizes(), options=options)
    (reduction,) = plan.traffic_of("sockets").reductions
    reduction = replace(reduction, hierarchical_from=0, chunk_bytes=4096)
    plan = replace(
        plan, traffic=tuple(replace(one, reductions=(reduction,)) for one in plan.traffic)
    )
    process = Process(rank, 4, 0, 1, "", 0, "test")
    current = session.Session(options, process, where, plan, rank, maker=maker)
    session.set_active(current)
    hooks.activate(extensions.hooks_of(current))
    ours, stock, losses, wanted = model(), model(), [], []
    reducer = GradientReducer(ours.named_parameters())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (ours, stock)]
    for step in range(6):
        inputs = torch.randn(4, 16, generator=seeded(1000 * step + rank))
        for one, found in ((ours, losses), (stock, wanted)):
            one.zero_grad(set_to_none=True)
            if one is ours:
                reducer.arm()
            loss = one(inputs).square().sum()
            loss.backward()
            found.append(loss.item())
        reducer.finish()
        for parameter in stock.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 4
        for optimizer in optimizers:
            optimizer.step()
    name = type(reducer._planned.reduction).__name__
    reducer.close()
    session.set_active(None)
    return name, losses, wanted


@gloo_only
@pytest.mark.parametrize("flag", ["on", "off"])
def test_losses_are_those_of_the_stock_all_reduce(flag):
    names = {"on": "DoublingAllReduce", "off": "HierarchicalAllReduce"}
    for name, losses, wanted in run_ranks(trained, 4, flag):
        assert name == names[flag]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_a_ring_that_is_planned_stays_a_ring():
    (spec,) = build_plan(site(), Sizes()).traffic_of("sockets").reductions
    for one in (replace(spec, clusters=()), replace(spec, compress="bf16")):
        assert doubling_for(None, 2**30, one, "cpu") is None


@pytest.mark.parametrize("flag, loaded", [("off", False), ("on", True)])
def test_the_reduction_is_loaded_with_its_flag_only(flag, loaded):
    code = (
        "import sys, types; from doubling.extension import EXTENSION; from holmes_ext import extensions\n"
        "extensions.found = lambda: extensions.Installed((EXTENSION,), ())\n"
        "from holmes_ext.options import options_from\n"
        f"current = types.SimpleNamespace(options=options_from(doubling={flag!r}))\n"
        "extensions.hooks_of(current); print('doubling.reduction' in sys.modules)"
    )
    path = os.pathsep.join((str(ROOT), str(ROOT / "examples" / "doubling")))
    command, environ = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == str(loaded), done.stderr


def test_compression_is_refused_in_one_line():
    with pytest.raises(HolmesError, match="--holmes-compress-gradients int8 has no effect"):
        on_options(Options(compress_gradients="int8"))
    assert on_options(Options()) == []
