"""Tests what a job does when a fault happens to it: a cable is pulled, a rank is killed, ...

The job trains on emulated nodes. The faults are listed in table.py, each with the messages and the exit
status that the job must have.
"""

import json
import re
import sys
import threading
from pathlib import Path

import pytest
from carriers import ON_GPUS, gloo_only
from telemetry_files import write

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from integration_tests.faults.table import FAULTS, OTHER_NAMES, Changes, Fault, renamed
from integration_tests.jobs import CLUSTER, full, said

TINY = str(Path(__file__).with_name("tiny.py"))
PRELOAD = (
    "torch",
    "holmes_ext.job",
    "holmes_ext.patches.engine.registry",
    *(f"holmes_ext.runtime.{name}" for name in ("start.rank", "start.preflight", "watch.failure")),
)
#: Faults that are tested over NCCL: those found before the job trains, and those that NCCL itself detects. A
#: rank that loses another one prints which, and torch's watchdog (SIGABRT) or the launcher ends it.
OVER_NCCL = (
    "unreachable on its fast NIC alone",
    "a fast NIC without link",
    "cable of the fast NIC pulled",
    "cable pulled and back in time",
    "killed in a reduction",
)
TIMED_OUT = 124  # exit status of a job that the lab ended after its timeout
ENDED_BY_LAUNCHER = 143  # exit status after SIGTERM
ABORTED = (-6, 134)  # exit statuses after SIGABRT
#: tiny.py has no flag --holmes, as it switches holmes on by itself. Without these variables, the lab would
#: take it for a job without holmes and disable its fast NICs.
STARTED_LATER = {"NCCL_IB_DISABLE": "0", "NCCL_SOCKET_IFNAME": ""} if ON_GPUS else None


def case_of(fault: Fault):
    """Return the fault as a parameter of test_fault.

    Over gloo, a fault with `default=False` gets the mark of exhaustive tests, which do not run before every
    merge. Over NCCL there are only five faults, and all of them run.
    """
    is_exhaustive = not fault.default and not ON_GPUS  # ON_GPUS: the jobs train over NCCL
    return pytest.param(fault, id=fault.name, marks=full if is_exhaustive else ())


CASES = [case_of(fault) for fault in FAULTS if not ON_GPUS or fault.name in OVER_NCCL]


@pytest.fixture(scope="module")
def plan(two_clusters):
    """Return the path of a plan.json for the four nodes."""
    path = two_clusters.lab.directory / "fault-plan.json"
    build_plan(site_from_spec(two_clusters.spec), Sizes(pipeline=2)).save(path)
    return str(path)


def happen(two_clusters, fault: Fault, plan: str):
    """Train a small job, cause the fault in it, and return the job's result and the lines that it printed."""
    changes = Changes(two_clusters.lab)  # makes changes to the emulated network, and undoes them
    is_applied = threading.Event()

    def on_line(rank, line, stream):  # called for each line that the job prints
        # fault.during: changes to the network in the second step, such as a NIC that goes down
        if fault.during and line.startswith("step 2") and not is_applied.is_set():
            is_applied.set()
            changes.do(fault.during)
        elif fault.undo_during and re.search(fault.undo_during, line):
            changes.undo()

    # Faults that the job causes in its ranks, such as killing one. "{plan}" stands for the path of plan.json.
    failing_ranks = json.loads(json.dumps(fault.ranks).replace("{plan}", plan))
    flags = ["--holmes-cluster", str(CLUSTER), "--holmes-sizes", "pipeline=2", *fault.flags]
    command = (TINY, json.dumps({"ranks": failing_ranks, "flags": flags, "env": fault.env}))
    try:
        changes.do(fault.before)  # changes to the network before the job starts
        result = two_clusters.run(
            *command,
            preload=PRELOAD,  # modules that are imported before a process is forked for each rank
            timeout=fault.within_s,
            grace=fault.grace_s,  # seconds that the other ranks have when a rank has failed
            on_line=on_line,
            env=STARTED_LATER,
        )
    finally:
        changes.undo()
    assert is_applied.is_set() or not fault.during, result.outputs
    printed_lines = [line for lines in result.lines.values() for _stream, line in lines]
    return result, printed_lines


