"""Signatures of the functions that holmes patches, read from the installed sources: nothing is imported."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from checkouts import find_checkout

from holmes_ext.patches import Patch
from holmes_ext.patches.engine.source import _parsed, _statements, find_module

P = inspect.Parameter

#: Distribution of a feature -> its checkout, where it is not installed.
CHECKOUTS = {"megatron-lm": "Megatron-LM", "megatron-deepspeed": "Megatron-DeepSpeed"}


def installed_signature(patch: Patch) -> tuple[inspect.Signature, type | None]:
    """Return (signature, kind) of the target; kind is its wrapper type, such as staticmethod, or None.

    It is read from the source, so nothing is imported. Where the framework or the target is not there, or is
    no Python, the signature has the parameters that the patch relies on.
    """
    node = definition(patch)
    if node is None:
        names = [*(["self"] if "." in patch.qualname else []), *(patch.parameters or ("first", "second"))]
        parameters = [P(name, P.POSITIONAL_OR_KEYWORD) for name in names]
        return inspect.Signature([*parameters, P("other", P.POSITIONAL_OR_KEYWORD, default=None)]), None
    decorators = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    kinds = [kind for kind in (staticmethod, classmethod) if kind.__name__ in decorators]
    return signature_of_definition(node.args), kinds[0] if kinds else None


def definition(patch: Patch) -> ast.FunctionDef | None:
    """Return the target's definition in the installed source, or in the checkout of a framework; or None."""
    source = source_of(patch)
    if source is None:
        return None
    node: Any = _parsed(source)
    for name in patch.qualname.split("."):
        definitions = [
            statement
            for statement in _statements(node.body)
            if isinstance(statement, (ast.ClassDef, ast.FunctionDef))
        ]
        found = [statement for statement in definitions if statement.name == name]
        if not found:
            return None
        node = found[-1]  # after its overloads
    return node if isinstance(node, ast.FunctionDef) else None


def source_of(patch: Patch) -> str | None:
    framework = patch.feature.requirement.name
    if framework not in CHECKOUTS:
        spec = find_module(patch.module)
        return spec.loader.get_source(patch.module) if spec else None  # type: ignore[union-attr]
    root = find_checkout(CHECKOUTS[framework])
    if root is None:
        return None
    module = root.joinpath(*patch.module.split("."))
    for file in (module.with_suffix(".py"), module / "__init__.py"):
        if file.exists():
            return file.read_text()
    return None


def signature_of_definition(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of an ast.arguments; defaults that are no literals become None."""

    def parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
        if default is None:
            return P(argument.arg, kind)
        value = ast.literal_eval(default) if isinstance(default, ast.Constant) else None
        return P(argument.arg, kind, default=value)

    by_position = [
        *((argument, P.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument, P.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    defaults = [*[None] * (len(by_position) - len(arguments.defaults)), *arguments.defaults]
    parameters = [parameter(*pair, default) for pair, default in zip(by_position, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(P(arguments.vararg.arg, P.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(parameter(argument, P.KEYWORD_ONLY, default))
    if arguments.kwarg:
        parameters.append(P(arguments.kwarg.arg, P.VAR_KEYWORD))
    return inspect.Signature(parameters)
