"""The registry against a small made-up framework, `fw<N>`, written to disk and imported for each test."""

import copy
import importlib
import itertools
import json
import pickle
import sys
import threading

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options, options_from
from holmes_ext.patches import Feature, Patch, Registry, disabled_features
from holmes_ext.patches.engine.location import source_misfit

COMM = """
import functools
def send(tensor, dst, group=None):
    return ("send", tensor, dst, group)
def recv(tensor, src): return ("recv", tensor, src)
DEBUG = None
OTHER = None
alias = send
class Base:
    def step(self, lr): return ("base step", lr)
class Engine(Base):
    def reduce(self, scale=1): return ("reduce", self.name, scale)
    @staticmethod
    def pick(a, b): return ("pick", a, b)
    @classmethod
    def make(cls, name):
        self = cls(); self.name = name; return self
    TABLE = {"reduce": reduce, Base: reduce, "other": len}
if DEBUG is None:
    def conditional(x): return x
"""
PIPE = """
from .comm import send, send as transmit
def forward(x): return transmit(x, 1)
"""
LATE = """
from .comm import send
"""
_number = itertools.count()


def sent(x, dst=1):
    return ("send", x, dst, None)


@pytest.fixture
def fw(tmp_path, monkeypatch):
    """Return the name of a fresh framework, version 1.5, not imported yet."""
    name = f"fw{next(_number)}"
    (tmp_path / name).mkdir()
    for file, text in {"__init__": "", "comm": COMM, "pipe": PIPE, "late": LATE}.items():
        (tmp_path / name / f"{file}.py").write_text(text)
    info = tmp_path / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("HOLMES_DISABLE", raising=False)
    yield name
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[module]


def tag(label):
    def wrapper(wrapped, instance, args, kwargs):
        return (label, wrapped(*args, **kwargs))

    return wrapper


def patch_of(
    fw,
    target="comm:send",
    feature="f",
    versions="",
    version_of=None,
    option="",
    idle=(),
    binding=False,
    **fields,
):
    if "replace" not in fields:
        fields.setdefault("wrap", tag(feature))
    its = Feature(
        feature,
        versions or f"{fw}>=1,<2",
        version_of=version_of,
        option=option,
        idle=idle,
        binding=binding,
    )
    return Patch(its, f"{fw}.{target}", "a test", **fields)


def load(fw, name):
    return importlib.import_module(f"{fw}.{name}")


def states(registry):
    return [status.state for status in registry.statuses()]


def test_patch_waits_for_its_module_and_reaches_from_imports(fw):
    registry = Registry([patch_of(fw, parameters=("tensor", "group"))])
    registry.enable(["f"])
    assert f"{fw}.comm" not in sys.modules and states(registry) == ["waiting"]
    comm, pipe = load(fw, "comm"), load(fw, "pipe")
    assert comm.send("x", 1) == ("f", sent("x"))
    assert pipe.forward("y") == ("f", sent("y"))
    assert states(registry) == ["applied"] and registry.statuses()[0].version == "1.5"


def test_copies_made_before_are_rebound_and_everything_is_undone_exactly(fw):
    comm, pipe = load(fw, "comm"), load(fw, "pipe")
    before = {module: dict(vars(module)) for module in (comm, pipe)}
    classes = {cls: dict(vars(cls)) for cls in (comm.Engine, comm.Base)}
    table = dict(comm.Engine.TABLE)
    registry = Registry(
        [
            patch_of(fw),
            patch_of(fw, "comm:Engine.pick"),
            patch_of(fw, "comm:Engine.make"),
            patch_of(fw, "comm:Engine.step"),
            patch_of(fw, "comm:Engine.reduce"),
        ]
    )
    registry.enable(["f"])
    assert pipe.transmit is pipe.send is comm.send is comm.alias is not before[comm]["send"]
    assert comm.Engine.pick(1, b=2) == ("f", ("pick", 1, 2)) == comm.Engine().pick(1, 2)
    label, engine = comm.Engine.make("e")
    assert label == "f" and type(engine) is comm.Engine
    assert engine.step(3) == ("f", ("base step", 3)) and comm.Base().step(3) == ("base step", 3)
    assert comm.OTHER is None

    late = load(fw, "late")  # copies the wrapper
    registry.undo()
    assert {module: dict(vars(module)) for module in (comm, pipe)} == before
    for cls, attributes in classes.items():
        assert vars(cls).keys() == attributes.keys()
        assert all(vars(cls)[name] is attributes[name] for name in attributes)
    assert "step" not in vars(comm.Engine)
    assert (
        all(comm.Engine.TABLE[key] is table[key] for key in table)
        and comm.Engine.TABLE.keys() == table.keys()
    )
    assert late.send is before[comm]["send"]
    assert states(registry) == ["off"] * 5

    registry.enable(["f"])
    assert comm.send("x", 1) == ("f", sent("x"))


