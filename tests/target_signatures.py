"""Reads the signatures of functions of torch and other frameworks from their source files.

holmes, a plugin, patches these functions: it replaces them by functions that do more. The frameworks are not
imported, because some of them need a GPU, or have side effects, when they are imported.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any, NamedTuple

from checkouts import find_checkout

from holmes_ext.patches import Patch
from holmes_ext.patches.engine.location import _parsed, _statements, find_module

Parameter = inspect.Parameter

#: Name of a framework that is not installed as a package -> name of its checkout (checkouts.py).
CHECKOUTS = {"megatron-lm": "Megatron-LM", "megatron-deepspeed": "Megatron-DeepSpeed"}


class TargetSignature(NamedTuple):
    """Signature of a framework's function that is patched, as the framework defines it."""

    signature: inspect.Signature  # that of a method includes `self`
    decorator: type | None  # staticmethod, classmethod, or None


def installed_signature(patch: Patch) -> TargetSignature:
    """Return the signature of the patched function in the installed release of the framework.

    If the framework is not installed, or the function is not written in Python, a signature is made up. It
    has the parameters that the patch reads, and an optional parameter named `other`.
    """
    node = find_definition(patch)
    if node is None:
        return TargetSignature(_assumed_signature(patch), decorator=None)
    # A decorator such as @staticmethod is an ast.Name. Decorators that are calls do not matter here.
    decorator_names = {name.id for name in node.decorator_list if isinstance(name, ast.Name)}
    decorator: type | None = None
    if "staticmethod" in decorator_names:
        decorator = staticmethod
    elif "classmethod" in decorator_names:
        decorator = classmethod
    return TargetSignature(signature_of_definition(node.args), decorator)


def _assumed_signature(patch: Patch) -> inspect.Signature:
    names = list(patch.parameters or ("first", "second"))
    is_method = "." in patch.qualname
    if is_method:
        names.insert(0, "self")
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    parameters.append(Parameter("other", Parameter.POSITIONAL_OR_KEYWORD, default=None))
    return inspect.Signature(parameters)


def find_definition(patch: Patch) -> ast.FunctionDef | None:
    """Return the syntax tree of the patched function, or None if its source code is not found."""
    source = read_source(patch)
    if source is None:
        return None
    node: Any = _parsed(source)  # the syntax tree of the module
    for name in patch.qualname.split(
        "."
    ):  # of a method such as "Engine.step": the class, then the function
        definitions = []
        for statement in _statements(node.body):  # also those inside `if` and `try`
            if isinstance(statement, (ast.ClassDef, ast.FunctionDef)) and statement.name == name:
                definitions.append(statement)
        if not definitions:
            return None
        node = definitions[-1]  # the earlier ones are declarations with @overload
    return node if isinstance(node, ast.FunctionDef) else None


def read_source(patch: Patch) -> str | None:
    """Return the source text of the module that contains the patched function.

    Returns:
        None if the framework is not on this machine.
    """
    framework = patch.feature.requirement.name
    if framework not in CHECKOUTS:  # an installed package
        spec = find_module(patch.module)  # without importing it
        if spec is None:
            return None
        return spec.loader.get_source(patch.module)  # type: ignore[union-attr]
    # Megatron-LM and Megatron-DeepSpeed run from a checkout of their git repository.
    root = find_checkout(CHECKOUTS[framework])
    if root is None:
        return None
    module = root.joinpath(*patch.module.split("."))
    for file in (module.with_suffix(".py"), module / "__init__.py"):
        if file.exists():
            return file.read_text()
    return None


def signature_of_definition(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of a function, given the part of its syntax tree that lists the parameters.

    Default values that are not literals are not evaluated; they become None.
    """
    parameters = []
    by_position = [*arguments.posonlyargs, *arguments.args]
    # `arguments.defaults` belong to the last of these parameters. The others are required.
    count_required = len(by_position) - len(arguments.defaults)
    defaults = [
        *[None] * count_required,
        *arguments.defaults,
    ]  # syntax trees; None for a required one
    for number, (argument, default) in enumerate(zip(by_position, defaults, strict=True)):
        kind = Parameter.POSITIONAL_OR_KEYWORD
        if number < len(arguments.posonlyargs):
            kind = Parameter.POSITIONAL_ONLY
        parameters.append(_parameter(argument, kind, default))
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, Parameter.KEYWORD_ONLY, default))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    if default is None:
        return Parameter(argument.arg, kind)
    if isinstance(default, ast.Constant):
        return Parameter(argument.arg, kind, default=ast.literal_eval(default))
    return Parameter(argument.arg, kind, default=None)
