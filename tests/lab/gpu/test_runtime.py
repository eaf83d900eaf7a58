"""The emulated GPU's runtime (lab/holmes_lab/gpu/csrc/runtime).

The tests cover the order in streams, memory and errors.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from holmes_lab.gpu import recipes
from holmes_lab.gpu.build import build
from holmes_lab.gpu.cache import cache_folder
from holmes_lab.gpu.compiler import find_compiler
from holmes_lab.gpu.races import missing_waits

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the runtime is built with g++")


@pytest.fixture(scope="session")
def cudart() -> Path:
    component = recipes.runtime(find_compiler(), (13, 0))
    return build([component], cache_folder())["runtime"] / "libcudart.so.13"


@pytest.fixture
def case(cudart):
    def run(name: str, **environment: str):
        command = [sys.executable, str(Path(__file__).with_name("runtime.py")), str(cudart), name]
        variables = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("CUDA_", "HOLMES_GPU_"))
        }
        done = subprocess.run(
            command, env={**variables, **environment}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_a_stream_keeps_its_order(case):
    assert case("in_order") == [str(number) for number in range(20)]


def test_streams_run_side_by_side(case):
    before, all_of_it = case("side_by_side")
    assert before == ["free"]
    assert all_of_it == ["free", "held", "behind it"]


def test_a_stream_waits_for_an_event(case):
    assert case("event_wait") == [False, ["produces", "consumes"]]


def test_an_event_counts_what_was_there(case):
    assert case("event_of_now") == ["first", "waits for the first"]


def test_the_default_stream_and_blocking_streams_wait_for_each_other(case):
    before, all_of_it = case("legacy_stream")
    assert before == ["other"]
    assert all_of_it == ["other", "blocking", "default", "blocking again"]


def test_one_hardware_queue_makes_false_dependencies(case):
    early, order = case("hardware_queue", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert not early and order[0] == "runs"


def test_events_in_one_hardware_queue_hold_up_no_other_stream(case):
    assert case("events_in_a_hardware_queue", CUDA_DEVICE_MAX_CONNECTIONS="1") == [
        "beside it",
        "runs",
    ]


def test_eight_hardware_queues_do_not(case):
    assert case("hardware_queues") == ["on its own", "runs", "cannot start"]


def test_kernels_wait_for_free_multiprocessors(case):
    before, last = case("multiprocessors", HOLMES_GPU_SMS="4")
    assert before == [["needs 1"], False] or before == [["computes", "needs 1"], False]
    assert last in ("needs 2", "computes")


def test_full_multiprocessors_stop_all(case):
    assert case("full", HOLMES_GPU_SMS="4") == [False, ["holds 4", "computes"]]


def test_copies_of_pageable_memory(case):
    assert case("pageable") == "abc"


def test_an_unknown_kernel_is_named(case):
    error, text, last, after = case("failure")
    assert error == last != 0 == after
    assert "kernel my_adder(float*, float*) is not emulated" in text


def test_the_emulated_clock(case):
    """Three kernels of 50 MFLOP at 1 GFLOP/s share one GPU.

    Each takes 50 ms of emulated time, and the host runs ahead.
    """
    early, ends = case("clock", HOLMES_GPU_MFLOPS="1000")
    assert not early
    assert [end >= least for end, least in zip(ends, (50, 100, 150))] == [True] * 3


def test_who_asks_in_vain_naps(case):
    """Awake it would ask a hundred thousand times; naps of a sixteenth of the wait leave some 130."""
    first, asked, again = case("patience")
    assert first == again == 0 and 20 < asked < 2000


def test_a_missing_wait_is_named(case, tmp_path):
    assert case("races", HOLMES_GPU_RANDOM="1", HOLMES_GPU_WATCH=str(tmp_path), RANK="0") == [
        1,
        1,
        1,
        2,
    ]
    wait, changed = missing_waits(tmp_path)
    assert (
        "a wait is missing (rank 0): copy cudaMemsetAsync (stream 2) writes 1 bytes that "
        "copy cudaMemsetAsync (stream 1) writes"
    ) in wait
    assert (
        "cudaMemcpyAsync (stream 1) reads 64 bytes of pinned memory that the host changed"
        in changed
    )


def test_memory_of_another_process(case):
    assert case("ipc") == ["hello", True, 0]


def test_memory_is_given_back(case):
    used, refused, again, same, bad = case("memory", HOLMES_GPU_MEMORY_MB="64")
    assert (used, again, same) == (3 << 20, 0, True)
    assert refused == 2 and bad == 1


def test_cuda_graphs_own_no_memory(case):
    """Without CUDA graphs, which are not emulated, their memory is 0. torch 2.15 reads that number."""
    assert case("graph_memory") == [[[0, 0]] * 4, 0]


def test_functions_of_torch_2_15_that_are_not_emulated_say_so(case):
    """Each function exists, because torch would not load without it, and its error contains its name."""
    errors = case("device_code_and_graphs")
    assert len(errors) == 6
    for name, error in errors.items():
        assert f"{name}: " in error and "not emulated" in error


def test_pci_info_fits_into_the_struct_of_nccl_2_30(case):
    """nvmlDeviceGetPciInfo_v3 writes the bus id that CUDA reports, and nothing after the first 52 bytes."""
    bus_id, legacy_bus_id, nvml_bus_id, after_struct = case("pci_info")
    assert bus_id == legacy_bus_id == nvml_bus_id
    assert after_struct == "x" * 16
