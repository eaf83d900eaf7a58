"""Joined jobs of real processes that meet faults: what starts, kills, stops and restarts them, and what must
hold whatever happened.

    job = Job(place, "west", fault=Fault("exchange", 3, "kill"));  job.start();  ...;  check(place, events)

Each process writes what it does into a file of its own: steps, ends of rounds, and the checksum of every
fragment's anchor when it changes. An outer state is right when all jobs have the same bits of the same
version.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from joined_jobs import TOKEN
from ranks import _context, run_ranks
from waiting import await_

from holmes_ext.join import training
from holmes_ext.join.loop import OuterLoop
from holmes_ext.join.patches import torch as torch_joined
from holmes_ext.join.peers import exchange, routes, transfer
from holmes_ext.join.peers import take as cross_take
from holmes_ext.join.rounds.coordinator_link import CoordinatorLink
from holmes_ext.join.shards.state import OuterState
from holmes_ext.join.sockets import handshake
from holmes_ext.options import options_from

TIMEOUT_S = 3
OUTER = f"every=4,fragments=2,delay=1,compress=off,weight=equal,timeout={TIMEOUT_S}"
LIES = ("flip", "claim", "accuse")
#: Seconds of a step: rounds need some of them.
PACE_S = 0.03


@dataclass(frozen=True)
class Fault:
    """At the `nth` time (from 1) that rank `rank` comes to `point`: "kill", "stop" (the parent lets it go
    on), "nan", "far" (weights far out), "reset" (connections to other jobs), "hole" (they carry nothing for 2
    timeouts), "slow" (1 KB at a time); and of liars, from then on: "flip" (it sends the opposite), "claim" (a
    version that no round made), "accuse" (all others, of anything).
    """

    point: str
    nth: int
    what: str
    rank: int = 0


#: point -> (class or module, function, for calls with this operation, whether after it).
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
    "settle": (OuterLoop, "settle", "", False),
    "apply": (OuterState, "apply", "", False),
    "write": (OuterLoop, "_write", "", False),
    "written": (OuterLoop, "_write", "", True),
    "take": (cross_take, "_fetch", "", False),
    "taken": (cross_take, "_fetch", "", True),
    "give": (OuterState, "copy_of", "", True),
    "step": (OuterLoop, "after_step", "", False),
    "save": (OuterLoop, "state_dict", "", True),
}


@dataclass
class Job:
    """Of `ranks` processes, which end together as under a launcher. place: directory of its files;
    faulty_incarnations: the fault is in so many of its starts; load: from its checkpoint; save: every so many
    steps, into at most disk_bytes (0: no bound); ahead_s: of its clocks; encrypted: TLS, as between hosts.
    """

    place: Path
    name: str
    port: int
    steps: int = 60
    ranks: int = 1
    outer: str = OUTER
    fault: Fault | None = None
    faulty_incarnations: int = 1
    load: bool = False
    save: int = 0
    disk_bytes: int = 0
    ahead_s: float = 0.0
    encrypted: bool = False
    seed: int = 0
    processes: list[Any] = field(default_factory=list)

    def start(self) -> Job:
        incarnation = 1 + len(list(self.place.glob(f"{self.name}.*.0.jsonl")))
        one = {name: value for name, value in vars(self).items() if name != "processes"}
        self.processes = [
            _context.Process(target=rank_of, args=(rank, incarnation, one), daemon=True)
            for rank in range(self.ranks)
        ]
        for process in self.processes:
            process.start()
        return self

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Of rank 0, all incarnations."""
        return [
            line
            for file in sorted(self.place.glob(f"{self.name}.*.0.jsonl"))
            for line in read(file)
        ]

    @property
    def lines_of_last(self) -> list[dict[str, Any]]:
        """So, of the last incarnation."""
        file = (
            self.place
            / f"{self.name}.{len(list(self.place.glob(f'{self.name}.*.0.jsonl')))}.0.jsonl"
        )
        return read(file) if file.exists() else []

    @property
    def made(self) -> int:
        """Steps, of all incarnations."""
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
        """Once one of its processes has failed the launcher ends the others."""
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
    return [
        json.loads(line)
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def rank_of(rank: int, incarnation: int, one: dict[str, Any]) -> None:
    """One process of a job."""
    job = Job(**one)
    torch.set_num_threads(1)
    _shift_clocks(job.ahead_s)
    if job.encrypted:
        for module in (handshake, routes):
            module.stays_on_host = lambda connection: False
    with open(job.place / f"{job.name}.{incarnation}.{rank}.jsonl", "a", buffering=1) as log:
        _train(job, rank, incarnation, lambda **told: print(json.dumps(told), file=log))


def _train(job: Job, rank: int, incarnation: int, tell: Callable[..., None]) -> None:
    if job.ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(job.place / f"{job.name}.{incarnation}.store"), job.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks)
    training.request(
        options_from(join=f"{job.name}@127.0.0.1:{job.port}", outer=job.outer),
        {"HOLMES_JOIN_TOKEN": TOKEN},
    )
    torch_joined.attach()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    _watch(tell)
    file, first = job.place / f"{job.name}.{rank}.pt", 0
    if job.load:
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        training.load_joined_state_dict(saved["outer"])
        first = saved["step"]
    if job.fault is not None and job.fault.rank == rank and incarnation <= job.faulty_incarnations:
        _plant(job.fault, model, tell)
    generator = torch.Generator().manual_seed(100 * job.seed + 10 * incarnation + rank)
    for step in range(first + 1, first + job.steps + 1):
        optimizer.zero_grad()
        loss = (model(torch.randn(8, 32, generator=generator)) - 1).square().mean()
        loss.backward()
        for p in model.parameters() if job.ranks > 1 else ():
            dist.all_reduce(p.grad)
        optimizer.step()
        tell(step=step, loss=loss.item())
        if job.save and step % job.save == 0:
            if job.disk_bytes and step > job.save:  # the second one finds the disk full
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

    def after(name, wrapped, state, fragment, *rest):
        wrapped(state, fragment, *rest)
        tell(
            anchor=state.fragments.index(fragment),
            version=fragment.version,
            how=name,
            sum=fragment.checksum(state.weights.position),
        )

    for name in ("apply", "replace"):
        wrapped = getattr(OuterState, name)
        setattr(
            OuterState, name, lambda *args, name=name, wrapped=wrapped: after(name, wrapped, *args)
        )


