"""Checks that every patch passes on a parameter that a later release of the framework adds to its target.

For each patch of all_patches(), with and without an active holmes session:

1. Read the signature of the installed target (target_signatures.py), and add an optional parameter to it,
   ADDED_PARAMETER: at the end, or before the other optional parameters.
2. Make a fake target with this signature. It records which arguments it receives.
3. Put the patch on the fake target, as the engine does it (`Location`). Its wrapper is an isolated copy: all
   modules and objects that it uses are mocks (every_branch.py), so neither framework nor GPU is needed.
4. Call the patched fake target with a mock for each parameter, the added one included.
5. Repeat 2 to 4 for every path through the wrapper: each test of a mock is true in one run, false in another.
6. Check each path: the added argument reached the fake target, and no argument reached it under the name of
   another parameter. A wrapper that does the target's work itself, and does not call the target, must raise
   a HolmesError that names the added parameter instead.

New patches are checked without a change to this file. If a wrapper cannot be run in this way, add its patch
to UNCHECKED with the reason.
"""

import inspect
import itertools
import sys
from dataclasses import replace
from enum import Enum
from types import ModuleType

import pytest
from every_branch import IsolatedCopies, Mock, run_every_path
from target_signatures import installed_signature

from holmes_ext.errors import HolmesError
from holmes_ext.patches import all_patches
from holmes_ext.patches.engine.call import Call
from holmes_ext.patches.engine.location import Location
from holmes_ext.patches.engine.wrap import Running, by_name, inside
from holmes_ext.runtime import session

#: "feature target" -> why its wrapper cannot be run on every path.
UNCHECKED: dict[str, str] = {}

ADDED_PARAMETER = "added_parameter"
FAKE_MODULE = "holmes_fake_framework"  # the module in sys.modules that contains the fake target
Parameter = inspect.Parameter

#: Kinds of parameters, in the order in which Python demands them in a signature.
PARAMETER_KINDS = (
    Parameter.POSITIONAL_ONLY,
    Parameter.POSITIONAL_OR_KEYWORD,
    Parameter.VAR_POSITIONAL,
    Parameter.KEYWORD_ONLY,
    Parameter.VAR_KEYWORD,
)


class Insertion(Enum):
    """Position of the added parameter in the signature."""

    LAST = "last"
    FIRST_OPTIONAL = "before the other optional parameters"


class CallStyle(Enum):
    """How a program passes arguments."""

    ALL_BY_POSITION = "all arguments, by position where possible"
    ALL_BY_KEYWORD = "all arguments, by keyword where possible"
    REQUIRED_ONLY = "required arguments and the added one"


class Outcome(Enum):
    """End of one call of the patched fake target."""

    DELIVERED = "the added argument reached the target"
    REFUSED = "a HolmesError names the added parameter"
    OTHER_ERROR = "an error that has nothing to do with the added parameter"


def name_of(patch):
    return f"{patch.feature.name} {patch.target}"


PATCHES = {name_of(patch): patch for patch in all_patches()}
CHECKED = {name: patch for name, patch in PATCHES.items() if name not in UNCHECKED}


def with_added_parameter(signature, insertion):
    """Return the signature with ADDED_PARAMETER, keyword-only if the target has such parameters or *args."""
    of_kind = {kind: [] for kind in PARAMETER_KINDS}
    for parameter in signature.parameters.values():
        of_kind[parameter.kind].append(parameter)

    if of_kind[Parameter.KEYWORD_ONLY] or of_kind[Parameter.VAR_POSITIONAL]:
        kind = Parameter.KEYWORD_ONLY
        first_optional = 0  # keyword-only parameters need no order
    else:
        kind = Parameter.POSITIONAL_OR_KEYWORD
        required = [parameter for parameter in of_kind[kind] if parameter.default is Parameter.empty]
        first_optional = len(required)

    added = Parameter(ADDED_PARAMETER, kind, default=None)
    if insertion is Insertion.LAST:
        of_kind[kind].append(added)
    else:
        of_kind[kind].insert(first_optional, added)
    return signature.replace(parameters=list(itertools.chain.from_iterable(of_kind.values())))


def arguments_for(signature, style, mock_for):
    """Return (args, kwargs) of a call in this style, which includes ADDED_PARAMETER.

    Args:
        mock_for: Returns the argument for the parameter of this name.
    """
    args = []
    kwargs = {}
    for parameter in signature.parameters.values():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        is_required = parameter.default is Parameter.empty
        if style is CallStyle.REQUIRED_ONLY:
            if not is_required and parameter.name != ADDED_PARAMETER:
                continue
            prefers_position = is_required
        else:
            prefers_position = style is CallStyle.ALL_BY_POSITION

        argument = mock_for(parameter.name)
        if parameter.kind == Parameter.POSITIONAL_ONLY:
            args.append(argument)
        elif parameter.kind == Parameter.POSITIONAL_OR_KEYWORD and prefers_position:
            args.append(argument)
        else:
            kwargs[parameter.name] = argument
    return args, kwargs


def may_call_target(argument):
    """Return whether a helper function that receives this argument may call the target, and must be run."""
    return isinstance(argument, Call) or inspect.isfunction(argument)


