"""The grid of ranks that a framework makes when it starts, against the one that was planned.

    other sizes than the user planned for    ends the job, on all ranks, with one line
    groups that straddle clusters            told once, with the way to fewer of them if there is one
"""

from __future__ import annotations

from typing import Literal

from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import Sizes, sizes_text
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
    if current.rank == 0 and current.maker is not None:
        tell(current, current.maker.advice_on_straddling(current.plan, current.site, sizes, instances))


def refuse_other_sizes(current: Session, sizes: Sizes) -> None:
    """HolmesError when the plan (--holmes-plan, --holmes-sizes) was made for others."""
    plan = current.plan
    if plan.sizes is not None and plan.sizes != sizes and {"plan", "sizes"} & current.options.given:
        where = f"{plan.source}: key 'sizes'" if "plan" in current.options.given else "--holmes-sizes"
        raise HolmesError(
            f"{where} says {sizes_text(plan.sizes)}, but the program initializes {sizes_text(sizes)}; make them agree")


def tell(current: Session, text: str, once: str | Literal[True] = "") -> None:
    """On rank 0; a text about `once` (True: the same text) only the first time in this process."""
    about = text if once is True else once
    if text and current.rank == 0 and about not in _told:
        tell_user(text)
        _told.update(filter(None, [about]))
