"""Extensions: packages that add flags, commands, patches and hooks to holmes without changing it.

An extension is one value of the class Extension. Python packages publish theirs as an entry point:

    [project.entry-points."holmes_ext.extensions"]
    mynic = "my_package.extension:EXTENSION"

Four extensions come with holmes_ext (BUILT_IN). They are imported by name, so they also work in a source
tree that is not installed.

The module with an Extension is imported in every job under holmes. It should import nothing but this module.
Other modules are named as "module:attribute", and are imported when they are needed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError

Options = Any  # holmes_ext.options.Options, which imports this module
Session = Any  # holmes_ext.runtime.session.Session

#: Entry-point group for the extensions of packages.
GROUP = "holmes_ext.extensions"
#: Extensions that come with holmes_ext.
BUILT_IN = (
    "holmes_ext.planner:EXTENSION",
    "holmes_ext.adapt:EXTENSION",
    "holmes_ext.join:EXTENSION",
    "holmes_ext.weights:EXTENSION",
)

#: Contribution point -> description of the objects that an extension can contribute there.
POINTS = {
    "nic_kinds": "holmes_ext.cluster.nic.NicKind, by the name that cluster.toml gives the kind",
    "reductions": "a function (group, bytes, spec, device_type) that makes a "
    "holmes_ext.runtime.reduce.reduction.Reduction, or returns None to keep holmes's own. It is called for "
    "every planned group of DistributedDataParallel and GradientReducer, also for a group inside a cluster, "
    "but not for DeepSpeed's own buckets: see holmes_ext.runtime.hooks.reduction_for",
    "outer_algorithms": "a class of holmes_ext.join.algorithms, by the name that --holmes-outer gives it",
    "doctor_checks": "a function that returns holmes_ext.doctor.finding.Finding objects; it gets no "
    "parameters: neither the node's NICs nor cluster.toml nor --sysfs",
    "command_parts": "a module with add_arguments(parser) and run(args), by the name of an existing command",
    "pass_solvers": "a function like holmes_ext.planner.schedule.solve.quickest",
    "plan_companions": "a module that adds another forecast to the search of `holmes plan`",
    "report_pages": "a function that makes the page of `holmes report --html`, by the name html",
    "report_sections": "a function that returns HTML for that page: (run, summary) -> list of parts",
    "join_services": "a function that `holmes join serve` runs beside its coordinator",
}
#: Hook -> the moment at which its function is called, and its arguments.
HOOKS = {
    "on_options": "the flags were read, before the ranks meet: on_options(options) -> lines for the user",
    "on_start": "the ranks have agreed on a plan: on_start(session) -> lines for the user",
    "on_ready": "the start line was printed, and the program is about to begin: on_ready(session)",
    "on_step": "a training step of a pipeline begins: see holmes_ext.runtime.hooks.on_step",
    "on_reduction": "gradients are about to be reduced: see holmes_ext.runtime.hooks.on_reduction",
    "on_checkpoint": "a checkpoint is complete, and this rank has written its part: on_checkpoint()",
    "on_stop": "holmes is switched off, or the program ends: on_stop(reason)",
}


@dataclass(frozen=True)
class Option:
    """A flag --holmes-NAME VALUE of an extension, and its environment variable HOLMES_NAME."""

    name: str  # with underscores, as a keyword of holmes_ext.enable()
    help: str
    default: str = ""
    choices: tuple[str, ...] = ()  # the only values allowed; () for any text
    #: Value of the flag without "=VALUE"; "" if the next argument is the value.
    bare_value: str = ""
    #: Returns the end of the error message for a value that is not allowed, or "". Not called for the
    #: default value.
    check: Callable[[str], str] = lambda value: ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise HolmesError(
                f"option {self.name!r}: its name must be an identifier, such as my_option"
            )


@dataclass(frozen=True)
class Extension:
    """Flags, commands, patches and hooks that a package adds to holmes.

    Modules, functions and objects are named by texts "module" or "module:attribute".
    """

    name: str
    options: tuple[Option, ...] = ()
    #: `holmes NAME` -> module with add_parser() and run().
    commands: Mapping[str, str] = field(default_factory=dict)
    #: Environment variable for users -> what it does.
    variables: Mapping[str, str] = field(default_factory=dict)
    #: Module with PATCHES -> the names of their features, as HOLMES_DISABLE takes them.
    patches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Contribution point (POINTS) -> name -> the object that is contributed.
    contributions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: Hook (HOOKS) -> function.
    hooks: Mapping[str, str] = field(default_factory=dict)
    #: Returns whether a job with these options uses the extension. Otherwise nothing of it is imported.
    is_active: Callable[[Options], bool] = lambda options: True
    #: Returns whether the extension has something to do in this job. Otherwise its hooks are not imported,
    #: except on_options.
    applies_to: Callable[[Session], bool] = lambda session: True

    def __post_init__(self) -> None:
        _refuse_unknown("contribution point", self.contributions, known=POINTS)
        _refuse_unknown("hook", self.hooks, known=HOOKS)


def _refuse_unknown(noun: str, names: Iterable[str], known: Mapping[str, str]) -> None:
    """Raise an error for the first name that is not known; `noun` describes the names in the message."""
    for name in names:
        if name not in known:
            raise HolmesError(f"there is no {noun} {name!r}; known: {', '.join(known)}")


class Contribution(NamedTuple):
    """Reference to an object that an extension contributes."""

    name: str
    reference: str  # "module:attribute"

    def load(self) -> Any:
        """Import and return the object."""
        return load(self.reference)


class Installed(NamedTuple):
    """The extensions of this Python environment."""

    extensions: tuple[Extension, ...]
    problems: tuple[str, ...]  # one line for each extension that could not be loaded


@functools.cache
def found() -> Installed:
    """Load the built-in extensions and those of other packages, which are found by entry points.

    An extension of another package that cannot be loaded is left out, and Installed.problems has the reason.

    Raises:
        HolmesError: two extensions have the same flag, command or name.
    """
    loaded = [load(reference) for reference in BUILT_IN]
    problems = []
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.value.startswith("holmes_ext."):
            continue  # built in; an older installation may name other modules
        try:
            extension = point.load()
            if not isinstance(extension, Extension):
                raise TypeError(f"{point.value} is not a holmes_ext.extensions.Extension")
        except Exception as error:  # an error of another package must not end a job
            problems.append(_left_out(point.name, error))
        else:
            loaded.append(extension)
    _refuse_duplicates(loaded)
    return Installed(tuple(loaded), tuple(problems))


def _refuse_duplicates(extensions: Iterable[Extension]) -> None:
    """Raise an error if two extensions have the same name, flag or command."""
    owners: dict[str, str] = {}  # name, flag or command -> name of the extension that has it
    for extension in extensions:
        # All that must be unique, in words.
        unique_texts = [f"name {extension.name}"]
        unique_texts += [
            f"flag --holmes-{option.name.replace('_', '-')}" for option in extension.options
        ]
        unique_texts += [f"command {command!r}" for command in extension.commands]
        for text in unique_texts:
            if text in owners:
                first = owners[text]
                raise HolmesError(
                    f"two extensions have the {text}: {first} and {extension.name}; uninstall one of them"
                )
            owners[text] = extension.name


def load(reference: str) -> Any:
    """Import and return the module or the object of a text "module" or "module:attribute"."""
    module, _, attribute = reference.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, attribute) if attribute else imported


def options() -> dict[str, Option]:
    """Return the options of all extensions: name -> option."""
    return {option.name: option for extension in found().extensions for option in extension.options}


def bare_value(name: str) -> str:
    """Return the value that an option gets from a flag without a value (`--holmes-check`); "" if none."""
    option = options().get(name)
    return option.bare_value if option else ""


def refuse_separate_values(argv: list[str]) -> None:
    """Raise HolmesError for `--holmes-check json` if this flag takes a value only after "=".

    The next word is not an error if it is no possible value of the flag: then it belongs to the script.
    All words after a lone "--" belong to the script, too.
    """
    for argument, word in itertools.pairwise(argv):
        if argument == "--":
            return
        if not argument.startswith("--holmes-"):
            continue
        option = options().get(argument.removeprefix("--holmes-").replace("-", "_"))
        if option and option.bare_value and word.isalpha() and not option.check(word):
            raise HolmesError(
                f"{argument} {word}: write {argument}={word}; if {word!r} is the script's, put "
                f"{argument} last"
            )


def variables() -> dict[str, str]:
    """Return the environment variables of all extensions that belong to no flag: name -> help text."""
    return {
        name: text for extension in found().extensions for name, text in extension.variables.items()
    }


def commands() -> dict[str, str]:
    """Return the commands of all extensions: name -> module."""
    return {
        name: module
        for extension in found().extensions
        for name, module in extension.commands.items()
    }


def contributions(point: str) -> list[Contribution]:
    """Return all contributions of extensions to a contribution point (POINTS)."""
    return [
        Contribution(name, reference)
        for extension in found().extensions
        for name, reference in extension.contributions.get(point, {}).items()
    ]


def objects(point: str) -> dict[str, Any]:
    """Import and return all objects that extensions contribute to a contribution point: name -> object.

    An object that cannot be imported is left out, and problems() then returns a line with the reason.

    Args:
        point: Name of the contribution point, such as "nic_kinds" (POINTS lists all).
    """
    loaded = {}
    for contribution in contributions(point):
        try:
            loaded[contribution.name] = contribution.load()
        except Exception as error:  # an error of another package must not end a job
            _note_problem(f"{contribution.reference} ({point} {contribution.name})", error)
    return loaded


def problems() -> list[str]:
    """Return a line for each extension, or part of one, that is left out because it could not be loaded."""
    return [*found().problems, *dict.fromkeys(_problems)]


#: One line for each contribution that could not be loaded.
_problems: list[str] = []


def _note_problem(name: str, error: Exception) -> None:
    _problems.append(_left_out(name, error))


def _left_out(name: str, error: Exception) -> str:
    """Return the line for the user about an extension, or a part of it, that cannot be loaded."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"extension {name} is left out: {reason}"


