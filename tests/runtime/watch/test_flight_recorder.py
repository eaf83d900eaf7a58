"""Tests what holmes says of the dumps of torch's flight recorder. The tests run without NCCL."""

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from holmes_ext.runtime.watch import flight_recorder

GROUP = object()  # stands for a process group
FILE = {"TORCH_FR_DUMP_TEMP_FILE": "/dumps/trace_"}


class LegacyBackend:
    """Stand-in for torch's ProcessGroupNCCL, which writes a dump by itself."""


HOOKED_BACKEND = SimpleNamespace(supports_abort_hooks=True)  # stands for ProcessGroupNCCL2
LAZY_BACKEND = SimpleNamespace(supports_abort_hooks=False)  # stands for ProcessGroupNCCLLazy


@pytest.fixture
def set_job(monkeypatch):
    """Return a function that sets the NCCL backend of the only group, and the version of torch."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", LegacyBackend, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    def set_job(backend, version="2.15.0+cu132", has_hook=True):
        monkeypatch.setattr(torch, "__version__", version)
        backends = [] if backend is None else [(GROUP, backend)]
        monkeypatch.setattr(flight_recorder, "cuda_backends", lambda: backends)
        world = SimpleNamespace(pg_flight_recorder_hooks={GROUP: "hook"} if has_hook else {})
        monkeypatch.setattr(dist.distributed_c10d, "_world", world)

    return set_job


@pytest.mark.parametrize("backend", [LegacyBackend(), HOOKED_BACKEND])
def test_the_file_and_the_command_are_named(set_job, backend):
    set_job(backend)
    assert flight_recorder.dump_hint(3, FILE) == (
        "when NCCL fails or times out, torch writes the last operations of rank 3 to /dumps/trace_3; "
        "copy these files of all ranks to a folder, and read them with: "
        "torchfrtrace --allow-incomplete-ranks --prefix trace_ FOLDER"
    )


@pytest.mark.parametrize("environ, file", [
    ({"HOME": "/root"}, "/root/.cache/torch/comm_lib_trace_rank_3;"),
    ({"HOME": "/root", "XDG_CACHE_HOME": "/fast"}, "/fast/torch/comm_lib_trace_rank_3;"),
    ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/old/trace"}, "/old/trace3;"),
    ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/old/trace", **FILE}, "/dumps/trace_3;"),
])  # fmt: skip
def test_the_file_follows_the_environment(set_job, environ, file):
    set_job(HOOKED_BACKEND)
    assert f" to {file}" in flight_recorder.dump_hint(3, environ)


@pytest.mark.parametrize("backend, environ", [
    (HOOKED_BACKEND, {"TORCH_FR_BUFFER_SIZE": "0"}),
    (LegacyBackend(), {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}),
    (HOOKED_BACKEND, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}),
    (HOOKED_BACKEND, {"TORCH_FR_DUMP_ON_TIMEOUT": "false", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
    (LegacyBackend(), {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}),
    (LegacyBackend(), {"TORCH_NCCL_ENABLE_MONITORING": "0"}),
    (LAZY_BACKEND, {}),
    (None, {}),  # no group has a backend for tensors on GPUs
])  # fmt: skip
def test_nothing_is_said_where_torch_writes_no_dump(set_job, backend, environ):
    set_job(backend)
    assert flight_recorder.dump_hint(0, {**FILE, **environ}) == ""


def test_variables_of_the_old_backend_do_not_count_for_the_new_one(set_job):
    set_job(HOOKED_BACKEND)
    assert flight_recorder.dump_hint(0, {"TORCH_NCCL_ENABLE_MONITORING": "0"})
    set_job(LegacyBackend())
    assert flight_recorder.dump_hint(0, {"TORCH_FR_DUMP_ON_TIMEOUT": "0"})


def test_nothing_is_said_before_torch_attaches_its_hook(set_job):
    """torch 2.14 has the new backend, but its flight recorder does not see it."""
    set_job(HOOKED_BACKEND, version="2.14.1", has_hook=False)
    assert flight_recorder.dump_hint(0, FILE) == ""


def test_nothing_is_said_of_a_torch_whose_defaults_are_not_known(set_job):
    set_job(LegacyBackend(), version="2.12.1")
    assert flight_recorder.dump_hint(0, FILE) == ""


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_file"), reason="torch 2.15 or newer"
)
def test_torch_writes_where_holmes_says(set_job, tmp_path, monkeypatch):
    """The default file of the installed torch, in the cache folder of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    torch._C._distributed_c10d._dump_fr_trace_file(3)
    set_job(HOOKED_BACKEND)
    file = tmp_path / "torch" / "comm_lib_trace_rank_3"
    assert f" to {file};" in flight_recorder.dump_hint(3)
    assert "entries" in pickle.loads(file.read_bytes())
