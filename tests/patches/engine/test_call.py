"""Tests that a wrapper of a framework's function reads arguments by name, and passes on all others.

A wrapper runs in place of a function, its target. The decorator `by_name` (engine/wrap.py) gives it

    call        calls the target with the program's arguments, of which it may change some
    instance    the object, if the target is a method
    ...         the arguments of the target that have the names of the wrapper's other parameters

The targets in these tests are the functions of FRAMEWORK. They return the arguments that they receive.
"""

import sys
from types import ModuleType

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.location import Location, Misfit
from holmes_ext.patches.engine.patch import Feature, Patch
from holmes_ext.patches.engine.wrap import (
    Running,
    arguments_of,
    by_name,
    inside,
    signature_of,
    with_session,
)

NAME = "framework_of_calls"
FRAMEWORK = """
def decorated(function):
    def hidden(*args, **kwargs):
        return function(*args, **kwargs)
    return hidden

def before(tensor, group=None): return "before", tensor, group
def inserted(tensor, scale=1, group=None): return "inserted", tensor, scale, group
def keyword_only(*, tensor, scale=1, group=None): return "keyword_only", tensor, scale, group
def any_args(tensor, group=None, *rest, scale=1, **more): return "any_args", tensor, group, rest, scale, more
def positional(tensor, scale=1, group=None, /, **more): return "positional", tensor, scale, group, more
@decorated
def hidden(tensor, scale=1, group=None): return "hidden", tensor, scale, group

class Engine:
    def __init__(self, tensor, scale=1, group=None): self.made = tensor, scale, group
    def method(self, tensor, scale=1, group=None): return "method", tensor, scale, group
    @staticmethod
    def static(tensor, scale=1, group=None): return "static", tensor, scale, group
    @classmethod
    def of_class(cls, tensor, scale=1, group=None): return cls.__name__, tensor, scale, group
"""


@pytest.fixture
def framework():
    module = ModuleType(NAME)
    sys.modules[NAME] = module
    exec(FRAMEWORK, vars(module))
    yield module
    del sys.modules[NAME]


def apply(wrap, qualname, **fields):
    """Put the wrapper in place of a function or method of FRAMEWORK, the fake framework of these tests."""
    # A feature is a group of patches that are enabled together. Its name and version do not matter here.
    patch = Patch(
        feature=Feature("f", "torch>=2"),
        target=f"{NAME}:{qualname}",
        reason="a test",
        wrap=wrap,
        **fields,
    )
    location = Location(patch)  # finds the target
    location.check(patch)  # raises Misfit if the target lacks a parameter that the wrapper reads
    location.add(patch)


@by_name
def double(call, instance, tensor, group):
    """Call the target with twice the `tensor`, and return `group` with the result."""
    return group, call(tensor=2 * tensor)


def function_of(framework, qualname):
    """Return a function of the fake framework by its name, such as "hidden" or "Engine.method"."""
    if not qualname.startswith("Engine."):
        return getattr(framework, qualname)
    engine = framework.Engine(0)
    return getattr(engine, qualname.removeprefix("Engine."))


METHODS = ("Engine.method", "Engine.static", "Engine.of_class")


@pytest.mark.parametrize("qualname", ["inserted", "keyword_only", "hidden", *METHODS])
def test_arguments_by_keyword_are_found(framework, qualname):
    """The wrapper reads `tensor` and `group`, and passes on `scale`, wherever they are in the signature."""
    original = function_of(framework, qualname)
    expected = original(tensor=10, scale=3, group="g")
    expected_with_defaults = original(tensor=10)
    apply(double, qualname)
    patched = function_of(framework, qualname)
    assert patched(tensor=5, scale=3, group="g") == ("g", expected)
    assert patched(tensor=5) == (None, expected_with_defaults)


@pytest.mark.parametrize("qualname", ["inserted", "positional", "hidden", *METHODS])
def test_arguments_by_position_are_found(framework, qualname):
    """The wrapper reads `tensor` and `group`, and passes on `scale`, which stands between them."""
    original = function_of(framework, qualname)
    expected = original(10, 3, "g")
    expected_with_defaults = original(10)
    apply(double, qualname)
    patched = function_of(framework, qualname)
    assert patched(5, 3, "g") == ("g", expected)
    assert patched(5) == (None, expected_with_defaults)


def test_arguments_of_a_variadic_target_are_found(framework):
    apply(double, "any_args")
    expected = ("any_args", 10, "g", ("more",), 3, {"x": 4})
    assert framework.any_args(5, "g", "more", scale=3, x=4) == ("g", expected)
    assert framework.any_args(5) == (None, ("any_args", 10, None, (), 1, {}))


def test_a_positional_only_argument_that_was_left_out_is_changed(framework):
    apply(by_name(lambda call, instance: call(group="new")), "positional")
    assert framework.positional(1, x=2) == ("positional", 1, 1, "new", {"x": 2})


