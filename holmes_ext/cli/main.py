"""The command `holmes`: finds the module of a subcommand and runs it.

A subcommand NAME is a module holmes_ext/cli/NAME.py with two functions:

    add_parser(subparsers)   adds the subcommand's parser. It is fast: slow imports such as torch
                             belong into run
    run(args) -> int         returns the exit status: 0 for success, 1 for a problem that was found.
                             Bad usage and bad input raise a HolmesError, which is printed in one
                             line; the exit status is 2

Only the module of the given subcommand is imported. `holmes --help` imports all.
"""

import argparse
import errno
import importlib
import os
import select
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from holmes_ext import __version__, extensions
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.words import did_you_mean, nearest

#: Command -> module. Extensions add other commands.
_COMMANDS = {
    "discover": "holmes_ext.cli.discover",
    "doctor": "holmes_ext.cli.doctor",
    "plan": "holmes_ext.cli.plan",
    "probe": "holmes_ext.cli.probe",
    "examples": "holmes_ext.cli.examples",
    "patches": "holmes_ext.cli.patches",
    "report": "holmes_ext.cli.report",
    "tune": "holmes_ext.cli.tune",
}
#: Order of the commands in `holmes --help`. Other commands follow.
_ORDER = (
    "discover",
    "doctor",
    "plan",
    "probe",
    "lab",
    "demo",
    "examples",
    "join",
    "patches",
    "report",
    "tune",
    "weights",
)
#: Longest time that Python and the imports may take before a command begins, in seconds.
_LONGEST_START_S = 60.0
#: Commands of the package holmes_lab, which may be missing.
_LAB_COMMANDS = ("lab", "demo")
#: Output of `holmes` without arguments.
FIRST = """\
holmes: one LLM training job over several GPU clusters whose NICs differ. First steps:

  holmes demo                                 compare stock and holmes on emulated clusters, without a GPU
  holmes discover                             list the NICs of this node that a job would use
  holmes doctor -- YOUR COMMAND               check this machine and the command, without a job
  holmes plan --cluster FILE -- YOUR COMMAND  predict the step time now, with holmes, and with the best sizes
  YOUR COMMAND --holmes                       run the job: the flag follows the script's name

FILE is a cluster.toml (docs/clusters.md); `holmes --help` lists all commands,
`holmes COMMAND --help` explains one.
"""


