"""FSDP2 and FSDP1 over two clusters: messages, and --holmes-fsdp hybrid.

Hybrid's losses, groups and checkpoints are compared with stock's.
"""

import io
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from clusters import site
from ranks import RankError, run_ranks, seeded
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from holmes_ext.options import Options
from holmes_ext.patches import registry
from holmes_ext.patches.torch import fsdp as fsdp_patches
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process
from integration_tests.jobs import some


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 192), nn.Linear(192, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def model():
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(3)))


def start(rank, *clusters, world=4, **options):
    here, chosen = site(*clusters), Options(**options)
    current = session.Session(
        chosen,
        Process(rank, world, 0, 1, "", 0, "test"),
        here,
        build_plan(here, options=chosen),
        rank,
        maker=maker,
    )
    session.set_active(current)
    registry().enable(["fsdp"], required=True)
    sys.stderr = io.StringIO()


def test_units_are_looked_through_once(monkeypatch):
    """The wrapper of FSDP2's _lazy_init reads the list of all sharded modules only in its first call.

    FSDP2 calls _lazy_init in every forward pass, which would otherwise become slower.
    """
    reads = []

    class Context:
        @property
        def all_states(self):  # FSDP2's list of all sharded modules
            reads.append("all_states")
            return []

    state = SimpleNamespace(
        _is_root=None, _state_ctx=Context()
    )  # stands in for the root's FSDPState

    def lazy_init():
        state._is_root = True

    monkeypatch.setattr(session, "_active", SimpleNamespace(rank=0))  # holmes is on
    for _ in range(3):  # forward passes
        # A wrapper gets the wrapped method, its object, and the positional and keyword arguments.
        fsdp_patches._print_cost_of_fsdp2(lazy_init, state, (), {})
    assert len(reads) == 1


def said():
    return sys.stderr.getvalue()


def shard(mesh=None, **more):
    made = model()
    for layer in (*made, made):
        fsdp.fully_shard(layer, mesh=mesh, **more)
    return made


def batch(rank, step, part=0):
    return torch.randn(4, 64, generator=seeded(100 * step + 10 * part + rank))


def train(made, rank, steps=4, accumulate=1, optimizer=None):
    """Mean losses over all ranks, clipped."""
    optimizer = optimizer or torch.optim.AdamW(made.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            if accumulate > 1 and isinstance(made, FSDPModule):
                made.set_requires_gradient_sync(part == accumulate - 1)
            loss = (made(batch(rank, step, part)) - 1).square().mean()
            loss.backward()
        if hasattr(made, "clip_grad_norm_"):
            made.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 4)
    return losses


def both(rank, more, steps):
    """Train with FSDP2 as it is and with hybrid.

    Returns:
        (losses of stock, of hybrid, hybrid's mesh, what was printed)
    """
    stock = train(shard(**more), rank, **steps)
    start(rank, fsdp="hybrid")
    made = shard(**more)
    ours = train(made, rank, **steps)
    return stock, ours, next(made.parameters()).device_mesh.mesh.tolist(), said()


CASES = {
    "plain": ({}, {}),
    "accumulation": ({}, {"accumulate": 3}),
    "kept after the forward pass": ({"reshard_after_forward": False}, {}),
    "bf16": (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {},
    ),
}


@pytest.mark.row("FSDP2")
@pytest.mark.parametrize("case", some(CASES, "accumulation", "bf16"))
def test_hybrid_has_stock_s_losses(case):
    """FSDP2 with --holmes-fsdp hybrid has the losses of FSDP2 without holmes.

    It shards inside each of the two clusters, and only rank 0 prints so.
    """
    tolerance = 1e-4 if case == "bf16" else 1e-6
    # Each of 4 processes trains without holmes, then with it.
    results = run_ranks(both, 4, *CASES[case])
    for losses_without_holmes, hybrid_losses, mesh, _ in results:  # of the ranks
        differences = [
            abs(loss - hybrid) for loss, hybrid in zip(losses_without_holmes, hybrid_losses)
        ]
        assert max(differences) < tolerance
        assert mesh == [[0, 1], [2, 3]]  # the ranks of each cluster
    printed_by_rank_0, *printed_by_other_ranks = [printed for _, _, _, printed in results]
    assert printed_by_rank_0.count("FSDP hybrid: sharded inside each of 2 clusters") == 1
    assert "in place of" in printed_by_rank_0
    assert not any(printed_by_other_ranks)


def one_dimension(rank, own_mesh):
    start(rank)
    mesh = init_device_mesh("cpu", (4,)) if own_mesh else None
    made = shard(mesh)
    train(made, rank, 2)
    return next(made.parameters()).device_mesh.ndim, said()


@pytest.mark.parametrize("own_mesh", [False, True])
def test_a_mesh_of_one_dimension_is_told_what_it_costs(own_mesh):
    answers = run_ranks(one_dimension, 4, own_mesh)
    assert [dimensions for dimensions, _ in answers] == [1] * 4
    text = answers[0][1]
    weights = 3 * (64 * 192 * 2 + 192 + 64) * 4
    assert (
        text.count("\n") == 1
        and f"FSDP gathers {weights / 1e3:.3g} kB of weights across clusters a, b" in text
    )
    assert "--holmes-fsdp hybrid:" in text
    assert (
        f"{2 * weights / 1e3:.3g} kB of weights, gradients" in text
        and f"of {weights / 1e3:.3g} kB" in text
    )


