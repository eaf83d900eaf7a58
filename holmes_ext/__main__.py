"""Runs a program under holmes: `python -m holmes_ext [FLAGS] SCRIPT ARGS` or `... -m MODULE ARGS`.

This command works without the file holmes_ext.pth (a source tree on PYTHONPATH, `pip install --target`), for
example `torchrun ... -m holmes_ext pretrain_gpt.py ...`. The flag `--holmes` is not needed. Other flags of
holmes may stand before SCRIPT or among ARGS.

The program runs as __main__, with the arguments, __file__ and sys.path[0] that it has without holmes;
sys.argv[0] becomes absolute. If HOLMES is 0, HOLMES_DISABLE is all, or this process descends from a worker,
the program runs without holmes, and the flags are removed.
"""

import os
import runpy
import sys
from typing import Any, NamedTuple

from holmes_ext import _pth
from holmes_ext.errors import HolmesError

USAGE = "python -m holmes_ext [--holmes-... VALUE] (SCRIPT | -m MODULE) ARGS"


class ProgramToRun(NamedTuple):
    """Program to run under holmes, and its arguments."""

    flags: list[str]  # flags of holmes before the program, with their values
    kind: str  # "file" or "module"
    program: str  # path of the file or name of the module
    arguments: list[str]  # arguments of the program


def split(command_line: list[str]) -> ProgramToRun:
    """Split the arguments of `python -m holmes_ext` into flags, program and arguments of the program.

    Args:
        command_line: "[FLAGS] SCRIPT [ARGS]" or "[FLAGS] -m MODULE [ARGS]", with flags of holmes.

    Raises:
        HolmesError: there is no program, it does not exist, or it is a launcher.
    """
    remaining = list(command_line)
    flags: list[str] = []
    while remaining and _pth.is_flag(remaining[0]):
        words_of_flag = 2 if _pth.takes_value(remaining[0]) else 1
        flags += remaining[:words_of_flag]
        del remaining[:words_of_flag]
    kind = "file"
    if remaining[:1] == ["-m"]:
        kind = "module"
        del remaining[0]
    if not remaining:
        raise HolmesError(f"no program to run: {USAGE}")
    program, *arguments = remaining
    if program.startswith("-"):
        raise HolmesError(f"{program} is not a flag of holmes: {USAGE}")
    if kind == "file" and not os.path.exists(program):
        raise HolmesError(f"{program}: no such script")
    if _pth.is_launcher(kind, program):
        example = "torchrun ... -m holmes_ext SCRIPT ARGS"
        raise HolmesError(
            f"{program} starts workers itself: put holmes_ext after it, as in `{example}`"
        )
    return ProgramToRun(flags, kind, program, arguments)


#: Global variables of the program. They live until the interpreter ends, as without this module.
variables: dict[str, Any] = {}


def main() -> int:
    """Run the program of a command line `python -m holmes_ext [--holmes-...] SCRIPT [ARGS]`.

    Holmes is started first. It is not if the environment switches it off (HOLMES=0), or if this
    process descends from a worker that runs under holmes. Then only the flags of holmes are removed
    from sys.argv.

    Returns:
        The exit status: 2 for a bad command line, otherwise 0 when the program has ended.
    """
    try:
        # kind: "file" or "module"; flags: those of holmes; arguments: those of the program.
        flags, kind, program, arguments = split(sys.argv[1:])
    except HolmesError as error:
        print(f"holmes: {error}", file=sys.stderr)
        return 2
    sys.argv[:] = [program, *flags, *arguments]  # as if the program had been started with the flags
    # A child of a worker, such as a data loader, trains nothing itself.
    if _pth.is_off(os.environ) or _pth.is_child(os.environ):
        _pth.strip_flags(sys.argv)
    else:
        _pth.start(sys.argv)
    # The program's global variables must live until the interpreter ends, so they are kept in `variables`.
    if kind == "module":
        variables.update(runpy.run_module(program, run_name="__main__", alter_sys=True))
    else:
        # With -P or PYTHONSAFEPATH, sys.path does not begin with the folder of the program.
        is_safe_path = getattr(sys.flags, "safe_path", False)
        if not is_safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(program))
        variables.update(runpy.run_path(os.path.abspath(program), run_name="__main__"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
