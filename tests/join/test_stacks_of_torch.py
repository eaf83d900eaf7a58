"""Joined jobs of several processes, as --holmes-join makes them of unmodified programs.

The programs use DDP, FSDP2 or one process.
"""

import pytest
import torch
from joined_jobs import batch, coordinator, in_threads, model_of, plain_sgd
from ranks import RankError, run_ranks
from torch import nn

from holmes_ext.join import training
from holmes_ext.join.patches import torch as joined
from holmes_ext.options import options_from

ROWS = 12


def script(model, optimizer, job, rank, ranks, steps, after=lambda step: None):
    """Run a training script that does nothing for joined jobs.

    Each rank takes its part of the job's batch.
    """
    for step in range(steps):
        inputs, labels = (one[rank::ranks] for one in batch(ROWS, job, step))
        optimizer.zero_grad()
        (model(inputs) - labels).square().mean().backward()
        optimizer.step()
        after(step)


def rank_of(rank, ranks, kind, job, name, port, outer, steps, sgd=False):
    """One rank; all weights after the last step."""
    training.request(options_from(join=f"{name}@127.0.0.1:{port}", outer=outer))
    joined.attach()
    model = model_of(3 + (rank if kind == "not replicated" else 0))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for layer in (model[0], model[2], model[4], model):
            fully_shard(layer, mesh=mesh)
    optimizer = (torch.optim.SGD if sgd else torch.optim.AdamW)(model.parameters(), lr=0.01)
    script(model, optimizer, job, rank, ranks, steps)
    training.end()
    joined.detach()
    found = [
        getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in model.parameters()
    ]
    return torch.cat(found).tolist()


def run(kinds, outer, steps=12, sgd=False):
    """{name: [of each rank]} of jobs named by `kinds`, {name: (kind, ranks)}."""
    outer = f"min={len(kinds)},{outer}"
    with coordinator() as server:
        return in_threads(
            {
                name: lambda k=k, name=name, kind=kind, ranks=ranks: run_ranks(
                    rank_of, ranks, ranks, kind, k, name, server.port, outer, steps, sgd
                )
                for k, (name, (kind, ranks)) in enumerate(kinds.items())
            }
        )


@pytest.fixture(scope="module")
def expected():
    return run(
        {"east": ("plain", 1), "west": ("plain", 1)},
        "every=6,fragments=2,delay=1,compress=off,weight=equal",
    )


@pytest.mark.parametrize(
    "kinds",
    [
        {"east": ("ddp", 2), "west": ("ddp", 2)},
        {"east": ("ddp", 3), "west": ("plain", 1)},
        {"east": ("fsdp2", 2), "west": ("fsdp2", 3)},
        {"east": ("fsdp2", 3), "west": ("ddp", 2)},
    ],
)
def test_the_same_weights_whatever_the_jobs_are_made_of(kinds, expected):
    found = run(kinds, "every=6,fragments=2,delay=1,compress=off,weight=equal")
    for name, ranks in found.items():
        for one in ranks:
            torch.testing.assert_close(
                torch.tensor(one), torch.tensor(expected[name][0]), rtol=1e-4, atol=2e-6
            )


def test_matrices_that_ranks_hold_in_parts_take_the_step_of_the_whole():
    outer = "algorithm=muon,every=6,fragments=2,delay=1,compress=off,weight=equal"
    whole = run({"east": ("plain", 1), "west": ("plain", 1)}, outer)
    parts = run({"east": ("fsdp2", 3), "west": ("ddp", 2)}, outer)
    for name, ranks in parts.items():
        for one in ranks:
            torch.testing.assert_close(
                torch.tensor(one), torch.tensor(whole[name][0]), rtol=1e-3, atol=1e-4
            )


def test_averaging_after_each_step_is_one_synchronous_job():
    """Plain SGD: the mean of the jobs' weights is a step of the mean of their gradients."""
    found = run(
        {"east": ("ddp", 2), "west": ("fsdp2", 2)},
        "algorithm=average,every=1,fragments=1,delay=0,compress=off,weight=equal",
        6,
        sgd=True,
    )
    wanted = plain_sgd(0, ROWS, 6)
    for one in (rank for ranks in found.values() for rank in ranks):
        torch.testing.assert_close(torch.tensor(one), wanted, rtol=1e-4, atol=2e-6)


def test_ranks_that_hold_different_weights_are_refused():
    """As those of a tensor-parallel model that nobody told holmes of."""
    with (
        coordinator() as server,
        pytest.raises(RankError, match="ranks 0, 1 of job east should hold the same"),
    ):
        run_ranks(
            rank_of,
            2,
            2,
            "not replicated",
            0,
            "east",
            server.port,
            "every=4,fragments=1,delay=0",
            4,
        )


def two_optimizers(rank, port):
    training.request(options_from(join=f"east@127.0.0.1:{port}"))
    joined.attach()
    for model in (model_of(), model_of()):
        script(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, 0, 1, 1)


def test_two_optimizers_are_refused():
    with coordinator() as server, pytest.raises(RankError, match="the script has two optimizers"):
        run_ranks(two_optimizers, 1, server.port)


def sampled(rank, ranks, job):
    training.request(options_from(join="east@127.0.0.1:1", outer=f"part={job}/2"))
    from torch.utils.data.distributed import DistributedSampler

    call = joined.PATCHES[0].wrap
    made = DistributedSampler.__new__(DistributedSampler)
    call(made.__init__, made, (list(range(60)),), {"seed": 5})
    return list(made)


def test_jobs_of_different_sizes_read_different_parts_of_one_data_set():
    east, west = run_ranks(sampled, 2, 2, 0), run_ranks(sampled, 3, 3, 1)
    assert sorted(sum(east, [])) + sorted(sum(west, [])) != list(
        range(60)
    )  # shuffled before it is shared out
    assert sorted(sum(east, []) + sum(west, [])) == list(range(60))
