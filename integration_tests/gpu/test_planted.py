"""Tests that emulated GPUs find synchronization errors; planted.py has functions with one error each.

The errors are of two kinds:

    missing wait    A kernel uses memory before another kernel has finished with it. With --gpu-order random,
                    the emulated GPU reports both kernels.
    deadlock        Ranks wait for each other. The job is ended, and the report says for each rank what it
                    waits for.

The same functions without the error are reported as correct. Some deadlocks are tested only in exhaustive
runs.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from holmes_lab.gpu.job import GpuClock

from integration_tests.jobs import full

SCRIPT = str(Path(__file__).with_name("planted.py"))

#: Numbers go wrong when a kernel starts late. None of them hangs. Fault -> what is told of it: nothing where
#: the host reads memory, which no CUDA call shows.
ON = r"\(stream \d+\)"
MADE = rf"kernel aten::mul.Tensor {ON} reads 65536 bytes that kernel"
WRONG_NUMBERS = {
    "consumer_does_not_wait": rf"{MADE} aten::round_ {ON} writes",
    "event_is_recorded_too_early": rf"{MADE} aten::round_ {ON} writes",
    "collective_does_not_wait": (
        rf"kernel AllReduce of 16384 Float32 .* (reads|writes) 65536 bytes that kernel "
        rf"aten::\S+ {ON} writes"
    ),
    "work_is_not_waited_for": rf"{MADE} AllReduce of 16384 Float32 .* writes",
    "sum_is_copied_too_early": (
        rf"kernel aten::copy_ {ON} reads 65536 bytes that kernel AllReduce of 16384 Float32 .* "
        rf"writes"
    ),
    "buffer_is_reused_too_early": (
        rf"kernel aten::fill\S+ {ON} writes 65536 bytes that kernel aten::mul.Tensor {ON} reads"
    ),
    "pinned_source_is_changed_too_early": (
        rf"copy cudaMemcpyAsync {ON} reads 65536 bytes of pinned memory that the host changed"
    ),
    "pinned_result_is_read_too_early": "",
}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
IN_ORDER = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


@dataclass(frozen=True)
class Hangs:
    """How a fault hangs. told: what the report says of it; sms: multiprocessors; circle: whether waits close
    one, else the job is ended because nothing moves on."""

    fault: str
    told: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    sms: int = 108
    circle: bool = True
    always: bool = False

    @property
    def title(self) -> str:
        return " ".join([self.fault, *self.env, *(["one multiprocessor"] if self.sms == 1 else [])])


HANGS = (
    Hangs(
        "communicators_in_other_orders",
        (
            r"rank 0: stream \d+: kernel AllReduce of 16384 Float32 \(group first, communicator",
            "waits for data from rank 1, which has launched no kernel for it: rank 1: its host",
            r"rank 1: its host waits in cudaDeviceSynchronize for",
            "group second",
        ),
        always=True,
    ),
    Hangs(
        "receive_before_a_device_wait",
        (
            r"kernel Recv from 1 \(65536 bytes\).*waits for data from rank 1, which has launched no kernel "
            r"for it",
            "its host waits in cudaDeviceSynchronize",
        ),
    ),
    Hangs("both_send_first", (r"kernel Send to 1 \(16777216 bytes\).*waits for room at rank 1",)),
    Hangs(
        "another_collective",
        ("mismatched coll.*AllReduce of.* on rank 0; Broadcast of.* on rank 1",),
    ),
    Hangs(
        "sizes_differ",
        (
            r"mismatched coll.*AllReduce of 1048576 Float32 on rank 0; AllReduce of 1024 "
            r"Float32 on"
            " rank 1",
        ),
    ),
    Hangs(
        "one_hardware_queue",
        ("stands in hardware queue 0 behind", "kernel Recv from 1"),
        ONE_QUEUE,
        always=True,
    ),
    Hangs("side_by_side", (r"needs \d multiprocessors, of which this holds some",), sms=1),
    Hangs(
        "launched_in_order",
        (
            r"waits \(cudaStreamWaitEvent\) for rank 0: .*kernel AllReduce of 16384 "
            r"Float32",
        ),
        IN_ORDER,
    ),
    Hangs("pooled_streams", ("kernel Send to 1.* comes in its stream after .*kernel Recv from 1",)),
    Hangs(
        "rank_waits_elsewhere",
        (
            "which has launched no kernel for it: rank 1: its host",
            r'planted.py", line \d+ in rank_waits_elsewhere',
            "its host is in no CUDA call",
        ),
        circle=False,
    ),
    Hangs(
        "both_receive_first",
        (
            "rank 0: .*kernel Recv from 1.*waits for data from rank 1, which is at rank 1: "
            ".*kernel Recv from "
            "0",
        ),
        {"TORCH_NCCL_BLOCKING_WAIT": "1"},
    ),
)


def shown(ran) -> dict[str, set[str]]:
    """Fault -> what the ranks printed of its numbers: "right", "wrong"."""
    found: dict[str, set[str]] = {}
    for lines in ran.result.stdout.values():
        for name, verdict in re.findall(r"^(\w+): (right|wrong)", lines, re.MULTILINE):
            found.setdefault(name, set()).add(verdict)
    return found


def test_late_kernels_make_numbers_wrong(lab, gpus):
    ran = lab.run(SCRIPT, *WRONG_NUMBERS, "--repeat", "5", order="a0", gpus=replace(gpus, seed=1))
    assert {name: "wrong" in verdicts for name, verdicts in shown(ran).items()} == dict.fromkeys(
        WRONG_NUMBERS, True
    )
    report = "\n".join(ran.races)
    for name, told in WRONG_NUMBERS.items():
        frames = "" if "host changed" in told else rf"[^\n]*(\n    .*)*in {name}"
        assert not told or re.search(told + frames, report), (name, report)


@pytest.mark.parametrize(
    "fault", ["consumer_does_not_wait", pytest.param("event_is_recorded_too_early", marks=full)]
)
def test_the_sanitizer_names_both_operators_and_the_line(lab, fault):
    ran = lab.run(SCRIPT, fault, order="a0", env={"TORCH_CUDA_SANITIZER": "1"})
    text = "\n".join(ran.result.outputs.values())
    assert "possible data race" in text and "aten::mul.Tensor" in text and "aten::round_" in text, (
        text
    )
    assert re.search(r'planted_numbers.py", line \d+, in check_doubled', text), text


def test_without_the_faults_late_kernels_change_nothing(lab, gpus):
    faults = [*WRONG_NUMBERS, *dict.fromkeys(one.fault for one in HANGS)]
    ran = lab.run(SCRIPT, *faults, "--right", order="a0", gpus=replace(gpus, seed=1))
    assert shown(ran) == dict.fromkeys(faults, {"right"}), ran.said
    assert ran.hang == () and ran.told == [] and ran.races == []


@pytest.mark.parametrize(
    "hang", [pytest.param(hang, id=hang.title, marks=() if hang.always else full) for hang in HANGS]
)
def test_hangs_are_ended_and_named(lab, gpus, hang):
    """A program of two ranks that hangs is ended, and the report says what each rank waits for."""
    clocked = replace(
        gpus, clock=GpuClock(sms=hang.sms)
    )  # sms: multiprocessors of the emulated GPU
    if hang.circle:
        # Ranks that wait for each other in a circle are found at once, long before end_s.
        end_s = 300.0
        reason = "each of these waits for the next"
    else:
        # Other hangs are found after end_s seconds in which no rank progressed.
        end_s = 3.0
        reason = "no rank progressed for 3 s"
    ran = lab.run(
        SCRIPT, hang.fault, order="a0", env=hang.env, gpus=clocked, end_s=end_s
    )  # on node a0
    report = "\n".join(ran.hang)
    assert reason in report, ran.said
    for pattern in hang.told:
        assert re.search(pattern, report), report
    assert f"in {hang.fault}" in report  # the Python stack names the function that hangs
    assert shown(ran) == {}  # no rank came as far as printing its result


@full
@pytest.mark.parametrize(
    "one", [one for one in HANGS if one.env or one.sms == 1], ids=lambda one: one.title
)
def test_it_is_the_fault_that_hangs(lab, gpus, one):
    """Mended it runs with the same setting; and what only the setting makes a fault runs without it."""
    clocked = replace(gpus, clock=GpuClock(sms=one.sms))
    assert shown(lab.run(SCRIPT, one.fault, "--right", order="a0", env=one.env, gpus=clocked)) == {
        one.fault: {"right"}
    }
    if one.fault in ("side_by_side", "one_hardware_queue", "launched_in_order"):
        assert shown(lab.run(SCRIPT, one.fault, order="a0")) == {one.fault: {"right"}}
