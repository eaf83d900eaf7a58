"""Finds environment variables that a launcher does not pass to the processes on other nodes.

    Open MPI's mpirun   passes only those of -x to other nodes (and its own OMPI_*)
    deepspeed           passes those that begin with NCCL, PYTHON, ... (runner.py: EXPORT_ENVS), and the lines
                        of .deepspeed_env in the home directory or here
    srun, MPICH         pass all

torchrun and accelerate are started on each node, with the variables that are set there.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from holmes_ext.doctor.command.launch import LaunchedNodes
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError
from holmes_ext.options import PREFIX, names, variable

_ENVIRONMENT_FILE = ".deepspeed_env"


def check_forwarded(
    launches: Sequence[LaunchedNodes],
    words: Sequence[str],
    environ: Mapping[str, str],
    has_flag: bool,
) -> Iterator[Finding]:
    """Yield findings about variables that ranks on other nodes need and do not get.

    Args:
        launches: Nodes and processes that the launchers of the command start, the outermost first.
        words: The command up to the script.
        environ: Environment variables of the command.
        has_flag: Whether --holmes is among the script's arguments; then HOLMES is not needed.
    """
    for launch in launches:
        if len(launch.hosts) <= 1:
            continue
        if launch.launcher == "deepspeed":
            passed = _names_in_files(environ)
            advice = f"write NAME=VALUE into {_ENVIRONMENT_FILE} here, or use the flag"
        elif launch.launcher == "mpirun" and "-x" in words:  # an option of Open MPI
            passed = _names_after(words, "-x")
            advice = "add `-x NAME` to the options of mpirun, or use the flag"
        else:
            continue
        yield from _check_options(launch.launcher, environ, passed, has_flag, advice)
    innermost = launches[-1] if launches else None
    if innermost and innermost.launcher == "mpirun" and len(innermost.hosts) > 1:
        yield from _check_master_address(words, environ)


def _check_options(
    launcher: str,
    environ: Mapping[str, str],
    passed: Collection[str],
    has_flag: bool,
    advice: str,
) -> Iterator[Finding]:
    """Yield a finding if variables of holmes are set here that the ranks on other nodes do not get.

    Each option has a variable: HOLMES_FALLBACK sets --holmes-fallback. HOLMES=1 switches holmes on,
    like the flag --holmes.

    Args:
        launcher: Name of the launcher.
        environ: Environment variables of the command.
        passed: Names of the variables that the launcher passes on.
        has_flag: Whether --holmes is among the script's arguments.
        advice: How to pass a variable on.
    """
    # names(): all options of holmes, such as "fallback"; variable("fallback"): "HOLMES_FALLBACK"
    wanted = [variable(name) for name in names()]
    if not has_flag:
        wanted.append("HOLMES")
    lost = sorted(name for name in wanted if environ.get(name) and name not in passed)
    if lost:
        # Without HOLMES_FALLBACK, for example, ranks on other nodes have the default of this option.
        # Without HOLMES=1 and the flag --holmes (PREFIX), they run without holmes.
        yield problem(
            ", ".join(lost),
            what=f"set here, but {launcher} does not pass it to the other nodes",
            why=f"ranks there run without it: they have other options, or none of {PREFIX}",
            mend=advice,
        )


def _check_master_address(words: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding if the ranks that mpirun starts on several nodes may not find rank 0.

    MASTER_ADDR names the host of rank 0. A job in Slurm does not need the variable: rank 0 is on the
    first node in Slurm's list of the job's nodes.

    Args:
        words: The command up to the script.
        environ: Environment variables of the command.
    """
    is_passed = "MASTER_ADDR" in _names_after(words, "-x")
    # -x is an option of Open MPI. Without it, this may be MPICH, whose mpirun passes all variables.
    may_be_mpich = "-x" not in words
    if is_passed or "SLURM_JOB_ID" in environ or ("MASTER_ADDR" in environ and may_be_mpich):
        return
    yield note(
        "MASTER_ADDR",
        what="mpirun does not pass it to the ranks",
        why="the job ends at start-up unless the environment of every node has it: it names rank 0's host",
        mend="mpirun -x MASTER_ADDR=HOST, with the first host of the list",
    )


def _names_after(words: Sequence[str], option: str) -> set[str]:
    """Return the names of the variables in all values of an option: "-x A=1 -x B" gives A and B."""
    following = [*words[1:], ""]
    values = [value for word, value in zip(words, following) if word == option]
    return {value.partition("=")[0] for value in values}


def _names_in_files(environ: Mapping[str, str]) -> set[str]:
    """Return the names of the variables in deepspeed's files of variables.

    Args:
        environ: Environment variables; DS_ENV_FILE may name another file.
    """
    file_name = environ.get("DS_ENV_FILE") or _ENVIRONMENT_FILE
    found = set()
    for folder in (environ.get("HOME", ""), os.curdir):
        try:
            lines = read_text(Path(folder, file_name), advice="", errors="replace").splitlines()
        except HolmesError:
            continue
        found |= {line.partition("=")[0].strip() for line in lines}
    return found
