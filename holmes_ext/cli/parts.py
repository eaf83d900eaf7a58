"""Parts of a command that extensions provide, such as the search of `holmes plan`.

A part is a module with two functions:

    add_arguments(parser)      adds arguments to the command's parser
    run(args) -> int | None    does the work of these arguments and returns the exit status. None if
                               the arguments are not given, or if the command has to do more
"""

from __future__ import annotations

from types import ModuleType

from holmes_ext import extensions


def command_parts(command: str) -> list[ModuleType]:
    """Import the parts of a command and return them in the order in which they run.

    Parts of other packages come first, because the built-in ones do all the work that is left.

    Args:
        command: Name of the command, such as "plan".
    """
    contributions = extensions.contributions("command_parts")
    parts = [part.load() for part in reversed(contributions) if part.name == command]
    return parts
