"""Runs training jobs on emulated clusters, each with and without holmes, for the tests to compare.

run.md's table "your job" lists the frameworks and launchers that holmes (the torch plugin of this
repository) supports, and says what to add to a job's command, usually `--holmes`. This module has:

    Job      a job for one entry of the table, such as "DDP"
    Start    starts the command of a job on all nodes
    Run      losses and output of one launch, from its first to its last training step
    Runs     all launches of one job: "stock", which is the job without holmes, and the job under
             holmes; either from step 1, or resumed from a checkpoint
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
from carriers import ON_GPUS
from checkouts import checkout_or_skip
from holmes_lab.process.fork_server import SKIP_TEARDOWN
from holmes_lab.process.job import RunResult

from holmes_ext.cli.main import main
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
    """Do nothing: for frameworks whose newest checkpoint is already the one to resume from."""


@dataclass(frozen=True)
class Checkpoints:
    """Command-line arguments with which a job saves a checkpoint, and with which it resumes later.

    The word CHECKPOINT_FOLDER in these arguments is a placeholder for the checkpoint's folder.
    """

    save_arguments: tuple[str, ...]  # save a checkpoint after SAVED_STEP
    load_arguments: tuple[str, ...]  # resume from that checkpoint
    #: Makes the checkpoint of SAVED_STEP the newest in the folder. Some frameworks save another one
    #: at the end of the job, and resume from the newest.
    rewind: Callable[[Path], None] = leave_as_saved
    #: Converts the losses that a resumed run prints into one loss for each step.
    losses_by_step: Callable[[list[float]], list[float]] = list
    #: Whether stock, resumed, has the losses of the stock run that was not interrupted.
    resumes_exactly: bool = True


@dataclass(frozen=True)
class Group:
    """Kind and network of process groups, as `holmes report` (the summary of a job) lists them."""

    kind: str  # "data", "pipeline" or "world"
    where: str  # "inside" one cluster, or "across" clusters
    fabric: str  # the network that the groups use: "ib", "roce" or "ethernet"


@dataclass(frozen=True)
class Job:
    """A training job that the tests run twice: with and without holmes, the torch plugin under test.

    run.md lists the frameworks and launchers that holmes supports. Each has at least one such job.
    """

    entry: str  # of run.md's table, as summary.readme_rows returns it
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
    #: The real launcher that starts all runs, such as "srun"; empty: the lab starts them.
    launcher: str = ""
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
    runs_on_emulated_gpus: bool = True

    @property
    def name(self) -> str:
        if self.variant:
            return f"{self.entry}, {self.variant}"
        return self.entry

    def skip_if_not_installed(self) -> None:
        """Skip the running test, with the reason, if something that the job needs is missing."""
        if ON_GPUS and not self.runs_on_emulated_gpus:
            pytest.skip("runs over gloo alone: a .pth file loads the emulated GPU's operators")
        for package in self.packages:
            if find_spec(package) is None:
                pytest.skip(
                    f"{self.name} needs the package {package}, which is not in {sys.prefix}"
                )
        if self.installed_in and not self.installed_in.is_dir():  # only torchtitan has a folder
            pytest.skip(f"{self.name} is not installed: make torchtitan")
        if self.checkout:
            checkout_or_skip(self.checkout)


@dataclass(frozen=True)
class Run:
    """Losses and output of one finished launch of a job."""

    losses: list[float]  # one for each step
    text: str  # what all ranks printed

    @property
    def holmes_lines(self) -> list[str]:
        """Return the lines that the plugin printed, without those of the lab's emulated GPU."""
        lines = [line for line in self.text.splitlines() if "holmes:" in line]
        return [line for line in lines if "holmes: emulated GPU:" not in line]


