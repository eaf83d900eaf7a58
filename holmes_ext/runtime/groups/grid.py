"""The grid of ranks that a framework makes when it starts, against the one that was planned.

    other sizes than the user planned for    ends the job, on all ranks, with one line
    groups that straddle clusters            told once, with the way to fewer of them if there is one
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from holmes_ext.errors import HolmesError
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.decide import straddling
from holmes_ext.plan.sizes import DEFAULT_ORDER, Sizes
from holmes_ext.runtime.refusal import told_once
from holmes_ext.runtime.session import Session
from holmes_ext.words import tell_user

_told: set[str] = set()


def check_grid(current: Session, sizes: Sizes, instances: int = 1) -> None:
    """For complete `sizes`; all ranks must call it. instances: see plan/decide.py, straddling()."""
    try:
        refuse_other_sizes(current, sizes)
    except HolmesError as error:
        raise told_once(error) from None
    if current.rank == 0:
        tell(current, advice(current, sizes, instances))


def refuse_other_sizes(current: Session, sizes: Sizes) -> None:
    """HolmesError when the plan (--holmes-plan, --holmes-sizes) was made for others."""
    plan = current.plan
    if plan.sizes is not None and plan.sizes != sizes and {"plan", "sizes"} & current.options.given:
        where = f"{plan.source}: key 'sizes'" if "plan" in current.options.given else "--holmes-sizes"
        raise HolmesError(
            f"{where} says {say(plan.sizes)}, but the program initializes {say(sizes)}; make them agree")


def advice(current: Session, sizes: Sizes, instances: int = 1) -> str:
    """On groups that straddle in the plan's order, unless the start line told them; "": none does."""
    here = straddling(current.plan, sizes, instances)
    if not here or (current.plan.sizes == sizes and instances == 1):
        return ""
    site = replace(current.site, fabrics=current.plan.fabrics)
    starts = {f"with --holmes-sizes {say(sizes).replace(' ', '')}": sizes, "without --holmes-sizes": None}
    counts = {start: straddling(build_plan(site, named), sizes, instances) for start, named in starts.items()}
    best = min(counts, key=lambda start: sum(counts[start].values()))
    avoidable = {kind: less for kind, count in here.items()
                 if (less := count - counts[best].get(kind, 0)) > 0}
    which = " and" if avoidable == here else f", {_counts(avoidable)}"
    way_out = f"{which} need not: start {best}" if avoidable else ""
    return f"{_counts(here)} straddle clusters (on ethernet){way_out}"


def _counts(groups: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind} groups" for kind, count in groups.items())


def say(sizes: Sizes) -> str:
    """ "pipeline=2, tensor=4": as --holmes-sizes takes it."""
    axes = ("pipeline", "tensor", "context", "expert")
    named = [f"{name}={size}" for name in axes if (size := getattr(sizes, name)) > 1]
    named += [f"order={sizes.order}"] if sizes.order != DEFAULT_ORDER else []
    return ", ".join(named) or "pipeline=1"


def tell(current: Session, text: str, once: str | Literal[True] = "") -> None:
    """On rank 0; a text about `once` (True: the same text) only the first time in this process."""
    about = text if once is True else once
    if text and current.rank == 0 and about not in _told:
        tell_user(text)
        _told.update(filter(None, [about]))