def crossing(rank, sizes, *clusters):
    start(rank, *clusters, world=sizes[0] * sizes[1])
    train(shard(init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))), rank, 2)
    return said()


@pytest.mark.parametrize(
    "sizes, clusters, where, way_out",
    [
        (
            (2, 2),
            ("a ib 2Gb/s a[0-2]", "b roce 1.6Gb/s b0"),
            "ranks 2, 3 lie in clusters a, b",
            "any size does (ranks of clusters: a 3, b 1)",
        ),
        (
            (1, 4),
            ("a ib 2Gb/s a[0-1]", "b roce 1.6Gb/s b[0-1]"),
            "ranks 0, 1, 2, 3 lie in clusters a, b",
            "size 2, or a divisor of it, would not",
        ),
    ],
)
def test_a_dimension_that_crosses_is_named_with_its_cost(sizes, clusters, where, way_out):
    text = run_ranks(crossing, 4, sizes, *clusters)[0]
    assert text.count("\n") == 1
    assert (
        f"dimension shard (size {sizes[1]}) crosses clusters: {where}, "
        "so every layer's weights cross, 0."
    ) in text
    assert text.endswith(f" s of a step (predicted); {way_out}\n")


def unequal(rank):
    start(rank, "a ib 2Gb/s a[0-2]", "b roce 1.6Gb/s b0", fsdp="hybrid")
    shard()


def part_of_the_ranks(rank):
    start(rank, "a ib 2Gb/s a[0-1]", "b roce 1.6Gb/s b[0-1]", fsdp="hybrid")
    shard(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"])


@pytest.mark.parametrize(
    "function, what",
    [
        (
            unequal,
            r"--holmes-fsdp hybrid: clusters hold different numbers of the 4 ranks .*\(a 3, b 1\)",
        ),
        (part_of_the_ranks, "FSDP shards over 2 of 4 ranks"),
    ],
)
def test_what_hybrid_cannot_do_is_one_line(function, what):
    with pytest.raises(RankError, match=what):
        run_ranks(function, 4)


def checkpoint(rank, directory, saved_hybrid):
    """Save a checkpoint in one job, and load it in another one under the other mesh.

    Returns:
        (the next loss in the job that saved, in the one that loaded)
    """
    losses = []
    before, after = (True, False) if saved_hybrid else (False, True)
    for hybrid, loads in ((before, False), (after, True)):
        if hybrid:
            start(rank, fsdp="hybrid")
        else:
            session.set_active(None)
        made = shard()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        if loads:
            weights, moments = get_state_dict(made, optimizer)
            state = {"model": weights, "optimizer": moments}
            dcp.load(state, checkpoint_id=directory)
            set_state_dict(
                made,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        else:
            train(made, rank, 2, optimizer=optimizer)
            weights, moments = get_state_dict(made, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory)
        losses.append(
            (next(made.parameters()).device_mesh.ndim, train(made, rank, 2, optimizer=optimizer))
        )
    return losses


@pytest.mark.parametrize("saved_hybrid", [False, True])
def test_checkpoints_load_both_ways(tmp_path, saved_hybrid):
    for (saved_on, saved), (loaded_on, loaded) in run_ranks(
        checkpoint, 4, str(tmp_path), saved_hybrid
    ):
        assert (saved_on, loaded_on) == ((2, 1) if saved_hybrid else (1, 2))
        assert max(abs(a - b) for a, b in zip(saved, loaded)) < 1e-6


def train_fsdp1(rank, strategy):
    """Train with FullyShardedDataParallel (FSDP1): without holmes, then with --holmes-fsdp hybrid.

    Returns the losses of both runs, and the number of device meshes that holmes made.
    """

    def losses_of_new_model():
        sharded = FullyShardedDataParallel(
            model(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=strategy,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        return train(sharded, rank)  # the losses of some steps

    losses_without_holmes = losses_of_new_model()
    start(rank, fsdp="hybrid")  # switches holmes on
    hybrid_losses = losses_of_new_model()
    meshes_of_holmes = fsdp_patches._hybrid_meshes  # type of device -> device mesh
    return losses_without_holmes, hybrid_losses, len(meshes_of_holmes)


@pytest.mark.row("FSDP1")
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, None]
)
def test_fsdp1_in_hybrid_has_stock_s_losses(strategy):
    """FSDP1 with --holmes-fsdp hybrid has the losses of FSDP1 without holmes.

    All sharded modules of the model share one device mesh.
    """
    results = run_ranks(train_fsdp1, 4, strategy, timeout_s=180)
    for losses_without_holmes, hybrid_losses, mesh_count in results:
        differences = [
            abs(loss - hybrid) for loss, hybrid in zip(losses_without_holmes, hybrid_losses)
        ]
        assert max(differences) < 1e-6
        assert mesh_count == 1


def nothing_sharded(rank):
    start(rank, fsdp="hybrid")
    fsdp_patches.tell_unused(session.require())
    return said()


def test_hybrid_without_fsdp_is_one_line():
    assert [
        text.count("--holmes-fsdp hybrid did nothing") for text in run_ranks(nothing_sharded, 2)
    ] == [1, 0]
