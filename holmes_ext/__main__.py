"""`python -m holmes_ext [FLAGS] SCRIPT ARGS` or `... -m MODULE ARGS`: run a program with holmes on.

For environments where the .pth is not in place (a source tree on PYTHONPATH, `pip install --target`), and
for those who want it spelled out: `torchrun ... -m holmes_ext pretrain_gpt.py ...`. No `--holmes` is needed;
its other flags may stand before SCRIPT or among ARGS. The program runs as __main__ with the arguments,
__file__ and sys.path[0] that it would have alone (sys.argv[0] is made absolute). HOLMES=0,
HOLMES_DISABLE=all, and being a child of a worker make it run without holmes, flags removed.
"""

import os
import runpy
import sys
from typing import Any

from holmes_ext import _pth
from holmes_ext.errors import HolmesError

USAGE = "python -m holmes_ext [--holmes-... VALUE] (SCRIPT | -m MODULE) ARGS"


def split(arguments: list[str]) -> tuple[list[str], str, str, list[str]]:
    """(flags before the program, "file" or "module", program, its arguments); HolmesError without one."""
    rest = list(arguments)
    flags: list[str] = []
    while rest and _pth.is_flag(rest[0]):
        count = 2 if _pth.takes_value(rest[0]) else 1
        flags += rest[:count]
        del rest[:count]
    kind = "file"
    if rest[:1] == ["-m"]:
        kind = "module"
        del rest[0]
    if not rest:
        raise HolmesError(f"no program to run: {USAGE}")
    program, *rest = rest
    if program.startswith("-"):
        raise HolmesError(f"{program} is not a flag of holmes: {USAGE}")
    if kind == "file" and not os.path.exists(program):
        raise HolmesError(f"{program}: no such script")
    if _pth.is_launcher(kind, program):
        wanted = "torchrun ... -m holmes_ext SCRIPT ARGS"
        raise HolmesError(
            f"{program} starts workers itself: put holmes_ext after it, as in `{wanted}`"
        )
    return flags, kind, program, rest


#: Of the program: they live until the interpreter ends, as they would without this module.
variables: dict[str, Any] = {}


def main() -> int:
    try:
        flags, kind, program, arguments = split(sys.argv[1:])
    except HolmesError as error:
        print(f"holmes: {error}", file=sys.stderr)
        return 2
    sys.argv[:] = [program, *flags, *arguments]
    if _pth.is_off(os.environ) or _pth.is_child(os.environ):
        _pth.strip_flags(sys.argv)
    else:
        _pth.start(sys.argv)
    if kind == "module":
        variables.update(runpy.run_module(program, run_name="__main__", alter_sys=True))
    else:
        if not getattr(
            sys.flags, "safe_path", False
        ):  # -P and PYTHONSAFEPATH: nothing was prepended
            sys.path[0] = os.path.dirname(os.path.realpath(program))
        # __file__ is absolute alone, too
        variables.update(runpy.run_path(os.path.abspath(program), run_name="__main__"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