class PatchedCall:
    """One call of a patched fake target, on one path through the patch's wrapper."""

    def __init__(self, patch, path, target_signature, has_session):
        self.patch = patch
        self.path = path
        self.signature = target_signature.signature
        self.decorator = target_signature.decorator  # staticmethod, classmethod or None
        self.has_session = has_session
        self.is_delivered = False  # whether the target, or a mock, has received the added argument
        self.misplaced = []  # sentences on arguments that the target did not receive as they were given
        self.added_argument = Mock(path, ADDED_PARAMETER)
        self.mock = Mock(path, on_receive=self.on_receive)  # for all that is no argument
        self.arguments = {ADDED_PARAMETER: self.added_argument}

    def on_receive(self, value):
        """Handle a value that the wrapper passes to a mock, such as a function of torch.

        The added argument counts as delivered: the wrapper passed it on. A `Call`, and a function without
        parameters (a hook), may call the target later. It is called now, because the mock never does it.
        """
        if value is self.added_argument:
            self.is_delivered = True
        elif isinstance(value, Call):
            value()
        elif inspect.isfunction(value) and not inspect.signature(value).parameters:
            value()

    def mock_for(self, name):
        """Return the argument for a parameter: a mock whose label is the parameter's name."""
        if name not in self.arguments:
            self.arguments[name] = Mock(self.path, name, self.on_receive)
        return self.arguments[name]

    def fake_target(self):
        """Return a function with the target's signature that records how its arguments arrive."""

        def target(*args, **kwargs):
            received = self.signature.bind(*args, **kwargs).arguments
            if received.get(ADDED_PARAMETER) is self.added_argument:
                self.is_delivered = True
            else:
                self.misplaced.append(f"{ADDED_PARAMETER} did not arrive")
            for name, value in received.items():
                if isinstance(value, Mock) and value.label not in ("", name):
                    self.misplaced.append(f"{value.label} arrived as {name}")
            return self.mock

        target.__signature__ = self.signature
        return self.decorator(target) if self.decorator else target

    def isolated_wrapper(self):
        """Return the patch's wrapper, copied for this path. A wrapper of the engine itself is not copied."""
        wrapper = self.patch.wrap
        if isinstance(wrapper, Running):
            return wrapper
        function = inspect.unwrap(wrapper)
        is_made_by_inside = function.__globals__ is inside.__globals__
        takes_session = next(iter(inspect.signature(function).parameters)) == "current"
        if is_made_by_inside or (takes_session and not self.has_session):
            return wrapper  # with_session calls the target if there is no session

        isolated = self.isolated_copies().copy(function)
        if hasattr(wrapper, "parameters"):
            isolated = by_name(isolated)
        if not takes_session:
            return isolated
        return lambda *arguments: isolated(self.mock, *arguments)

    def isolated_copies(self):
        replacements = {}
        if not self.has_session:
            no_session = type("NoSession", (), {"active": staticmethod(lambda: None)})
            replacements["session"] = no_session
        return IsolatedCopies(
            mock=self.mock,
            replacements=replacements,
            keep_none=not self.has_session,  # state that holmes sets only in a session
            must_run=may_call_target,
        )

    def call(self, style):
        """Put the patch on the fake target, and call the target as a program does."""
        module = ModuleType(FAKE_MODULE)
        sys.modules[FAKE_MODULE] = module
        is_method = "." in self.patch.qualname
        if is_method:
            module.Holder = type("Holder", (Mock,), {"target": self.fake_target()})
            self.apply_patch(f"{FAKE_MODULE}:Holder.target")
        else:
            module.target = self.fake_target()
            self.apply_patch(f"{FAKE_MODULE}:target")

        args, kwargs = arguments_for(self.signature, style, self.mock_for)
        if not is_method:
            module.target(*args, **kwargs)
        elif self.decorator:
            module.Holder.target(*args, **kwargs)
        else:
            if "self" in kwargs:
                del kwargs["self"]
            else:
                del args[0]
            holder = module.Holder(self.path, "self", self.on_receive)
            holder.target(*args, **kwargs)

    def apply_patch(self, target):
        """Apply an isolated copy of the patch to the fake target."""
        if self.patch.replace:
            isolated = self.isolated_copies().copy(self.patch.replace)
            changed = replace(self.patch, target=target, replace=isolated)
        else:
            changed = replace(self.patch, target=target, wrap=self.isolated_wrapper())
        location = Location(changed)
        location.check(changed)
        location.add(changed)

    def run(self, style):
        """Call the patched fake target, and return how the call ended.

        Raises:
            AssertionError: an argument got lost, or arrived under the name of another parameter.
        """
        try:
            self.call(style)
        except HolmesError as error:
            return Outcome.REFUSED if ADDED_PARAMETER in str(error) else Outcome.OTHER_ERROR
        except Mock:
            return Outcome.OTHER_ERROR  # an error that the framework or the wrapper raises
        situation = f"{style.value}, {self.signature}, branch {self.path.decisions}"
        assert not self.misplaced, f"{self.misplaced}: {situation}"
        assert self.is_delivered, f"neither passed on nor refused: {situation}"
        return Outcome.DELIVERED


@pytest.fixture(autouse=True)
def no_session():
    assert session.active() is None
    yield
    sys.modules.pop(FAKE_MODULE, None)


@pytest.mark.parametrize("has_session", [False, True], ids=["no session", "session"])
@pytest.mark.parametrize("patch", CHECKED.values(), ids=CHECKED)
def test_a_new_parameter_arrives(patch, has_session):
    target = installed_signature(patch)
    for insertion in Insertion:
        signature = with_added_parameter(target.signature, insertion)
        for style in CallStyle:
            check_every_path(patch, target._replace(signature=signature), style, has_session)


def check_every_path(patch, target_signature, style, has_session):
    """Assert that no path loses the added argument, and that at least one delivers or refuses it."""
    outcomes = set()

    def run(path):
        outcomes.add(PatchedCall(patch, path, target_signature, has_session).run(style))

    run_every_path(run)
    assert outcomes & {Outcome.DELIVERED, Outcome.REFUSED}, "every path ends in another error"


def test_patches_that_are_not_checked_exist():
    assert set(UNCHECKED) <= set(PATCHES)
