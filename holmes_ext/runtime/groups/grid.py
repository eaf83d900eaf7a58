"""Compares the parallel sizes that a framework initializes with the planned ones.

If they differ from sizes that the user gave for the plan, the job ends on all ranks with a message. If
process groups span clusters although other sizes would avoid it, rank 0 prints a line of advice.
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
    """Check the parallel sizes that a framework initializes against the planned ones.

    If process groups span clusters although other sizes would avoid it, rank 0 prints a line of advice. All
    ranks must call this function.

    Args:
        current: State of holmes in this process.
        sizes: Complete parallel sizes of the framework.
        instances: megatron-core's num_distributed_optimizer_instances: the data-parallel ranks form
            so many parts, and each part shards the optimizer state among its own ranks.

    Raises:
        HolmesError: the sizes differ from those that the user gave for the plan.
    """
    try:
        refuse_other_sizes(current, sizes)
    except HolmesError as error:
        # told_once() prints the message on one rank. All ranks raise its result: an error that is
        # not printed again.
        raise told_once(error) from None
    # maker: functions that derive plans and judge them; None only in tests.
    if current.rank == 0 and current.maker is not None:
        # A group spans clusters if its ranks are in several. The advice is "" unless other sizes would keep
        # more groups inside clusters.
        advice = current.maker.advice_on_spanning(current.plan, current.site, sizes, instances)
        tell(current, advice)


def refuse_other_sizes(current: Session, sizes: Sizes) -> None:
    """Raise an error if the plan was made for other parallel sizes, by --holmes-plan or --holmes-sizes.

    Sizes that holmes read from the program's command line are a guess. They may differ without an error.

    Args:
        current: State of holmes in this process.
        sizes: Parallel sizes that the framework initializes.

    Raises:
        HolmesError: names the option and both sizes.
    """
    plan = current.plan
    if plan.sizes is None or plan.sizes == sizes:
        return
    if "plan" in current.options.given:
        source = f"{plan.source}: key 'sizes'"
    elif "sizes" in current.options.given:
        source = "--holmes-sizes"
    else:
        return  # the planned sizes are a guess
    raise HolmesError(
        f"{source} says {sizes_text(plan.sizes)}, but the program initializes {sizes_text(sizes)}; "
        "make them agree"
    )
