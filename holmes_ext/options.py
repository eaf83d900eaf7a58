"""Options of a job: the --holmes flags, their environment variables, and their help texts.

An option `link_timeout` has the flag --holmes-link-timeout, the environment variable HOLMES_LINK_TIMEOUT, and
the keyword argument link_timeout of holmes_ext.enable(). A flag or keyword overrides the variable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from holmes_ext import extensions, units, words
from holmes_ext.errors import HolmesError
from holmes_ext.words import did_you_mean, nearest

PREFIX = "--holmes"
#: Environment variable for users that belongs to no flag -> help text.
VARIABLES = {
    "HOLMES": "1: the same as `--holmes`; 0: off",
    "HOLMES_DISABLE": "feature,...: leave these off (`holmes patches` lists the features)",
    "HOLMES_NODE": "the name of this node, in place of its host name",
    "HOLMES_SYSFS": "root of the /sys tree to read NICs from; `holmes lab` sets it",
}
PARTITIONS = ("uniform", "speed", "balanced")
#: End of the value of --holmes-profile that ends the job when the profile is written.
STOP = ",stop"

_MOST_SECONDS = 1e6
_LEAST_MEGABYTES = 0.001
_MOST_MEGABYTES = 10_000
_MOST_PROFILE_STEPS = 100_000


def _option(default: str, text: str, choices: tuple[str, ...] = ()) -> Any:
    """Return a dataclass field for an option with its default, help text and allowed values."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Options:
    """Options of a job, as the texts that the user gave; properties return parsed values."""

    cluster: str = _option(
        "",
        "FILE: cluster.toml, the clusters and their nodes (default: worked out from the nodes' NICs)",
    )
    plan: str = _option(
        "", "FILE: plan.json of `holmes plan` (default: a plan is made at start-up)"
    )
    sizes: str = _option(
        "",
        "pipeline=2,tensor=1,...: the job's parallel sizes, where holmes cannot read them from the command "
        "line",
    )
    timeout: str = _option(
        "300",
        "seconds to wait for all ranks to report; then the job ends and names those missing (default 300)",
    )
    require: str = _option(
        "",
        "feature,...: these must be usable (see `holmes patches`), or the job ends; others are left off "
        "with a reason",
    )
    try_: str = _option(
        "",
        "feature,...: use these with an untested version, at your own risk, if everything they patch exists",
    )
    overlap: str = _option(
        "auto",
        "auto (default): DeepSpeed's pipeline engine and megatron-core reduce gradients while the last "
        "backward pass runs, on the stages whose reduction would be waited for, where no checkpoint "
        "depends on it; on: on every stage, and updated weights of megatron-core's distributed optimizer "
        "travel during the next forward pass; off: as the framework does it",
        ("auto", "on", "off"),
    )
    bucket: str = _option(
        "", "size of a gradient bucket in megabytes (default: from the fabric's latency and rate)"
    )
    inflight: str = _option(
        "auto",
        "auto (default): stages of DeepSpeed's pipeline engine and of megatron-core run enough forward "
        "passes before their first backward to hide the sends between stages, within memory; N: N more "
        "than under 1F1B; off: the engine's own schedule, with blocking sends",
    )
    schedule: str = _option(
        "1f1b",
        "1f1b (default): stages alternate forward and backward passes; auto: backward passes are split "
        "into input and weight gradients, in the order with the shortest step found within memory "
        "(DeepSpeed's pipeline engine, torch's schedules of one stage a rank)",
        ("1f1b", "auto"),
    )
    compress_activations: str = _option(
        "off",
        "off (default), bf16, or int8 (a scale for each row): activations and their gradients between "
        "pipeline stages on the slow network only",
        ("off", "bf16", "int8"),
    )
    compress_gradients: str = _option(
        "off",
        "off (default), bf16, or int8 (with error feedback): gradients on the slow network only, "
        "where they are reduced hierarchically",
        ("off", "bf16", "int8"),
    )
    fsdp: str = _option(
        "stock",
        "stock (default): FSDP shards over the ranks that the program chooses; hybrid: inside each "
        "cluster, and gradients are summed across clusters (more memory, reported at start)",
        ("stock", "hybrid"),
    )
    experts: str = _option(
        "",
        "FILE: where each expert of megatron-core's MoE layers lives, as `holmes plan --experts` placed "
        "them",
    )
    partition: str = _option(
        "uniform",
        "uniform (the framework decides), speed (the Holmes paper's formula), balanced (least predicted "
        "step), or layers of each stage: 5,3",
    )
    model: str = _option(
        "",
        "FILE: the model as TOML, see examples/models (for speed and balanced; default: read from "
        "Megatron's flags)",
    )
    preflight: str = _option(
        "on",
        "on (default): before training every node tests the connection to its neighbours in every group "
        "over the group's NIC; off: skip this",
        ("on", "off"),
    )
    fallback: str = _option(
        "ethernet",
        "ethernet (default): groups whose fast NIC does not work go over Ethernet, on all their ranks; "
        "fail: the job ends",
        ("ethernet", "fail"),
    )
    link_timeout: str = _option(
        "20",
        "seconds that a NIC in use may be without link until the job ends with a line that names it "
        "(default 20; 0: no limit)",
    )
    telemetry: str = _option(
        "",
        "DIR: where each rank writes what its steps and messages took; `holmes report DIR` shows it",
    )
    metrics: str = _option(
        "",
        "PORT (of 127.0.0.1), HOST:PORT or FILE.prom: step times and the state of the NICs, for "
        "Prometheus, from one rank of each node (extra `metrics`); 0.0.0.0:PORT serves anyone who can "
        "reach the node",
    )
    watchdog: str = _option(
        "5,10",
        "K or K,SECONDS: a step that takes over K times the median (and over SECONDS) is explained in one "
        "line while it hangs (default 5,10); or off",
    )
    profile: str = _option(
        "",
        "N or N,FILE: measure N steps after a warm-up and write FILE (default profile.json) for `holmes "
        "plan --profile`",
    )
    verbose: str = _option(
        "off", "on: one line for every process group and the fabric it got", ("on", "off")
    )
    #: Names of the options that the user has set.
    given: frozenset[str] = frozenset()
    #: Features that HOLMES_DISABLE switches off. The plan does not rely on them.
    off: frozenset[str] = frozenset()
    #: (name, value) of the options of extensions that the user has set; value() reads them.
    extension_values: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Raise HolmesError if an option of holmes or of an extension has a value that is not allowed."""
        for name in NAMES:
            value = getattr(self, name)
            if not isinstance(value, str):
                raise HolmesError(f"{flag(name)}: {value!r} is not a text")
            _check_choice(name, value, CHOICES.get(name, ()))
        for name, value in self.extension_values:
            option = extensions.options()[name]
            _check_choice(name, value, option.choices)
            problem = option.check(value)  # in words; "" if the value is allowed
            if problem:
                raise HolmesError(f"{flag(name)}: {value!r} {problem}")
        self._check_forms()  # numbers, lists and paths: whether their text is well-formed

    def _check_forms(self) -> None:
        """Raise HolmesError if the text of an option is malformed, such as a timeout of "5 min"."""
        # parse_decimal() returns NaN for a text that is no number: then all comparisons are false.
        timeout_s = units.parse_decimal(self.timeout)
        link_timeout_s = units.parse_decimal(self.link_timeout)
        bucket_megabytes = units.parse_decimal(self.bucket or "1")
        is_count = self.inflight[:4].isdecimal()
        names = ", ".join(PARTITIONS)
        self._require(
            self.partition in PARTITIONS or bool(self.stage_layers),
            "partition",
            f"is not one of {names}, nor layers of each stage such as 5,3",
        )
        is_time = 0 < timeout_s < _MOST_SECONDS
        self._require(is_time, "timeout", "is not a number of seconds above 0")
        self._require(
            self.inflight in ("auto", "off") or is_count,
            "inflight",
            "is none of auto, off and a number of micro-batches",
        )
        self._require(
            0 <= link_timeout_s < _MOST_SECONDS,
            "link_timeout",
            "is not a number of seconds (0: no limit)",
        )
        self._require(
            _LEAST_MEGABYTES <= bucket_megabytes <= _MOST_MEGABYTES,
            "bucket",
            "is not a number of megabytes from 0.001 to 10000",
        )
        self._require(
            self.watchdog == "off" or self.watchdog_limits is not None,
            "watchdog",
            "is neither off nor K or K,SECONDS with K of 1.5 or more and SECONDS of 1 or more",
        )
        metrics_problem = units.metrics_problem(self.metrics) if self.metrics else ""
        self._require(not metrics_problem, "metrics", metrics_problem)
        self._require(
            not self.profile or 0 < self.profile_steps < _MOST_PROFILE_STEPS,
            "profile",
            "is not a number of steps, 1 or more, nor N,FILE",
        )

    def _require(self, is_allowed: bool, name: str, problem: str) -> None:
        """Raise an error that names an option, its value and the problem, unless the value is allowed."""
        if not is_allowed:
            raise HolmesError(f"{flag(name)}: {getattr(self, name)!r} {problem}")

    @property
    def watchdog_limits(self) -> units.WatchdogLimits | None:
        """Times after which the watchdog prints why a step takes so long, e.g. whom it waits for.

        None if the watchdog (a thread) is off, or if the text of the option is invalid.
        """
        return units.parse_watchdog_limits(self.watchdog)

    @property
    def profile_steps(self) -> int:
        """Number of training steps to measure; 0 for none."""
        return units.parse_count(self.profile.partition(",")[0], digits=6)

    @property
    def profile_file(self) -> str:
        """File into which the profile is written."""
        return self.profile.partition(",")[2].removesuffix(STOP) or "profile.json"

    @property
    def profile_stops(self) -> bool:
        """True if the job ends when the profile is written (`holmes tune`)."""
        return self.profile.endswith(STOP)

    @property
    def bucket_bytes(self) -> int | None:
        """Size of a gradient bucket in bytes; None to choose it for the fabric."""
        return round(float(self.bucket) * 1e6) if self.bucket else None

    @property
    def required_features(self) -> tuple[str, ...]:
        """Features without which the job ends."""
        return tuple(name.strip() for name in self.require.split(",") if name.strip())

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Number of layers of each pipeline stage if `partition` lists them ("5,3"), else ()."""
        layers = tuple(map(units.parse_count, self.partition.replace(" ", "").split(",")))
        return layers if all(layers) else ()

    @property
    def needs_model(self) -> bool:
        """True if layers are divided among stages by their predicted cost."""
        return self.partition != "uniform" and not self.stage_layers

    @property
    def timeout_s(self) -> float:
        """Longest wait for all ranks to report, in seconds."""
        return float(self.timeout)

    @property
    def link_timeout_s(self) -> float:
        """Longest time that a NIC in use may be without link, in seconds; 0 for no limit."""
        return float(self.link_timeout)

    def value(self, name: str) -> str:
        """Return the value of an option of holmes or of an extension, by its name."""
        if name in NAMES:
            return str(getattr(self, name))
        return dict(self.extension_values).get(name, extensions.options()[name].default)

    def agreed(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks: name -> value."""
        return {name: self.value(name) for name in names()}


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise HolmesError if the value of an option was renamed or is not allowed.

    Args:
        name: Name of the option.
        value: Its value.
        choices: Allowed values; () for any text.
    """
    new_value = words.RENAMED_VALUES.get((name, value))
    if new_value:
        raise HolmesError(f"{flag(name)}: {value!r} is called {new_value!r} now")
    if choices and value not in choices:
        raise HolmesError(f"{flag(name)}: {value!r} is not one of {', '.join(choices)}")


HELP = {item.name: item.metadata["help"] for item in fields(Options) if item.metadata}
CHOICES: dict[str, tuple[str, ...]] = {
    item.name: item.metadata["choices"] for item in fields(Options) if item.metadata.get("choices")
}
NAMES = tuple(HELP)


def flag(name: str) -> str:
    """Return the flag of an option, such as "--holmes-link-timeout" for "link_timeout".

    An underscore at the end of a name, which avoids a keyword of Python, is left out.
    """
    return f"{PREFIX}-{name.rstrip('_').replace('_', '-')}"


def variable(name: str) -> str:
    """Return the environment variable of an option, such as "HOLMES_LINK_TIMEOUT"."""
    return f"HOLMES_{name.rstrip('_').upper()}"


def names() -> tuple[str, ...]:
    """Return the names of all options: first those of holmes itself, then those of extensions."""
    return (*NAMES, *extensions.options())


def variables() -> dict[str, str]:
    """Return the environment variables for users that belong to no flag: name -> help text."""
    return {**VARIABLES, **extensions.variables()}


def help_of(name: str) -> str:
    """Return the help text of an option."""
    return HELP[name] if name in HELP else extensions.options()[name].help


def choices_of(name: str) -> tuple[str, ...]:
    """Return the values that an option may have; () if it takes any text."""
    return CHOICES.get(name, ()) if name in NAMES else extensions.options()[name].choices


def default_of(name: str) -> str:
    """Return the default value of an option."""
    return Options().value(name)


def _by_flag() -> dict[str, str]:
    """Return flag -> name of all options.

    Raises:
        HolmesError: an extension has a flag of holmes itself.
    """
    for name in extensions.options():
        if name in NAMES:
            raise HolmesError(
                f"an extension has the flag {flag(name)} of holmes itself; uninstall it"
            )
    return {flag(name): name for name in names()}


def misspelt_flag(word: str) -> str:
    """Return the flag of holmes of which a word is probably a misspelling, or ""."""
    return nearest(word, _by_flag(), cutoff=0.85)


def _refuse_old_name(name: str, written: Callable[[str], str]) -> None:
    """Raise HolmesError if an option was removed or renamed.

    Args:
        name: Name of the option that the user gave.
        written: Returns how the user writes an option's name, such as "--holmes-apart" for "apart".

    Raises:
        HolmesError: the option was removed or renamed. The message has the way out.
    """
    if name in words.REMOVED_OPTIONS:
        raise HolmesError(f"{written(name)} was removed; {words.REMOVED_OPTIONS[name]}")
    if name in words.RENAMED_OPTIONS:
        raise HolmesError(f"{written(name)} is called {written(words.RENAMED_OPTIONS[name])} now")


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return name -> value of the options that environment variables set: "cluster" of HOLMES_CLUSTER, ...

    A variable that is empty counts as not set.

    Raises:
        HolmesError: the variable of a removed or renamed option is set.
    """
    for name in (*words.REMOVED_OPTIONS, *words.RENAMED_OPTIONS):
        if environ.get(variable(name)):
            _refuse_old_name(name, written=variable)
    values = {}
    for name in names():
        value = environ.get(variable(name))
        if value:
            values[name] = value
    return values


def parse_flags(argv: list[str], environ: Mapping[str, str]) -> tuple[Options, list[str]]:
    """Return the options of a command line, and the other arguments, which belong to the script.

    A flag of holmes in `argv` overrides its environment variable (--holmes-cluster HOLMES_CLUSTER). All
    arguments from a lone "--" on belong to the script.

    Raises:
        HolmesError: a flag is unknown, removed or renamed, lacks its value, or is given twice.
    """
    extensions.refuse_separate_values(argv)
    by_flag = _by_flag()
    old_names = {flag(name): name for name in (*words.REMOVED_OPTIONS, *words.RENAMED_OPTIONS)}
    values = from_environment(environ)  # name of an option, e.g. "cluster" -> its value
    seen: set[str] = set()  # flags so far
    rest: list[str] = []  # arguments of the script
    items = iter(argv)
    for item in items:
        if item == "--":
            rest += [item, *items]
            break
        name, equals, value = item.partition("=")  # PREFIX is "--holmes"
        is_holmes_flag = name == PREFIX or name.startswith(f"{PREFIX}-")
        if not is_holmes_flag:
            rest.append(item)
            continue
        if name in seen:
            raise HolmesError(f"{name} is given twice on the command line; give it once")
        seen.add(name)
        if name == PREFIX:  # it switches holmes on, and is no option
            if equals:
                raise HolmesError(
                    f"{PREFIX} takes no value, so {item!r} cannot be read; write {PREFIX} alone"
                )
            continue
        if name in old_names:
            _refuse_old_name(old_names[name], written=flag)
        option = by_flag.get(name, "")
        if not option:
            flags = [known_flag.removeprefix(f"{PREFIX}-") for known_flag in by_flag]
            suggestion = did_you_mean(name.removeprefix(f"{PREFIX}-"), flags, flag)
            raise HolmesError(f"{name} is not a flag of holmes; {suggestion}")
        if not equals:  # the next argument is the value, unless the flag can stand alone
            # "--" at the end of `argv`, as if another flag followed
            value = extensions.bare_value(option) or next(items, "--")
            if value.startswith("--"):
                raise HolmesError(f"{name} needs a value: {help_of(option)}")
        values[option] = value
    return _options(values), rest


def options_from(**values: Any) -> Options:
    """Return the options for keyword arguments of enable(), e.g. cluster="c.toml".

    Raises:
        HolmesError: an option is unknown (the message has the nearest one), removed or renamed.
    """
    for name in values:
        _refuse_old_name(name, written=lambda option: f"enable({option}=...)")
        if name not in names():
            raise HolmesError(
                f"enable({name}=...) is not an option of holmes; {did_you_mean(name, names())}"
            )
    return _options({name: str(value) for name, value in values.items() if value is not None})


def _options(values: Mapping[str, str]) -> Options:
    """Return Options with the given values (name -> value), including options of extensions."""
    own_values: dict[str, Any] = {}
    extension_values = []
    for name, value in values.items():
        if name in NAMES:
            own_values[name] = value
        else:
            extension_values.append((name, value))
    return Options(**own_values, given=frozenset(values), extension_values=tuple(extension_values))
