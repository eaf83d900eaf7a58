"""Words that many messages share: the name that was probably meant, a few of many items, items by key."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from holmes_ext.errors import HolmesError

K = TypeVar("K")
V = TypeVar("V")

# Names that changed before the first release -> their new names. Each old name is rejected in one line that
# gives the new one.

#: Options, as keywords of `holmes_ext.enable`. The flags and environment variables follow from them.
RENAMED_OPTIONS = {
    "compress": "compress_gradients",
    "edges": "compress_activations",
    "passes": "schedule",
    "patience": "link_timeout",
}
#: Values of options: (option, old value) -> new value.
RENAMED_VALUES = {
    ("adapt", "tell"): "report",
    ("restart", "tell"): "report",
}
#: Features, as `holmes patches` lists them.
RENAMED_FEATURES = {
    "deepspeed-edges": "deepspeed-stage-links",
    "deepspeed-narrow": "deepspeed-compression",
    "megatron-edges": "megatron-stage-links",
    "torch-passes": "torch-schedule",
    "two-level": "hierarchical",
}
#: Keys of plan.json.
RENAMED_PLAN_KEYS = {
    "edges": "stage_links",
    "narrow": "compression",
    "passes": "schedule",
    "straddling": "spanning",
}


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The name of `known` that `name` is probably a misspelling of; "" when none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), "")


def did_you_mean(name: str, known: Iterable[str], show: Callable[[str], str] | None = None) -> str:
    """ "did you mean 'cluster'?", else "known: a, b, c"; show: how a name is written (default: quoted)."""
    known = list(known)
    near = nearest(name, known)
    if near:
        return f"did you mean {(show or repr)(near)}?"
    return f"known: {', '.join(map(show or str, known)) or 'none'}"


def named_values(parts: Iterable[str], known: Iterable[str], where: str) -> dict[str, str]:
    """ "lr=1" -> {"lr": "1"}, of several parts. HolmesError, begun with `where`: not NAME=VALUE, a name that
    is not known (any is where `known` is empty), or twice."""
    values: dict[str, str] = {}
    names = list(known)
    for part in filter(None, map(str.strip, parts)):
        name, _, value = map(str.strip, part.partition("="))
        name = name.replace("-", "_") if names else name
        if names and name not in names:
            raise HolmesError(f"{where}: {name!r:.60} is not known; {did_you_mean(name, names)}")
        if not name or not value:
            raise HolmesError(f"{where}: {part!r:.60} is not NAME=VALUE")
        if name in values:
            raise HolmesError(f"{where}: {name} is given twice; give it once")
        values[name] = value
    return values


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def some_of(items: Iterable[object], most: int = 8, separator: str = ", ") -> str:
    """ "0, 1, 2, and 5 more": the first `most` of many items; all of them where there are no more."""
    texts = [str(item) for item in items]
    left = len(texts) - most
    return separator.join([*texts[:most], f"and {left} more"] if left > 0 else texts)


def why(error: Exception) -> str:
    """What an error says, without its class and number: "No such file or directory"."""
    return str(getattr(error, "strerror", None) or error)


def tell_user(line: str) -> None:
    """A line of holmes's on stderr."""
    print(f"holmes: {line}", file=sys.stderr, flush=True)
