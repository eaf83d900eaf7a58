"""Tests that holmes's wrappers of framework functions pass on parameters that a later release may add.

holmes patches functions of torch, DeepSpeed and Megatron: a wrapper runs in place of the function, its
target, and usually calls it. For each patch, the test does the following:

1. It makes a fake target: a function with the signature of the installed target, and with one more optional
   parameter, ADDED_PARAMETER. The function records which arguments it receives.
2. It patches the fake target as holmes does, and calls it with an argument for each parameter.
3. It repeats this for every path through the wrapper. The arguments, and all modules that the wrapper uses,
   are mock objects (every_branch.py). Therefore the test needs neither the framework nor a GPU.

On each path, the added argument must reach the fake target, and no argument may arrive under the name of
another parameter. A wrapper that does not call its target must instead raise a HolmesError that names the
added parameter.

If a wrapper cannot be run in this way, add its patch to UNCHECKED with the reason.
"""

import inspect
import itertools
import sys
from dataclasses import replace
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
from every_branch import IsolatedCopies, Mock, run_every_path
from target_signatures import installed_signature

from holmes_ext.errors import HolmesError
from holmes_ext.patches import all_patches
from holmes_ext.patches.engine.location import Location
from holmes_ext.patches.engine.wrap import Call, Running, by_name, inside
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
    """Position of a parameter that is added to a function's signature."""

    LAST = "last"
    FIRST_OPTIONAL = "before the other optional parameters"


class CallStyle(Enum):
    """Which arguments a call passes to a function, and whether by position or by keyword."""

    ALL_BY_POSITION = "all arguments, by position where possible"
    ALL_BY_KEYWORD = "all arguments, by keyword where possible"
    REQUIRED_ONLY = "required arguments and the added one"


class Outcome(Enum):
    """How a call of a patched function ended. The call passes an argument for an added parameter."""

    DELIVERED = "the added argument reached the target"
    REFUSED = "a HolmesError names the added parameter"
    OTHER_ERROR = "an error that has nothing to do with the added parameter"


def name_of(patch):
    return f"{patch.feature.name} {patch.target}"


PATCHES = {name_of(patch): patch for patch in all_patches()}
CHECKED = {name: patch for name, patch in PATCHES.items() if name not in UNCHECKED}


def with_added_parameter(signature, insertion):
    """Return a copy of the signature with one more optional parameter, ADDED_PARAMETER.

    The parameter is keyword-only if the signature has keyword-only parameters or *args. Otherwise it may be
    passed by position, too.

    Args:
        signature: An inspect.Signature.
        insertion: Whether the parameter is the last one, or stands before the other optional parameters.
    """
    parameters_by_kind = {kind: [] for kind in PARAMETER_KINDS}
    for parameter in signature.parameters.values():
        parameters_by_kind[parameter.kind].append(parameter)

    if parameters_by_kind[Parameter.KEYWORD_ONLY] or parameters_by_kind[Parameter.VAR_POSITIONAL]:
        kind = Parameter.KEYWORD_ONLY
        required_count = 0  # optional keyword-only parameters may stand before required ones
    else:
        kind = Parameter.POSITIONAL_OR_KEYWORD
        required = [parameter for parameter in parameters_by_kind[kind] if is_required(parameter)]
        required_count = len(required)

    added = Parameter(ADDED_PARAMETER, kind, default=None)
    if insertion is Insertion.LAST:
        parameters_by_kind[kind].append(added)
    else:
        parameters_by_kind[kind].insert(required_count, added)
    # The keys of parameters_by_kind are in the order in which Python demands the kinds.
    parameters = list(itertools.chain.from_iterable(parameters_by_kind.values()))
    return signature.replace(parameters=parameters)


def is_required(parameter):
    return parameter.default is Parameter.empty


def arguments_for(signature, style, mock_for):
    """Return (args, kwargs) for a call of a function, always with an argument for ADDED_PARAMETER.

    Args:
        signature: The function's signature, which contains ADDED_PARAMETER.
        style: The CallStyle: which other arguments are passed, and whether by position or by keyword.
        mock_for: Returns the argument, a mock object, for a parameter, given its name.
    """
    args = []
    kwargs = {}
    for parameter in signature.parameters.values():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue  # nothing is passed for *args and **kwargs
        if style is CallStyle.REQUIRED_ONLY:
            is_passed = is_required(parameter) or parameter.name == ADDED_PARAMETER
            if not is_passed:
                continue
            prefers_position = is_required(
                parameter
            )  # ADDED_PARAMETER, which is optional, by keyword
        else:
            prefers_position = style is CallStyle.ALL_BY_POSITION

        argument = mock_for(parameter.name)
        may_take_position = parameter.kind == Parameter.POSITIONAL_OR_KEYWORD
        if parameter.kind == Parameter.POSITIONAL_ONLY or (may_take_position and prefers_position):
            args.append(argument)
        else:
            kwargs[parameter.name] = argument
    return args, kwargs


