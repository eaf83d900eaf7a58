"""The grid of ranks that a framework makes when it starts, against the one that was planned.

other sizes than the user planned for    ends the job, on all ranks, with one line
groups that span clusters            told once, with the way to fewer of them if there is one
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import sizes_text
from holmes_ext.runtime.deadline import told_once
from holmes_ext.runtime.session import tell

if TYPE_CHECKING:
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.runtime.session import Session


def check_grid(current: Session, sizes: Sizes, instances: int = 1) -> None:
    """For complete `sizes`; all ranks must call it. instances: see plan/maker.py, spanning()."""
    try:
        refuse_other_sizes(current, sizes)
    except HolmesError as error:
        raise told_once(error) from None
    if current.rank == 0 and current.maker is not None:
        tell(
            current,
            current.maker.advice_on_spanning(current.plan, current.site, sizes, instances),
        )


def refuse_other_sizes(current: Session, sizes: Sizes) -> None:
    """HolmesError when the plan (--holmes-plan, --holmes-sizes) was made for others."""
    plan = current.plan
    if plan.sizes is not None and plan.sizes != sizes and {"plan", "sizes"} & current.options.given:
        where = (
            f"{plan.source}: key 'sizes'" if "plan" in current.options.given else "--holmes-sizes"
        )
        raise HolmesError(
            f"{where} says {sizes_text(plan.sizes)}, but the program initializes {sizes_text(sizes)}; "
            "make them agree"
        )
