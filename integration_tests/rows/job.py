"""What a row of README's table "your job" is tested with: its training command, and how it is run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import pytest
from checkouts import checkout_or_skip

from holmes_ext.cli.main import main
from holmes_ext.lab.process.job import RunResult
from integration_tests.gpu.commands import LOG, Command
from integration_tests.jobs import LabOf, follows_plan

STEPS = 5
SAVED = 3  # the step after which a checkpoint is saved
FOLDER = "FOLDER"  # in the flags of Checkpoints: the folder of the checkpoint
#: Losses of these jobs are printed or computed in float32 and lie below 12, where neighbouring
#: values differ by 4.8e-7 (below 8) or 9.5e-7. Four ranks add gradients in another order in two
#: levels than in one ring, which changes a loss by one or two of these steps.
ROUNDING = 2e-6
EXACT = 0.0  # two ranks have no other order to add up in


def as_saved(folder: Path) -> None:
    """Leave the folder of a checkpoint as it is: it has the one that was saved after step SAVED."""


@dataclass(frozen=True)
class Checkpoints:
    """How a job saves a checkpoint after step SAVED and goes on from it."""

    save: tuple[str, ...]
    load: tuple[str, ...]
    #: Makes the checkpoint of step SAVED the newest one, if the job saves another at its end.
    rewind: Callable[[Path], None] = as_saved
    #: Turns what a resumed job prints as losses into the losses of its steps.
    resumed_losses: Callable[[list[float]], list[float]] = list
    #: Whether a job that stock resumes has the losses of the job that was not stopped.
    exact_in_stock: bool = True


@dataclass(frozen=True)
class Group:
    """A kind of process group that the report must name."""

    kind: str  # "data", "pipeline", "world"
    where: str  # "inside" a cluster or "across" clusters
    fabric: str


@dataclass(frozen=True)
class Job:
    """A training job that README's table promises."""

    part: str  # the entry of README's table, as summary.readme_rows returns it
    command: Callable[[Path], Command]  # stock's, for a folder in which it may write
    groups: frozenset[Group]
    checkpoints: Checkpoints | str  # a string: why there are none
    variant: str = ""
    holmes: tuple[str, ...] = ("--holmes",)  # README's second column
    holmes_env: Mapping[str, str] = field(default_factory=dict)
    #: A shell line that starts the whole run under holmes in place of the lab's fork of a preloaded
    #: Python. {python}: the interpreter, {words}: what comes behind it.
    shell: str = ""
    launcher: str = ""  # the real one that starts all runs
    #: Features that the first line of holmes must name, besides those of every job. Those of
    #: Megatron are applied after that line, when it is imported.
    features: frozenset[str] = frozenset()
    stages: int = 1  # of the pipeline whose messages holmes runs
    #: Whether the report names how the gradients of each stage were reduced. False if the framework
    #: reduces by itself, or if the command line does not say how many stages there are.
    names_reductions: bool = True
    tolerance: float = ROUNDING
    packages: tuple[str, ...] = ()
    checkout: str = ""
    folder: Path | None = None  # in which `make torchtitan` installs it

    @property
    def name(self) -> str:
        return f"{self.part}, {self.variant}" if self.variant else self.part

    def skip_without_needs(self) -> None:
        """Skip the running test, with the reason, if a package or the checkout is missing."""
        for package in self.packages:
            if find_spec(package) is None:
                pytest.skip(f"{self.name} needs the package {package}, which is not in {sys.prefix}")
        if self.folder and not self.folder.is_dir():
            pytest.skip(f"{self.name} is not installed: make torchtitan")
        if self.checkout:
            checkout_or_skip(self.checkout)


@dataclass(frozen=True)
class Run:
    """What a run computed and printed."""

    losses: list[float]
    text: str

    @property
    def holmes_lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if "holmes:" in line]


class Start(Protocol):
    """Runs a command to its end on the nodes of two clusters."""

    nodes: tuple[str, ...]  # of the ranks, in the plan's order

    def __call__(self, job: Job, command: Command, words: Sequence[str], env: Mapping[str, str],
                 shell: str) -> RunResult: ...


class StartInLab:
    """The lab's own launch: four nodes of one rank each, which alternate between the clusters."""

    nodes = ("a0", "a1", "b0", "b1")

    def __init__(self, clusters: LabOf):
        self.clusters = clusters

    def __call__(self, job: Job, command: Command, words: Sequence[str], env: Mapping[str, str],
                 shell: str) -> RunResult:
        if shell:
            quoted = " ".join(map(shlex.quote, words))
            line = shell.format(python=sys.executable, words=quoted)
            return self.clusters.run("sh", "-c", f"exec {line}", env=env, cwd=command.inside, timeout=400)
        return self.clusters.run(*words, preload=command.preload, env=env, cwd=command.inside, timeout=400)


