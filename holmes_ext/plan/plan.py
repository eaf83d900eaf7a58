"""The Plan of a job: order of the nodes, networks, reductions and stages, in a file that all ranks follow.

The ranks are numbered node by node, in the order of `nodes`, so the framework's own layout of ranks
produces the planned placement. A running job looks up `fabrics` (its networks) and `traffic` (how each
stage reduces gradients and sends to the next stage). The other fields contain reasons and predictions.
plan.json does not contain `traffic`: a job derives it from the other fields, its ports and its options
(derive_traffic() of plan/decide.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.cluster.wan import Wan
from holmes_ext.document import Table, digest_of, load_json, parse_json, with_digest
from holmes_ext.errors import HolmesError
from holmes_ext.files import save
from holmes_ext.plan.schedule import PassOrder
from holmes_ext.plan.sizes import KINDS, Sizes, groups
from holmes_ext.plan.traffic import (
    LOCAL,
    NETWORK_APIS,
    SOCKETS,
    VERBS,
    PlannedFabric,
    Traffic,
    neighbours,
)
from holmes_ext.plan.workload import StageLoad, Workload
from holmes_ext.words import counted

VERSION = 4
#: Value of `basis` if the model is not known.
NOMINAL = "nominal"
ADVICE = "`holmes plan` writes one"
_UPGRADE = "make the plan again with `holmes plan`"


@dataclass(frozen=True)
class SpanningGroups:
    """Groups of the same kind whose nodes share no fast fabric, and the predicted cost."""

    kind: str  # such as "data"
    groups: int  # number of such groups
    example: tuple[str, ...]  # nodes of the first of the groups
    fabric: str  # slow fabric that these groups have to use
    seconds: float  # by which a step is longer than with a fast fabric


@dataclass(frozen=True)
class Plan:
    """Node order, networks, reductions and stages of a job on a given site."""

    site_digest: str
    nodes: tuple[str, ...]  # in the order of the ranks
    processes: int  # of each node; if nodes differ, the greatest common divisor of all
    sizes: Sizes | None = None  # parallel sizes; None: not known before the framework starts
    fabrics: tuple[PlannedFabric, ...] = ()  # the preferred fabric first; () until derive_traffic()
    clusters: dict[str, tuple[str, ...]] = field(default_factory=dict)  # cluster -> its nodes
    wan: Wan = Wan()  # links between clusters
    traffic: tuple[Traffic, ...] = ()  # () until derive_traffic()
    workload: Workload = Workload()  # that the decisions were made with
    basis: str = NOMINAL  # NOMINAL, or where the model came from
    loads: tuple[StageLoad, ...] = ()  # of each stage; (): the model is not known
    spanning: tuple[SpanningGroups, ...] = ()
    stage_layers: tuple[int, ...] = ()  # layers of each stage; (): the framework decides
    partition: str = "uniform"
    predicted: dict[str, float] = field(default_factory=dict)  # name -> seconds
    source: str = "computed at start-up"  # file of the plan, for messages
    #: Node -> its processes, if nodes differ; {}: every node has `processes`.
    processes_of: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise HolmesError if a field contradicts the nodes or the sizes."""
        if self.processes < 1 or not self.nodes:
            raise HolmesError("keys 'nodes' and 'processes' must give at least one rank")
        if len(set(self.nodes)) != len(self.nodes):
            twice = next(node for node in self.nodes if self.nodes.count(node) > 1)
            raise HolmesError(f"key 'nodes': node {twice!r} is listed twice")
        if self.processes_of and set(self.processes_of) != set(self.nodes):
            raise HolmesError(
                "key 'processes_of' must have every node of key 'nodes', and no other"
            )
        if min(self.processes_of.values(), default=1) < 1:
            raise HolmesError("key 'processes_of': a node has fewer than 1 process")
        if self.sizes is None:
            return
        try:
            complete = self.sizes.complete(self.world_size)
        except HolmesError as error:
            raise HolmesError(f"key 'sizes': {error}") from None
        if complete != self.sizes:
            raise HolmesError("key 'sizes' lacks the data size")
        if len(self.loads) not in (0, self.sizes.pipeline):
            entries = counted(len(self.loads), "entry")
            stages = counted(self.sizes.pipeline, "stage")
            raise HolmesError(f"key 'loads' has {entries} for {stages}")
        if len(self.stage_layers) % self.sizes.pipeline:
            entries = counted(len(self.stage_layers), "entry")
            raise HolmesError(f"key 'stage_layers' has {entries} for {self.sizes.pipeline} stages")

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return sum(map(self.processes_on, self.nodes))

    def processes_on(self, node: str) -> int:
        """Return how many ranks run on a node."""
        return self.processes_of.get(node, self.processes)

    def first_rank(self, node: str) -> int:
        """Return the rank of a node's first process, as holmes numbers the ranks."""
        return self.first_ranks[node]

    def node_of(self, rank: int) -> str:
        """Return the node of a rank, as holmes numbers the ranks."""
        if not self.processes_of:
            return self.nodes[rank // self.processes]
        return self._node_of_ranks[rank]

    def misaligned_node(self) -> str:
        """Return the first node on which rank % processes is not the local rank; "" if there is none.

        There the node's first rank is no multiple of its processes. A framework that chooses its
        GPU by this formula chooses a wrong GPU on such a node.
        """
        for node, rank in self.first_ranks.items():
            if rank % self.processes_on(node):
                return node
        return ""

    def widths_text(self) -> str:
        """Return the different numbers of processes, each with its first node: "4 on a0, 8 on b0"."""
        first_of: dict[int, str] = {}
        for node in self.nodes:
            first_of.setdefault(self.processes_on(node), node)
        return ", ".join(f"{count} on {node}" for count, node in sorted(first_of.items()))

    @cached_property
    def _node_of_ranks(self) -> list[str]:
        """Return the name of the node that runs each rank, in the order of the ranks."""
        return [node for node in self.nodes for _ in range(self.processes_on(node))]

    @cached_property
    def first_ranks(self) -> dict[str, int]:
        """Return node -> rank of its first process, in the order of the nodes."""
        ends = accumulate(map(self.processes_on, self.nodes))
        return dict(zip(self.nodes, [0, *ends]))

    @cached_property
    def reach(self) -> dict[str, dict[str, frozenset[str]]]:
        """Return the fabrics that each node can use: network API -> node -> names of fabrics."""
        result: dict[str, dict[str, frozenset[str]]] = {}
        for network_api in NETWORK_APIS:
            nodes_of = {fabric.name: set(getattr(fabric, network_api)) for fabric in self.fabrics}
            result[network_api] = {
                node: frozenset(name for name, nodes in nodes_of.items() if node in nodes)
                for node in self.nodes
            }
        return result

    def fabric_of(self, ranks: Iterable[int], network_api: str = VERBS) -> Fabric | None:
        """Return the fabric of a group: the first that all its nodes can use; None inside a node."""
        nodes = {self.node_of(rank) for rank in ranks}
        if len(nodes) == 1:
            return None
        shared = frozenset.intersection(*{self.reach[network_api][node] for node in nodes})
        return next(fabric for fabric in self.fabrics if fabric.name in shared)

    def spans_networks(self, ranks: Collection[int], network_api: str = VERBS) -> bool:
        """Return whether a group has to use Ethernet although a member's node has a faster fabric."""
        fabric = self.fabric_of(ranks, network_api)
        if fabric is None or fabric.name != ETHERNET:
            return False
        return any(len(self.reach[network_api][self.node_of(rank)]) > 1 for rank in ranks)

    def by_cluster(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """Group ranks by the cluster that they run on: cluster -> those of `ranks`, in the given order."""
        result: dict[str, list[int]] = {}
        for rank in ranks:
            result.setdefault(self.cluster_of[self.node_of(rank)], []).append(rank)
        return result

    @cached_property
    def cluster_of(self) -> dict[str, str]:
        """Return node -> its cluster."""
        return {node: name for name, nodes in self.clusters.items() for node in nodes}

    def groups(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (kind, ranks) of every group, the group of all ranks ("world") last."""
        if self.sizes is not None:
            for kind in KINDS:
                if kind == "expert" and self.sizes.expert == 1:
                    continue
                for ranks in groups(self.sizes, kind):
                    yield kind, ranks
        yield "world", tuple(range(self.world_size))

    def stage_of(self, ranks: Iterable[int]) -> int | None:
        """Return the pipeline stage whose gradients a group reduces; None: it is no data-parallel group."""
        return self._stage_of_group.get(tuple(sorted(ranks)))

    @cached_property
    def _stage_of_group(self) -> dict[tuple[int, ...], int]:
        """Ranks of each data-parallel group -> its pipeline stage."""
        sizes = self.sizes or Sizes().complete(self.world_size)
        stride = sizes.strides()["pp"]
        return {ranks: ranks[0] // stride % sizes.pipeline for ranks in groups(sizes, "data")}

    def traffic_of(self, network_api: str = VERBS) -> Traffic:
        """Return the decisions (networks, reductions, pass order) for groups that use a network API.

        NCCL's groups use "verbs", gloo's "sockets".
        """
        return next(traffic for traffic in self.traffic if network_api in traffic.network_apis)

    @property
    def transports(self) -> dict[str, tuple[str, ...]]:
        """Return kind of group -> fabrics that NCCL's groups of this kind use (see Traffic.transports).

        {}: the plan has no decisions yet (a plan that was just loaded; derive_traffic() adds them).
        """
        return self.traffic_of().transports if self.traffic else {}

    @property
    def digest(self) -> str:
        """Return the SHA-256 digest (hex) of all fields except `source`."""
        return digest_of(self._content())

    def _content(self) -> dict[str, Any]:
        """Return the fields of the plan that the digest covers: all except `source`."""
        return {
            "version": VERSION,
            **{name: value for name, value in asdict(self).items() if name != "source"},
        }

    def to_json(self) -> str:
        """Return the whole plan as JSON, also its decisions about communication (`traffic`)."""
        return with_digest(self._content())

    def save(self, path: str | Path) -> None:
        """Write plan.json, completely or not at all.

        Raises:
            HolmesError: The file cannot be written.
        """
        content = self._content()
        del content["traffic"]
        save(path, with_digest(content), "the plan")


def load_plan(path: str | Path) -> Plan:
    """Read and validate plan.json; the plan has no `traffic`.

    Raises:
        HolmesError: The file cannot be read, a key has a bad value, or the file was edited.
    """
    return _parsed(load_json(path, ADVICE), traffic=False)


def parse_plan(text: str, source: str) -> Plan:
    """Return the plan that Plan.to_json() wrote, with its `traffic`.

    Args:
        text: The JSON.
        source: Name of its origin, for messages.

    Raises:
        HolmesError: The JSON is bad, a key has a bad value, or the plan was edited.
    """
    return _parsed(parse_json(text, source, ADVICE), traffic=True)


def _parsed(top: Table, traffic: bool) -> Plan:
    """Read a plan from a parsed JSON document.

    Args:
        top: The document.
        traffic: Whether to read the key "traffic"; else the plan has none.

    Raises:
        HolmesError: A key has a bad value, or the digest does not match the content.
    """
    top.version(VERSION, _UPGRADE)
    digest = top.take("digest", str)
    given: dict[str, Any] = {"source": top.source}
    if not traffic:
        # The output of `holmes plan --json` has the key. tables() marks it as read, so that it is no
        # unknown key. Its value is dropped: the job decides again, for the ports that work.
        top.tables("traffic")
        given["traffic"] = ()
    plan = top.into(Plan, **given)
    if digest != digest_of({key: value for key, value in top.values.items() if key != "digest"}):
        way_out = "the file was edited or truncated; make it again with `holmes plan`"
        raise HolmesError(f"{top.at('digest')} does not match: {way_out}")
    return plan


def check_plan(plan: Plan, site: Site) -> Plan:
    """Return `plan` if it was made for `site`.

    Raises:
        HolmesError: The nodes, processes, clusters or rates differ.
    """
    # The plan has to have the same nodes, in any order.
    reported = {node.name for node in site.nodes}
    planned = set(plan.nodes)
    if reported != planned:
        missing = sorted(planned - reported)
        surplus = sorted(reported - planned)
        problems = []
        if missing:
            problems.append(f"the plan has node {missing[0]!r}, which did not report")
        if surplus:
            problems.append(f"node {surplus[0]!r} reported but is not in the plan")
        way_out = "make the plan for these nodes with `holmes plan`"
        raise HolmesError(f"{plan.source}: key 'nodes': {'; '.join(problems)}; {way_out}")

    # Each node has to have as many processes.
    world_sizes = f"(world size {plan.world_size} in the plan, {site.world_size} here)"
    for node in site.nodes:
        planned_processes = plan.processes_on(node.name)
        if node.processes == planned_processes:
            continue
        if plan.processes_of or not site.has_equal_nodes:
            raise HolmesError(
                f"{plan.source}: node {node.name!r} has {counted(planned_processes, 'process')} in the "
                f"plan, but {node.processes} were started on it {world_sizes}"
            )
        raise HolmesError(
            f"{plan.source}: key 'processes' is {plan.processes}, but {site.processes} were started on each "
            f"node {world_sizes}"
        )

    # The digest covers the clusters of the nodes, and the rates of their networks.
    if plan.site_digest != site.digest:
        made_for = (
            f"made for other clusters or rates than {site.source}; make it again with `holmes plan`"
        )
        raise HolmesError(f"{plan.source}: key 'site_digest': {made_for}")
    return plan


def site_of(plan: Plan, network_api: str = VERBS) -> Site:
    """Return the nodes and networks of a plan as a site with the ports that a network API can use.

    The nodes are in the order of the plan.

    Args:
        plan: The plan.
        network_api: "verbs" (NCCL, needs an HCA) or "sockets" (gloo, needs an IP address).
    """
    fast = [fabric.name for fabric in plan.fabrics if fabric.name != ETHERNET]  # the fastest first

    def node(name: str) -> Node:
        """Return a node of the plan, with the ports that the network API can use; all nodes have Ethernet."""
        reachable = plan.reach[network_api][name]  # names of the fabrics
        fast_ports = (Port(fabric) for fabric in fast if fabric in reachable)
        ports = (*fast_ports, Port(ETHERNET))
        return Node(name, plan.cluster_of[name], plan.processes_on(name), ports)

    return Site(tuple(map(node, plan.nodes)), plan.fabrics, wan=plan.wan)


def planned_fabrics(plan: Plan, site: Site, measured: Site) -> tuple[PlannedFabric, ...]:
    """Return the fabrics of a site, in order of preference, with the nodes that can use each.

    Rates and latencies are those of the plan for fabrics that it has already, else the measured ones.
    Two network APIs may reach different nodes: "verbs" (NCCL) needs an HCA, "sockets" (gloo) an IP
    address.

    Args:
        plan: The plan.
        site: Nodes with the ports that work.
        measured: The same site with measured rates.
    """
    nodes = [site.node_by_name[name] for name in plan.nodes]

    def nodes_on(fabric: Fabric, network_api: str) -> tuple[str, ...]:
        """Return the nodes with a port on a fabric that a network API can use."""
        return tuple(
            node.name
            for node in nodes
            for port in node.ports
            if port.fabric == fabric.name and _carries(port, network_api)
        )

    # Fabrics with the plan's rates and latencies, else with the measured ones.
    planned = {fabric.name: fabric for fabric in plan.fabrics}
    fabrics: list[Fabric] = [planned.get(fabric.name, fabric) for fabric in measured.fabrics]
    fabrics.sort(key=lambda fabric: fabric.preference, reverse=True)

    # Fabric -> NCCL's name of the network (see Fabric.net), always as the site says now.
    net_of = {fabric.name: fabric.net for fabric in site.fabrics}
    return tuple(
        PlannedFabric(
            fabric.name,
            fabric.kind,
            fabric.rate_bps,
            fabric.latency_s,
            verbs=nodes_on(fabric, VERBS),
            sockets=nodes_on(fabric, SOCKETS),
            net=net_of[fabric.name],
        )
        for fabric in fabrics
    )


def _carries(port: Port, network_api: str) -> bool:
    """Return whether a network API can use `port`; a port without a known NIC is assumed to work."""
    if not port.usable:
        return False
    is_known = bool(port.interface or port.address or port.hcas)
    if port.fabric == ETHERNET or not is_known:
        return True
    if network_api == VERBS:
        return bool(port.hcas) and not port.no_verbs
    return bool(port.address)


def name_of(fabric: Fabric | None) -> str:
    """Return the name of the network that a group uses; "local" for None, a group inside a node."""
    return LOCAL if fabric is None else fabric.name


def pair_needs_group(
    plan: Plan, pair: Sequence[int], over: Sequence[int], network_api: str
) -> bool:
    """Return whether two ranks need a group of their own, because they share a faster network.

    Args:
        plan: The plan.
        pair: The two ranks.
        over: Larger group that contains both ranks. They send over it if they get no group of their own.
        network_api: "verbs" or "sockets".
    """
    # A group uses the fastest fabric that all members share. So if the larger group uses a different
    # fabric, it is slower.
    return name_of(plan.fabric_of(pair, network_api)) != name_of(plan.fabric_of(over, network_api))


def pairs_with_group(plan: Plan, ranks: Sequence[int], network_api: str) -> list[tuple[int, int]]:
    """Return the pairs of neighbouring stages that need a process group of their own.

    Without such groups, a framework sends over the group of the whole pipeline (`ranks`). A pair needs
    its own group if its two ranks share a faster network than `ranks`. The result contains all pairs of the
    pipeline or none: NCCL creates the communicator of `ranks` at the first send, and all ranks take
    part in that. A rank with own groups on both sides would never send over `ranks`, and the other
    ranks would hang.

    Args:
        plan: The plan.
        ranks: A pipeline group, in the order of the stages.
        network_api: "verbs" or "sockets".
    """
    # Includes the pair of the last and the first stage, because interleaved schedules send there.
    pairs = sorted({(min(pair), max(pair)) for pair in neighbours(ranks)})
    if any(pair_needs_group(plan, pair, ranks, network_api) for pair in pairs):
        return pairs
    return []


def more_bytes(plan: Plan) -> tuple[float, ...]:
    """Return the bytes of activations that each stage holds in addition to those under 1F1B.

    The plan either has an order of passes (`schedule`), or numbers of micro-batches in flight.

    Returns:
        () under the framework's own schedule, or if the plan knows nothing of the model's activations.
    """
    # The decisions for sockets (gloo) are close enough to those for verbs (NCCL) for an estimate.
    traffic = plan.traffic_of(SOCKETS)
    in_flight = traffic.in_flight
    if traffic.schedule:
        in_flight = PassOrder.parse(traffic.schedule).in_flight
    result = []
    # in_flight is () under the framework's own schedule, loads is () if the model is not known.
    for stage, (count, load) in enumerate(zip(in_flight, plan.loads)):
        of_1f1b = min(len(in_flight) - stage, plan.workload.micro_batches)
        result.append((count - of_1f1b) * load.kept_bytes)
    return tuple(result)
