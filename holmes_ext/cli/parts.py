"""Parts that extensions add to a command of holmes: more arguments, and what they ask for.

A part is a module with two functions:

    add_arguments(parser)      adds its arguments to the command's parser
    run(args) -> int | None    does what its arguments ask for and returns the exit status; None if they ask
                               for nothing of it, or if the command itself has more to do
"""

from __future__ import annotations

from types import ModuleType

from holmes_ext import extensions


def command_parts(command: str) -> list[ModuleType]:
    """Import and return the parts of a command, such as "plan".

    Those of other packages come first, because the built-in ones do everything that is left.
    """
    parts = [part for part in extensions.contributions("command_parts") if part.name == command]
    return [part.load() for part in reversed(parts)]
