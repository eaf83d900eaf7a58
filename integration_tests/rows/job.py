"""Defines a job of README's table "your job", and runs it with and without holmes.

Words used in this folder:

    entry    one kind of job that the table promises, such as "DDP"; a row of the table lists some
    stock    the job as its users run it today, without holmes
    holmes   the same job with what the table says to add to its command, usually `--holmes`
    run      one launch of a job on all nodes, from its first to its last training step
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
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

STEPS = 5  # training steps of a run that is not resumed
SAVED_STEP = 3  # the step after which a run saves the checkpoint that other runs resume from
CHECKPOINT_FOLDER = "CHECKPOINT_FOLDER"  # placeholder in command-line arguments for that folder
RUN_TIMEOUT_S = 400
#: Losses of these jobs are printed or computed in float32 and lie below 12, where neighbouring
#: values differ by 4.8e-7 (below 8) or 9.5e-7. Four ranks add gradients in another order in two
#: levels than in one ring, which changes a loss by one or two of these steps.
ROUNDING_TOLERANCE = 2e-6
EXACT = 0.0  # tolerance for two ranks: a sum of two gradients has only one order
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def leave_as_saved(checkpoint_folder: Path) -> None:
    """Change nothing: the only checkpoint in the folder is the one of SAVED_STEP."""


@dataclass(frozen=True)
class Checkpoints:
    """How a job saves a checkpoint after SAVED_STEP, and how it resumes from that checkpoint.

    CHECKPOINT_FOLDER in the arguments stands for the folder of the checkpoint.
    """

    save_arguments: tuple[str, ...]
    load_arguments: tuple[str, ...]
    #: Makes the checkpoint of SAVED_STEP the newest in the folder. Some frameworks save another one
    #: at the end of the job, and resume from the newest.
    rewind: Callable[[Path], None] = leave_as_saved
    #: Converts the losses that a resumed run prints into one loss for each step.
    losses_by_step: Callable[[list[float]], list[float]] = list
    #: Whether stock, resumed, has the losses of the stock run that was not interrupted.
    resumes_exactly: bool = True


@dataclass(frozen=True)
class Group:
    """Process groups of one kind, as `holmes report` lists them."""

    kind: str  # "data", "pipeline" or "world"
    where: str  # "inside" one cluster, or "across" clusters
    fabric: str  # the network that the groups use: "ib", "roce" or "ethernet"


@dataclass(frozen=True)
class Job:
    """A training job that README's table "your job" promises to run under holmes."""

    entry: str  # of README's table, as summary.readme_rows returns it
    command: Callable[[Path], Command]  # returns the command of stock, given a folder to write to
    groups: frozenset[Group]  # the report must list them
    #: None: no test saves or resumes this job. With launchers, the frameworks' rows test that.
    checkpoints: Checkpoints | None
    variant: str = ""  # distinguishes several jobs of one entry
    #: Arguments and environment variables that the table says to add to the command of stock.
    holmes_arguments: tuple[str, ...] = ("--holmes",)
    holmes_env: Mapping[str, str] = field(default_factory=dict)
    #: A shell line that starts the complete run under holmes. It replaces the lab's default, a fork
    #: of a Python process that has loaded torch already, which would bypass how a user starts
    #: Python. {python} stands for the interpreter, {words} for the script and its arguments.
    shell: str = ""
    launcher: str = ""  # the real launcher that starts all runs, such as "srun"; empty: the lab does
    #: Patched features that the banner of holmes must list besides those of every job. Megatron's
    #: are not in the banner, because they are applied later, when Megatron is imported.
    features: frozenset[str] = frozenset()
    pipeline_stages: int = 1  # more than one: holmes sends the messages between the stages
    #: Whether the report says how the gradients of each stage were reduced. It does not if the
    #: framework itself reduces, or if the command line does not give the number of stages.
    reports_reductions: bool = True
    tolerance: float = ROUNDING_TOLERANCE  # largest difference of a loss from the loss of stock
    packages: tuple[str, ...] = ()  # must be installed, or the tests of this job are skipped
    checkout: str = ""  # repository that must be checked out, as tests/checkouts.py names it
    installed_in: Path | None = None  # folder that `make torchtitan` creates

    @property
    def name(self) -> str:
        if self.variant:
            return f"{self.entry}, {self.variant}"
        return self.entry

    def skip_if_not_installed(self) -> None:
        """Skip the running test, with the reason, if a package or the checkout is missing."""
        for package in self.packages:
            if find_spec(package) is None:
                pytest.skip(
                    f"{self.name} needs the package {package}, which is not in {sys.prefix}"
                )
        if self.installed_in and not self.installed_in.is_dir():
            pytest.skip(f"{self.name} is not installed: make torchtitan")
        if self.checkout:
            checkout_or_skip(self.checkout)


