"""The Plan: what goes where, and how. One JSON file that every rank follows.

Rank r of the job runs on nodes[r // processes], so the framework's own layout lands on the planned placement.
`fabrics` and `traffic` are what a running job looks up; the rest says why, and what to expect. plan.json
has no traffic: a job derives it from the rest, its ports and its options (derive_traffic() of
plan/decide.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.wan import Wan
from holmes_ext.document import Table, digest_of, load_json, parse_json, save, with_digest
from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import KINDS, Sizes, groups
from holmes_ext.plan.traffic import LOCAL, NETWORK_APIS, VERBS, PlannedFabric, Traffic, neighbours
from holmes_ext.plan.workload import StageLoad, Workload

VERSION = 4
#: `basis` of a plan whose model nobody told.
NOMINAL = "nominal"
ADVICE = "`holmes plan` writes one"
_UPGRADE = "make the plan again with `holmes plan`"


@dataclass(frozen=True)
class SpanningGroups:
    """Groups of one kind that no single fast fabric holds, and what that costs: seconds a step, predicted."""

    kind: str
    groups: int
    example: tuple[str, ...]
    fabric: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Node order, networks, reductions and stages of one job on one site."""

    site_digest: str
    nodes: tuple[str, ...]
    processes: int
    sizes: Sizes | None = None
    #: In the order of preference; () until derive_traffic().
    fabrics: tuple[PlannedFabric, ...] = ()
    #: Nodes of each, and the network between them.
    clusters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    wan: Wan = Wan()
    #: () until derive_traffic().
    traffic: tuple[Traffic, ...] = ()
    #: The decisions were made with it; basis: NOMINAL, or where the model came from.
    workload: Workload = Workload()
    basis: str = NOMINAL
    #: Of each stage; () where the model is not known.
    loads: tuple[StageLoad, ...] = ()
    spanning: tuple[SpanningGroups, ...] = ()
    #: Of each pipeline stage; () where the framework decides.
    stage_layers: tuple[int, ...] = ()
    partition: str = "uniform"
    #: Seconds, by name.
    predicted: dict[str, float] = field(default_factory=dict)
    source: str = "computed at start-up"

    def __post_init__(self) -> None:
        if self.processes < 1 or not self.nodes:
            raise HolmesError("keys 'nodes' and 'processes' must give at least one rank")
        if len(set(self.nodes)) != len(self.nodes):
            twice = next(node for node in self.nodes if self.nodes.count(node) > 1)
            raise HolmesError(f"key 'nodes': node {twice!r} is listed twice")
        if self.sizes is None:
            return
        try:
            complete = self.sizes.complete(self.world_size)
        except HolmesError as error:
            raise HolmesError(f"key 'sizes': {error}") from None
        if complete != self.sizes:
            raise HolmesError("key 'sizes' lacks the data size")
        if len(self.loads) not in (0, self.sizes.pipeline):
            raise HolmesError(
                f"key 'loads' has {len(self.loads)} entries for {self.sizes.pipeline} stages"
            )
        if len(self.stage_layers) % self.sizes.pipeline:
            entries, stages = len(self.stage_layers), self.sizes.pipeline
            raise HolmesError(f"key 'stage_layers' has {entries} entries for {stages} stages")

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.processes

    def node_of(self, rank: int) -> str:
        """Name of the node on which `rank` (as renumbered) runs."""
        return self.nodes[rank // self.processes]

    @cached_property
    def reach(self) -> dict[str, dict[str, frozenset[str]]]:
        """Carrier -> node -> names of the fabrics that it can use."""
        return {
            network_api: {
                node: frozenset(f.name for f in self.fabrics if node in of[f.name])
                for node in self.nodes
            }
            for network_api in NETWORK_APIS
            for of in [{f.name: set(getattr(f, network_api)) for f in self.fabrics}]
        }

    def fabric_of(self, ranks: Iterable[int], network_api: str = VERBS) -> Fabric | None:
        """The network of a group: the first fabric that all its nodes can use; None inside one node."""
        nodes = {self.node_of(rank) for rank in ranks}
        if len(nodes) == 1:
            return None
        shared = frozenset.intersection(*{self.reach[network_api][node] for node in nodes})
        return next(fabric for fabric in self.fabrics if fabric.name in shared)

    def spans_networks(self, ranks: Collection[int], network_api: str = VERBS) -> bool:
        """Whether a group is left to Ethernet although one of its nodes has better."""
        used = self.fabric_of(ranks, network_api)
        better = (len(self.reach[network_api][self.node_of(rank)]) > 1 for rank in ranks)
        return used is not None and used.name == ETHERNET and any(better)

    def by_cluster(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """Cluster -> those of `ranks` that run on it, in their order."""
        result: dict[str, list[int]] = {}
        for rank in ranks:
            result.setdefault(self.cluster_of[self.node_of(rank)], []).append(rank)
        return result

    @cached_property
    def cluster_of(self) -> dict[str, str]:
        """Of each node."""
        return {node: name for name, nodes in self.clusters.items() for node in nodes}

    def groups(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(kind, ranks) of every group, that of all ranks last; expert groups where there are experts."""
        if (sizes := self.sizes) is not None:
            kinds = (kind for kind in KINDS if kind != "expert" or sizes.expert > 1)
            yield from ((kind, ranks) for kind in kinds for ranks in groups(sizes, kind))
        yield "world", tuple(range(self.world_size))

    def stage_of(self, ranks: Iterable[int]) -> int | None:
        """The pipeline stage whose gradients the group of `ranks` reduces; None: no such group."""
        return self._reducing.get(tuple(sorted(ranks)))

    @cached_property
    def _reducing(self) -> dict[tuple[int, ...], int]:
        sizes = self.sizes or Sizes().complete(self.world_size)
        stride = sizes.strides()["pp"]
        return {ranks: ranks[0] // stride % sizes.pipeline for ranks in groups(sizes, "data")}

    def traffic_of(self, network_api: str = VERBS) -> Traffic:
        return next(traffic for traffic in self.traffic if network_api in traffic.network_apis)

    @property
    def transports(self) -> dict[str, tuple[str, ...]]:
        """Of NCCL's groups (for gloo's: traffic_of); {} in a plan that is not settled."""
        return self.traffic_of().transports if self.traffic else {}

    @property
    def digest(self) -> str:
        """sha256 (hex) of all that the plan says; `source` does not count."""
        return digest_of(self._content())

    def _content(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            **{name: value for name, value in asdict(self).items() if name != "source"},
        }

    def to_json(self) -> str:
        """All of it, for other ranks and for people."""
        return with_digest(self._content())

    def save(self, path: str | Path) -> None:
        """Write plan.json whole or not at all; HolmesError when the place cannot be written."""
        content = self._content()
        del content["traffic"]
        save(path, with_digest(content), "the plan")


def load_plan(path: str | Path) -> Plan:
    """Read and validate plan.json, without traffic; HolmesError names file and key, and tells an edited
    file."""
    return _plan(load_json(path, ADVICE), traffic=False)


def parse_plan(text: str, source: str) -> Plan:
    """What Plan.to_json() made; see load_plan."""
    return _plan(parse_json(text, source, ADVICE), traffic=True)


def _plan(top: Table, traffic: bool) -> Plan:
    top.version(VERSION, _UPGRADE)
    digest = top.take("digest", str)
    given: dict[str, Any] = {"source": top.source}
    if not traffic:
        top.tables("traffic")  # what `holmes plan --json` prints has it; the job derives it again
        given["traffic"] = ()
    plan = top.into(Plan, **given)
    if digest != digest_of({key: value for key, value in top.values.items() if key != "digest"}):
        way_out = "the file was edited or truncated; make it again with `holmes plan`"
        raise HolmesError(f"{top.at('digest')} does not match: {way_out}")
    return plan


def check_plan(plan: Plan, site: Site) -> Plan:
    """`plan` itself, after making sure that it was made for `site`; HolmesError names the difference."""
    here, planned = {node.name for node in site.nodes}, set(plan.nodes)
    if here != planned:
        parts = [
            f"the plan has node {name!r}, which did not report"
            for name in sorted(planned - here)[:1]
        ]
        parts += [
            f"node {name!r} reported but is not in the plan" for name in sorted(here - planned)[:1]
        ]
        way_out = "make the plan for these nodes with `holmes plan`"
        raise HolmesError(f"{plan.source}: key 'nodes': {'; '.join(parts)}; {way_out}")
    if plan.processes != site.processes:
        raise HolmesError(
            f"{plan.source}: key 'processes' is {plan.processes}, but {site.processes} were started on each "
            f"node (world size {plan.world_size} in the plan, {site.world_size} here)"
        )
    if plan.site_digest != site.digest:
        made_for = (
            f"made for other clusters or rates than {site.source}; make it again with `holmes plan`"
        )
        raise HolmesError(f"{plan.source}: key 'site_digest': {made_for}")
    return plan


def name_of(fabric: Fabric | None) -> str:
    return LOCAL if fabric is None else fabric.name


def pair_needs_group(
    plan: Plan, pair: Sequence[int], over: Sequence[int], network_api: str
) -> bool:
    """Whether two ranks that would send over `over` get a group: what they share is faster."""
    return name_of(plan.fabric_of(pair, network_api)) != name_of(plan.fabric_of(over, network_api))


def pairs_with_group(plan: Plan, ranks: Sequence[int], network_api: str) -> list[tuple[int, int]]:
    """The neighbours that get a group each where a framework sends batches over their pipeline group.

    All or none: NCCL makes a group's communicator among all its ranks at the first batch over it (where no
    device is bound), and a rank whose pairs all have their own would never come to it.
    """
    pairs = sorted(
        {(min(pair), max(pair)) for pair in neighbours(ranks)}
    )  # with chunks last and first, too
    return pairs if any(pair_needs_group(plan, pair, ranks, network_api) for pair in pairs) else []
