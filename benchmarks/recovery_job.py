"""Trains one rank of a joined job of benchmarks/recovery.py, and logs when each phase of its start ends.

    recovery_job.py --name west --where HOST:PORT --invitation FILE --outer SETTINGS --times FILE [--pace 0.1]

The log has a line of JSON for each end of a phase and for each step, written by rank 0: its name, the time,
and the CPU seconds of the process until then. All ranks end by SIGKILL as soon as the file FILE.kill is
newer than their start.

The functions of holmes_ext whose ends are logged are wrapped here, so that holmes_ext itself needs no code
for this measurement.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
#: Seconds between two checks whether this process should kill itself.
_LOOK_S = 0.005


class Marks:
    """Log of this process: when each phase of its start ended ("import of torch", ...), and each step.

    A line is JSON: {"mark": name of the phase, "at": time.time(), "cpu_s": CPU seconds until then}.

    Args:
        file: Path of the log; None: this rank logs nothing.
    """

    def __init__(self, file: Path | None):
        self._log = None
        if file is not None:
            self._log = file.open("a", buffering=1)  # noqa: SIM115 - open until the process ends

    def add(self, name: str, at: float = 0.0, cpu_s: float | None = None) -> None:
        """Log that a phase ends now.

        Args:
            name: Name of the phase.
            at: Time of its end, if it is not now.
            cpu_s: CPU seconds of the process until then, if it is not now.
        """
        if self._log is None:
            return
        seconds = time.process_time() if cpu_s is None else cpu_s
        line = {"mark": name, "at": at or time.time(), "cpu_s": seconds}
        print(json.dumps(line), file=self._log)

    def end_of(self, owner: Any, function: str, name: str, first_argument: str = "") -> None:
        """Log the ends of all calls of a function, by replacing it with a wrapper.

        Args:
            owner: Class or module of the function.
            function: Name of the function.
            name: Name of the phase that its end concludes.
            first_argument: Log only calls whose first argument (after self) is this text; "": all.
        """
        original: Callable[..., Any] = getattr(owner, function)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not first_argument or first_argument in args[:2]:
                self.add(name)
            return result

        setattr(owner, function, wrapper)


def start_of_process() -> float:
    """Return the time (as of time.time()) at which the kernel started this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_ticks = int(fields[19])  # field 22 of proc(5), since the boot of the machine
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def kill_on_request(request: Path, started: float, marks: Marks) -> None:
    """Wait until a file is newer than this process, and then kill this process (SIGKILL).

    This function runs in a thread, and never returns.

    Args:
        request: The file. benchmarks/recovery.py touches it to kill the job.
        started: Time at which this process started. An older file was for a process before it.
        marks: Log that gets the time of the kill.
    """
    while True:
        if request.exists() and request.stat().st_mtime > started:
            marks.add("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_LOOK_S)


def mark_phases_of_join(marks: Marks) -> None:
    """Log the ends of the phases in which the job joins the others, before its first optimizer step.

    A phase ends when a certain function of holmes_ext returns. So these functions are replaced by
    wrappers that call them and then log the end.

    Args:
        marks: The log.
    """
    from holmes_ext.join import training

    begin = training._begin

    def marked_begin(*args: Any) -> None:
        """Join as training._begin() does, with wrappers that log the ends of the phases.

        holmes_ext calls this before the first optimizer step.
        """
        marks.add("model and first gradients")
        import holmes_ext.join.join as join
        from holmes_ext.join.loop import OuterLoop
        from holmes_ext.join.peers.routes import Routes
        from holmes_ext.join.rounds.coordinator_link import CoordinatorLink

        marks.add("import of holmes_ext.join")
        marks.end_of(join, "prepare", "credentials")
        marks.end_of(join, "join", "ports and addresses")
        # ask() sends a request to the coordinator. "enter": the job enters the run. "maps": where is
        # the donor, the job that sends its current weights?
        marks.end_of(CoordinatorLink, "ask", "entry", first_argument="enter")
        marks.end_of(CoordinatorLink, "ask", "address of the donor", first_argument="maps")
        marks.end_of(Routes, "dial", "connections to the donor")
        marks.end_of(OuterLoop, "begin", "transfer of the weights")
        begin(*args)

    training._begin = marked_begin


def train(args: argparse.Namespace, marks: Marks) -> None:
    """Train without end, and log each step.

    Args:
        args: Options of this program.
        marks: Log that gets a line for each step.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    marks.add("import of torch")
    torch.set_num_threads(1)
    if args.where:
        import holmes_ext

        holmes_ext.enable(
            join=f"{args.name}@{args.where}", join_invitation=args.invitation, outer=args.outer
        )
        marks.add("start of holmes_ext")
        mark_phases_of_join(marks)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
        marks.add("process group")
    from peers_job import BATCH, LR, SIZE, example, model, text

    gpt = model()
    data, _ = text()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LR)
    shape = argparse.Namespace(
        seed=args.seed, sequence=SIZE["sequence"], micro_batch=BATCH // world_size
    )
    rank = int(os.environ.get("RANK", "0"))
    for step in itertools.count():
        inputs, labels = example.micro_batch(data, shape, step + rank * 10**6, torch.device("cpu"))
        optimizer.zero_grad()
        loss = functional.cross_entropy(gpt(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        if world_size > 1:
            for parameter in gpt.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        time.sleep(args.pace)
        optimizer.step()
        marks.add("step")


def main() -> None:
    """Train one rank until it is killed, as the command line says.

    A thread watches for the request to kill this process. --outer has the settings of this job alone
    (the coordinator has those of all jobs). --times is the log, for which Marks has the format.
    Without --where the job trains alone and does not import holmes_ext.
    """
    at_script = time.time()
    cpu_at_script_s = time.process_time()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--name", required=True, help="name of the job among the joined jobs")
    add("--where", default="", help="HOST:PORT of the coordinator (default: without holmes_ext)")
    add("--invitation", default="", help="file with the job's invitation")
    add("--outer", default="", help="the job's own settings, of --holmes-outer")
    add("--times", type=Path, required=True, help="file for the ends of the phases")
    add("--seed", type=int, default=1, help="seed of the order of the text")
    add("--pace", type=float, default=0.1, help="seconds of an accelerator in each step")
    args = parser.parse_args()
    started = start_of_process()
    marks = Marks(args.times if os.environ.get("RANK", "0") == "0" else None)
    marks.add("start", at=started, cpu_s=0.0)
    marks.add("start of Python", at=at_script, cpu_s=cpu_at_script_s)
    request = args.times.with_name(f"{args.times.name}.kill")
    threading.Thread(target=kill_on_request, args=(request, started, marks), daemon=True).start()
    train(args, marks)


if __name__ == "__main__":
    main()
