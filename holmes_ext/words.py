"""Helpers for messages: similar names, shortened lists, and names that were changed."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from holmes_ext.errors import HolmesError

K = TypeVar("K")
V = TypeVar("V")

# Names that changed before the first release. An old name is rejected with a message that gives the new one.

_INVITED = "run `holmes join invite NAME --output FILE`, and give --holmes-join-invitation FILE"
#: Option that was removed -> what to do instead.
REMOVED_OPTIONS = {
    "apart": "run joined jobs instead (docs/joined.md)",
    "join_plain": "all traffic between joined jobs is encrypted",
    "join_token": _INVITED,
    "join_token_file": _INVITED,
}
#: Old name of an option -> its new name, as keywords of `holmes_ext.enable`. The names of flags and
#: environment variables follow from them.
RENAMED_OPTIONS = {
    "compress": "compress_gradients",
    "edges": "compress_activations",
    "passes": "schedule",
    "patience": "link_timeout",
}
#: (option, old value) -> new value.
RENAMED_VALUES = {
    ("adapt", "tell"): "report",
    ("restart", "tell"): "report",
}
#: Old name of a feature -> its new name, as `holmes patches` lists them.
RENAMED_FEATURES = {
    "deepspeed-edges": "deepspeed-stage-links",
    "deepspeed-narrow": "deepspeed-compression",
    "megatron-edges": "megatron-stage-links",
    "torch-passes": "torch-schedule",
    "two-level": "hierarchical",
}
#: Old key of plan.json -> its new name.
RENAMED_PLAN_KEYS = {
    "edges": "stage_links",
    "narrow": "compression",
    "passes": "schedule",
    "straddling": "spanning",
}


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that is most similar to a name, or "" if none is similar.

    Args:
        name: Probably a misspelling of a known name.
        known: Known names.
        cutoff: Least similarity, from 0 to 1 (see difflib.get_close_matches).
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def did_you_mean(name: str, known: Iterable[str], show: Callable[[str], str] | None = None) -> str:
    """Return a hint about an unknown name: "did you mean 'cluster'?" or "known: a, b, c".

    Args:
        name: The unknown name.
        known: Known names.
        show: Returns how a name is written in the hint; None to quote a single name and list others plainly.
    """
    names = list(known)
    similar = nearest(name, names)
    if similar:
        shown = show(similar) if show is not None else repr(similar)
        return f"did you mean {shown}?"
    if not names:
        return "known: none"
    all_shown = map(show, names) if show is not None else names
    return f"known: {', '.join(all_shown)}"


def named_values(parts: Iterable[str], known: Iterable[str], where: str) -> dict[str, str]:
    """Return the values of texts such as "lr=1": name -> value. Empty texts are ignored.

    Args:
        parts: Texts of the form NAME=VALUE. In NAME, "-" and "_" are equal if `known` has names.
        known: Allowed names; if it is empty, all names are.
        where: Source of the texts; errors begin with it.

    Raises:
        HolmesError: a text has another form, or a name is unknown or occurs twice.
    """
    values: dict[str, str] = {}
    names = list(known)
    for text in parts:
        part = text.strip()
        if not part:
            continue
        name, _, value = part.partition("=")
        name = name.strip()
        value = value.strip()
        if names:  # they are written with "_"
            name = name.replace("-", "_")
        if names and name not in names:
            raise HolmesError(f"{where}: {name!r:.60} is not known; {did_you_mean(name, names)}")
        if not name or not value:
            raise HolmesError(f"{where}: {part!r:.60} is not NAME=VALUE")
        if name in values:
            raise HolmesError(f"{where}: {name} is given twice; give it once")
        values[name] = value
    return values


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Group (key, value) pairs by key: key -> its values, in their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def some_of(items: Iterable[object], most: int = 8, separator: str = ", ") -> str:
    """Return a list of items for a message, such as "0, 1, 2, and 5 more".

    Args:
        items: The items.
        most: Largest number of items that are listed.
        separator: Text between two items.
    """
    texts = [str(item) for item in items]
    left_out = len(texts) - most  # number of items that are not listed
    if left_out > 0:
        texts = [*texts[:most], f"and {left_out} more"]
    return separator.join(texts)


#: Verb after several things -> verb after one.
_SINGULAR_VERBS = {"are": "is", "have": "has", "do": "does", "span": "spans"}


def counted(number: int, noun: str, verb: str = "") -> str:
    """Return a number with its noun, and a verb: "1 node", "3 nodes", "1 process has", "0 ranks are".

    Args:
        number: The number.
        noun: The noun for one thing. For several, "s" is added, or "es" after "s", "x" and "ch". "entry"
            gives "entries", but "key" gives "keys".
        verb: The verb for several things, one of _SINGULAR_VERBS; "" for none.
    """
    if number == 1:
        text = f"{number} {noun}"
        verb = _SINGULAR_VERBS.get(verb, "")
    else:
        text = f"{number} {_plural(noun)}"
    return f"{text} {verb}" if verb else text


def _plural(noun: str) -> str:
    if noun.endswith("y") and not noun.endswith(("ay", "ey", "oy", "uy")):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch")) else f"{noun}s"


def why(error: Exception) -> str:
    """Return the message of an error without its errno, such as "No such file or directory"."""
    return str(getattr(error, "strerror", None) or error)


def tell_user(line: str) -> None:
    """Print a line to stderr that begins with "holmes: "."""
    print(f"holmes: {line}", file=sys.stderr, flush=True)


def print_line(line: str) -> None:
    """Print a line to stdout; if stdout is a pipe without a reader, discard this line and all later ones.

    For processes that must continue after their reader has ended. Several threads may call this function.
    """
    try:
        sys.stdout.write(
            f"{line}\n"
        )  # in one piece: print() would write the end of the line separately
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