def may_call_target(argument):
    """Return whether a function that receives this argument may call the target (the patched function).

    The test runs a helper function of a wrapper if this is true for one of its arguments. Mock objects
    replace all other functions that a wrapper calls.
    """
    return isinstance(argument, Call) or inspect.isfunction(argument)


class PatchedCall:
    """A call of a patched function, which follows one path through the wrapper of the patch.

    The function (the target) is a fake. It has the signature of the real function and one more parameter,
    ADDED_PARAMETER, and records its arguments. All other objects that the wrapper uses are mock objects.
    """

    def __init__(self, patch, path, target_signature, has_session):
        """Prepare the call.

        Args:
            patch: The patch, whose wrapper is tested.
            path: The ExecutionPath, which decides whether each test of a mock object is true.
            target_signature: TargetSignature of the fake target.
            has_session: Whether the wrapper sees an active session: a job that runs under holmes.
        """
        self.patch = patch
        self.path = path
        self.signature = target_signature.signature
        self.decorator = (
            target_signature.decorator
        )  # of the target: staticmethod, classmethod or None
        self.has_session = has_session
        self.is_delivered = False  # whether the target, or a mock, has received the added argument
        self.misplaced = []  # sentences on arguments that the target did not receive as they were given
        self.added_argument = Mock(path, label=ADDED_PARAMETER)
        self.mock = Mock(path, on_receive=self.on_receive)  # for all that is not an argument
        self.arguments = {ADDED_PARAMETER: self.added_argument}

    def on_receive(self, value):
        """Handle a value that the wrapper passes to a mock object, for example to one in place of torch.

        If it is the added argument, the wrapper has passed it on, and it counts as delivered. If it is a
        function that may call the target, it is called at once: the mock object will not call it.
        """
        if value is self.added_argument:
            self.is_delivered = True
        elif isinstance(value, Call):  # the object by which the wrapper calls the target
            value()
        elif (
            inspect.isfunction(value) and not inspect.signature(value).parameters
        ):  # such as a hook
            value()

    def mock_for(self, name):
        """Return the mock object that is the argument for the parameter of this name."""
        if name not in self.arguments:
            self.arguments[name] = Mock(self.path, name, self.on_receive)
        return self.arguments[name]

    def fake_target(self):
        """Return a function with the target's signature, which records whether its arguments are right.

        It sets `is_delivered` if the added argument arrives. It adds a sentence to `misplaced` if that
        argument is missing, and for each argument that arrives under the name of another parameter.
        """

        def target(*args, **kwargs):
            received = self.signature.bind(
                *args, **kwargs
            ).arguments  # parameter's name -> argument
            if received.get(ADDED_PARAMETER) is self.added_argument:
                self.is_delivered = True
            else:
                self.misplaced.append(f"{ADDED_PARAMETER} did not arrive")
            for name, value in received.items():
                # The label of an argument is the name of its parameter; other mock objects have none.
                if isinstance(value, Mock) and value.label not in ("", name):
                    self.misplaced.append(f"{value.label} arrived as {name}")
            return self.mock

        target.__signature__ = self.signature  # inspect.signature(target) returns it
        return self.decorator(target) if self.decorator else target

    def isolated_wrapper(self):
        """Return a copy of the patch's wrapper in which mock objects replace all that it uses.

        Wrappers that use nothing besides the target (Running, inside) are returned as they are.
        """
        wrapper = self.patch.wrap
        if isinstance(wrapper, Running):
            return wrapper
        function = inspect.unwrap(wrapper)  # without the decorators by_name and with_session
        is_made_by_inside = (
            function.__globals__ is inside.__globals__
        )  # both are in the same module
        if is_made_by_inside:
            return wrapper
        # The decorator with_session calls its function with the session as the first argument, or, if there
        # is no session, calls only the target.
        first_parameter = next(iter(inspect.signature(function).parameters))
        takes_session = first_parameter == "current"
        if takes_session and not self.has_session:
            return wrapper

        isolated = self.isolated_copies().copy(function)
        has_by_name = hasattr(wrapper, "parameters")  # set by the decorator by_name
        if has_by_name:
            isolated = by_name(isolated)  # the copy is of the undecorated function
        if not takes_session:
            return isolated
        mock_session = self.mock
        return lambda *arguments: isolated(mock_session, *arguments)  # as with_session does

    def isolated_copies(self):
        """Return an object that copies functions, and replaces all that they use by mock objects.

        If the call is to have no session, `session.active()` returns None in these copies.
        """
        replacements = {}  # name of a module variable -> its value, if that is not a mock object
        if not self.has_session:
            replacements["session"] = SimpleNamespace(active=lambda: None)
        return IsolatedCopies(
            mock=self.mock,
            replacements=replacements,
            keep_none=not self.has_session,  # state that holmes sets only in a session
            must_run=may_call_target,
        )

    def call(self, style):
        """Patch the fake target, and call it as a program does.

        Args:
            style: The CallStyle: which arguments are passed, and whether by position or by keyword.
        """
        module = ModuleType(FAKE_MODULE)  # contains the fake target
        sys.modules[FAKE_MODULE] = module
        is_method = "." in self.patch.qualname
        if is_method:
            # A class with the fake target as its method. All its other attributes are mock objects.
            module.Holder = type("Holder", (Mock,), {"target": self.fake_target()})
            self.apply_patch(f"{FAKE_MODULE}:Holder.target")
        else:
            module.target = self.fake_target()
            self.apply_patch(f"{FAKE_MODULE}:target")

        # mock_for(name) makes the argument for the parameter of this name.
        args, kwargs = arguments_for(self.signature, style, self.mock_for)
        if not is_method:
            module.target(*args, **kwargs)
        elif self.decorator:  # a static method or class method
            module.Holder.target(*args, **kwargs)
        else:
            # Python passes the object as `self`, so the call must not contain an argument for it. `self` is
            # the first parameter of the signature.
            if "self" in kwargs:
                del kwargs["self"]
            else:
                del args[0]
            holder = module.Holder(self.path, "self", self.on_receive)
            holder.target(*args, **kwargs)

    def apply_patch(self, target):
        """Patch the fake target with a copy of the patch that uses mock objects.

        Args:
            target: Name of the fake target, "module:function" or "module:class.method".
        """
        if self.patch.replace:
            isolated = self.isolated_copies().copy(self.patch.replace)
            changed = replace(self.patch, target=target, replace=isolated)
        else:
            changed = replace(self.patch, target=target, wrap=self.isolated_wrapper())
        location = Location(changed)  # finds the fake target in sys.modules
        location.check(changed)  # raises Misfit if a parameter is missing that the wrapper reads
        location.add(changed)  # replaces the fake target by the wrapper

    def run(self, style):
        """Call the patched target, and return the Outcome of the call.

        Args:
            style: The CallStyle: which arguments are passed, and whether by position or by keyword.

        Raises:
            AssertionError: an argument got lost, or arrived under the name of another parameter.
        """
        try:
            self.call(style)  # the fake target sets is_delivered and misplaced
        except HolmesError as error:
            if ADDED_PARAMETER in str(error):
                return Outcome.REFUSED  # by Call.refuse_unread_arguments()
            return Outcome.OTHER_ERROR
        except Mock:
            return (
                Outcome.OTHER_ERROR
            )  # the wrapper raised an exception class of a framework, here a mock
        situation = f"{style.value}, {self.signature}, branch {self.path.decisions}"
        assert not self.misplaced, f"{self.misplaced}: {situation}"
        assert self.is_delivered, f"neither passed on nor refused: {situation}"
        return Outcome.DELIVERED