@dataclass(frozen=True)
class Run:
    """Losses and output of a finished run."""

    losses: list[float]  # one for each step
    text: str  # what all ranks printed

    @property
    def holmes_lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if "holmes:" in line]


class Start(Protocol):
    """Runs a program on the nodes of two clusters, and waits for its end."""

    nodes: tuple[str, ...]  # node of each rank, in the order in which holmes numbers the ranks

    def __call__(
        self, job: Job, command: Command, arguments: Sequence[str], env: Mapping[str, str], shell: str
    ) -> RunResult:
        """Run the job.

        Args:
            command: Says in which folder the program runs and which modules to load before a fork.
            arguments: The script and all of its arguments.
            env: Environment variables of every rank.
            shell: See Job.shell; empty unless this run needs it.
        """


class StartInLab:
    """Starts a job by the lab's own launcher, on two clusters of two nodes, one rank a node.

    The launcher alternates between the clusters (a0, b0, a1, b1), and holmes renumbers the ranks.
    """

    nodes = ("a0", "a1", "b0", "b1")

    def __init__(self, clusters: LabOf):
        self.clusters = clusters

    def __call__(
        self, job: Job, command: Command, arguments: Sequence[str], env: Mapping[str, str], shell: str
    ) -> RunResult:
        if not shell:
            return self.clusters.run(
                *arguments,
                preload=command.preload,
                env=env,
                cwd=command.inside,
                timeout=RUN_TIMEOUT_S,
            )
        quoted_arguments = " ".join(shlex.quote(argument) for argument in arguments)
        line = shell.format(python=sys.executable, words=quoted_arguments)
        return self.clusters.run(
            "sh", "-c", f"exec {line}", env=env, cwd=command.inside, timeout=RUN_TIMEOUT_S
        )


