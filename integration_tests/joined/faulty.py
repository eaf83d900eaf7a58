"""Joined jobs in real processes, with faults: functions to start, kill, stop and restart the jobs.

    job = Job(place, "west", fault=Fault("exchange", 3, "kill"));  job.start();  ...;  check(place, events)

Joined jobs are separate training jobs that regularly average their weights. Each process writes a log of
its steps, the ends of rounds, and the checksum of every fragment's anchor when it changes. (An anchor is
the state of the weights after the last round; a fragment is the part of the weights that one round
averages.) check() asserts that all jobs have the same bits in the same version of a fragment.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import _context, run_ranks
from waiting import await_

from holmes_ext.join import training
from holmes_ext.join.loop import OuterLoop
from holmes_ext.join.patches import torch as torch_joined
from holmes_ext.join.peers import exchange, routes, transfer
from holmes_ext.join.peers import take as cross_take
from holmes_ext.join.rounds.coordinator_link import CoordinatorLink
from holmes_ext.join.shards.state import OuterState
from holmes_ext.options import options_from
from integration_tests.joined.accounting import holder_of

TIMEOUT_S = 3
OUTER = f"every=4,fragments=2,delay=1,compress=off,weight=equal,timeout={TIMEOUT_S}"
#: Largest time between two states of the same version that check() compares.
SAME_RUN_S = 60.0
LIES = ("flip", "claim", "accuse")
#: File in the folder of the jobs: a JSON list of pairs of jobs that cannot connect to each other directly.
CUT = "cut.json"
#: Seconds between two checks of that file.
LOOK_S = 0.2
#: Seconds that each training step takes at least, so that rounds can end within a few steps.
PACE_S = 0.03


@dataclass(frozen=True)
class Fault:
    """A fault that happens when a rank comes to a point of the code for the `nth` time.

    kill, stop     signals; the parent process continues a stopped rank
    nan, far       wrong weights: not a number, or far from the right ones
    reset          the connections to other jobs break
    hole, slow     the connections transfer nothing, or 1 KB at a time, for 2 timeouts
    flip           a lie: from then on, the rank sends the opposite values
    claim          a lie: the rank claims a version that no round made
    accuse         a lie: the rank accuses all jobs of other holders of a lie
    """

    point: str  # a key of POINTS
    nth: int  # counted from 1
    what: str  # "kill", "stop", ...
    rank: int = 0


#: Point -> (class or module, name of its function, operation that the call must have as an argument or "",
#: whether the fault happens after the call).
POINTS: dict[str, tuple[Any, str, str, bool]] = {
    "enter": (CoordinatorLink, "ask", "enter", False),
    "entered": (CoordinatorLink, "ask", "enter", True),
    "ready": (CoordinatorLink, "ask", "ready", False),
    "go": (CoordinatorLink, "ask", "ready", True),
    "exchange": (transfer.PeerTransfer, "move", "", True),
    "exchanged": (exchange.Attempt, "run", "", True),
    "done": (CoordinatorLink, "ask", "done", False),
    "check": (CoordinatorLink, "ask", "done", True),
    "checked": (CoordinatorLink, "ask", "checked", False),
    "verdict": (CoordinatorLink, "ask", "checked", True),
    "finish": (OuterLoop, "finish_round", "", False),
    "apply": (OuterState, "apply", "", False),
    "write": (OuterLoop, "_overwrite_local", "", False),
    "written": (OuterLoop, "_overwrite_local", "", True),
    "take": (cross_take, "_fetch", "", False),
    "taken": (cross_take, "_fetch", "", True),
    "give": (OuterState, "copy_of", "", True),
    "step": (OuterLoop, "after_step", "", False),
    "save": (OuterLoop, "state_dict", "", True),
}


@dataclass
class Job:
    """A joined job of several processes, which end together as under a launcher."""

    place: Path  # folder of the logs and checkpoints
    name: str
    port: int  # of the coordinator
    steps: int = 60
    ranks: int = 1
    outer: str = OUTER  # value of --holmes-outer
    fault: Fault | None = None
    faulty_incarnations: int = 1  # number of starts in which the fault happens
    load: bool = False  # begin with the checkpoint
    save: int = 0  # steps between checkpoints; 0: none
    disk_bytes: int = 0  # largest size of a checkpoint after the first; 0: no limit
    ahead_s: float = 0.0  # seconds by which the clocks of the job are ahead
    seed: int = 0
    invitation: str = ""  # file; "": the job signs its certificate, as on the coordinator's host
    incarnation: int = 0  # number of the last start, from 1
    processes: list[Any] = field(default_factory=list)

    def start(self) -> Job:
        incarnation = self.incarnation = 1 + self._starts()
        fields = {name: value for name, value in vars(self).items() if name != "processes"}
        self.processes = [
            _context.Process(target=rank_of, args=(rank, incarnation, fields), daemon=True)
            for rank in range(self.ranks)
        ]
        for process in self.processes:
            process.start()
        return self

    @property
    def home(self) -> Path:
        """Return the folder that keeps the certificate of an invited job, as on a host of its own."""
        return self.place / f"{self.name}.home"

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return what rank 0 has logged, in all starts of the job."""
        return [
            line
            for file in sorted(self.place.glob(f"{self.name}.*.0.jsonl"))
            for line in read(file)
        ]

    @property
    def lines_of_last(self) -> list[dict[str, Any]]:
        """Return what rank 0 has logged since the last start of the job; nothing while it is starting."""
        file = self.place / f"{self.name}.{self.incarnation}.0.jsonl"
        return read(file) if file.exists() else []

    def _starts(self) -> int:
        return len(list(self.place.glob(f"{self.name}.*.0.jsonl")))

    @property
    def made(self) -> int:
        """Return the number of training steps in all starts of the job."""
        return sum("step" in line for line in self.lines)

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    @property
    def ended(self) -> bool:
        """Return whether all processes have ended; kill the others if one of them has failed."""
        codes = [process.exitcode for process in self.processes]
        if any(codes):
            self.kill()
        return all(code is not None for code in codes)

    @property
    def status(self) -> int:
        return next((process.exitcode for process in self.processes if process.exitcode), 0)

    def wait(self, seconds: float) -> int:
        await_(lambda: self.ended, seconds, f"the end of job {self.name}")
        return self.status


