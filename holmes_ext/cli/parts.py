"""Parts of a command that extensions provide: arguments, and the work that they start.

An example is the search for the best sizes in `holmes plan`. A part is a module with two functions:

    add_arguments(parser)      adds arguments to the command's parser
    run(args) -> int | None    does the work of these arguments and returns the exit status. None if
                               the arguments are not given, or if the command has to do more
"""

from __future__ import annotations

from types import ModuleType

from holmes_ext import extensions


def command_parts(command: str) -> list[ModuleType]:
    """Import the modules that extensions add to a command, and return them in the order of their runs.

    A module has add_arguments(parser) and run(args). run() returns the exit status if it has
    handled the arguments; then no later module runs. It returns None to leave them to the next
    module. Modules of other packages come before the built-in ones, so they get the arguments
    first.

    Args:
        command: Name of the command, such as "plan".
    """
    contributions = extensions.contributions("command_parts")
    parts = [part.load() for part in reversed(contributions) if part.name == command]
    return parts
