"""Makes the Plan of a job at its start, from the options, the files they name, and the nodes' reports."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holmes_ext.cluster.nccl import NodeReport
from holmes_ext.cluster.resolve import part_of, resolve_site
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model, load_model, on_clusters
from holmes_ext.plan.decide import derive_traffic, with_loads, workload_of
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.plan import NOMINAL, Plan, check_plan, load_plan
from holmes_ext.plan.sizes import Sizes, sizes_text


@dataclass
class PlanRequest:
    """What one rank knows of the job before it has heard of the others."""

    options: Options
    sizes: Sizes | None = None  # parallel sizes; None if neither an option nor the command line gives them
    model: Model | None = None  # None if neither an option nor the command line describes it
    overlap: bool = False  # whether predictions assume that gradients are reduced during the last backward pass
    engine: EngineTraits = EngineTraits()
    spec: SiteSpec | None = None  # of --holmes-cluster, set by read_files()
    plan: Plan | None = None  # of --holmes-plan, set by read_files()
    digests: dict[str, str] = field(default_factory=dict)  # name for messages -> digest of each file
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
        sizes = self.sizes.complete(site.world_size, site.processes) if self.sizes is not None else None
        if self.plan is not None:
            plan = check_plan(self.plan, site)
            self._compare(plan, sizes)
            plan = derive_traffic(plan, site, options, links, engine=engine)
            return site, with_loads(plan, options, model, engine)
        if options.model or options.needs_model:
            shape: dict[str, Any] = {"partition": options.partition, "model": model, "overlap": self.overlap}
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
        return self.options, [f"--holmes-restart auto: started again with --holmes-partition {layers}"]

    def _compare(self, plan: Plan, sizes: Sizes | None) -> None:
        """Raise HolmesError if the given plan is for other sizes or layers than the options or the command line."""
        options = self.options
        if sizes is not None and plan.sizes is not None and sizes != plan.sizes:
            raise HolmesError(
                f"{plan.source}: key 'sizes' is {sizes_text(plan.sizes)}, but the job runs {sizes_text(sizes)}")
        wanted = "explicit" if options.stage_layers else options.partition
        other = wanted != plan.partition or options.stage_layers not in ((), plan.stage_layers)
        if "partition" in options.given and other:
            wanted = f"but --holmes-partition asks for {options.partition!r}"
            raise HolmesError(f"{plan.source}: key 'partition' is {plan.partition!r}, {wanted}")
