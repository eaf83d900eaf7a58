"""Tests the message that names the dump file of torch's flight recorder and the command that reads the dumps.

The tests run without NCCL: stand-ins replace torch's NCCL backends.
"""

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from holmes_ext.runtime.watch import nccl_errors as flight_recorder

GROUP = object()  # stands for a process group
#: Environment in which a dump is the file /dumps/trace_ with the rank appended.
DUMP_PATH = {"TORCH_FR_DUMP_TEMP_FILE": "/dumps/trace_"}


class LegacyBackend:
    """Stand-in for torch's ProcessGroupNCCL, which writes dumps without an abort hook."""


#: Stands for ProcessGroupNCCL2. It runs abort hooks, so that torch's FlightRecorderHook can write a dump.
HOOKED_BACKEND = SimpleNamespace(supports_abort_hooks=True)
#: Stands for ProcessGroupNCCLLazy. It does not run torch's FlightRecorderHook, so no dump is written.
LAZY_BACKEND = SimpleNamespace(supports_abort_hooks=False)


@pytest.fixture
def set_job(monkeypatch):
    """Return a function that replaces torch's version and process groups by stand-ins.

    It takes the NCCL backend of the only group (None: no group has one), the version of torch, and whether
    torch has registered its FlightRecorderHook with the group.
    """
    monkeypatch.setattr(dist, "ProcessGroupNCCL", LegacyBackend, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    def set_job(backend, version="2.15.0+cu132", has_hook=True):
        monkeypatch.setattr(torch, "__version__", version)
        backends = [] if backend is None else [(GROUP, backend)]
        monkeypatch.setattr(flight_recorder, "cuda_backends", lambda: backends)
        hooks = {GROUP: "hook"} if has_hook else {}
        world = SimpleNamespace(pg_flight_recorder_hooks=hooks)
        monkeypatch.setattr(dist.distributed_c10d, "_world", world)

    return set_job


@pytest.mark.parametrize("backend", [LegacyBackend(), HOOKED_BACKEND])
def test_the_message_names_the_dump_file_and_the_command(set_job, backend):
    set_job(backend)
    assert flight_recorder.dump_hint(rank=3, environ=DUMP_PATH) == (
        "when NCCL fails or times out, torch writes the last operations of rank 3 to /dumps/trace_3; "
        "copy these files of all ranks to a folder, and read them with: "
        "torchfrtrace --allow-incomplete-ranks --prefix trace_ FOLDER"
    )


@pytest.mark.parametrize(
    "environ, expected_file",
    [
        ({"HOME": "/root"}, "/root/.cache/torch/comm_lib_trace_rank_3;"),
        ({"HOME": "/root", "XDG_CACHE_HOME": "/fast"}, "/fast/torch/comm_lib_trace_rank_3;"),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/old/trace"}, "/old/trace3;"),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/old/trace", **DUMP_PATH}, "/dumps/trace_3;"),
    ],
)
def test_environment_variables_set_the_dump_file(set_job, environ, expected_file):
    set_job(HOOKED_BACKEND)
    assert f" to {expected_file}" in flight_recorder.dump_hint(rank=3, environ=environ)


@pytest.mark.parametrize(
    "backend, environ",
    [
        (HOOKED_BACKEND, {"TORCH_FR_BUFFER_SIZE": "0"}),
        (LegacyBackend(), {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}),
        (HOOKED_BACKEND, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}),
        (HOOKED_BACKEND, {"TORCH_FR_DUMP_ON_TIMEOUT": "false", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
        (LegacyBackend(), {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}),
        (LegacyBackend(), {"TORCH_NCCL_ENABLE_MONITORING": "0"}),
        (LAZY_BACKEND, {}),
        (None, {}),  # no group has a backend for tensors on GPUs
    ],
)
def test_there_is_no_message_if_torch_writes_no_dump(set_job, backend, environ):
    set_job(backend)
    assert flight_recorder.dump_hint(rank=0, environ={**DUMP_PATH, **environ}) == ""


def test_switches_of_one_backend_do_not_affect_the_other(set_job):
    """ProcessGroupNCCL and FlightRecorderHook have separate switches, which turn off only their own dumps."""
    legacy_switch = {"TORCH_NCCL_ENABLE_MONITORING": "0"}
    set_job(HOOKED_BACKEND)
    assert flight_recorder.dump_hint(rank=0, environ=legacy_switch) != ""

    hook_switch = {"TORCH_FR_DUMP_ON_TIMEOUT": "0"}
    set_job(LegacyBackend())
    assert flight_recorder.dump_hint(rank=0, environ=hook_switch) != ""


def test_there_is_no_message_for_nccl2_of_torch_2_14(set_job):
    """No dump is written with the backend "nccl2" of torch 2.14, which registers no FlightRecorderHook."""
    set_job(HOOKED_BACKEND, version="2.14.1", has_hook=False)
    assert flight_recorder.dump_hint(rank=0, environ=DUMP_PATH) == ""


def test_there_is_no_message_for_torch_before_2_13(set_job):
    """Older releases have other defaults of the environment variables, which holmes does not implement."""
    set_job(LegacyBackend(), version="2.12.1")
    assert flight_recorder.dump_hint(rank=0, environ=DUMP_PATH) == ""


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_file"), reason="torch 2.15 or newer"
)
def test_the_default_dump_file_is_the_one_that_torch_writes(set_job, tmp_path, monkeypatch):
    """The installed torch dumps its real flight recorder to the file that holmes names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(variable, raising=False)
    torch._C._distributed_c10d._dump_fr_trace_file(3)  # as torch does on rank 3 after a failure
    set_job(HOOKED_BACKEND)
    file = tmp_path / "torch" / "comm_lib_trace_rank_3"
    assert f" to {file};" in flight_recorder.dump_hint(rank=3)
    assert "entries" in pickle.loads(file.read_bytes())
