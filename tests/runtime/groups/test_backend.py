from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from holmes_ext.options import Options
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.carrier import backends, carrier, carrier_of
from holmes_ext.runtime.reduce import straddling
from holmes_ext.runtime.reduce.two_level import TwoLevelAllReduce


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
def test_the_device_decides_where_a_group_has_two_backends(backend, gpu, cpu_tensors, default, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert (carrier_of(backend, "cpu"), carrier_of(backend)) == (cpu_tensors, default)


@pytest.mark.parametrize(
    "text, names",
    [("gloo", {"gloo"}), ("nccl", {"nccl"}), ("cpu:gloo,cuda:nccl", {"gloo", "nccl"}), ("mpi", {"mpi"}), ("fake", {"fake"})],
)
def test_backends(text, names):
    assert set(backends(text).values()) == names


def test_undefined_is_gloo_here():
    assert "gloo" in backends("undefined").values()


def unnamed(rank):
    """A job whose init_process_group names no backend."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(store=dist.PrefixStore("unnamed", store), rank=rank, world_size=2)
    straddling.planned = lambda ranks, size, compress: [[0], [1]]
    session.set_active(SimpleNamespace(options=Options()))
    found = (str(dist.get_backend()), carrier(), carrier(dist.new_group([0, 1])), type(straddling.two_level_for(dist.group.WORLD, 1000)).__name__)
    session.set_active(None)
    return found


def test_a_job_that_names_no_backend_gets_gloo_s_two_levels():
    assert run_ranks(unnamed, 2) == [("undefined", "gloo", "gloo", TwoLevelAllReduce.__name__)] * 2
