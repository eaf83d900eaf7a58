"""Makes the Plan of a job, and derives other Plans from it.

PlanRequest makes the Plan when the job starts, from the options, the files they name, and the nodes'
reports. The functions derive one Plan from another while the job starts and runs. job.py hands this module
to the runtime, for which it implements holmes_ext.runtime.planning.PlanMaker.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.resolve import part_of, resolve_site
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model, load_model, on_clusters
from holmes_ext.plan.decide import (
    complete_plan,
    derive_traffic,
    spanning,
    spec_of_group,
    with_loads,
    workload_of,
)
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.plan import NOMINAL, Plan, check_plan, load_plan
from holmes_ext.plan.sizes import Sizes, sizes_text


@dataclass
class PlanRequest:
    """What one rank knows of the job before it has heard of the others."""

    options: Options
    sizes: Sizes | None = (
        None  # parallel sizes; None if neither an option nor the command line gives them
    )
    model: Model | None = None  # None if neither an option nor the command line describes it
    overlap: bool = (
        False  # whether predictions assume that gradients are reduced during the last backward pass
    )
    engine: EngineTraits = EngineTraits()
    spec: SiteSpec | None = None  # of --holmes-cluster, set by read_files()
    plan: Plan | None = None  # of --holmes-plan, set by read_files()
    digests: dict[str, str] = field(
        default_factory=dict
    )  # name for messages -> digest of each file
    counted: bool = True  # whether nodes must start as many processes as cluster.toml says

    def read_files(self) -> None:
        """Read the files that the options name.

        Raises:
            HolmesError: a file cannot be read, or its content is bad.
        """
        given = self.options
        if given.cluster:
            self.spec = load_spec(given.cluster)
        if given.plan:
            self.plan = load_plan(given.plan)
        if given.model:
            self.model = load_model(given.model)
        if self.model is not None and self.spec is not None:
            self.model = on_clusters(self.model, self.spec)
        for key, path in (("cluster", given.cluster), ("plan", given.plan), ("model", given.model)):
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""
            self.digests[f"content of {key} file"] = content

    def make_plan(self, nodes: list[NodeReport]) -> tuple[Site, Plan]:
        """Make the plan for the nodes that reported, or adapt the given one to the ports that they have.

        Returns:
            The site as the nodes have reported it, and the plan.

        Raises:
            HolmesError: the given plan is for other nodes, sizes or layers, or no plan is possible.
        """
        options, model, engine = self.options, self.model, self.engine
        spec = part_of(self.spec, nodes) if self.spec is not None else None
        site = resolve_site(nodes, spec, options.fallback == "ethernet", self.counted)
        links = Links.of_spec(spec) if spec is not None else Links()
        sizes = (
            self.sizes.complete(site.world_size, site.processes) if self.sizes is not None else None
        )
        if self.plan is not None:
            plan = check_plan(self.plan, site)
            self._compare(plan, sizes)
            plan = derive_traffic(plan, site, options, links, engine=engine)
            return site, with_loads(plan, options, model, engine)
        if options.model or options.needs_model:
            shape: dict[str, Any] = {
                "partition": options.partition,
                "model": model,
                "overlap": self.overlap,
            }
        else:
            # a model from the command line is good for decisions; whether it fits is the program's to say
            workload = workload_of(model, sizes)
            shape = {"workload": workload, "basis": model.source if model and workload else NOMINAL}
        if options.stage_layers:
            shape |= {"partition": "uniform", "stage_layers": options.stage_layers}
        plan = build_plan(site, sizes, links=links, options=options, engine=engine, **shape)
        return site, with_loads(plan, options, model, engine)

    def start_again(self, layers: str, sizes: Sizes | None) -> tuple[Options, list[str]]:
        """Take over what the previous start of the job has left in its store.

        Args:
            layers: Layers of each stage, as --holmes-partition takes them; "" if it left nothing.
            sizes: The parallel sizes of the previous start.

        Returns:
            The options, and lines for the user.
        """
        if not layers:
            return self.options, []
        self.options, self.sizes = replace(self.options, partition=layers), self.sizes or sizes
        return self.options, [
            f"--holmes-restart auto: started again with --holmes-partition {layers}"
        ]

    def _compare(self, plan: Plan, sizes: Sizes | None) -> None:
        """Raise HolmesError if the given plan is for other sizes or layers than the job's."""
        options = self.options
        if sizes is not None and plan.sizes is not None and sizes != plan.sizes:
            raise HolmesError(
                f"{plan.source}: key 'sizes' is {sizes_text(plan.sizes)}, "
                f"but the job runs {sizes_text(sizes)}"
            )
        wanted = "explicit" if options.stage_layers else options.partition
        other = wanted != plan.partition or options.stage_layers not in ((), plan.stage_layers)
        if "partition" in options.given and other:
            wanted = f"but --holmes-partition asks for {options.partition!r}"
            raise HolmesError(f"{plan.source}: key 'partition' is {plan.partition!r}, {wanted}")


__all__ = ["advice_on_spanning", "complete_plan", "on_ports", "spec_of_group"]


def on_ports(plan: Plan, site: Site, options: Options, *, engine: EngineTraits) -> Plan:
    """Return the plan for the ports that `site` has left."""
    return derive_traffic(plan, site, options, engine=engine)


def advice_on_spanning(plan: Plan, site: Site, sizes: Sizes, instances: int) -> str:
    """Return a line on the groups that span clusters, and how to avoid it.

    Args:
        plan: The plan of the job.
        site: The nodes of the job, in the launcher's order.
        sizes: The parallel sizes that the framework has reported.
        instances: See spanning().

    Returns:
        "" if no group spans, or if the line at the start of the job has said so.
    """
    found = spanning(plan, sizes, instances)
    if not found or (plan.sizes == sizes and instances == 1):
        return ""
    measured = replace(site, fabrics=plan.fabrics)
    starts = {
        f"with --holmes-sizes {sizes_text(sizes).replace(' ', '')}": sizes,
        "without --holmes-sizes": None,
    }
    counts = {
        start: spanning(build_plan(measured, planned_sizes), sizes, instances)
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
    return f"{_counts(found)} span clusters (on ethernet){way_out}"


def _counts(groups: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind} groups" for kind, count in groups.items())