class Help(argparse.HelpFormatter):
    """Formatter of help texts that keeps the line breaks of a text with several paragraphs.

    In the usage, a command to run is "-- COMMAND", in brackets if it is optional.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n\n" in text else super()._fill_text(text, width, indent)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs != argparse.REMAINDER:
            return super()._format_args(action, default_metavar)
        return str(action.metavar) if action.default is None else f"[{action.metavar}]"


class _Parser(argparse.ArgumentParser):
    """Parser that raises a HolmesError for bad usage and accepts no abbreviated options."""

    def __init__(self, **kwargs: Any):
        super().__init__(**{"formatter_class": Help, "allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments as argparse does, but raise a HolmesError for an unknown option."""
        parsed, unknown = super().parse_known_args(args, namespace)
        for argument in unknown:
            if not argument.startswith("-"):
                continue
            name = argument.partition("=")[0]
            near = nearest(name, self._option_string_actions)
            advice = f"; did you mean {near!r}?" if near else f" (see {self.prog} --help)"
            raise HolmesError(f"{self.prog} has no option {name}{advice}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Raise a HolmesError with argparse's message."""
        raise HolmesError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """Run a command line of `holmes` and return the exit status.

    If the reader of standard output ends (`holmes plan ... | head`), the remaining output is
    dropped.

    Args:
        argv: Arguments after "holmes"; None for those of this process.

    Returns:
        0 or 1 by the result of the command; 0 if the reader of standard output has ended; 2 after an
        error of the user or if the disk is full (a line was printed); 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if argv is None else argv
    # Without `argv`, the command is the whole process, so its time limit counts from the process's start.
    begin = _process_begin() if argv is None else time.monotonic()
    try:
        try:
            return _run_command(arguments, begin)
        finally:
            sys.stdout.flush()
    except RemoteError:  # another process of the job has printed the message
        return 2
    except HolmesError as error:
        message = str(error)
        if arguments and message.startswith(f"holmes {arguments[0]}"):
            message = message.removeprefix("holmes ")
        print(f"holmes: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        # The reader has ended while rich was printing a table: rich turns that into a SystemExit.
        if isinstance(end.__context__, BrokenPipeError):
            return 0
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _discard_output()
            print(
                f"holmes: {error.filename or 'the output'} cannot be written: {error.strerror}",
                file=sys.stderr,
            )
            return 2
        # The reader has ended while print() was writing. A BrokenPipeError may also come from
        # another pipe or socket: then it is a real error.
        if isinstance(error, BrokenPipeError) and _reader_has_ended():
            _discard_output()
            return 0
        raise


def _process_begin() -> float:
    """Return the time.monotonic() at which this process began; the current time if that is unknown."""
    now = time.monotonic()
    try:
        stat = Path("/proc/self/stat").read_text()
        # The name of the program, in parentheses, may contain spaces. The process's start is the 20th
        # field after it: clock ticks since the machine was started.
        start_ticks = int(stat.rpartition(")")[2].split()[19])
        start_s = start_ticks / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_s
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return now
    is_plausible = 0 <= age_s < _LONGEST_START_S  # containers may count from another moment
    return now - age_s if is_plausible else now


def _run_command(argv: list[str], begin: float) -> int:
    """Parse a command line, run its command, and return the exit status.

    Args:
        argv: Arguments after "holmes".
        begin: time.monotonic() at the begin of the command; its time limit counts from there.
    """
    if not argv:
        print(FIRST, end="")
        return 0
    args = _parse_arguments(argv)
    args.begin = begin  # time limits and reported times include the imports
    status: int = args.run(args)
    return status


def _discard_output() -> None:
    """Redirect standard output to /dev/null, so that flushing it at the end does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _reader_has_ended() -> bool:
    """Return whether the process that reads standard output has closed it."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def commands() -> dict[str, str]:
    """Return the module of every command, in the order of `holmes --help`.

    Raises:
        HolmesError: two extensions have the same command, or an extension has a command of holmes
            itself.
    """
    added = extensions.commands()
    for name in _COMMANDS:
        if name in added:
            raise HolmesError(
                f"an extension has the command {name!r} of holmes itself; uninstall it"
            )
    every = {**_COMMANDS, **added}
    return dict(sorted(every.items(), key=lambda item: _position_in_help(item[0])))


def _position_in_help(name: str) -> int:
    """Return the position of a command in `holmes --help`."""
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the parsed arguments of a command line.

    Raises:
        HolmesError: the usage is bad, or there is no such command.
    """
    command = argv[0] if not argv[0].startswith("-") else None  # None: an option such as --help
    modules = commands()
    for problem in extensions.problems():
        print(f"holmes: {problem}", file=sys.stderr)
    if command is not None and command not in modules:
        if command in _LAB_COMMANDS:
            raise HolmesError(
                f"holmes {command} needs the package holmes_lab: pip install ./lab "
                "(in a clone of holmes_ext)"
            )
        raise HolmesError(f"there is no command {command!r}; {did_you_mean(command, modules)}")
    parser = _Parser(
        prog="holmes",
        description="One LLM training job over several GPU clusters whose NICs differ.",
    )
    parser.add_argument("--version", action="version", version=f"holmes_ext {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    # The help lists all commands; otherwise only the module of the given command is imported.
    for name in [command] if command else modules:
        _add_command_parser(name, subparsers)
    return parser.parse_args(argv)


def _add_command_parser(
    name: str, subparsers: "argparse._SubParsersAction[Any]"
) -> argparse.ArgumentParser:
    """Import the module of a command, and add and return the command's parser.

    Args:
        name: Name of the command.
        subparsers: Parsers of the commands of `holmes`. The parser is added to them.
    """
    module = importlib.import_module(commands()[name])
    module.add_parser(subparsers)
    parser: argparse.ArgumentParser = subparsers.choices[name]
    parser.set_defaults(run=module.run)
    return parser


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command, for the documentation."""
    return _add_command_parser(name, _Parser(prog="holmes").add_subparsers())


if __name__ == "__main__":
    sys.exit(main())
