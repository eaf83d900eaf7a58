"""Tests that a job that a fault ended goes on from its last checkpoint.

The job trains with DeepSpeed's pipeline engine and saves a checkpoint after every step. After a fault, its
last checkpoint must be complete. The job is started again by the test, or by torchrun. It must then train
each step after the checkpoint, with the losses of a job without the fault.
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from carriers import ON_GPUS, gloo_only

from integration_tests.faults.table import IN_TRAINING, OTHER_NAMES, Changes, Fault, renamed
from integration_tests.jobs import CLUSTER, full, launch, said
from integration_tests.jobs import TRAIN as EXAMPLE

SIZE = (
    "--layers 2 --hidden 64 --heads 2 --sequence 16 "
    "--micro-batch 2 --micro-batches 2 --stages 2 --zero 1"
).split()
HOLMES = ("--holmes", "--holmes-cluster", str(CLUSTER), "--holmes-sizes", "pipeline=2")
TRAIN = str(Path(__file__).with_name("train.py"))
STEPS = 5  # of a job that meets a fault
MORE = 8  # of a job that resumes, counted from the first step
TIMED_OUT = 124  # exit status of a job that the lab ended after its timeout
#: How the message begins if a call of torch.distributed fails in a job that calls it directly (tiny.py). The
#: patterns of table.py contain these words.
TORCH_FAILED = "communication failed"
#: Pattern for the same message in this file's job. There holmes sends activations between pipeline stages and
#: reduces gradients, and the message names what failed.
ENGINE_FAILED = (
    "(communication|stage link from stage .*|the reduction of .*) failed( over fabric [^;:]*)?"
)


@pytest.fixture(scope="module")
def undisturbed(two_clusters, tmp_path_factory):
    """Return the losses of the job without holmes and without faults: step -> loss."""
    log = tmp_path_factory.mktemp("undisturbed") / "log"
    result = launch(two_clusters, EXAMPLE, *SIZE, "--steps", str(MORE), "--log", str(log))
    assert result.returncode == 0, result.outputs
    return losses(log)


def losses(log):
    """Return the losses in a log: step -> loss.

    A step that was trained twice, because no checkpoint had it yet, must have the same loss both times.
    """
    loss_of = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        first_loss = loss_of.setdefault(entry["step"], entry["loss"])
        assert first_loss == pytest.approx(entry["loss"], abs=1e-6)
    return loss_of


def assert_whole(save):
    """Assert that all files of the latest checkpoint can be read, and return its step."""
    folder = save / (save / "latest").read_text()
    files = list(folder.glob("*.pt"))
    assert files
    for file in files:
        torch.load(file, weights_only=False, map_location="cpu")
    return int(folder.name.removeprefix("step"))


def assert_goes_on(two_clusters, save, undisturbed, log=None, here=None):
    """Assert that a job resumes from its checkpoint with the losses of an undisturbed job.

    The checkpoint is of the last trained step or of the step before.

    Args:
        save: Folder of the checkpoints, as the nodes see it.
        here: The same folder, as this process sees it, if its path differs.
    """
    log = log or save / "log"
    last_step = max(losses(log))
    saved_step = assert_whole(here or save)
    assert last_step - 1 <= saved_step <= last_step
    result = launch(
        two_clusters,
        TRAIN,
        str(save),
        json.dumps({"log": str(log)}),
        *SIZE,
        "--steps",
        str(MORE),
        *HOLMES,
    )
    assert result.returncode == 0, result.outputs
    assert losses(log) == pytest.approx(undisturbed, abs=1e-6)
    assert assert_whole(here or save) == MORE


#: Faults while a rank writes its checkpoint. `says`: patterns that holmes's messages must match.
WRITING = (
    Fault(
        "killed while it writes its checkpoint",
        says=(r"communication failed; node b0 .rank 2. is lost",),
        ranks={"1": {"do": "kill", "when": "save"}},
        gone=(1,),
    ),
    Fault(
        "the first rank is killed while it writes its checkpoint",
        says=(r"communication failed; node a0 .rank 0. is lost",),
        ranks={"0": {"do": "kill", "when": "save"}},
        gone=(0,),
        default=False,
    ),
    Fault(
        "stopped while it writes its checkpoint",
        says=(r"communication failed: .*[Tt]imed out",),
        ranks={"1": {"do": "stop", "when": "save"}},
        gone=(1,),
        default=False,
    ),
)
#: What holmes prints if NCCL has failed. NCCL does not say which rank is lost, so the message names all of
#: the others.
NCCL_FAILED = (
    "communication failed; (the timeout has passed|(one of )?node .* is lost): NCCL's [A-Z_]+ in "
)
#: Over NCCL these faults are not tested: the lab ends a job on emulated GPUs in which nothing moves, before
#: the job's own timeout.
NOTHING_MOVES = (
    "cable of Ethernet pulled",
    "cable pulled in a pipeline send",
    "packets of the fast NIC vanish",
    "packets of Ethernet vanish",
    "packets of a whole node vanish",
)
#: When a rank of table.py's job fails (in step 3, a send, a checkpoint) -> when a rank of this job fails.
OF_ENGINE = {3: "reduce", "send": "send", "save": "save"}
CASES = [*WRITING, *IN_TRAINING]


def assert_explains_the_end(fault: Fault, lines: list[str]) -> None:
    """Assert that the job's messages name the cause of its end, such as the NIC or the lost node.

    Args:
        fault: Its field `says` has the patterns of the expected messages.
        lines: The lines that holmes printed. Each pattern must match one of them.
    """
    assert fault.says
    # The patterns are written for a job that calls torch.distributed directly. In this file's job, holmes's
    # message begins with the operation that failed, such as "the reduction of ... failed".
    for pattern in fault.says:
        expected = pattern.replace(TORCH_FAILED, ENGINE_FAILED)
        is_about_a_lost_rank = "is lost" in pattern or "imed out" in pattern
        if ON_GPUS and is_about_a_lost_rank:
            expected = NCCL_FAILED
        assert any(re.search(expected, line) for line in lines), (
            f"no line matches {expected!r}: {lines}"
        )


def marks_of(fault: Fault) -> list:
    """Return the marks of a fault's test: whether it is slow, and whether it runs over gloo alone."""
    marks = [] if fault in WRITING and fault.default else [full]
    if fault.name in NOTHING_MOVES:
        marks.append(gloo_only)
    return marks


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=marks_of(fault)) for fault in CASES]
)
def test_after_a_fault_in_training_the_job_goes_on(two_clusters, undisturbed, tmp_path, fault):
    """A fault in the third step ends the job with a message that names the cause.

    Started again from its last checkpoint, the job has the losses of a job without the fault.
    """
    changes = Changes(two_clusters.lab)  # makes changes to the emulated network, and undoes them
    is_applied = threading.Event()
    save = tmp_path / "saved"  # folder of the checkpoints

    def on_line(rank, line, stream):  # called for each line that the job prints
        # fault.during: changes to the network in the third step, such as a NIC that goes down
        if fault.during and line.startswith("step 2 saved") and not is_applied.is_set():
            is_applied.set()
            changes.do(fault.during)
        elif fault.undo_during and re.search(fault.undo_during, line):
            changes.undo()

    # Ranks that train.py kills or stops, each with the moment in the third step.
    # OF_ENGINE maps the moment named in the table of faults to one of this job, such as "reduce".
    failing_ranks = {
        rank: {**failure, "when": OF_ENGINE[failure["when"]]}
        for rank, failure in fault.ranks.items()
    }
    job = {"pause_s": float(fault.env.get("PAUSE_S", 0)), "timeout_s": 20, "ranks": failing_ranks}
    command = (
        TRAIN,
        str(save),
        json.dumps(job),
        *SIZE,
        "--steps",
        str(STEPS),
        *HOLMES,
        *fault.flags,
    )
    try:
        result = launch(
            two_clusters, *command, timeout=fault.within_s, grace=fault.grace_s, on_line=on_line
        )
    finally:
        changes.undo()
    assert is_applied.is_set() or not fault.during, result.outputs
    survives = fault.status == 0 and not fault.gone  # gone: ranks that the fault kills or stops
    assert result.returncode != TIMED_OUT, result.outputs
    assert (result.returncode == 0) == survives, result.outputs
    if not survives:
        messages_of_holmes = said(result)
        assert_explains_the_end(fault, messages_of_holmes)
    # Starts the job again from its checkpoint and compares the losses.
    assert_goes_on(two_clusters, save, undisturbed)