def test_dict_entries_are_rebound_with_the_instance(fw):
    comm = load(fw, "comm")
    seen = []

    def wrapper(wrapped, instance, args, kwargs):
        seen.append(instance)
        return "wrapped", wrapped(*args, **kwargs)

    registry = Registry([patch_of(fw, "comm:Engine.reduce", wrap=wrapper)])
    registry.enable(["f"])
    engine = comm.Engine.make("e")
    assert engine.reduce(scale=2) == ("wrapped", ("reduce", "e", 2))
    for key in ("reduce", comm.Base):
        assert comm.Engine.TABLE[key].__get__(engine)(scale=2) == ("wrapped", ("reduce", "e", 2))
    assert seen == [engine] * 3
    assert comm.Engine.TABLE["other"] is len


def test_replace_also_constants_without_touching_equal_ones(fw):
    comm = load(fw, "comm")
    registry = Registry([patch_of(fw, "comm:DEBUG", replace=lambda original: "on")])
    registry.enable(["f"])
    assert (comm.DEBUG, comm.OTHER) == ("on", None)
    registry.undo()
    assert comm.DEBUG is None


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"versions": "{fw}>=2"}, "{fw} 1.5 is not supported (needs >=2)"),
        ({"versions": "no-such-framework"}, "no-such-framework is not installed"),
        ({"target": "comm:gone"}, "{fw}.comm has no gone"),
        ({"target": "comm:Engine.gone"}, "{fw}.comm has no Engine.gone"),
        ({"parameters": ("tensor", "tag")}, "{fw}.comm:send has no parameter tag"),
        ({"version_of": lambda: "3.0"}, "{fw} 3.0 is not supported (needs <2,>=1)"),
        ({"replace": lambda original: 1 / 0}, "ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.parametrize("imported_before", [False, True])
def test_a_misfit_switches_the_whole_feature_off(fw, fields, reason, imported_before, caplog):
    fields = {**fields, "versions": fields.get("versions", "{fw}>=1,<2").format(fw=fw)}
    if imported_before:
        load(fw, "comm")
    others = {key: value for key, value in fields.items() if key in ("versions", "version_of")}
    registry = Registry(
        [
            patch_of(fw, "comm:recv", **others),
            patch_of(fw, **fields),
            patch_of(fw, "comm:recv", "good"),
        ]
    )
    caplog.set_level("INFO", "holmes_ext.patches")  # what is known at once is in the start line
    registry.enable(["f", "good"])
    comm = load(fw, "comm")
    assert comm.recv("x", 1) == ("good", ("recv", "x", 1)) and comm.send("x", 1) == sent("x")
    assert states(registry) == ["off", "off", "applied"]
    assert registry.statuses()[0].reason == reason.format(fw=fw)
    assert f"feature f is off: {reason.format(fw=fw)}" in caplog.text


@pytest.mark.parametrize("imported_before", [False, True])
def test_a_module_of_another_framework_switches_the_feature_off_without_a_warning(
    fw, imported_before, caplog
):
    """A patch of a third module must not be judged before the framework is known.

    The other framework lacks this module.
    """
    if imported_before:
        load(fw, "comm")
    other = lambda: None  # noqa: E731
    registry = Registry(
        [patch_of(fw, "nowhere:x", version_of=other), patch_of(fw, version_of=other)]
    )
    with caplog.at_level("INFO"):
        registry.enable(["f"])
        load(fw, "comm")
    assert states(registry) == ["off", "off"] and not caplog.text
    assert registry.statuses()[0].reason == f"the imported module is not of {fw}"
    required = Registry([patch_of(fw, version_of=lambda: None)])
    with pytest.raises(
        HolmesError, match=f"feature f cannot be used: the imported module is not of {fw}"
    ):
        required.enable(["f"], required=True)


@pytest.mark.parametrize(
    "target, parameters", [("pipe:gone", ()), ("pipe:forward", ("y",)), ("nowhere:x", ())]
)
def test_a_feature_whose_other_module_cannot_fit_is_not_begun(fw, target, parameters):
    registry = Registry([patch_of(fw), patch_of(fw, target, parameters=parameters)])
    registry.enable(["f"])
    comm = load(fw, "comm")
    assert states(registry) == ["off", "off"] and comm.send("x", 1) == sent("x")
    assert f"{fw}.pipe" not in sys.modules


def test_a_misfit_that_shows_late_undoes_what_was_applied(fw):
    registry = Registry(
        [patch_of(fw), patch_of(fw, "pipe:transmit", parameters=("no such",))]
    )  # an alias: source says nothing
    registry.enable(["f"])
    comm = load(fw, "comm")
    original = comm.send.__wrapped__
    assert states(registry) == ["applied", "waiting"]
    pipe = load(fw, "pipe")
    assert states(registry) == ["off", "off"]
    assert comm.send is pipe.send is pipe.transmit is original


def test_required_features_stop_with_one_line(fw):
    registry = Registry(
        [
            patch_of(fw, parameters=("nope",)),
            patch_of(fw, "comm:recv", feature="old", versions=f"{fw}>=2"),
        ]
    )
    with pytest.raises(HolmesError, match="feature old cannot be used: .* is not supported"):
        registry.enable(["old"], required=True)
    registry.enable(["f"], required=True)
    with pytest.raises(HolmesError, match="feature f cannot be used: .* has no parameter nope"):
        load(fw, "comm")


def test_a_binding_feature_must_fit_once_its_framework_is_imported(fw):
    """A version that is installed and not used, or another framework's module, is no reason to end."""
    bound = {"option": "join", "idle": ("",), "binding": True}
    registry = Registry(
        [
            patch_of(fw, parameters=("nope",), **bound),
            patch_of(fw, "comm:recv", "old", versions=f"{fw}>=2", **bound),
            patch_of(fw, "pipe:forward", "other", version_of=lambda: None, **bound),
        ]
    )
    registry.enable_for_options(options_from(join="east@host"))
    with pytest.raises(HolmesError, match="feature f cannot be used: .* has no parameter nope"):
        load(fw, "comm")
    load(fw, "pipe")


def test_two_features_on_one_function_come_off_in_any_order(fw):
    comm = load(fw, "comm")
    original, mine = comm.send, []
    for first, second in [("a", "b"), ("b", "a")]:
        registry = Registry([patch_of(fw, feature="a"), patch_of(fw, feature="b")])
        registry.enable(["a", "b"])
        assert comm.send("x", 1) == ("b", ("a", sent("x")))
        mine.append(comm.send)
        registry.enable([first], disabled=frozenset([first]))
        assert comm.send("x", 1) == (second, sent("x")) == mine[-1]("x", 1)
        registry.undo()
        assert comm.send is original
    assert all(
        stale("x", 1) == sent("x") for stale in mine
    )  # copies that others hold do nothing any more


def test_somebody_elses_change_on_top_is_left_alone(fw, caplog):
    comm = load(fw, "comm")
    registry = Registry([patch_of(fw)])
    registry.enable(["f"])
    ours = comm.send
    comm.send = theirs = lambda *args: ("theirs", ours(*args))
    registry.undo()
    assert comm.send is theirs and comm.send("x", 1) == ("theirs", sent("x"))
    assert "changed by somebody else" in caplog.text


def test_disable(fw, monkeypatch):
    registry = Registry(
        [patch_of(fw, feature="transport"), patch_of(fw, "comm:recv", feature="overlap")]
    )
    monkeypatch.setenv("HOLMES_DISABLE", " overlap,")
    registry.enable(["transport", "overlap"], required=True)
    load(fw, "comm")
    assert states(registry) == ["applied", "off"]
    assert registry.statuses()[1].reason == "switched off by HOLMES_DISABLE"
    monkeypatch.setenv("HOLMES_DISABLE", "overlpa")
    with pytest.raises(
        HolmesError, match="HOLMES_DISABLE: there is no feature 'overlpa'; did you mean 'overlap'"
    ):
        registry.enable(["transport"])
    with pytest.raises(
        HolmesError, match="there is no feature 'transprot'; did you mean 'transport'"
    ):
        registry.enable(["transprot"], disabled=frozenset())
    assert disabled_features({"HOLMES_DISABLE": "all"}, ["a", "b"]) == {"a", "b"}
    assert disabled_features({}, ["a"]) == frozenset()


def test_states_tell_ranks_apart_that_are_patched_differently(fw):
    def states_of(*enabled, imports=True, **fields):
        registry = Registry([patch_of(fw, **fields), patch_of(fw, "comm:recv", feature="g")])
        registry.enable(enabled)
        if imports:
            load(fw, "comm")
        result = tuple(sorted(registry.states().items()))
        registry.undo()
        return result

    assert states_of("f", imports=False) == states_of("f") == states_of("f", parameters=("dst",))
    assert (
        len(
            {
                states_of("f"),
                states_of("g"),
                states_of("f", "g"),
                states_of(),
                states_of("f", version_of=lambda: "1.9"),
            }
        )
        == 5
    )
    assert states_of("f", parameters=("nope",)) == states_of()


def test_wrapped_functions_and_methods_pickle_and_copy(fw):
    comm = load(fw, "comm")
    Registry(
        [patch_of(fw), patch_of(fw, "comm:Engine.reduce"), patch_of(fw, "comm:Engine.pick")]
    ).enable(["f"])
    assert pickle.loads(pickle.dumps(comm.send)) is comm.send
    assert pickle.loads(pickle.dumps(comm.Engine.pick))(1, 2) == ("f", ("pick", 1, 2))
    method = pickle.loads(pickle.dumps(comm.Engine.make("e").reduce))
    assert method() == ("f", ("reduce", "e", 1))
    assert copy.deepcopy({"send": comm.send})["send"] is comm.send


def test_imports_in_many_threads(fw, tmp_path):
    count = 8
    for n in range(count):
        (tmp_path / fw / f"m{n}.py").write_text(
            "import time; time.sleep(0.01)\ndef f(): return 0\n"
        )
    registry = Registry([patch_of(fw, f"m{n}:f") for n in range(count)])
    registry.enable(["f"])
    threads = [threading.Thread(target=load, args=(fw, f"m{n}")) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert states(registry) == ["applied"] * count
    assert all(load(fw, f"m{n}").f() == ("f", 0) for n in range(count))


def test_a_module_in_the_middle_of_its_import_is_not_patched(fw, tmp_path):
    (tmp_path / fw / "self.py").write_text(
        "import builtins\ndef f(): pass\nbuiltins.enable_now()\n"
    )
    registry = Registry([patch_of(fw, "self:f")])
    import builtins

    builtins.enable_now = lambda: registry.enable(["f"])
    try:
        load(fw, "self")
    finally:
        del builtins.enable_now
    assert (
        registry.statuses()[0].reason
        == f"{fw}.self is being imported; enable holmes before its import"
    )


@pytest.mark.parametrize(
    "target, parameters, reason",
    [
        ("comm:send", ("tensor", "group"), None),
        ("comm:send", ("x",), "{fw}.comm:send has no parameter x"),
        ("comm:Engine.reduce", ("self", "scale"), None),
        ("comm:Engine.step", ("anything",), None),  # inherited: only the import tells
        ("comm:Base.gone", (), "{fw}.comm has no Base.gone"),
        ("comm:conditional", ("x",), None),
        ("comm:alias", ("anything",), None),
        ("gone:x", (), "there is no module {fw}.gone"),
        ("comm.deeper:x", (), "there is no module {fw}.comm.deeper"),
    ],
)
def test_source_is_judged_without_importing(fw, target, parameters, reason):
    assert source_misfit(patch_of(fw, target, parameters=parameters)) == (
        reason and reason.format(fw=fw)
    )
    assert fw not in sys.modules


@pytest.mark.parametrize(
    "fields", [{"target": "no colon"}, {"wrap": None}, {"replace": len, "wrap": len}]
)
def test_malformed_patches_are_refused(fields):
    good = {"feature": Feature("f", "a>=1"), "target": "a:b", "reason": "r", "wrap": tag("f")}
    Patch(**good)
    with pytest.raises(ValueError):
        Patch(**{**good, **fields})
    with pytest.raises(ValueError):
        Feature("f", ">=1")
    for twice in (
        Patch(**good),
        Patch(**{**good, "feature": Feature("f", "a>=2"), "target": "a:c"}),
    ):
        with pytest.raises(ValueError, match="twice"):
            Registry([Patch(**good), twice])


def test_an_option_asks_for_a_feature(fw):
    """An option that nobody sets is neither on nor reported as missing.

    It is an error to require the feature without the option.
    """
    comm = load(fw, "comm")
    registry = Registry(
        [
            patch_of(fw, option="overlap", idle=("off", "auto")),
            patch_of(fw, "comm:recv", "always"),
            patch_of(fw, "comm:Engine.step", "old", versions=f"{fw}>=2"),
            patch_of(fw, "comm:Engine.make", "late", version_of=lambda: "1.9"),
        ]
    )
    registry.enable_for_options(Options())
    assert comm.send("x", 1) == sent("x")
    assert registry.summary() == (
        ["always", "late"],
        {"old": f"{fw} 1.5 is not supported (needs >=2)"},
    )
    registry.undo()
    registry.enable_for_options(Options(overlap="on"))
    assert comm.send("x", 1) == ("f", sent("x"))
    registry.undo()
    with pytest.raises(
        HolmesError, match="--holmes-require f has no effect without --holmes-overlap on"
    ):
        registry.enable_for_options(Options(require="f"))


def test_a_patch_of_another_version_is_left_out(fw):
    """Of two patches for version < 2 and >= 2 of a framework, only the one for the installed 1.5 is applied.

    The version may come from the package's metadata, or from the imported module (version_of).
    """
    comm = load(fw, "comm")  # imports the framework's module
    for version_of in (None, lambda: "1.5"):
        registry = Registry(
            [
                patch_of(fw, "comm:send", version_of=version_of, only="<2"),
                patch_of(fw, "comm:Sender.send", version_of=version_of, only=">=2"),
            ]
        )
        registry.enable(["f"])  # the feature of both patches
        assert states(registry) == ["applied", "other version"]
        # The patch of comm:send returns ("f", result of the original function).
        assert comm.send("x", 1) == ("f", sent("x"))
        registry.undo()

    old = patch_of(fw, only="<2")
    new = patch_of(fw, "comm:Sender.send", only=">=2")
    assert old.is_for_version("1.5")
    assert old.is_for_version(None)
    assert not old.is_for_version("2.0a0+vendor.24")
    assert new.is_for_version("2.0a0+vendor.24")
    assert not new.is_for_version("1.5")


@pytest.mark.parametrize("version_of", [None, lambda: "1.5"])
@pytest.mark.parametrize("named", ["f", "all"])
def test_a_version_that_was_not_tried_is_tried_when_the_user_says_so(fw, version_of, named):
    def registry(**fields):
        return Registry([patch_of(fw, versions=f"{fw}>=1,<1.5", version_of=version_of, **fields)])

    load(fw, "comm")
    off, on, misfit = registry(), registry(), registry(parameters=("nothing",))
    off.enable_for_options(Options())
    assert states(off) == ["off"] and "is not supported" in off.statuses()[0].reason
    assert off.untried() == {}
    on.enable_for_options(Options(try_=named))
    assert states(on) == ["applied"] and on.untried() == {f"{fw} 1.5": ["f"]}
    on.undo()
    waiting = Registry([patch_of("not_there", versions="not_there>=1", version_of=lambda: "0.1")])
    waiting.enable_for_options(Options(try_=named))
    assert states(waiting) == ["waiting"] and waiting.untried() == {}
    misfit.enable_for_options(Options(try_=named))
    assert states(misfit) == ["off"] and "has no parameter nothing" in misfit.statuses()[0].reason
    assert misfit.untried() == {}
    with pytest.raises(HolmesError, match="--holmes-try: there is no feature 'g'"):
        on.enable_for_options(Options(try_="g"))


def test_versions_that_a_feature_was_run_with_are_in_its_range():
    from holmes_ext.patches import all_patches

    for feature in {patch.feature for patch in all_patches()}:
        assert feature.tried and not list(
            filter(None, map(feature.version_misfit, feature.tried))
        ), feature


def test_holmes_patches_prints_the_table(fw, monkeypatch, capsys):
    from holmes_ext.cli.main import main

    patches = (
        patch_of(fw, parameters=("tensor",)),
        patch_of(fw, "comm:Engine.step", parameters=("gone",)),
    )
    monkeypatch.setattr("holmes_ext.cli.patches.all_patches", lambda: patches)
    assert main(["patches", "--all"]) == 0
    assert f"{fw}.comm:send" in capsys.readouterr().out
    assert fw not in sys.modules
    assert main(["patches", "--json", "--check"]) == 1
    rows = json.loads(capsys.readouterr().out)["patches"]
    assert [row["state"] for row in rows] == ["fits", "off"]
    assert (
        rows[1]["reason"] == f"{fw}.comm:Engine.step has no parameter gone"
        and rows[0]["installed"] == "1.5"
    )


def test_the_command_line_reports_bad_usage_in_one_line(capsys):
    from holmes_ext.cli.main import main

    for argv, message in [
        (["patchs"], "there is no command 'patchs'; did you mean 'patches'?"),
        (["lab"], "ACTION"),
        (["patches", "--nope"], "--nope"),
    ]:
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("holmes: ") and error.count("\n") == 1