@pytest.fixture(autouse=True)
def no_session():
    """Check that no earlier test left a session, and remove the module of the fake target after the test."""
    assert session.active() is None
    yield
    sys.modules.pop(FAKE_MODULE, None)


@pytest.mark.parametrize("has_session", [False, True], ids=["no session", "session"])
@pytest.mark.parametrize("patch", CHECKED.values(), ids=CHECKED)
def test_a_new_parameter_arrives(patch, has_session):
    target = installed_signature(patch)
    # `target` has the signature of the real function if the framework is installed.
    for insertion in Insertion:
        signature = with_added_parameter(target.signature, insertion)
        for style in CallStyle:
            check_every_path(patch, target._replace(signature=signature), style, has_session)


def check_every_path(patch, target_signature, style, has_session):
    """Assert that no path through a patch's wrapper loses the argument for the added parameter.

    On at least one path, the argument must reach the target, or an error must name the added parameter.
    """
    outcomes = set()

    def run(path):
        patched_call = PatchedCall(patch, path, target_signature, has_session)
        outcomes.add(patched_call.run(style))

    # Calls run() with one ExecutionPath after another. A path decides whether each test of a mock is true.
    run_every_path(run)
    # run() raises AssertionError if a path loses the argument. If all paths end in other errors, the test has
    # shown nothing.
    assert outcomes & {Outcome.DELIVERED, Outcome.REFUSED}, "every path ends in another error"


def test_patches_that_are_not_checked_exist():
    assert set(UNCHECKED) <= set(PATCHES)