@dataclass
class Runs:
    """The four runs of a job, each made when a test first asks for it."""

    job: Job
    start: Start
    folder: Path
    on_gpus: bool
    stock_of: Runs | None = None  # another job's runs, if stock is the same

    @cached_property
    def command(self) -> Command:
        folder = self.folder / "command"
        folder.mkdir()
        return self.job.command(folder)

    @cached_property
    def stock(self) -> Run:
        """Stock's STEPS steps, with a checkpoint after step SAVED."""
        if self.stock_of is not None:
            return self.stock_of.stock
        return self._run("stock", self._save("stock"))

    @cached_property
    def holmes(self) -> Run:
        """The same under holmes, with telemetry."""
        words, env = [*self._save("holmes"), *self.job.holmes], dict(self.job.holmes_env)
        if "--holmes" in words:
            words += ["--holmes-telemetry", str(self.telemetry)]
        else:
            env["HOLMES_TELEMETRY"] = str(self.telemetry)
        return self._run("holmes", words, env, self.job.shell)

    @cached_property
    def losses_after_saving(self) -> list[float]:
        """The losses that a resumed job must have: those of stock's run that was not stopped.

        If the framework itself does not resume exactly: of stock from stock's checkpoint.
        """
        assert isinstance(self.job.checkpoints, Checkpoints)
        if self.job.checkpoints.exact_in_stock:
            return self.stock.losses[SAVED:]
        return self._run("stock-from-stock", self._load("stock", self.stock)).losses

    @cached_property
    def holmes_from_stock(self) -> Run:
        """The steps after SAVED under holmes, from stock's checkpoint."""
        words = (*self._load("stock", self.stock), *self.job.holmes)
        return self._run("holmes-from-stock", words, self.job.holmes_env)

    @cached_property
    def stock_from_holmes(self) -> Run:
        """The steps after SAVED by stock, from holmes's checkpoint."""
        return self._run("stock-from-holmes", self._load("holmes", self.holmes))

    @property
    def telemetry(self) -> Path:
        return self.folder / "telemetry"

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What `holmes report --json` prints of the run under holmes."""
        return json.loads(self._report("--json"))

    @cached_property
    def report(self) -> str:
        """What `holmes report` prints."""
        return self._report()

    def _report(self, *flags: str) -> str:
        assert self.holmes  # it has run
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["report", str(self.telemetry), *flags]) == 0
        return printed.getvalue()

    def _save(self, side: str) -> tuple[str, ...]:
        if isinstance(self.job.checkpoints, str):
            return ()
        return in_folder(self.job.checkpoints.save, self.folder / f"saved-by-{side}")

    def _load(self, side: str, _saved_by: Run) -> tuple[str, ...]:
        assert isinstance(self.job.checkpoints, Checkpoints)
        folder = self.folder / f"saved-by-{side}"
        self.job.checkpoints.rewind(folder)
        return in_folder(self.job.checkpoints.load, folder)

    def _run(self, name: str, words: Iterable[str], env: Mapping[str, str] = MappingProxyType({}),
             shell: str = "") -> Run:
        command = self.command
        log = self.folder / f"{name}.jsonl"
        words = [*command.words, *words]
        if not self.on_gpus:
            words += command.on_cpu
            env = {**command.env_on_cpu, **env}
        words = [str(log) if word == LOG else word for word in words]
        result = self.start(self.job, command, words, {"OMP_NUM_THREADS": "1", **command.env, **env}, shell)
        first = result.outputs[result.first_failed or 0]
        assert result.returncode == 0, f"{name}: status {result.returncode}\n{first[-4000:]}"
        text = "\n".join(result.outputs.values())
        losses = command.read(follows_plan(result), log)
        if "-from-" in name and isinstance(self.job.checkpoints, Checkpoints):
            losses = self.job.checkpoints.resumed_losses(losses)
        return Run(losses, text)


def in_folder(flags: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """Return the flags with the folder of the checkpoint filled in."""
    return tuple(flag.replace(FOLDER, str(folder)) for flag in flags)


def patched(run: Run) -> set[str]:
    """Return the features that the first line of holmes names as patched."""
    banner = next(line for line in run.holmes_lines if "patched: " in line)
    return set(re.split(r"patched: |; ", banner.partition("patched: ")[2])[0].split(", "))


def installed(*names: str) -> str:
    """Return a PYTHONPATH with these folders first."""
    return os.pathsep.join(filter(None, [*names, os.environ.get("PYTHONPATH", "")]))