def read(file: Path) -> list[dict[str, Any]]:
    """Return the complete JSON lines of a log."""
    return [
        json.loads(line)
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def rank_of(rank: int, incarnation: int, fields: dict[str, Any]) -> None:
    """Train one rank of a job in this process.

    Args:
        incarnation: Number of the start of the job, from 1.
        fields: Fields of the Job.
    """
    job = Job(**fields)
    torch.set_num_threads(1)
    _shift_clocks(job.ahead_s)
    _obey_cuts(job)
    with open(job.place / f"{job.name}.{incarnation}.{rank}.jsonl", "a", buffering=1) as log:
        _train(job, rank, incarnation, lambda **entry: print(json.dumps(_dated(entry)), file=log))


def _dated(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of a log with the time, which _shift_clocks() does not change."""
    return {**entry, "time": time.clock_gettime(time.CLOCK_REALTIME)}


def _train(job: Job, rank: int, incarnation: int, tell: Callable[..., None]) -> None:
    if job.ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(job.place / f"{job.name}.{incarnation}.store"), job.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks)
    if job.invitation:
        os.environ["XDG_STATE_HOME"] = str(job.home)
    address = f"{job.name}@127.0.0.1:{job.port}"
    training.request(options_from(join=address, outer=job.outer, join_invitation=job.invitation))
    torch_joined.attach()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    _watch(tell)
    file = job.place / f"{job.name}.{rank}.pt"
    steps_done = 0
    if job.load:
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        training.load_joined_state_dict(saved["outer"])
        steps_done = saved["step"]
    if job.fault is not None and job.fault.rank == rank and incarnation <= job.faulty_incarnations:
        _plant(job.fault, model, tell)
    generator = torch.Generator().manual_seed(100 * job.seed + 10 * incarnation + rank)
    for step in range(steps_done + 1, steps_done + job.steps + 1):
        optimizer.zero_grad()
        loss = (model(torch.randn(8, 32, generator=generator)) - 1).square().mean()
        loss.backward()
        if job.ranks > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        tell(step=step, loss=loss.item())
        if job.save and step % job.save == 0:
            if job.disk_bytes and step > job.save:  # the second checkpoint finds the disk full
                resource.setrlimit(resource.RLIMIT_FSIZE, (job.disk_bytes, job.disk_bytes))
            state = {
                "step": step,
                "model": model.state_dict(),
                "outer": training.joined_state_dict(),
            }
            torch.save(state, f"{file}.new")
            os.replace(f"{file}.new", file)
        time.sleep(PACE_S)
    training.end()
    tell(end=True)


def _watch(tell: Callable[..., None]) -> None:
    """Log each round's end, and each fragment's anchor when it changes."""
    training.telemetry.outer_round = lambda told: tell(
        round=told["round"],
        verdict=told["verdict"],
        why=told["why"],
        jobs=told["jobs"],
        exposed=told["exposed"],
    )

    def will_lack_momentum(name, fragment, rest):
        """Return whether a call stores an anchor whose momentum add_momentum() will store later."""
        if fragment.momentum is None:
            return False
        if name == "replace":
            return rest[-1] is None
        oldest = fragment.pending[0] if name == "apply" else None
        return oldest is not None and oldest.replaces and oldest.momentum is None

    def after(name, wrapped, state, fragment, *rest):
        is_incomplete = will_lack_momentum(name, fragment, rest)
        wrapped(state, fragment, *rest)
        if is_incomplete or fragment.lacks_momentum:
            return  # the checksum covers the momentum, too
        tell(
            anchor=state.fragments.index(fragment),
            version=fragment.version,
            how="replace" if name == "add_momentum" else name,
            sum=fragment.checksum(state.weights.position),
        )

    for name in ("apply", "replace", "add_momentum"):
        wrapped = getattr(OuterState, name)
        setattr(
            OuterState, name, lambda *args, name=name, wrapped=wrapped: after(name, wrapped, *args)
        )


def _shift_clocks(seconds: float) -> None:
    """Shift the clocks of this process, as on a host that was started, and set, at another time."""
    if seconds:
        for name in ("time", "monotonic"):
            setattr(time, name, lambda clock=getattr(time, name): clock() + seconds)


def cut(place: Path, pairs: list[tuple[str, str]]) -> None:
    """Keep these pairs of jobs, and no others, from connecting to each other directly from now on."""
    new = place / f"{CUT}.new"
    new.write_text(json.dumps(pairs))
    os.replace(new, place / CUT)


def _obey_cuts(job: Job) -> None:
    """Let this process connect to no job from which cut() separates it, and lose open connections to it.

    The coordinator can still forward their bytes.
    """
    called = threading.local()  # `job`: name of the job that this thread calls

    def is_cut(other: str | None) -> bool:
        file = job.place / CUT
        pairs = json.loads(file.read_text()) if file.exists() else []
        return other is not None and sorted((job.name, other)) in map(sorted, pairs)

    def naming(function: Callable[..., Any], name_of: Callable[[Any], str]) -> Callable[..., Any]:
        """Return the function, which notes the name of the job that it calls, from its first argument."""

        def wrapper(self, other, *args, **kwargs):
            called.job = name_of(other)
            try:
                return function(self, other, *args, **kwargs)
            finally:
                called.job = None

        return wrapper

    def call(*args, original=routes.call, **kwargs):
        if is_cut(getattr(called, "job", None)):
            raise ConnectionRefusedError("the link is cut")
        return original(*args, **kwargs)

    def lose_connections():
        while True:
            time.sleep(LOOK_S)
            joined = training._job.loop if training._job is not None else None
            if joined is not None:
                links = joined.rounds.links
                links.drop({key.job for key in list(links._open) if is_cut(key.job)})

    routes.Routes.dial = naming(routes.Routes.dial, lambda peer: peer.job)
    routes.Routes._call_back = naming(routes.Routes._call_back, lambda caller: caller.get("job"))
    routes.call = call
    threading.Thread(target=lose_connections, daemon=True).start()


def _plant(fault: Fault, model: torch.nn.Module, tell: Callable[..., None]) -> None:
    """Wrap the function of the fault's point such that its nth call causes the fault."""
    owner, name, operation, is_after_call = POINTS[fault.point]
    original = getattr(owner, name)
    calls = 0

    def count_call() -> None:
        nonlocal calls
        calls += 1
        if calls == fault.nth:
            tell(fault=fault.what, point=fault.point)
            _do(fault.what, model)

    def wrapper(*args, **kwargs):
        counts = not operation or operation in args
        if counts and not is_after_call:
            count_call()
        result = original(*args, **kwargs)
        if counts and is_after_call:
            count_call()
        return result

    setattr(owner, name, wrapper)


def _do(what: str, model: torch.nn.Module) -> None:
    """Cause the fault `what` (see Fault) in this process."""
    if what in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    elif what in ("nan", "far"):
        with torch.no_grad():
            if what == "nan":
                model[0].bias.fill_(float("nan"))
            else:
                model[0].bias.add_(1e4)
    elif what in ("reset", *LIES) and training._job.loop is None:
        return  # the outer loop has not begun: there are no connections and no messages yet
    elif what == "reset":
        training._job.loop.rounds.links.drop()
    elif what in LIES:
        _lie(what, training._job.loop.rounds)
    else:
        move = transfer.PeerTransfer.move
        until = time.monotonic() + 2 * TIMEOUT_S + 1

        def slowly(traffic, mask):
            if time.monotonic() > until:
                return move(traffic, mask)
            time.sleep(0.005)
            if what == "slow":
                transfer._CALL_BYTES = 1024
                return move(traffic, mask)
            return None  # no data is transferred, and no error is reported

        transfer.PeerTransfer.move = slowly


def _lie(what: str, rounds: Any) -> None:
    """Let this rank send wrong values or wrong reports from now on.

    Args:
        what: "flip", "claim" or "accuse" (see Fault).
        rounds: The object that runs the rounds of the job.
    """
    if what == "flip":
        encode = rounds.codec.encode
        rounds.codec.encode = lambda values, residual: encode(-values, residual)
        return
    original_ask = rounds.coordinator.ask
    holder = holder_of(training._job.address.job)
    others: list[str] = []  # members of the latest round that have other holders

    def ask(operation, message):
        if what == "claim" and operation == "ready":
            message = {**message, "versions": [10**9] * len(message["versions"])}
        elif what == "accuse" and operation == "done":
            message = {**message, "faults": dict.fromkeys(others, "a lie")}
        reply = original_ask(operation, message)
        if "members" in reply:
            others[:] = [name for name in reply["members"] if holder_of(name) != holder]
        return reply

    rounds.coordinator.ask = ask


class _State(NamedTuple):
    """A version of a fragment that a job has stored."""

    time: float  # of the log's line
    job: str  # "NAME.INCARNATION"
    checksum: int


def _compare(states: Mapping[tuple[int, int], Mapping[str, _State]]) -> int:
    """Assert that all jobs have the same bits in the same version of a fragment.

    Args:
        states: (fragment, version) -> job -> the last state that it has stored.

    Returns:
        Number of pairs of states that were compared.
    """
    pairs = 0
    for (fragment, version), state_of_job in states.items():
        for earlier, later in pairwise(sorted(state_of_job.values())):
            if later.time - earlier.time > SAME_RUN_S:
                continue
            pairs += 1
            assert earlier.checksum == later.checksum, (
                f"fragment {fragment}, version {version}: different bits: {earlier}, {later}"
            )
    return pairs


def check(place: Path, events: list[str]) -> dict[str, int]:
    """Assert that the jobs' logs agree with each other and with the coordinator, and return counts.

        weights      all jobs have the same bits in the same version of a fragment
        order        the rounds of a job are in order
        commits      every round that several jobs committed was applied by them, or they died in it

    Versions that a job made alone are not compared: with a new coordinator, or while all other jobs are
    gone, it does not know that other jobs use the same version number. If all jobs die, the next run
    counts its versions from 0 again. So bits are only compared if they were stored within SAME_RUN_S, and
    version 0, the weights before training, is not compared.
    """
    #: (fragment, version) -> "job.incarnation" -> the last state that it has stored
    states: dict[tuple[int, int], dict[str, _State]] = defaultdict(dict)
    applied: dict[str, set[int]] = defaultdict(set)  # job -> versions
    counts: dict[str, int] = defaultdict(int)
    deaths: dict[str, int] = defaultdict(int)  # job -> number of starts that did not end well
    for first in sorted(place.glob("*.0.jsonl")):
        name, incarnation = first.name.split(".")[:2]
        ranks = [read(file) for file in sorted(place.glob(f"{name}.{incarnation}.*.jsonl"))]
        deaths[name] += not any("end" in line for line in ranks[0])
        ends_of_rounds = [line for line in ranks[0] if "verdict" in line]
        for line in ends_of_rounds:
            counts[line["verdict"]] += 1
        shared_rounds = {line["round"] for line in ends_of_rounds if len(line["jobs"]) > 1}
        changes = [[line for line in lines if "anchor" in line] for lines in ranks]
        for lines_of_ranks in zip(*changes):  # the checksums of the ranks add up to the job's
            ((fragment, version),) = {(line["anchor"], line["version"]) for line in lines_of_ranks}
            applied[name].add(version)
            was_replaced = version and lines_of_ranks[0]["how"] == "replace"
            if was_replaced or version in shared_rounds:
                total = sum(line["sum"] for line in lines_of_ranks) % 2**64
                state = _State(lines_of_ranks[0]["time"], f"{name}.{incarnation}", total)
                states[fragment, version][state.job] = state
        rounds = [line["round"] for line in ends_of_rounds if line["verdict"] == "commit"]
        assert rounds == sorted(set(rounds)), f"{name}: rounds out of order: {rounds}"
    counts["states compared"] = _compare(states)
    for event in events:
        commit = re.search(r"round (\d+): commit \((.*)\)", event)
        if not commit:
            continue
        number = int(commit[1])
        counts["committed"] += 1
        members = [part.split()[0] for part in commit[2].split(", ")]
        if len(members) == 1:
            continue
        for name in members:
            if number not in applied[name]:
                counts["committed, not applied"] += 1
                deaths[name] -= 1
                assert deaths[name] >= 0, (
                    f"round {number} was committed, but {name} never applied it"
                )
    return dict(counts)


def nothing(rank: int) -> None:
    """Do nothing; the first process starts the server of processes."""


def start_server() -> None:
    run_ranks(nothing, 1, timeout_s=300)
