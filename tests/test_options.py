import pytest

from holmes_ext import extensions, words
from holmes_ext.errors import HolmesError
from holmes_ext.options import (
    Options,
    flag,
    from_environment,
    options_from,
    parse_flags,
    variable,
)


def test_flags_are_read_and_removed():
    options, rest = parse_flags(
        ["--lr", "1", "--holmes", "--holmes-cluster", "c.toml", "--holmes-plan=p.json", "x"], {}
    )
    assert (options.cluster, options.plan) == ("c.toml", "p.json")
    assert rest == ["--lr", "1", "x"]
    assert options.given == {"cluster", "plan"}


def test_flag_wins_over_environment():
    environ = {"HOLMES_CLUSTER": "env.toml", "HOLMES_TIMEOUT": "7"}
    options, _ = parse_flags(["--holmes-cluster=flag.toml"], environ)
    assert (options.cluster, options.timeout_s) == ("flag.toml", 7.0)


def test_after_a_lone_dash_dash_arguments_are_the_scripts():
    assert parse_flags(["--holmes", "--", "--holmes-plan", "x"], {})[1] == [
        "--",
        "--holmes-plan",
        "x",
    ]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--holmes", "--holmes"], "--holmes is given twice"),
        (["--holmes-plan=a", "--holmes-plan", "b"], "--holmes-plan is given twice"),
        (["--holmes-clutser", "x"], "did you mean --holmes-cluster?"),
        (["--holmes-zzz"], "known: --holmes-cluster"),
        (["--holmes-plan"], "--holmes-plan needs a value"),
        (["--holmes-plan", "--lr"], "--holmes-plan needs a value"),
        (["--holmes=1"], "takes no value"),
        (["--holmes-timeout", "soon"], "not a number of seconds"),
        (["--holmes-timeout", "0"], "not a number of seconds"),
        (["--holmes-verbose", "yes"], "not one of on, off"),
        (["--holmes-overlap", "yes"], "not one of auto, on, off"),
        (["--holmes-bucket", "0"], "not a number of megabytes"),
        (["--holmes-bucket", "25MB"], "not a number of megabytes"),
        (
            ["--holmes-partition", "best"],
            "'best' is not one of uniform, speed, balanced, nor layers of each stage",
        ),
        (["--holmes-partition", "3,0"], "'3,0' is not one of"),
    ],
)
def test_bad_flags_are_named(argv, message):
    with pytest.raises(HolmesError) as error:
        parse_flags(argv, {})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_enable_options():
    assert options_from(plan="p", timeout=5) == Options(
        plan="p", timeout="5", given=frozenset({"plan", "timeout"})
    )
    with pytest.raises(HolmesError, match="did you mean 'cluster'"):
        options_from(clusters="x")


def test_removed_options_name_what_to_do_instead():
    instead = "was removed; run joined jobs instead (docs/joined.md)"
    for read, given_as in (
        (lambda: parse_flags(["--holmes-apart", "2"], {}), "--holmes-apart"),
        (lambda: parse_flags(["--holmes-apart=2"], {}), "--holmes-apart"),
        (lambda: parse_flags([], {"HOLMES_APART": "2"}), "HOLMES_APART"),
        (lambda: options_from(apart="2"), "enable(apart=...)"),
    ):
        with pytest.raises(HolmesError) as error:
            read()
        assert str(error.value) == f"{given_as} {instead}"
    assert parse_flags([], {"HOLMES_APART": ""})[0] == Options()


@pytest.mark.parametrize("old, new", words.RENAMED_OPTIONS.items())
def test_an_option_that_was_renamed_is_rejected_with_its_new_name(old, new):
    for read, old_as, new_as in (
        (lambda: parse_flags([flag(old), "x"], {}), flag(old), flag(new)),
        (lambda: parse_flags([], {variable(old): "x"}), variable(old), variable(new)),
        (lambda: options_from(**{old: "x"}), f"enable({old}=...)", f"enable({new}=...)"),
    ):
        with pytest.raises(HolmesError) as error:
            read()
        assert str(error.value) == f"{old_as} is called {new_as} now"


@pytest.mark.parametrize("option, old", words.RENAMED_VALUES)
def test_a_value_that_was_renamed_is_rejected_with_its_new_name(option, old):
    with pytest.raises(HolmesError, match=f"^{flag(option)}: '{old}' is called 'report' now$"):
        options_from(**{option: old})


def test_twins_in_the_environment_are_values_of_flags():
    """The variable HOLMES_TELEMETRY sets the option of the flag --holmes-telemetry.

    A variable without a value sets nothing, nor does a HOLMES_ variable without such a flag.
    """
    environ = {"HOLMES_TELEMETRY": "runs", "HOLMES_CLUSTER": "", "HOLMES_DEBUG_OF_OTHERS": "1"}
    assert from_environment(environ) == {"telemetry": "runs"}


def test_layers_of_each_stage():
    assert parse_flags(["--holmes-partition", "5,3"], {})[0].stage_layers == (5, 3)
    assert parse_flags(["--holmes-partition=balanced"], {})[0].stage_layers == ()


def test_agreed_lists_every_option():
    core = set(Options.__dataclass_fields__) - {"given", "off", "extension_values"}
    assert set(Options().agreed()) == core | set(extensions.options())


def test_an_option_whose_name_is_a_word_of_python():
    assert parse_flags(["--holmes-try", "overlap"], {})[0].try_ == "overlap"
    assert parse_flags([], {"HOLMES_TRY": "overlap"})[0].try_ == "overlap"
    with pytest.raises(HolmesError, match="did you mean --holmes-try"):
        parse_flags(["--holmes-tri", "overlap"], {})
    with pytest.raises(HolmesError, match="is not a flag"):
        parse_flags(["--holmes-try_", "overlap"], {})