def contributed(point: str, name: str) -> Any:
    """Import and return one object that an extension contributes.

    Args:
        point: Name of the contribution point, such as "reductions".
        name: Name of the object at this point.

    Raises:
        HolmesError: no extension contributes it.
    """
    for contribution in contributions(point):
        if contribution.name == name:
            return contribution.load()
    raise HolmesError(
        f"no extension of holmes contributes {name!r} to {point}; install the one that does"
    )


def features() -> tuple[str, ...]:
    """Return the names of all features that installed extensions patch; no extension is imported.

    A feature is a set of patches to a framework that is switched on or off as a whole. An extension is
    a package that adds patches, commands or the like to holmes (see the module docstring).
    """
    names: list[str] = []
    for extension in found().extensions:
        for features_of_module in extension.patches.values():
            names += features_of_module
    return tuple(names)


def patch_modules(options: Options | None = None) -> list[str]:
    """Return the modules with patches of the active extensions; without options, of all extensions."""
    return [
        module
        for extension in found().extensions
        if options is None or extension.is_active(options)
        for module in extension.patches
    ]


def hooks_of(current: Session) -> dict[str, list[Callable[..., Any]]]:
    """Return the functions of the active extensions that holmes calls in a job.

    Hooks are called at certain points, such as on_start. A function in "reductions" may replace
    holmes's hierarchical all-reduce of a group. A hook's module is imported when the hook is called
    first. on_stop is an exception: it is skipped if its module was not imported before.

    Args:
        current: State of holmes in this process.

    Returns:
        Name of a hook, or "reductions" -> functions.
    """
    functions: dict[str, list[Callable[..., Any]]] = {}
    for extension in found().extensions:
        if not (extension.is_active(current.options) and extension.applies_to(current)):
            continue
        for name, reference in extension.hooks.items():
            functions.setdefault(name, []).append(_on_call(reference, loads=name != "on_stop"))
        for reference in extension.contributions.get("reductions", {}).values():
            functions.setdefault("reductions", []).append(load(reference))
    return functions


def _on_call(reference: str, loads: bool) -> Callable[..., Any]:
    """Return a function that imports a module when it is called, and calls a function of the module.

    Args:
        reference: "module:function".
        loads: True: the call imports the module if necessary. False: the call has no effect unless
            the module has been imported before, for example by another hook.
    """

    def call(*arguments: Any) -> Any:
        if loads or reference.partition(":")[0] in sys.modules:
            return load(reference)(*arguments)  # load() imports the module and returns the function
        return None

    return call


def on_options(options: Options) -> list[str]:
    """Let the active extensions check the options, and return their lines for the user.

    Raises:
        HolmesError: an extension cannot do what the options ask for.
    """
    lines: list[str] = []
    for extension in found().extensions:
        if "on_options" in extension.hooks and extension.is_active(options):
            check_options = load(extension.hooks["on_options"])
            lines += check_options(options)
    return lines