@pytest.mark.parametrize("fault", CASES)
def test_fault(two_clusters, plan, fault):
    """The job prints the expected messages of the fault, and its ranks end with the expected exit status."""
    result, lines = happen(two_clusters, fault, plan)  # trains a small job that meets the fault
    text = "\n".join(lines)
    assert result.returncode != TIMED_OUT, f"not over within {fault.within_s} s:\n{text}"

    for pattern in fault.says:  # patterns of the expected messages
        assert any(re.search(pattern, line) for line in lines), (
            f"no line matches {pattern!r}:\n{text}"
        )
    for pattern in fault.silent:  # patterns that no message may match
        assert not any(re.search(pattern, line) for line in lines), (
            f"a line matches {pattern!r}:\n{text}"
        )

    # Exit statuses of the ranks that the fault itself does not kill or stop.
    ended = {rank: status for rank, status in result.statuses.items() if rank not in fault.gone}
    if fault.gone:  # ranks that the fault kills or stops
        # Ranks that do not notice in time that another rank is gone are ended by the launcher.
        ended = {rank: status for rank, status in ended.items() if status != ENDED_BY_LAUNCHER}
    if ON_GPUS and fault.name == "killed in a reduction":
        # torch's NCCL watchdog may abort a rank before holmes ends it.
        assert set(ended.values()) <= {fault.status, *ABORTED}, text
        return
    assert set(ended.values()) == {fault.status}, f"{result.statuses}\n{text}"
    if fault.status == 2 and not fault.during:  # bad input: a message without a traceback
        assert not any("Traceback" in result.outputs[rank] for rank in ended), text


@gloo_only  # for NCCL, the lab sets NCCL_SOCKET_IFNAME to the first name of the NIC
def test_nics_have_other_names_at_the_next_start(two_clusters, plan):
    """A NIC that was renamed between two starts is used again.

    Both jobs have the same cluster.toml and plan.json, neither of which names a NIC.
    """
    changes = Changes(two_clusters.lab)
    flags = ["--holmes-cluster", str(CLUSTER), "--holmes-plan", plan]
    job = json.dumps({"ranks": {}, "flags": flags, "env": {}})
    sent = []
    try:
        for nic in ("roce0", OTHER_NAMES["roce0"]):
            before = two_clusters.lab.counters()
            result = two_clusters.run(TINY, job, preload=PRELOAD)
            assert result.returncode == 0, result.outputs
            assert not any("uses Ethernet" in line for line in said(result)), result.outputs
            sent.append(two_clusters.sent(before)["b1"][nic])
            if nic == "roce0":
                changes.do([renamed("b1")])
    finally:
        changes.undo()
    assert min(sent) > 1 and sent[1] == pytest.approx(sent[0], rel=0.2), sent


def test_the_table_has_what_was_promised():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 40
    assert all(0 < fault.within_s <= 120 for fault in FAULTS)


FULL_DISK = """
set -e
mkdir -p {folder}; mount -t tmpfs -o size=4k none {folder}; echo old > {folder}/{file}
{command} && exit 7
test $? = 2; test "$(cat {folder}/{file})" = old; test "$(ls -A {folder})" = {file}
"""


@pytest.mark.parametrize(
    "words, file",
    [
        (f"plan --cluster {CLUSTER} --pipeline 2 --output", "p.json"),
        ("report {telemetry} --trace", "trace.json"),
    ],
)
def test_the_disk_is_full(two_clusters, tmp_path, words, file):
    """The command ends with status 2 and one line; the old file stays, and no partial file is left."""
    words = words.format(telemetry=write(tmp_path / "telemetry"))
    command = f"{sys.executable} -m holmes_ext.cli.main {words} {tmp_path}/disk/{file}"
    script = FULL_DISK.format(folder=tmp_path / "disk", file=file, command=command)
    result = two_clusters.lab.run(["sh", "-c", script], order=["a0"], timeout=90)
    output = result.outputs[0]
    assert result.returncode == 0, output
    assert re.search(rf"holmes: .*{file}.*No space left on device", output), output
    assert "Traceback" not in output, output
