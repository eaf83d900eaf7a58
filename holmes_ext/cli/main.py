"""The `holmes` command: runs a subcommand's module; a HolmesError is one line and exit status 2.

A subcommand NAME is a module holmes_ext/cli/NAME.py with

    add_parser(subparsers)   adds its parser (light: imports of torch and the like belong into run)
    run(args) -> int         0 good, 1 found a problem, 2 bad usage or bad input (or raise HolmesError)

Only the module of the subcommand that is asked for is imported; `holmes --help` imports all.
"""

import argparse
import errno
import importlib
import os
import select
import sys
import time

from holmes_ext import __version__, extensions
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.words import did_you_mean, nearest

#: Command -> its module. Extensions add others.
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
#: Order of the commands in `holmes --help`; those that are not here come after them.
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
)
#: Commands of packages that may be missing: command -> package, and how to install it from a clone.
_ELSEWHERE = dict.fromkeys(("lab", "demo"), ("holmes_lab", "pip install ./lab"))
#: What `holmes` alone prints.
FIRST = """\
holmes: one LLM training job over several GPU clusters whose NICs differ. What to do first:

  holmes demo                                 see it: stock against holmes on emulated clusters; no GPU
  holmes discover                             which NICs this node has, and which of them a job would use
  holmes doctor -- YOUR COMMAND               checks this machine and the command; starts nothing
  holmes plan --cluster FILE -- YOUR COMMAND  what a step takes today, with holmes, and with the best sizes
  YOUR COMMAND --holmes                       the job itself: the flag after the script's name

FILE is a cluster.toml (docs/clusters.md); `holmes --help` lists all commands,
`holmes COMMAND --help` explains one.
"""


class Help(argparse.HelpFormatter):
    """Wraps a text, but leaves one of several paragraphs as it is written; usage names the command that is
    the rest of the line (in brackets where it has a default: it may be left out)."""

    def _fill_text(self, text, width, indent):
        return text if "\n\n" in text else super()._fill_text(text, width, indent)

    def _format_args(self, action, default_metavar):
        if action.nargs != argparse.REMAINDER:
            return super()._format_args(action, default_metavar)
        return action.metavar if action.default is None else f"[{action.metavar}]"


class _Parser(argparse.ArgumentParser):
    """Its errors are HolmesErrors, one line each; a flag is never abbreviated."""

    def __init__(self, **kwargs):
        super().__init__(**{"formatter_class": Help, "allow_abbrev": False, **kwargs})

    def parse_known_args(self, args=None, namespace=None):
        parsed, unknown = super().parse_known_args(args, namespace)
        for name in (text.partition("=")[0] for text in unknown if text.startswith("-")):
            near = nearest(name, self._option_string_actions)
            advice = f"; did you mean {near!r}?" if near else f" (see {self.prog} --help)"
            raise HolmesError(f"{self.prog} has no option {name}{advice}")
        return parsed, unknown

    def error(self, message):
        raise HolmesError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """Run a `holmes` command line (default: this process's); its exit status, 130 after Ctrl-C. Where the
    reader of standard output has gone (`holmes plan ... | head`) the rest is not printed."""
    argv, begin = sys.argv[1:] if argv is None else argv, time.monotonic()
    try:
        try:
            if not argv:
                print(FIRST, end="")
                return 0
            args = _parse(argv)
            args.begin = begin  # imports of the command belong to its seconds
            return args.run(args)
        finally:
            sys.stdout.flush()
    except RemoteError:  # another process of the job has told it
        return 2
    except HolmesError as error:
        text = str(error)
        if argv and text.startswith(f"holmes {argv[0]}"):  # it says which command it is about
            text = text.removeprefix("holmes ")
        print(f"holmes: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        if not isinstance(
            end.__context__, BrokenPipeError
        ):  # how rich ends when its reader has gone
            raise
        return 0
    except OSError as error:
        full = error.errno == errno.ENOSPC
        if not (full or isinstance(error, BrokenPipeError) and _reader_has_gone()):
            raise
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 1
        )  # or Python tries to print the rest when it ends
        if full:
            print(
                f"holmes: {error.filename or 'the output'} cannot be written: {error.strerror}",
                file=sys.stderr,
            )
        return 2 if full else 0


def _reader_has_gone() -> bool:
    """Whether nobody reads standard output any more. (A socket of ours may break, too.)"""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def commands() -> dict[str, str]:
    """Return all commands, in the order in which `holmes --help` lists them: name -> module.

    Raises:
        HolmesError: two extensions have the same command, or one has a command of holmes itself.
    """
    added = extensions.commands()
    for name in _COMMANDS:
        if name in added:
            raise HolmesError(
                f"an extension has the command {name!r} of holmes itself; uninstall it"
            )
    every = {**_COMMANDS, **added}
    return dict(sorted(every.items(), key=lambda item: _rank(item[0])))


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _parse(argv):
    command = argv[0] if argv and not argv[0].startswith("-") else None
    known = commands()
    for problem in extensions.problems():
        print(f"holmes: {problem}", file=sys.stderr)
    if command in _ELSEWHERE and command not in known:
        package, install = _ELSEWHERE[command]
        raise HolmesError(
            f"holmes {command} needs the package {package}: {install} (in a clone of holmes_ext)"
        )
    if command is not None and command not in known:
        raise HolmesError(f"there is no command {command!r}; {did_you_mean(command, known)}")
    parser = _Parser(
        prog="holmes",
        description="One LLM training job over several GPU clusters whose NICs differ.",
    )
    parser.add_argument("--version", action="version", version=f"holmes_ext {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in [command] if command else known:
        _add(name, subparsers)
    return parser.parse_args(argv)


def _add(name: str, subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    module = importlib.import_module(commands()[name])
    module.add_parser(subparsers)
    added = subparsers.choices[name]
    added.set_defaults(run=module.run)
    return added


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command, for what documents it."""
    return _add(name, _Parser(prog="holmes").add_subparsers())


if __name__ == "__main__":
    sys.exit(main())