def test_the_constructor_of_a_class(framework):
    @by_name
    def scaled(call, instance, scale):
        call(scale=2 * scale)
        instance.seen = scale

    apply(scaled, "Engine.__init__")
    engine = framework.Engine(1, group="g")
    assert (engine.made, engine.seen) == ((1, 2, "g"), 1)


def test_a_wrapper_may_call_the_target_often_or_never(framework):
    @by_name
    def several(call, instance, tensor):
        return [call(tensor=one) for one in tensor]

    apply(several, "inserted")
    assert framework.inserted([1, 2], 5) == [("inserted", 1, 5, None), ("inserted", 2, 5, None)]
    assert framework.inserted([]) == []


def test_a_parameter_that_some_versions_lack(framework):
    @by_name
    def wrap(call, instance, tensor, scale="none"):
        return call.accepts("scale"), scale

    assert wrap.parameters == ("tensor",)
    apply(wrap, "before")
    apply(wrap, "inserted")
    assert framework.before(1) == (False, "none")
    assert framework.inserted(1) == (True, 1) and framework.inserted(1, 7) == (True, 7)


def test_a_required_parameter_that_is_gone_is_a_misfit(framework):
    with pytest.raises(Misfit, match="has no parameter dtype"):
        apply(by_name(lambda call, instance, dtype: call()), "inserted")
    with pytest.raises(Misfit, match="has no parameter color, dtype"):
        apply(by_name(lambda call, instance, dtype: call()), "inserted", parameters=("color",))


def test_wrong_calls_raise_pythons_own_error(framework):
    apply(double, "inserted")
    with pytest.raises(TypeError, match="missing a required argument: 'tensor'"):
        framework.inserted(group=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtype'"):
        framework.inserted(1, dtype=2)
    with pytest.raises(TypeError, match="missing a required argument: 'tensor'"):
        arguments_of(framework.before, (), {})


def test_all_arguments_by_name(framework):
    seen = []

    @by_name
    def wrap(call, instance):
        seen.append((call.arguments(), call.given()))
        return call()

    apply(wrap, "inserted")
    framework.inserted(1, group=2)
    assert seen == [({"tensor": 1, "scale": 1, "group": 2}, {"tensor": 1, "group": 2})]


def test_a_wrapper_with_variadic_parameters_is_refused():
    with pytest.raises(TypeError, match="name the arguments that it reads"):
        by_name(lambda call, instance, tensor, *rest: call())
    with pytest.raises(TypeError, match="name the arguments that it reads"):
        by_name(lambda call, instance, **more: call())


@by_name
def instead(call, instance, tensor):
    call.refuse_unread_arguments()
    return "instead", tensor


def test_a_wrapper_that_replaces_the_target_refuses_what_it_does_not_know(framework):
    apply(instead, "inserted")
    assert framework.inserted(1) == ("instead", 1)
    assert framework.inserted(1, 1, None) == framework.inserted(tensor=1, scale=1) == ("instead", 1)
    with pytest.raises(
        HolmesError, match="inserted was called with scale, group, which holmes does not"
    ):
        framework.inserted(1, 2, "g")
    apply(instead, "any_args")
    with pytest.raises(HolmesError, match="argument 2: 'x', color"):
        framework.any_args(1, None, "x", color=1)


def test_without_a_session_the_target_is_called_as_it_was(framework):
    @with_session
    @by_name
    def wrap(current, call, instance, tensor):
        raise AssertionError("there is a session")

    assert wrap.parameters == ("tensor",)
    apply(wrap, "inserted")
    assert framework.inserted(1, group=2) == ("inserted", 1, 1, 2)


def test_wrappers_that_read_nothing(framework):
    """The wrappers `inside` and `Running` pass on all arguments of the method that they wrap."""
    running = Running()  # a wrapper that lists the objects whose method is running
    running_on_entry = []

    class Context:
        def __enter__(self):
            running_on_entry.append(list(running.instances))

        def __exit__(self, *_):
            pass

    apply(inside(Context), "Engine.method")  # calls the method within `with Context():`
    apply(running, "Engine.method")  # wraps the wrapper above, so it is called first
    engine = framework.Engine(0)
    # def method(self, tensor, scale=1, group=None) returns its name and its arguments.
    assert engine.method(1, group=2) == ("method", 1, 1, 2)
    assert running_on_entry == [[engine]]
    assert running.instances == []  # the method has ended


def test_the_signature_behind_a_decorator_that_hides_it(framework):
    assert list(signature_of(framework.hidden).parameters) == ["tensor", "scale", "group"]
    apply(double, "hidden")  # and behind holmes's own wrapper
    assert list(signature_of(framework.hidden).parameters) == ["tensor", "scale", "group"]
