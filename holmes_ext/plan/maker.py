"""Makes the Plan of a job, and derives other Plans from it.

PlanRequest makes the plan at the start of the job, from options, files and the reports of the nodes. The
functions derive a plan from another one: for the ports that still work, or for the sizes that a framework
reports when it starts. The module implements the protocol holmes_ext.runtime.planning.PlanMaker: job.py hands
it to the runtime, which does not import plan/maker.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.resolve import part_of, resolve_site
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.document import read_bytes
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.buckets import FEWEST, SMALLEST_BYTES
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model, load_model, on_clusters
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel
from holmes_ext.plan.decide import decisions, derive_traffic, with_traffic
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.plan import NOMINAL, Plan, check_plan, load_plan, site_of
from holmes_ext.plan.sizes import INSIDE, Sizes, groups, sizes_text
from holmes_ext.plan.traffic import ReductionSpec
from holmes_ext.plan.workload import Workload
from holmes_ext.words import counted


@dataclass
class PlanRequest:
    """The options and files of a rank, before it communicates with the other ranks."""

    options: Options
    sizes: Sizes | None = None  # None if neither an option nor the command line gives them
    model: Model | None = None  # None if neither an option nor the command line describes it
    #: Whether predictions assume that gradients are reduced during the last backward pass.
    overlap: bool = False
    engine: EngineTraits = EngineTraits()
    spec: SiteSpec | None = None  # of --holmes-cluster, set by read_files()
    plan: Plan | None = None  # of --holmes-plan, set by read_files()
    digests: dict[str, str] = field(default_factory=dict)  # name for messages -> digest of a file
    counted: bool = True  # whether nodes must start the number of processes that cluster.toml gives

    def read_files(self) -> None:
        """Load the cluster, plan and model files that the options name into this request's fields.

        `spec`, `plan` and `model` get the parsed files, and `digests` a hash of each file. An option
        that is not set leaves its field as it is.

        Raises:
            HolmesError: A file cannot be read, or its content is bad.
        """
        options = self.options
        if options.cluster:
            self.spec = load_spec(options.cluster)
        if options.plan:
            self.plan = load_plan(options.plan)
        if options.model:
            self.model = load_model(options.model)
        if self.model is not None and self.spec is not None:
            # Returns a copy of the model with the GPUs that the cluster file gives for each cluster.
            self.model = on_clusters(self.model, self.spec)

        # The ranks compare these digests, so that all of them work with the same files.
        paths = {"cluster": options.cluster, "plan": options.plan, "model": options.model}
        for name, path in paths.items():
            digest = ""  # no such file
            if path:
                digest = hashlib.sha256(
                    read_bytes(path, f"give --holmes-{name} a file")
                ).hexdigest()[:16]
            self.digests[f"content of {name} file"] = digest

    def make_plan(self, nodes: list[NodeReport]) -> tuple[Site, Plan]:
        """Return the plan of --holmes-plan for the nodes that reported, or a new plan for them.

        A given plan keeps its order of the nodes. Only the networks of its groups are decided again,
        because other ports may work now than when the plan was made.

        Returns:
            The site as the nodes have reported it, and the plan.

        Raises:
            HolmesError: The given plan is for other nodes, sizes or layers, or no plan is possible.
        """
        options = self.options
        model = self.model
        engine = self.engine
        spec = part_of(self.spec, nodes) if self.spec is not None else None  # of these nodes only

        # self.counted: whether nodes must have the number of processes that cluster.toml gives.
        site = resolve_site(nodes, spec, options.fallback == "ethernet", self.counted)
        links = Links.of_spec(spec) if spec is not None else Links()
        sizes = None
        if self.sizes is not None:
            sizes = self.sizes.complete(site.world_size, site.ranks_of_every_node)
        if self.plan is not None:  # --holmes-plan
            plan = check_plan(self.plan, site)
            self._compare(plan, sizes)
            # The networks that groups use, decided for the ports that `site` has.
            plan = derive_traffic(plan, site, options, links, engine=engine)
            # with_loads adds each stage's work and the order of passes, if the plan lacks them.
            return site, with_loads(plan, options, model, engine)

        # `model_options`: arguments of build_plan that describe the model and its partition. If the user
        # names a model file, or an option needs a model, the plan has predictions for it.
        if options.model or options.needs_model:
            model_options: dict[str, Any] = {
                "partition": options.partition,
                "model": model,
                "overlap": self.overlap,
            }
        else:
            # The model was derived from the framework's arguments. The plan gets no predictions for it,
            # only the work of a rank on an average stage. The training program itself checks whether the
            # model fits.
            workload = workload_of(model, sizes)
            basis = model.source if model and workload else NOMINAL  # where the workload comes from
            model_options = {"workload": workload, "basis": basis}
        if options.stage_layers:
            model_options |= {"partition": "uniform", "stage_layers": options.stage_layers}
        plan = build_plan(site, sizes, links=links, options=options, engine=engine, **model_options)
        return site, with_loads(plan, options, model, engine)

    def start_again(self, layers: str, sizes: Sizes | None) -> tuple[Options, list[str]]:
        """Set the layers of each stage to those that a restarted job left for this start.

        With --holmes-restart auto, a job stops to run again with other layers per stage. Before its
        end it writes these layers and its parallel sizes into the rendezvous store, which remains.

        Args:
            layers: Layers of each stage, as --holmes-partition takes them; "": this is the first
                start, nothing changes.
            sizes: The parallel sizes of the previous start.

        Returns:
            The options with the layers, and lines for the user.
        """
        if not layers:
            return self.options, []
        self.options = replace(self.options, partition=layers)
        self.sizes = self.sizes or sizes  # sizes that the user gave as an option stay
        return self.options, [
            f"--holmes-restart auto: started again with --holmes-partition {layers}"
        ]

    def _compare(self, plan: Plan, sizes: Sizes | None) -> None:
        """Raise HolmesError if the plan of --holmes-plan has other sizes or layers than the job."""
        options = self.options
        if sizes is not None and plan.sizes is not None and sizes != plan.sizes:
            raise HolmesError(
                f"{plan.source}: key 'sizes' is {sizes_text(plan.sizes)}, "
                f"but the job runs {sizes_text(sizes)}"
            )
        if "partition" not in options.given:  # the user did not set --holmes-partition
            return
        partition = "explicit" if options.stage_layers else options.partition
        has_other_layers = bool(options.stage_layers) and options.stage_layers != plan.stage_layers
        if partition != plan.partition or has_other_layers:
            raise HolmesError(
                f"{plan.source}: key 'partition' is {plan.partition!r}, "
                f"but --holmes-partition asks for {options.partition!r}"
            )


def on_ports(plan: Plan, site: Site, options: Options, *, engine: EngineTraits) -> Plan:
    """Adapt a plan to the ports that still work, which are those of `site`.

    Args:
        plan: The plan.
        site: Nodes with the ports that work.
        options: Options of the user.
        engine: Abilities of the training engine.
    """
    return derive_traffic(plan, site, options, engine=engine)


def complete_plan(
    plan: Plan,
    sizes: Sizes,
    options: Options,
    model: Model | None = None,
    engine: EngineTraits = EngineTraits(),
) -> Plan:
    """Adapt a plan to the parallel sizes that the framework reports; the order of the nodes stays.

    The framework reports its sizes only when it starts. The decisions that depend on sizes are made
    again: fabrics of groups, reductions, stage links, and the order of passes.

    Args:
        plan: The plan, made without sizes or for other sizes.
        sizes: Parallel sizes that the framework has reported, with the data size.
        options: Options of the user.
        model: The model; None: not known, the plan's workload stays.
        engine: Traits of the training engine.
    """
    changed = replace(
        plan,
        sizes=sizes,
        workload=workload_of(model, sizes) or plan.workload,
        loads=(),
        stage_layers=(),
        spanning=(),
        predicted={},
    )
    # with_traffic adds the decisions; with_loads adds each stage's work and the order of passes.
    return with_loads(with_traffic(changed, options, engine), options, model, engine)


def with_loads(
    plan: Plan, options: Options, model: Model | None, engine: EngineTraits = EngineTraits()
) -> Plan:
    """Return `plan` with the work of each stage (`loads`), and the order of passes computed from it.

    The plan stays as it is if it has the loads, if the model is not known, or if the framework will refuse
    the sizes.

    Args:
        plan: The plan, with decisions.
        options: Options of the user.
        model: The model; None: not known.
        engine: Traits of the training engine.
    """
    sizes = plan.sizes
    if plan.loads or model is None or sizes is None:
        return plan
    if workload_of(model, sizes) is None:
        return plan  # the framework refuses a batch that does not divide evenly
    if model.layers < sizes.pipeline:
        return plan  # the framework refuses a stage without layers
    network = Network(site_of(plan))
    prices = Prices(network, RankModel.of(model, sizes))
    costs = prices.costs(network.placement(plan.nodes, sizes))
    layers = plan.stage_layers

    # The plan may have no layers, or those of chunks (interleaved).
    has_layers_of_stages = len(layers) == costs.stages and sum(layers) == model.layers
    if not has_layers_of_stages:
        layers = uniform(model.layers, costs.stages)

    # The loads contain computation and memory only, so they do not depend on engine and options.
    plan = replace(plan, loads=costs.loads(layers))
    # plan.traffic has an entry with the decisions for each network API, or a single entry if they are
    # equal for both. So the first network API of an entry stands for all of its network APIs.
    # with_order() returns the existing decisions with an order of passes computed from the new loads.
    traffic = []
    for decided in plan.traffic:
        network_api = decided.network_apis[0]
        traffic.append(decisions(plan, network_api, options, engine).with_order(decided))
    return replace(plan, traffic=tuple(traffic))


def workload_of(model: Model | None, sizes: Sizes | None) -> Workload | None:
    """Return the work of a rank on an average pipeline stage: seconds of computation, and bytes sent.

    Returns:
        None if model or sizes are not known, or if the batch is not divisible (the framework refuses that).
    """
    if model is None or sizes is None:
        return None
    try:
        return model.workload(sizes)
    except HolmesError:
        return None


def spec_of_group(
    plan: Plan,
    ranks: Sequence[int],
    network_api: str,
    options: Options,
    total_bytes: float = inf,
    engine: EngineTraits = EngineTraits(),
) -> ReductionSpec:
    """Return how a group sums its gradients: as the plan says for its pipeline stage, or decided again.

    It is decided again in these cases:

        for the group alone   the plan has no such group, or
                              the options set another compression than the plan, or
                              the group has too few bytes to fill buckets of the planned size
        for its stage         the plan did not know the model's size, and there are links between
                              clusters with a latency: then the best way depends on the bytes

    Args:
        plan: The plan.
        ranks: The group.
        network_api: "verbs" or "sockets".
        options: Options of the user.
        total_bytes: Bytes of the group's gradients per step.
        engine: Abilities of the training engine.
    """
    planned = plan.traffic_of(network_api).reductions
    stage = plan.stage_of(ranks)
    if stage is None:
        overlap = options.overlap != "off"
        return decisions(plan, network_api, options, engine).reduction_of_group(
            ranks, overlap, total_bytes
        )
    overlap = planned[stage].overlap

    # Whether the plan was made without knowing the model's size.
    is_nominal = plan.basis == NOMINAL and plan.sizes is not None
    if plan.wan and is_nominal and total_bytes < inf:
        # With latencies between clusters the decision depends on the bytes, which are known now.
        resized = replace(plan, workload=replace(plan.workload, gradient_bytes=total_bytes))
        return decisions(resized, network_api, options, engine).reduction(stage, overlap)

    # With fewer bytes, buckets are smaller than SMALLEST_BYTES, so that there are FEWEST
    # (bucket_bytes).
    fills_buckets = total_bytes >= FEWEST * SMALLEST_BYTES
    if planned[stage].compress == options.compress_gradients and fills_buckets:
        return planned[stage]
    return decisions(plan, network_api, options, engine).reduction_of_group(
        ranks, overlap, total_bytes
    )


def advice_on_spanning(plan: Plan, site: Site, sizes: Sizes, instances: int) -> str:
    """Return a line on the groups that span clusters, and how to avoid it.

    An example is "8 data groups span clusters (on ethernet) and need not: start without
    --holmes-sizes".

    Args:
        plan: The plan of the job.
        site: The nodes of the job, in the launcher's order.
        sizes: The parallel sizes that the framework has reported.
        instances: Number of equal slices of each data-parallel group. megatron-core reduces within each
            slice first (its option --num-distributed-optimizer-instances).

    Returns:
        "" if no group spans, or if the job has already printed such a line at its start.
    """
    spanning_groups = spanning(plan, sizes, instances)
    # At its start a job prints such a line for the planned sizes only.
    was_printed_at_start = plan.sizes == sizes and instances == 1
    if not spanning_groups or was_printed_at_start:
        return ""
    measured = replace(site, fabrics=plan.fabrics)  # with the rates in the plan

    # Ways to start the job again -> sizes that holmes would then plan with.
    starts = {
        f"with --holmes-sizes {sizes_text(sizes).replace(' ', '')}": sizes,
        "without --holmes-sizes": None,
    }

    # A plan for the planned sizes has an order of the nodes. How many groups of the reported sizes
    # would span with this order?
    counts = {
        start: spanning(build_plan(measured, planned_sizes), sizes, instances)
        for start, planned_sizes in starts.items()
    }
    best = min(counts, key=lambda start: sum(counts[start].values()))
    avoidable = {}  # kind of group -> groups that would not span if the job started in the best way
    for kind, count in spanning_groups.items():
        fewer = count - counts[best].get(kind, 0)
        if fewer > 0:
            avoidable[kind] = fewer
    way_out = ""
    if avoidable == spanning_groups:
        way_out = f" and need not: start {best}"
    elif avoidable:  # name those that need not span
        way_out = f", {_counts(avoidable)} need not: start {best}"
    verb = "spans" if sum(spanning_groups.values()) == 1 else "span"
    return f"{_counts(spanning_groups)} {verb} clusters (on ethernet){way_out}"


def spanning(plan: Plan, sizes: Sizes, instances: int = 1) -> dict[str, int]:
    """Return how many groups must use Ethernet although a node of theirs has a faster fabric, by kind.

    The nodes of such a group are on different fast networks ("the group spans networks"). Kinds:
    "data", "tensor", "context", "expert"; kinds without such a group are left out.

    Args:
        plan: The plan of the job.
        sizes: Parallel sizes, with the data size.
        instances: Number of slices of each data-parallel group within which megatron-core reduces first.
            With more than 1, the slices count instead of the whole groups.
    """
    result = {}
    for kind in INSIDE:
        members = groups(sizes, kind)
        if kind == "data" and instances > 1:
            slice_size = len(members[0]) // instances
            members = [
                ranks[start : start + slice_size]
                for ranks in members
                for start in range(0, len(ranks), slice_size)
            ]
        count = sum(plan.spans_networks(ranks) for ranks in members)
        if count:
            result[kind] = count
    return result


def _counts(spanning_groups: dict[str, int]) -> str:
    """Return the numbers of groups as text, such as "2 data groups, 1 tensor group"."""
    return ", ".join(counted(count, f"{kind} group") for kind, count in spanning_groups.items())
