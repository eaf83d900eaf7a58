"""Facts that --holmes-check reads from a started job: node of each rank, networks of groups, problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.sources.hostlist import folded
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import NETWORK_APIS

if TYPE_CHECKING:
    from holmes_ext.cluster.site import Site
    from holmes_ext.plan.plan import Plan
    from holmes_ext.runtime.session import Session

#: Name in messages for the network of a group inside a node.
_MEMORY = "memory"


class PlacedNodes(NamedTuple):
    """Neighbouring nodes of a cluster that have the same pipeline stages."""

    ranks: str  # "0-15"
    nodes: str  # "a[0-1]"
    cluster: str
    stages: str  # "0", "0-1"; "" if the parallel sizes are not known
    layers: str  # "0-11"; "" if the model is not known


class GroupsOnNetwork(NamedTuple):
    """Process groups of the same kind that use the same network."""

    kind: str  # "data", "pipeline", ..., "world"
    groups: int  # number of groups
    nccl: str  # name of the network with NCCL
    gloo: str  # name of the network with gloo (it cannot use RDMA)


class NetworkRate(NamedTuple):
    """Rate of a network or of the link between two clusters."""

    name: str
    kind: str  # of the NICs, or "link"
    rate_bps: float  # of a node or of the link; 0: no limit
    latency_s: float


@dataclass(frozen=True)
class Findings:
    """Facts about a started job for the report of --holmes-check (report.py).

    They are read from the plan and the NICs; nothing here is predicted.
    """

    site: Site  # clusters, nodes and networks
    sizes: Sizes | None  # None if neither flags nor options give them
    placed: tuple[PlacedNodes, ...]
    networks: tuple[GroupsOnNetwork, ...]
    rates: tuple[NetworkRate, ...]
    problems: tuple[str, ...]  # a line for each port or NIC that does not work as planned

    @property
    def status(self) -> int:
        """Exit status of the job: 1 if a problem was found, else 0."""
        return 1 if self.problems else 0


def find(current: Session) -> Findings:
    """Collect the facts about a started job for --holmes-check, after its ranks have agreed on a plan."""
    plan = current.plan
    layers = _layers_of_stages(current)
    return Findings(
        site=current.site,
        sizes=plan.sizes,
        placed=tuple(_placed_nodes(plan, layers)),
        networks=tuple(_group_networks(plan)),
        rates=tuple(_rates(plan)),
        problems=(*_faulty_ports(current.site), *current.nic_problems),
    )


def _layers_of_stages(current: Session) -> tuple[int, ...]:
    """Return the number of layers of each stage; () if sizes or model are not known."""
    plan = current.plan
    if plan.sizes is None:
        return ()
    if len(plan.stage_layers) == plan.sizes.pipeline:
        return plan.stage_layers
    if current.model is None or current.model.layers < plan.sizes.pipeline:
        return ()
    return tuple(uniform(current.model.layers, plan.sizes.pipeline))


def _placed_nodes(plan: Plan, layers: tuple[int, ...]) -> Iterable[PlacedNodes]:
    """Yield the nodes in the order of the ranks; neighbours with equal cluster and stages share an item.

    Args:
        plan: The plan of the job.
        layers: Number of layers of each stage; () if not known.
    """
    neighbours: list[str] = []
    for node in plan.nodes:
        if neighbours and _role(plan, node) != _role(plan, neighbours[-1]):
            yield _one_item(plan, neighbours, layers)
            neighbours = []
        neighbours.append(node)
    yield _one_item(plan, neighbours, layers)


def _role(plan: Plan, node: str) -> tuple[str, range]:
    """Return the cluster that a node belongs to, and the pipeline stages that its ranks hold."""
    return plan.cluster_of[node], _stages_of(plan, node)


def _stages_of(plan: Plan, node: str) -> range:
    """Return the range of the pipeline stages of a node; empty without sizes."""
    if plan.sizes is None:
        return range(0)
    first_rank = plan.first_rank(node)
    ranks = range(first_rank, first_rank + plan.processes_on(node))
    stages = [plan.sizes.stage(rank) for rank in ranks]
    return range(min(stages), max(stages) + 1)


def _one_item(plan: Plan, nodes: list[str], layers: tuple[int, ...]) -> PlacedNodes:
    """Merge neighbouring nodes with the same cluster and pipeline stages into an item of the report."""
    first_rank = plan.first_rank(nodes[0])
    last_rank = plan.first_rank(nodes[-1]) + plan.processes_on(nodes[-1]) - 1
    stages = _stages_of(plan, nodes[0])
    layer_text = ""
    if stages and layers:
        first_layers = [0, *accumulate(layers)]  # of each stage, and the end of the last one
        layer_text = _range_text(first_layers[stages[0]], first_layers[stages[-1] + 1] - 1)
    return PlacedNodes(
        ranks=_range_text(first_rank, last_rank),
        nodes=folded(nodes),
        cluster=plan.cluster_of[nodes[0]],
        stages=_range_text(stages[0], stages[-1]) if stages else "",
        layers=layer_text,
    )


def _range_text(first: int, last: int) -> str:
    """Return a range of numbers as text: "3" or "3-5"."""
    return str(first) if first == last else f"{first}-{last}"


def _group_networks(plan: Plan) -> Iterable[GroupsOnNetwork]:
    """Yield the networks of all planned groups with two or more ranks, and the number of groups on each.

    Without parallel sizes, the program's data, pipeline and other groups are not known. Then a group of
    all ranks of each cluster shows which network a group inside this cluster uses.
    """
    groups = list(plan.groups())  # without sizes, only the group of all ranks, "world"
    if plan.sizes is None:
        clusters = plan.by_cluster(range(plan.world_size))
        groups = [("inside a cluster", tuple(ranks)) for ranks in clusters.values()] + groups
    counts: dict[tuple[str, ...], int] = defaultdict(int)
    for kind, ranks in groups:
        if len(ranks) > 1:
            nccl, gloo = (_network(plan, ranks, network_api) for network_api in NETWORK_APIS)
            counts[kind, nccl, gloo] += 1
    for (kind, nccl, gloo), count in counts.items():
        yield GroupsOnNetwork(kind, count, nccl, gloo)


def _network(plan: Plan, ranks: tuple[int, ...], network_api: str) -> str:
    """Return the name of the network over which a process group communicates through NCCL or gloo."""
    fabric = plan.fabric_of(ranks, network_api)
    return _MEMORY if fabric is None else fabric.name


def _rates(plan: Plan) -> Iterable[NetworkRate]:
    """Yield the networks of the plan with their rates, and the links between clusters."""
    for fabric in plan.fabrics:
        yield NetworkRate(fabric.name, fabric.kind, fabric.rate_bps, fabric.latency_s)
    for link in plan.wan.between:
        yield NetworkRate(" - ".join(link.clusters), "link", link.rate_bps, link.latency_s)


def _faulty_ports(site: Site) -> Iterable[str]:
    """Yield a line for each port that does not work, as the NICs report it or the preflight found it."""
    for node in site.nodes:
        for port in node.ports:
            if not port.fault:
                continue
            effect = "works with what is left" if port.usable else f"{ETHERNET} is used instead"
            yield f"node {node.name}, {port.fabric}: {port.fault}; {effect}"
