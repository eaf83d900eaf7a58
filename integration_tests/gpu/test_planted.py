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

ON = r"\(stream \d+\)"
MADE = rf"kernel aten::mul.Tensor {ON} reads 65536 bytes that kernel"
#: Fault whose numbers are wrong if a kernel starts late -> pattern of the report about it. No report is
#: possible if the host reads memory, which is no CUDA call. None of these faults hangs.
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
class Hang:
    """A fault that hangs, and the report about it."""

    fault: str
    report: tuple[str, ...]  # patterns that the report must match
    env: dict[str, str] = field(default_factory=dict)
    sms: int = 108  # multiprocessors of the emulated GPU
    #: Ranks wait for each other in a circle. Otherwise the job is ended because no rank progresses.
    is_circle: bool = True
    is_exhaustive: bool = True  # tested in exhaustive runs only

    @property
    def title(self) -> str:
        return " ".join([self.fault, *self.env, *(["one multiprocessor"] if self.sms == 1 else [])])


HANGS = (
    Hang(
        "communicators_in_other_orders",
        (
            r"rank 0: stream \d+: kernel AllReduce of 16384 Float32 \(group first, communicator",
            "waits for data from rank 1, which has launched no kernel for it: rank 1: its host",
            r"rank 1: its host waits in cudaDeviceSynchronize for",
            "group second",
        ),
        is_exhaustive=False,
    ),
    Hang(
        "receive_before_a_device_wait",
        (
            r"kernel Recv from 1 \(65536 bytes\).*waits for data from rank 1, which has launched no kernel "
            r"for it",
            "its host waits in cudaDeviceSynchronize",
        ),
    ),
    Hang("both_send_first", (r"kernel Send to 1 \(16777216 bytes\).*waits for room at rank 1",)),
    Hang(
        "another_collective",
        ("mismatched coll.*AllReduce of.* on rank 0; Broadcast of.* on rank 1",),
    ),
    Hang(
        "sizes_differ",
        (
            r"mismatched coll.*AllReduce of 1048576 Float32 on rank 0; AllReduce of 1024 "
            r"Float32 on"
            " rank 1",
        ),
    ),
    Hang(
        "one_hardware_queue",
        ("stands in hardware queue 0 behind", "kernel Recv from 1"),
        ONE_QUEUE,
        is_exhaustive=False,
    ),
    Hang("side_by_side", (r"needs \d multiprocessors, of which this holds some",), sms=1),
    Hang(
        "launched_in_order",
        (
            r"waits \(cudaStreamWaitEvent\) for rank 0: .*kernel AllReduce of 16384 "
            r"Float32",
        ),
        IN_ORDER,
    ),
    Hang("pooled_streams", ("kernel Send to 1.* comes in its stream after .*kernel Recv from 1",)),
    Hang(
        "rank_waits_elsewhere",
        (
            "which has launched no kernel for it: rank 1: its host",
            r'planted.py", line \d+ in rank_waits_elsewhere',
            "its host is in no CUDA call",
        ),
        is_circle=False,
    ),
    Hang(
        "both_receive_first",
        (
            "rank 0: .*kernel Recv from 1.*waits for data from rank 1, which is at rank 1: "
            ".*kernel Recv from "
            "0",
        ),
        {"TORCH_NCCL_BLOCKING_WAIT": "1"},
    ),
)


def printed_verdicts(ran) -> dict[str, set[str]]:
    """Return fault -> verdicts that the ranks printed about its numbers: "right", "wrong"."""
    verdicts: dict[str, set[str]] = {}
    for lines in ran.result.stdout.values():
        for name, verdict in re.findall(r"^(\w+): (right|wrong)", lines, re.MULTILINE):
            verdicts.setdefault(name, set()).add(verdict)
    return verdicts


def test_late_kernels_make_numbers_wrong(lab, gpus):
    ran = lab.run(SCRIPT, *WRONG_NUMBERS, "--repeat", "5", order="a0", gpus=replace(gpus, seed=1))
    is_wrong = {name: "wrong" in verdicts for name, verdicts in printed_verdicts(ran).items()}
    assert is_wrong == dict.fromkeys(WRONG_NUMBERS, True)
    report = "\n".join(ran.races)
    for name, pattern in WRONG_NUMBERS.items():
        if not pattern:
            continue
        if "host changed" not in pattern:
            pattern += rf"[^\n]*(\n    .*)*in {name}"  # the Python stack names the function
        assert re.search(pattern, report), (name, report)


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
    faults = [*WRONG_NUMBERS, *dict.fromkeys(hang.fault for hang in HANGS)]
    ran = lab.run(SCRIPT, *faults, "--right", order="a0", gpus=replace(gpus, seed=1))
    assert printed_verdicts(ran) == dict.fromkeys(faults, {"right"}), ran.said
    assert ran.hang == () and ran.told == [] and ran.races == []


@pytest.mark.parametrize(
    "hang",
    [pytest.param(hang, id=hang.title, marks=full if hang.is_exhaustive else ()) for hang in HANGS],
)
def test_hangs_are_ended_and_named(lab, gpus, hang):
    """A program of two ranks that hangs is ended, and the report says what each rank waits for."""
    clocked = replace(gpus, clock=GpuClock(sms=hang.sms))
    if hang.is_circle:
        # Ranks that wait for each other in a circle are found at once, long before end_s.
        end_s = 300.0
        reason = "each of these waits for the next"
    else:
        # Other hangs are found after end_s seconds in which no rank progressed.
        end_s = 3.0
        reason = "no rank progressed for 3 s"
    ran = lab.run(SCRIPT, hang.fault, order="a0", env=hang.env, gpus=clocked, end_s=end_s)
    report = "\n".join(ran.hang)
    assert reason in report, ran.said
    for pattern in hang.report:
        assert re.search(pattern, report), report
    assert f"in {hang.fault}" in report  # the Python stack names the function that hangs
    assert printed_verdicts(ran) == {}  # no rank has printed its result


@full
@pytest.mark.parametrize(
    "hang", [hang for hang in HANGS if hang.env or hang.sms == 1], ids=lambda hang: hang.title
)
def test_it_is_the_fault_that_hangs(lab, gpus, hang):
    """The corrected program runs with the same settings.

    Programs that are a fault only with a setting run without it.
    """
    clocked = replace(gpus, clock=GpuClock(sms=hang.sms))
    ran = lab.run(SCRIPT, hang.fault, "--right", order="a0", env=hang.env, gpus=clocked)
    assert printed_verdicts(ran) == {hang.fault: {"right"}}
    if hang.fault in ("side_by_side", "one_hardware_queue", "launched_in_order"):
        ran = lab.run(SCRIPT, hang.fault, order="a0")
        assert printed_verdicts(ran) == {hang.fault: {"right"}}
