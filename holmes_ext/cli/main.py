"""The `holmes` command: finds the subcommand's module, runs it, and turns HolmesError into one line and exit status 2.

A subcommand NAME is a module holmes_ext/cli/NAME.py with

    add_parser(subparsers)   adds its parser (light: imports of torch and the like belong into run)
    run(args) -> int         0 good, 1 found a problem, 2 bad usage or bad input (or raise HolmesError)

Only the module of the subcommand that is asked for is imported; `holmes --help` imports all.
"""

import argparse
import difflib
import importlib
import sys

from holmes_ext import __version__
from holmes_ext.errors import HolmesError

COMMANDS = ("discover", "doctor", "plan", "probe", "lab", "demo", "patches", "report", "tune")


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are HolmesErrors: one line."""

    def error(self, message):
        raise HolmesError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """Run a `holmes` command line (default: this process's) and return its exit status; 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = _parse(argv)
        return args.run(args)
    except HolmesError as error:
        print(f"holmes: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(argv):
    command = argv[0] if argv and not argv[0].startswith("-") else None
    if command is not None and command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}"
        raise HolmesError(f"there is no command {command!r}; {hint}")
    parser = _Parser(prog="holmes", description="One LLM training job over several GPU clusters whose NICs differ.")
    parser.add_argument("--version", action="version", version=f"holmes_ext {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in [command] if command else COMMANDS:
        module = importlib.import_module(f"holmes_ext.cli.{name}")
        module.add_parser(subparsers)
        subparsers.choices[name].set_defaults(run=module.run)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
