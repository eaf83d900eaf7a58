"""The --holmes flags, their environment twins, and what they say."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from holmes_ext.errors import HolmesError

PREFIX = "--holmes"
CHOICES = {
    "verbose": ("on", "off"),
    "overlap": ("auto", "on", "off"),
    "compress": ("off", "bf16", "int8"),
    "preflight": ("on", "off"),
    "fallback": ("ethernet", "fail"),
}
PARTITIONS = ("uniform", "speed", "balanced")
#: After --holmes-profile's file: end the job when it is written.
STOP = ",stop"
HELP = {
    "cluster": "FILE: cluster.toml, the clusters and their nodes (default: worked out from the nodes' NICs)",
    "plan": "FILE: plan.json of `holmes plan` (default: a plan is made at start-up)",
    "sizes": "pipeline=2,tensor=1,...: the job's parallel sizes, where holmes cannot read them from the command line",
    "timeout": "seconds until a rank that has not reported is named and the job ends (default 300)",
    "require": "feature,...: these must be usable (see `holmes patches`), or the job ends; others are left off with a reason",
    "overlap": "auto (default): DeepSpeed's pipeline engine and megatron-core reduce gradients while the last backward pass runs, on the stages whose reduction would be waited for, where no checkpoint depends on it; on: on every stage, and updated parameters of ZeRO 1 and of a distributed optimizer travel during the next forward pass; off: as the framework does it",
    "bucket": "megabytes of gradients that travel together (default: from the fabric's latency and rate)",
    "compress": "off (default), bf16, or int8 (with error feedback): gradients on the slow network only, where they are reduced in two levels",
    "partition": "uniform (the framework decides), speed (the Holmes paper's formula), balanced (least predicted step), or layers of each stage: 5,3",
    "model": "FILE: the model as TOML, see examples/models (for speed and balanced; default: read from Megatron's flags)",
    "preflight": "on (default): before training every node tries its neighbours of every group over the NIC chosen for it; off: no",
    "fallback": "ethernet (default): groups whose fast NIC does not work go over Ethernet, on all their ranks; fail: the job ends",
    "patience": "seconds that a NIC in use may be without link until the job ends with a line that names it (default 20; 0: no limit)",
    "telemetry": "DIR: where each rank writes what its steps and messages took; `holmes report DIR` shows it",
    "watchdog": "K or K,SECONDS: a step that takes over K times the median (and over SECONDS) is explained in one line while it hangs (default 5,10); or off",
    "profile": "N or N,FILE: measure N steps after a warm-up and write FILE (default profile.json) for `holmes plan --profile`",
    "verbose": "on: one line for every process group and the fabric it got",
}


@dataclass(frozen=True)
class Options:
    """What the user asked for. `given` names the options that were set on purpose; timeout is in seconds."""

    cluster: str = ""
    plan: str = ""
    sizes: str = ""
    timeout: str = "300"
    require: str = ""
    overlap: str = "auto"
    bucket: str = ""
    compress: str = "off"
    partition: str = "uniform"
    model: str = ""
    preflight: str = "on"
    fallback: str = "ethernet"
    patience: str = "20"
    telemetry: str = ""
    watchdog: str = "5,10"
    profile: str = ""
    verbose: str = "off"
    given: frozenset[str] = frozenset()

    def __post_init__(self):
        for name in NAMES:
            value = getattr(self, name)
            if not isinstance(value, str):
                raise HolmesError(f"{flag(name)}: {value!r} is not a text")
            if name in CHOICES and value not in CHOICES[name]:
                raise HolmesError(f"{flag(name)}: {value!r} is not one of {', '.join(CHOICES[name])}")
        if self.partition not in PARTITIONS and not self.stage_layers:
            raise HolmesError(f"{flag('partition')}: {self.partition!r} is not one of {', '.join(PARTITIONS)}, nor layers of each stage such as 5,3")
        if not self.timeout.replace(".", "", 1).isdecimal() or not 0 < float(self.timeout) < 1e6:
            raise HolmesError(f"{flag('timeout')}: {self.timeout!r} is not a number of seconds above 0")
        if not self.patience.replace(".", "", 1).isdecimal() or float(self.patience) >= 1e6:
            raise HolmesError(f"{flag('patience')}: {self.patience!r} is not a number of seconds (0: no limit)")
        if self.bucket and (not self.bucket.replace(".", "", 1).isdecimal() or not 0.001 <= float(self.bucket) <= 10_000):
            raise HolmesError(f"{flag('bucket')}: {self.bucket!r} is not a number of megabytes from 0.001 to 10000")
        if self.watchdog != "off" and not self._watchdog_numbers():
            raise HolmesError(f"{flag('watchdog')}: {self.watchdog!r} is neither off nor K or K,SECONDS with K of 1.5 or more and SECONDS of 1 or more")
        if self.profile and not 0 < self.profile_steps < 100_000:
            raise HolmesError(f"{flag('profile')}: {self.profile!r} is not a number of steps, 1 or more, nor N,FILE")

    def _watchdog_numbers(self) -> tuple[float, float] | None:
        parts = self.watchdog.replace(" ", "").split(",")
        if len(parts) > 2 or not all(part.replace(".", "", 1).isdecimal() for part in parts):
            return None
        factor, floor = float(parts[0]), float(parts[1]) if len(parts) == 2 else 10.0
        return (factor, floor) if 1.5 <= factor <= 1e6 and 1 <= floor <= 1e6 else None

    @property
    def watchdog_limits(self) -> tuple[float, float] | None:
        """(times the median step, seconds) that a step may take at least, before it is explained; None: off."""
        return None if self.watchdog == "off" else self._watchdog_numbers()

    @property
    def profile_steps(self) -> int:
        """Steps to measure; 0: none."""
        count = self.profile.partition(",")[0]
        return int(count) if count.isdecimal() and len(count) < 7 else 0

    @property
    def profile_file(self) -> str:
        return self.profile.partition(",")[2].removesuffix(STOP) or "profile.json"

    @property
    def profile_stops(self) -> bool:
        """Whether the job ends once the profile is written (`holmes tune`)."""
        return self.profile.endswith(STOP)

    @property
    def bucket_bytes(self) -> int | None:
        """Bytes of a gradient bucket; None: chosen for the fabric."""
        return round(float(self.bucket) * 1e6) if self.bucket else None

    @property
    def required_features(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.require.split(",") if name.strip())

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage where `partition` lists them ("5,3"), else ()."""
        parts = self.partition.replace(" ", "").split(",")
        return tuple(map(int, parts)) if all(part.isdecimal() and 0 < len(part) < 6 and int(part) for part in parts) else ()

    @property
    def needs_model(self) -> bool:
        """Whether the layers of the stages are worked out from what they cost."""
        return self.partition != "uniform" and not self.stage_layers

    @property
    def timeout_s(self) -> float:
        return float(self.timeout)

    @property
    def patience_s(self) -> float:
        return float(self.patience)

    def agreed(self) -> dict[str, str]:
        """What every rank must have been given alike."""
        values = asdict(self)
        return {name: values[name] for name in NAMES}


