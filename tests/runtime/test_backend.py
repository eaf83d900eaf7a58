import pytest
import torch
import torch.distributed as dist
from clusters import example
from ranks import run_ranks

from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_named, backend_of, backends, network_api_of
from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce
from holmes_ext.runtime.reduce.planned import PlannedReduction
from holmes_ext.runtime.start.launcher import Process


@pytest.mark.parametrize(
    ("backend", "gpu", "cpu_tensors", "default"),
    [
        ("nccl", True, "nccl", "nccl"),
        ("gloo", True, "gloo", "gloo"),
        ("cpu:gloo,cuda:nccl", True, "gloo", "nccl"),
        ("cuda:nccl,cpu:gloo", True, "gloo", "nccl"),
        ("cpu:gloo,cuda:nccl", False, "gloo", "gloo"),
    ],
)
def test_the_device_decides_where_a_group_has_two_backends(
    backend, gpu, cpu_tensors, default, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert (backend_named(backend, "cpu"), backend_named(backend)) == (cpu_tensors, default)


@pytest.mark.parametrize(
    "text, names",
    [
        ("gloo", {"gloo"}),
        ("nccl", {"nccl"}),
        ("cpu:gloo,cuda:nccl", {"gloo", "nccl"}),
        ("mpi", {"mpi"}),
        ("fake", {"fake"}),
    ],
)
def test_backends(text, names):
    assert set(backends(text).values()) == names


def test_undefined_is_gloo_here():
    assert "gloo" in backends("undefined").values()


@pytest.mark.parametrize(
    "backend, network_api",
    [("nccl", "verbs"), ("fake", "verbs"), ("gloo", "sockets"), ("ucc", ""), ("mpi", "")],
)
def test_what_of_a_nodes_ports_a_backend_can_use(backend, network_api):
    assert network_api_of(backend) == network_api


def unnamed(rank):
    """Start a job whose init_process_group names no backend."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(store=dist.PrefixStore("unnamed", store), rank=rank, world_size=4)
    site = example()
    session.set_active(
        session.Session(
            Options(),
            Process(rank, 4, 0, 1, "", 0, "test"),
            site,
            build_plan(site),
            rank,
            maker=maker,
        )
    )
    made = PlannedReduction(dist.group.WORLD, 2**20, "cpu").reduction
    session.set_active(None)
    return (
        str(dist.get_backend()),
        backend_of(),
        backend_of(dist.new_group([0, 1, 2, 3])),
        type(made).__name__,
    )


def test_a_job_that_names_no_backend_gets_gloo_s_hierarchical():
    assert (
        run_ranks(unnamed, 4) == [("undefined", "gloo", "gloo", HierarchicalAllReduce.__name__)] * 4
    )
