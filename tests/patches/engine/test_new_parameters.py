"""Every patch passes on a parameter that a later release of the framework adds to its target.

Each wrapper of all_patches() is put on a stand-in: a function with the signature of the installed target and
one parameter more. It is called with that parameter, on every branch of the wrapper (every_branch.py), with
and without a session. On each branch the argument must arrive at the target. A wrapper that does the target's
work itself must refuse the argument by its name instead.

A new patch needs no line here. If its wrapper cannot be run like this, add it to NOT_RUN with the reason.
"""

import inspect
import sys
from dataclasses import replace
from types import ModuleType

import pytest
from every_branch import Anything, Branches, explore
from target_signatures import installed_signature

from holmes_ext.errors import HolmesError
from holmes_ext.patches import all_patches
from holmes_ext.patches.engine.call import Call
from holmes_ext.patches.engine.location import Location
from holmes_ext.patches.engine.wrap import Running, by_name, inside
from holmes_ext.runtime import session

#: "feature target" -> why its wrapper cannot be run on every branch.
NOT_RUN: dict[str, str] = {}

NEW = "added_parameter"
P = inspect.Parameter


def name_of(patch):
    return f"{patch.feature.name} {patch.target}"


PATCHES = {name_of(patch): patch for patch in all_patches()}
RUN = {name: patch for name, patch in PATCHES.items() if name not in NOT_RUN}