def _shift_clocks(seconds: float) -> None:
    """As on a host that was started, and set, at another time."""
    if seconds:
        for name in ("time", "monotonic"):
            setattr(time, name, lambda clock=getattr(time, name): clock() + seconds)


def _plant(fault: Fault, model: torch.nn.Module, tell: Callable[..., None]) -> None:
    where, name, operation, later = POINTS[fault.point]
    wrapped, times = getattr(where, name), [0]

    def strike() -> None:
        times[0] += 1
        if times[0] == fault.nth:
            tell(fault=fault.what, point=fault.point)
            _do(fault.what, model)

    def call(*args, **kwargs):
        meant = not operation or operation in args
        if meant and not later:
            strike()
        result = wrapped(*args, **kwargs)
        if meant and later:
            strike()
        return result

    setattr(where, name, call)


def _do(what: str, model: torch.nn.Module) -> None:
    if what in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    elif what in ("nan", "far"):
        with torch.no_grad():
            model[0].bias.fill_(float("nan")) if what == "nan" else model[0].bias.add_(1e4)
    elif what in ("reset", *LIES) and training._job.loop is None:
        return  # it is about to begin: it has no connections, and says nothing yet
    elif what == "reset":
        training._job.loop.rounds.links.drop()
    elif what in LIES:
        _lie(what, training._job.loop.rounds)
    else:
        move, until = transfer.PeerTransfer.move, time.monotonic() + 2 * TIMEOUT_S + 1

        def slowly(traffic, mask):
            if time.monotonic() > until:
                return move(traffic, mask)
            time.sleep(0.005)
            if what == "slow":
                transfer._CALL_BYTES = 1024
                return move(traffic, mask)
            return None  # nothing comes or goes, and nobody is told

        transfer.PeerTransfer.move = slowly


def _lie(what: str, rounds: Any) -> None:
    if what == "flip":
        encode = rounds.codec.encode
        rounds.codec.encode = lambda values, residual: encode(-values, residual)
        return
    ask, others = rounds.coordinator.ask, ("east", "west", "north")
    op, change = {
        "claim": ("ready", lambda told: {**told, "versions": [10**9] * len(told["versions"])}),
        "accuse": ("done", lambda told: {**told, "faults": dict.fromkeys(others, "a lie")}),
    }[what]
    rounds.coordinator.ask = lambda asked, told: ask(
        asked, change(dict(told)) if asked == op else told
    )


def check(place: Path, events: list[str]) -> dict[str, int]:
    """All jobs have the same bits of the same version of a fragment; rounds of a job are in order; every
    round that several jobs committed was applied by them, or they died in it. Returns counts.

    What a job made in a round alone is its own: at a coordinator that is new, or while all others are gone,
    it does not know of versions that are the same number to others.
    """
    sums: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    applied: dict[str, set[int]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)
    deaths: dict[str, int] = defaultdict(int)
    for first in sorted(place.glob("*.0.jsonl")):
        name, incarnation = first.name.split(".")[:2]
        ranks = [read(file) for file in sorted(place.glob(f"{name}.{incarnation}.*.jsonl"))]
        deaths[name] += not any("end" in line for line in ranks[0])
        for verdict in (line["verdict"] for line in ranks[0] if "verdict" in line):
            counts[verdict] += 1
        changes = [[line for line in lines if "anchor" in line] for lines in ranks]
        others = {line["round"] for line in ranks[0] if "verdict" in line and len(line["jobs"]) > 1}
        for together in zip(*changes):  # the ranks' shares add up to the job's
            (key,) = {(line["anchor"], line["version"]) for line in together}
            applied[name].add(key[1])
            if together[0]["how"] == "replace" or key[1] in others:
                sums[key][f"{name}.{incarnation}"] = sum(line["sum"] for line in together) % 2**64
        rounds = [line["round"] for line in ranks[0] if line.get("verdict") == "commit"]
        assert rounds == sorted(set(rounds)), f"{name}: rounds out of order: {rounds}"
    for (fragment, version), found in sums.items():
        counts["states compared"] += len(found)
        assert len(set(found.values())) == 1, (
            f"fragment {fragment}, version {version}: different bits: {found}"
        )
    for event in events:
        if commit := re.search(r"round (\d+): commit \((.*)\)", event):
            number = int(commit[1])
            counts["committed"] += 1
            members = [part.split()[0] for part in commit[2].split(", ")]
            for name in members if len(members) > 1 else ():
                if number not in applied[name]:
                    counts["committed, not applied"] += 1
                    deaths[name] -= 1
                    assert deaths[name] >= 0, (
                        f"round {number} was committed, but {name} never applied it"
                    )
    return dict(counts)


def nothing(rank: int) -> None:
    """Starts the server of processes."""


def start_server() -> None:
    run_ranks(nothing, 1, timeout_s=300)