class Start(Protocol):
    """Callable that runs a job on all nodes of two emulated clusters, and waits for its end."""

    nodes: tuple[str, ...]  # node of each rank, in the order in which holmes numbers the ranks

    def __call__(
        self,
        job: Job,
        command: Command,
        arguments: Sequence[str],
        env: Mapping[str, str],
        shell: str,
    ) -> RunResult:
        """Run a Python script on every node, wait for its end, and return the output of all ranks.

        Args:
            job: Names the launcher of the processes, such as srun, if it has one.
            command: Gives the working directory of the script, and the modules that are imported
                once before the processes of the ranks are forked.
            arguments: The path of the script, and all of its arguments.
            env: Environment variables of every rank.
            shell: Shell line that starts Python with the script; "": start it in the default way.
        """


class StartInLab:
    """Starts a job on four emulated nodes, one rank on each, without a launcher such as torchrun.

    Nodes a0 and a1 form one cluster, b0 and b1 another. Before holmes renumbers them, ranks 0 to 3
    are on a0, b0, a1, b1: neighbouring ranks are in different clusters.
    """

    nodes = ("a0", "a1", "b0", "b1")  # nodes of ranks 0 to 3 after holmes has renumbered them

    def __init__(self, clusters: LabOf):
        self.clusters = clusters

    def __call__(
        self,
        job: Job,
        command: Command,
        arguments: Sequence[str],
        env: Mapping[str, str],
        shell: str,
    ) -> RunResult:
        if not shell:
            # By default, each rank is a fork of a Python process that has imported the modules
            # in `preload`. The fork runs the script.
            return self.clusters.run(
                *arguments,
                preload=command.preload,
                env=env,
                cwd=command.inside,
                timeout=RUN_TIMEOUT_S,
            )
        # The shell line has the placeholders {python} and {words}, the script with its arguments.
        quoted_arguments = " ".join(shlex.quote(argument) for argument in arguments)
        line = shell.format(python=sys.executable, words=quoted_arguments)
        return self.clusters.run(
            "sh", "-c", f"exec {line}", env=env, cwd=command.inside, timeout=RUN_TIMEOUT_S
        )


