"""The functions that derive one Plan from another; job.py hands this module to the runtime.

It implements holmes_ext.runtime.planning.PlanMaker.
"""

from __future__ import annotations

from dataclasses import replace

from holmes_ext.cluster.site import Site
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.decide import complete_plan, derive_traffic, spec_of_group, straddling
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.sizes import Sizes, sizes_text

__all__ = ["advice_on_straddling", "complete_plan", "on_ports", "spec_of_group"]


def on_ports(plan: Plan, site: Site, options: Options, *, engine: EngineTraits) -> Plan:
    """Return the plan for the ports that `site` has left."""
    return derive_traffic(plan, site, options, engine=engine)


def advice_on_straddling(plan: Plan, site: Site, sizes: Sizes, instances: int) -> str:
    """Return a line on the groups that straddle clusters, and how to avoid it.

    Args:
        plan: The plan of the job.
        site: The nodes of the job, in the launcher's order.
        sizes: The parallel sizes that the framework has reported.
        instances: See straddling().

    Returns:
        "" if no group straddles, or if the line at the start of the job has said so.
    """
    found = straddling(plan, sizes, instances)
    if not found or (plan.sizes == sizes and instances == 1):
        return ""
    measured = replace(site, fabrics=plan.fabrics)
    starts = {
        f"with --holmes-sizes {sizes_text(sizes).replace(' ', '')}": sizes,
        "without --holmes-sizes": None,
    }
    counts = {
        start: straddling(build_plan(measured, planned_sizes), sizes, instances)
        for start, planned_sizes in starts.items()
    }
    best = min(counts, key=lambda start: sum(counts[start].values()))
    avoidable = {}
    for kind, count in found.items():
        fewer = count - counts[best].get(kind, 0)
        if fewer > 0:
            avoidable[kind] = fewer
    way_out = ""
    if avoidable:
        which = " and" if avoidable == found else f", {_counts(avoidable)}"
        way_out = f"{which} need not: start {best}"
    return f"{_counts(found)} straddle clusters (on ethernet){way_out}"


def _counts(groups: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind} groups" for kind, count in groups.items())