@full
def test_the_disk_fills_while_a_checkpoint_is_written(two_clusters, undisturbed, tmp_path):
    """All nodes share a disk, and another program fills it up to the half of a checkpoint."""
    lab = two_clusters.lab
    folder = tmp_path / "disk"
    log = tmp_path / "log"
    mounted = lab.run(
        ["sh", "-c", f"mkdir {folder} && mount -t tmpfs -o size=64m none {folder}"], order=["a0"]
    )
    assert mounted.returncode == 0, mounted.outputs
    # The disk is mounted in the namespace of the nodes: its paths, as the nodes and as this process see it.
    inside = Path(f"/proc/{lab.holder('a0', inside=True)}/root{folder}/saved")
    here = Path(f"/proc/{lab.holder('a0', inside=False)}/root{folder}/saved")
    ballast = here.parent / "ballast"

    def on_line(rank, line, stream):
        if line.startswith("step 2 saved") and not ballast.exists():
            space = os.statvfs(here)
            checkpoint = sum(file.stat().st_size for file in (here / "step2").iterdir())
            ballast.write_bytes(bytes(space.f_bavail * space.f_bsize - checkpoint // 2))

    job = {"pause_s": 1.0, "timeout_s": 20, "log": str(log)}
    try:
        result = launch(
            two_clusters,
            TRAIN,
            str(inside),
            json.dumps(job),
            *SIZE,
            "--steps",
            str(STEPS),
            *HOLMES,
            on_line=on_line,
            grace=30.0,
        )
        assert result.returncode == 1, result.outputs
        assert any(
            re.search(r"rank \d on node \w\d: .*is the disk full\?", line) for line in said(result)
        ), result.outputs
        ballast.unlink()
        assert_goes_on(two_clusters, inside, undisturbed, log, here)
    finally:
        lab.run(["umount", str(folder)], order=["a0"])


def torchrun(two_clusters, save, steps, *flags, **options):
    """Start a job with one agent of torchrun on each node, all of which rendezvous at the first node.

    Args:
        options: Options of LabOf.start; and meet: address of the rendezvous, keep_alive_s: seconds between
            two heartbeats of an agent.
    """
    meet = options.pop("meet", "$MASTER_ADDR:$MASTER_PORT")
    keep_alive_s = options.pop("keep_alive_s", 20)
    arguments = " ".join([str(save), "{}", *SIZE, "--steps", str(steps), *HOLMES, *flags])
    command = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d"
        f" --rdzv-id {save.name} --rdzv-endpoint {meet} --max-restarts 6 --monitor-interval 0.2"
        f" --rdzv-conf keep_alive_interval={keep_alive_s} {TRAIN} {arguments}"
    )
    return two_clusters.start("sh", "-c", command, **{"timeout": 600, "grace": 60.0, **options})


def when_logged(job, log, count, then):
    """Return the result of a job; call `then` once, as soon as the log has `count` lines."""
    over = threading.Event()

    def wait_for_step():
        while not over.wait(0.05):
            if log.exists() and len(log.read_text().splitlines()) >= count:
                then()
                return

    thread = threading.Thread(target=wait_for_step)
    thread.start()
    try:
        return job.wait()
    finally:
        over.set()
        thread.join()


@full
def test_a_nic_dies_and_comes_back(two_clusters, undisturbed, tmp_path):
    """The cable of a NIC is pulled in step 3, and plugged in before a later start of the job.

    The job ends, starts again on Ethernet from its checkpoint, and uses the NIC again at the later start.
    """
    lab = two_clusters.lab
    save = tmp_path / "saved"
    save.mkdir()
    no_link = r"on node b1: NIC roce0 .mlx5_0:1. of node b1 .* has no link for .* the job ends here"
    try:
        job = torchrun(two_clusters, save, STEPS, "--holmes-link-timeout", "3")
        result = when_logged(job, save / "log", 2, lambda: lab.set_link("b1", "roce0", up=False))
        lines = said(result)
        assert result.returncode == 0, result.outputs
        assert any(re.search(no_link, line) for line in lines), lines
        assert any(
            "node b1: mlx5_0:1 is DOWN" in line and "uses Ethernet instead" in line
            for line in lines
        ), lines
    finally:
        lab.set_link("b1", "roce0", up=True)
    assert losses(save / "log") == pytest.approx(
        {step: undisturbed[step] for step in range(1, STEPS + 1)}, abs=1e-6
    )
    assert assert_whole(save) == STEPS

    before = lab.counters()
    result = torchrun(two_clusters, save, MORE).wait()
    assert result.returncode == 0 and not any("uses Ethernet" in line for line in said(result)), (
        result.outputs
    )
    assert losses(save / "log") == pytest.approx(undisturbed, abs=1e-6)
    assert assert_whole(save) == MORE
    assert two_clusters.sent(before)["b1"]["roce0"] > 0.2


def processes_on(lab, node):
    """Yield the ids of the processes in a node's network namespace, but for its holder."""
    net = os.stat(f"/proc/{lab.holder(node)}/ns/net").st_ino
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(name) != lab.holder(node) and os.stat(f"/proc/{name}/ns/net").st_ino == net:
                yield int(name)
        except OSError:  # gone meanwhile, or another user's
            continue


@full
def test_a_node_is_replaced_by_one_with_other_nic_names(two_clusters, undisturbed, tmp_path):
    """A node loses its power in step 3, and another machine of that name joins the job instead.

    The job, started by torchrun, resumes and uses the fast NIC of the new machine.
    """
    lab = two_clusters.lab
    save = tmp_path / "saved"
    changes = Changes(lab)
    save.mkdir()
    # Agents of torch 2.13 share a store, and publish its address in their first round only, so an agent that
    # joins later would wait for the address for ever.
    rendezvous = {
        "meet": f"{lab.nodes[0].address}:29400",
        "keep_alive_s": 5,
        "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    }
    try:
        job = torchrun(two_clusters, save, STEPS, **rendezvous, grace=400.0)
        new_agents = []  # (agent on the new machine, counters of the NICs when it started)

        def replace_node():
            for pid in processes_on(lab, "b1"):
                with contextlib.suppress(ProcessLookupError):  # it ended with its parent
                    os.kill(pid, signal.SIGKILL)
            changes.do([renamed("b1")])
            new_agent = torchrun(two_clusters, save, STEPS, **rendezvous, order=["b1"])
            new_agents.append((new_agent, lab.counters()))

        result = when_logged(job, save / "log", 2, replace_node)
        [(new_agent, before)] = new_agents
        new_result = new_agent.wait()
        assert new_result.returncode == 0, new_result.outputs
        lost_rank = two_clusters.order.index("b1")
        surviving = {rank: status for rank, status in result.statuses.items() if rank != lost_rank}
        assert surviving == dict.fromkeys({0, 1, 2, 3} - {lost_rank}, 0), result.outputs
        lines = [*said(result), *said(new_result)]
        assert not any("uses Ethernet" in line for line in lines), result.outputs
        assert losses(save / "log") == pytest.approx(
            {step: undisturbed[step] for step in range(1, STEPS + 1)}, abs=1e-6
        )
        assert assert_whole(save) == STEPS
        assert two_clusters.sent(before)["b1"][OTHER_NAMES["roce0"]] > 0.2
    finally:
        changes.undo()