@dataclass
class Runs:
    """The runs of one job. A run starts when a test first reads it, and is then kept.

        stock                STEPS steps without holmes, with a checkpoint after SAVED_STEP
        holmes               the same with holmes, and with telemetry for `holmes report`
        holmes_from_stock    the steps after SAVED_STEP with holmes, from the checkpoint of stock
        stock_from_holmes    the steps after SAVED_STEP without holmes, from the checkpoint of holmes
    """

    job: Job
    start: Start
    folder: Path  # for logs, checkpoints and telemetry
    on_gpus: bool
    #: Runs of another job whose stock run serves for this job, too. None: this job has its own.
    stock_of: Runs | None = None

    @cached_property
    def command(self) -> Command:
        folder = self.folder / "command"
        folder.mkdir()
        return self.job.command(folder)

    @cached_property
    def stock(self) -> Run:
        if self.stock_of is not None:
            return self.stock_of.stock
        return self._run("stock", self._save_arguments("stock"))

    @cached_property
    def holmes(self) -> Run:
        arguments = [*self._save_arguments("holmes"), *self.job.holmes_arguments]
        env = dict(self.job.holmes_env)
        if "--holmes" in arguments:
            arguments += ["--holmes-telemetry", str(self.telemetry)]
        else:  # the script would not accept a flag of holmes
            env["HOLMES_TELEMETRY"] = str(self.telemetry)
        return self._run("holmes", arguments, env=env, shell=self.job.shell)

    @cached_property
    def holmes_from_stock(self) -> Run:
        assert self.stock  # it has saved its checkpoint
        arguments = [*self._load_arguments("stock"), *self.job.holmes_arguments]
        return self._run("holmes-from-stock", arguments, env=self.job.holmes_env, resumed=True)

    @cached_property
    def stock_from_holmes(self) -> Run:
        assert self.holmes  # it has saved its checkpoint
        return self._run("stock-from-holmes", self._load_arguments("holmes"), resumed=True)

    @cached_property
    def losses_after_saving(self) -> list[float]:
        """Return the losses that a resumed run must have in the steps after SAVED_STEP.

        They are those of the stock run that was not interrupted. If the framework does not resume
        exactly, they are those of another run: stock, resumed from the checkpoint of stock.
        """
        assert self.job.checkpoints is not None
        if self.job.checkpoints.resumes_exactly:
            return self.stock.losses[SAVED_STEP:]
        assert self.stock  # it has saved its checkpoint
        return self._run("stock-from-stock", self._load_arguments("stock"), resumed=True).losses

    @property
    def telemetry(self) -> Path:
        return self.folder / "telemetry"

    @cached_property
    def report(self) -> str:
        """Return what `holmes report` prints of the run under holmes."""
        return self._report()

    @cached_property
    def report_json(self) -> dict[str, Any]:
        """Return what `holmes report --json` prints of the run under holmes."""
        return json.loads(self._report("--json"))

    def _report(self, *flags: str) -> str:
        assert self.holmes  # it has written its telemetry
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = main(["report", str(self.telemetry), *flags])
        assert status == 0
        return printed.getvalue()

    def _save_arguments(self, saved_by: str) -> list[str]:
        if self.job.checkpoints is None:
            return []
        folder = self._checkpoint_folder(saved_by)
        return with_checkpoint_folder(self.job.checkpoints.save_arguments, folder)

    def _load_arguments(self, saved_by: str) -> list[str]:
        """Return the arguments that resume from SAVED_STEP of a run, which has ended."""
        assert self.job.checkpoints is not None
        folder = self._checkpoint_folder(saved_by)
        self.job.checkpoints.rewind(folder)
        return with_checkpoint_folder(self.job.checkpoints.load_arguments, folder)

    def _checkpoint_folder(self, saved_by: str) -> Path:
        # Without spaces: the lab takes a command for one under holmes if any of its words says so.
        return self.folder / f"saved-by-{saved_by}"

    def _run(
        self,
        name: str,
        added_arguments: Sequence[str],
        env: Mapping[str, str] = NO_VARIABLES,
        shell: str = "",
        resumed: bool = False,
    ) -> Run:
        """Run the command of stock with more arguments and variables. It must end with status 0.

        Args:
            resumed: Whether the run resumes from a checkpoint, so that some frameworks print
                losses that have to be converted.
        """
        command = self.command
        log = self.folder / f"{name}.jsonl"
        arguments = [*command.words, *added_arguments]
        env = {"OMP_NUM_THREADS": "1", **command.env, **self._env_on_cpu(), **env}
        if not self.on_gpus:
            arguments += command.on_cpu
        arguments = [str(log) if argument == LOG else argument for argument in arguments]

        result = self.start(self.job, command, arguments, env=env, shell=shell)
        text_of_failure = result.outputs[result.first_failed or 0]
        assert result.returncode == 0, f"{name}: status {result.returncode}\n{text_of_failure[-4000:]}"
        losses = command.read(follows_plan(result), log)
        if resumed and self.job.checkpoints is not None:
            losses = self.job.checkpoints.losses_by_step(losses)
        return Run(losses=losses, text="\n".join(result.outputs.values()))

    def _env_on_cpu(self) -> Mapping[str, str]:
        if self.on_gpus:
            return NO_VARIABLES
        return self.command.env_on_cpu


def with_checkpoint_folder(arguments: Sequence[str], folder: Path) -> list[str]:
    """Return the arguments with the folder in place of CHECKPOINT_FOLDER."""
    return [argument.replace(CHECKPOINT_FOLDER, str(folder)) for argument in arguments]


def patched_features(run: Run) -> set[str]:
    """Return the features that the banner, holmes's first line, lists as patched.

    The list is separated by commas and ends before a semicolon: "patched: ddp, nics; ...".
    """
    banner = next(line for line in run.holmes_lines if "patched: " in line)
    listed = banner.partition("patched: ")[2]
    listed = re.split("patched: |; ", listed)[0]
    return set(listed.split(", "))


def python_path(*folders: str) -> str:
    """Return the value of PYTHONPATH with the folders in front."""
    current = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(folder for folder in [*folders, current] if folder)