@dataclass
class Runs:
    """All launches of one job, with and without the plugin holmes.

    Each launch is a property, which runs the job when it is first read. These properties train all
    STEPS steps, and save a checkpoint after step SAVED_STEP:

        stock                the job without holmes
        holmes               the job under holmes, which also records what `holmes report` prints

    These properties resume from such a checkpoint, and train the remaining steps:

        holmes_from_stock    the job under holmes, from the checkpoint of `stock`
        stock_from_holmes    the job without holmes, from the checkpoint of `holmes`
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
        assert self.stock  # reading it runs the job, which saves the checkpoint
        arguments = [*self._load_arguments("stock"), *self.job.holmes_arguments]
        return self._run("holmes-from-stock", arguments, env=self.job.holmes_env, resumed=True)

    @cached_property
    def stock_from_holmes(self) -> Run:
        assert self.holmes  # reading it runs the job, which saves the checkpoint
        return self._run("stock-from-holmes", self._load_arguments("holmes"), resumed=True)

    @cached_property
    def losses_after_saving(self) -> list[float]:
        """Return the losses that a resumed run must have, one for each step after SAVED_STEP.

        They are the losses of an uninterrupted run without the plugin holmes, which must not change
        losses. Some frameworks train on other batches after a resume. For their jobs, the losses are
        those of a run without holmes that resumes from its own checkpoint.
        """
        assert self.job.checkpoints is not None
        uninterrupted = self.stock  # reading it runs the job, which saves the checkpoint
        if self.job.checkpoints.resumes_exactly:
            return uninterrupted.losses[SAVED_STEP:]
        resumed = self._run("stock-from-stock", self._load_arguments("stock"), resumed=True)
        return resumed.losses

    @property
    def telemetry(self) -> Path:
        return self.folder / "telemetry"

    @cached_property
    def report(self) -> str:
        """Return what `holmes report`, the summary of a finished job, prints of the run under holmes."""
        return self._report()

    @cached_property
    def report_json(self) -> dict[str, Any]:
        """Return the summary of the run under holmes, from the JSON of `holmes report --json`."""
        return json.loads(self._report("--json"))

    def _report(self, *flags: str) -> str:
        assert self.holmes  # reading it runs the job, which writes its telemetry
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
        """Return the arguments with which the job resumes from the checkpoint after SAVED_STEP.

        Args:
            saved_by: The run that has saved this checkpoint: "stock" (without holmes) or "holmes".
        """
        assert self.job.checkpoints is not None
        folder = self._checkpoint_folder(saved_by)
        self.job.checkpoints.rewind(folder)  # the job would resume from a later checkpoint, if any
        return with_checkpoint_folder(self.job.checkpoints.load_arguments, folder)

    def _checkpoint_folder(self, saved_by: str) -> Path:
        # Without the word "holmes" between spaces, by which the lab recognizes commands under holmes.
        return self.folder / f"saved-by-{saved_by}"

    def _run(
        self,
        name: str,
        added_arguments: Sequence[str],
        env: Mapping[str, str] = NO_VARIABLES,
        shell: str = "",
        resumed: bool = False,
    ) -> Run:
        """Run the job's command with added arguments, and return its losses and output.

        Args:
            name: Name of the log file.
            added_arguments: Are appended to the arguments of the job without holmes.
            env: Added environment variables.
            shell: Shell line that starts Python with the script; "": start it in the default way.
            resumed: Whether the run resumes from a checkpoint. Some frameworks then print other
                numbers than the losses of single steps; Checkpoints.losses_by_step converts them.

        Raises:
            AssertionError: the command ended with a status other than 0.
        """
        command = self.command
        arguments = [*command.words, *added_arguments]
        env = {"OMP_NUM_THREADS": "1", **command.env, **self._env_on_cpu(), **env}
        if name == "holmes":  # one run of each framework under holmes ends as it does for a user
            env[SKIP_TEARDOWN] = "0"
        if not self.on_gpus:
            arguments += command.on_cpu  # flags that some scripts need without a GPU
        log = self.folder / f"{name}.jsonl"
        # LOG is a placeholder for the file to which the script writes its losses.
        arguments = [str(log) if argument == LOG else argument for argument in arguments]

        result = self.start(self.job, command, arguments, env=env, shell=shell)
        failed_rank = result.first_failed or 0
        end_of_output = result.outputs[failed_rank][-4000:]
        assert result.returncode == 0, f"{name}: status {result.returncode}\n{end_of_output}"
        follows_plan(result)  # fails the test if holmes printed a difference from its plan
        losses = command.read(result, log)  # from the log or the output, depending on the script
        if resumed and self.job.checkpoints is not None:
            losses = self.job.checkpoints.losses_by_step(losses)
        return Run(losses=losses, text="\n".join(result.outputs.values()))

    def _env_on_cpu(self) -> Mapping[str, str]:
        if self.on_gpus:
            return NO_VARIABLES
        return self.command.env_on_cpu


def with_checkpoint_folder(arguments: Sequence[str], folder: Path) -> list[str]:
    """Return the arguments with the folder's path in place of the placeholder CHECKPOINT_FOLDER."""
    return [argument.replace(CHECKPOINT_FOLDER, str(folder)) for argument in arguments]


def patched_features(run: Run) -> set[str]:
    """Return the names of holmes's features that were active in a run.

    The first line that holmes prints in a run lists them, for example "patched: ddp, nics; ...".
    """
    banner = next(line for line in run.holmes_lines if "patched: " in line)
    listed = banner.partition("patched: ")[2]
    listed = re.split("patched: |; ", listed)[0]
    return set(listed.split(", "))


def python_path(*folders: str) -> str:
    """Return a value for PYTHONPATH: the folders, and then those of its present value."""
    current = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(folder for folder in [*folders, current] if folder)