def with_new(signature, place):
    """Return the signature with NEW as its last parameter, or before its other optional ones."""
    parameters = list(signature.parameters.values())
    by_position = [p for p in parameters if p.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    keyword_only = [p for p in parameters if p.kind == P.KEYWORD_ONLY]
    rest = {p.kind: p for p in parameters}
    required = [p for p in by_position if p.default is P.empty]
    only_by_keyword = bool(keyword_only) or P.VAR_POSITIONAL in rest
    new = P(NEW, P.KEYWORD_ONLY if only_by_keyword else P.POSITIONAL_OR_KEYWORD, default=None)
    if only_by_keyword:
        keyword_only.insert(len(keyword_only) if place == "last" else 0, new)
    else:
        by_position.insert(len(by_position) if place == "last" else len(required), new)
    variadic = [[rest[kind]] if kind in rest else [] for kind in (P.VAR_POSITIONAL, P.VAR_KEYWORD)]
    return signature.replace(parameters=[*by_position, *variadic[0], *keyword_only, *variadic[1]])


def arguments_for(signature, style, value_of):
    """Return (args, kwargs) of a call with NEW.

    style: "by position" and "by keyword" give all arguments, "left out" gives no other optional ones.
    """
    args, kwargs = [], {}
    for parameter in signature.parameters.values():
        if parameter.kind in (P.VAR_POSITIONAL, P.VAR_KEYWORD):
            continue
        optional = parameter.default is not P.empty and parameter.name != NEW
        if style == "left out" and optional:
            continue
        required = parameter.default is P.empty and style == "left out"
        if parameter.kind == P.POSITIONAL_ONLY or (
            parameter.kind == P.POSITIONAL_OR_KEYWORD and (style == "by position" or required)
        ):
            args.append(value_of(parameter.name))
        else:
            kwargs[parameter.name] = value_of(parameter.name)
    return args, kwargs


def must_run(value):
    return isinstance(value, Call) or inspect.isfunction(value)


class Run:
    """One call of a patched stand-in, on one branch."""

    def __init__(self, patch, branch, signature, kind, with_session):
        self.patch, self.signature, self.kind = patch, signature, kind
        self.branch, self.with_session = branch, with_session
        self.arrived, self.lost = False, []
        self.new = Anything(branch, NEW)
        self.anything = Anything(branch, on_given=self.given)
        self.objects = {NEW: self.new}

    def given(self, value):
        """Note a value that something else than the target receives; call what may call the target later."""
        if value is self.new:
            self.arrived = True
        elif isinstance(value, Call):
            value()
        elif inspect.isfunction(value) and not inspect.signature(value).parameters:
            value()

    def value_of(self, name):
        return self.objects.setdefault(name, Anything(self.branch, name, self.given))

    def stand_in(self):
        """Return the target's stand-in, which notes what arrives."""

        def target(*args, **kwargs):
            arguments = self.signature.bind(*args, **kwargs).arguments
            self.arrived |= arguments.get(NEW) is self.new
            if arguments.get(NEW) is not self.new:
                self.lost.append(NEW)
            for name, value in arguments.items():
                if isinstance(value, Anything) and value.label not in ("", name):
                    self.lost.append(f"{value.label} arrived as {name}")
            return self.anything

        target.__signature__ = self.signature
        return self.kind(target) if self.kind else target

    def wrap(self):
        """Return the patch's wrapper, copied for this branch."""
        wrap = self.patch.wrap
        original = inspect.unwrap(wrap)
        takes_session = next(iter(inspect.signature(original).parameters)) == "current"
        if isinstance(wrap, Running) or original.__globals__ is inside.__globals__:
            return wrap
        if takes_session and not self.with_session:
            return wrap  # the target runs
        copy = self.copies().clone(original)
        copied = by_name(copy) if hasattr(wrap, "parameters") else copy
        if not takes_session:
            return copied
        return lambda *arguments: copied(self.anything, *arguments)

    def copies(self):
        present = {}
        if not self.with_session:
            absent = type("Absent", (), {"active": staticmethod(lambda: None)})
            present = {"session": absent}
        return Branches(self.anything, present, not self.with_session, must_run)

    def call(self, style):
        """Put the patch on the stand-in, by the engine's own Location, and call it."""
        module = sys.modules[STAND_IN] = ModuleType(STAND_IN)
        in_class = "." in self.patch.qualname
        methods = {"target": self.stand_in()} if in_class else {}
        module.Holder = type("Holder", (Anything,), methods)
        if not in_class:
            module.target = self.stand_in()
        place = f"{STAND_IN}:{'Holder.target' if in_class else 'target'}"
        if self.patch.replace:
            changed = replace(self.patch, target=place, replace=self.copies().clone(self.patch.replace))
        else:
            changed = replace(self.patch, target=place, wrap=self.wrap())
        location = Location(changed)
        location.check(changed)
        location.add(changed)
        args, kwargs = arguments_for(self.signature, style, self.value_of)
        if not in_class:
            module.target(*args, **kwargs)
        elif self.kind:
            module.Holder.target(*args, **kwargs)
        else:
            args = args[1:] if "self" not in kwargs else args
            kwargs.pop("self", None)
            module.Holder(self.branch, "self", self.given).target(*args, **kwargs)


STAND_IN = "holmes_stand_in"


@pytest.fixture(autouse=True)
def no_session():
    assert session.active() is None
    yield
    sys.modules.pop(STAND_IN, None)


@pytest.mark.parametrize("with_session", [False, True], ids=["no session", "session"])
@pytest.mark.parametrize("patch", RUN.values(), ids=RUN)
def test_a_new_parameter_arrives(patch, with_session):
    signature, kind = installed_signature(patch)
    for place in ("last", "first optional"):
        for style in ("by position", "by keyword", "left out"):
            check(patch, with_new(signature, place), kind, style, with_session)


def check(patch, signature, kind, style, with_session):
    verdicts = []

    def run(branch):
        attempt = Run(patch, branch, signature, kind, with_session)
        where = f"{style}, {signature}, branch {branch.decisions}"
        try:
            attempt.call(style)
        except HolmesError as error:
            verdicts.append(NEW in str(error))  # else the wrapper refuses something of its own
            return
        except Anything:
            return  # an error that the framework or the wrapper raises
        assert not attempt.lost, f"{attempt.lost}: {where}"
        assert attempt.arrived, f"neither passed on nor refused: {where}"
        verdicts.append(True)

    explore(run)
    assert any(verdicts), "no branch ends"


def test_patches_that_are_not_run_exist():
    assert set(NOT_RUN) <= set(PATCHES)