NAMES = tuple(field.name for field in fields(Options) if field.name != "given")


def flag(name: str) -> str:
    return f"{PREFIX}-{name}"


def parse_flags(argv: list[str], environ: Mapping[str, str]) -> tuple[Options, list[str]]:
    """Options from `argv` (over HOLMES_CLUSTER, HOLMES_PLAN, ...), and argv without the flags.

    Both "--holmes-plan FILE" and "--holmes-plan=FILE" are read; what stands after a lone "--" is the script's.
    HolmesError for an unknown flag (with the near miss), one without its value, or one that stands twice.
    """
    values = {name: environ[f"HOLMES_{name.upper()}"] for name in NAMES if environ.get(f"HOLMES_{name.upper()}")}
    seen: set[str] = set()
    rest: list[str] = []
    items = iter(argv)
    for item in items:
        if item == "--":
            rest += [item, *items]
            break
        name, equals, value = item.partition("=")
        if name != PREFIX and not name.startswith(f"{PREFIX}-"):
            rest.append(item)
            continue
        if name in seen:
            raise HolmesError(f"{name} stands twice on the command line; give it once")
        seen.add(name)
        if name == PREFIX:
            if equals:
                raise HolmesError(f"{PREFIX} takes no value, so {item!r} cannot be read; write {PREFIX} alone")
            continue
        key = name.removeprefix(f"{PREFIX}-")
        if key not in NAMES:
            near = difflib.get_close_matches(key, NAMES, 1)
            hint = f"did you mean {flag(near[0])}?" if near else f"known: {', '.join(map(flag, NAMES))}"
            raise HolmesError(f"{name} is not a flag of holmes; {hint}")
        if not equals:
            value = next(items, "--")
            if value.startswith("--"):
                raise HolmesError(f"{name} needs a value: {HELP[key]}")
        values[key] = value
    return Options(**values, given=frozenset(values)), rest


def options_from(**values: Any) -> Options:
    """Options from enable()'s keyword arguments; an unknown one is named with its near miss."""
    for name in values:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(NAMES)}"
            raise HolmesError(f"enable({name}=...) is not an option of holmes; {hint}")
    texts = {name: str(value) for name, value in values.items() if value is not None}
    return Options(**texts, given=frozenset(texts))
