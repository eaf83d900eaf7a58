"""The Plan: what goes where. One JSON file that every rank follows.

`nodes` is the heart of it: rank r of the job runs on nodes[r // processes], so the framework's own default layout
lands on the planned placement. The rest records why, and what to expect.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holmes_ext.cluster.site import Fabric, Site
from holmes_ext.document import Table, load_json, parse_json, save
from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import Sizes

VERSION = 1
ADVICE = "`holmes plan` writes one"


@dataclass(frozen=True)
class Straddle:
    """Groups of one kind that no single fast fabric holds, and what that costs: seconds for each step, predicted."""

    kind: str
    groups: int
    example: tuple[str, ...]
    fabric: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Node order, transports and stages of one job on one site.

    transports: for each kind of group ("data", "tensor", "context", "pipeline", "world") the fabric of every group, in the order of
    its first rank; where all groups of a kind share one, one entry. stage_layers: layers of each pipeline stage, () when the
    framework decides. predicted: seconds, by name.
    """

    site_digest: str
    nodes: tuple[str, ...]
    processes: int
    sizes: Sizes | None = None
    transports: dict[str, tuple[str, ...]] = field(default_factory=dict)
    straddling: tuple[Straddle, ...] = ()
    stage_layers: tuple[int, ...] = ()
    partition: str = "uniform"
    predicted: dict[str, float] = field(default_factory=dict)
    source: str = "computed at start-up"

    def __post_init__(self):
        if len(set(self.nodes)) != len(self.nodes):
            twice = next(node for node in self.nodes if self.nodes.count(node) > 1)
            raise HolmesError(f"{self.source}: key 'nodes': node {twice!r} stands twice")
        if self.sizes is not None:
            try:
                complete = self.sizes.complete(self.world_size)
            except HolmesError as error:
                raise HolmesError(f"{self.source}: key 'sizes': {error}") from None
            if complete != self.sizes:
                raise HolmesError(f"{self.source}: key 'sizes' leaves the data size open")
            if self.stage_layers and len(self.stage_layers) % self.sizes.pipeline:
                raise HolmesError(
                    f"{self.source}: key 'stage_layers' has {len(self.stage_layers)} entries for {self.sizes.pipeline} stages"
                )

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.processes

    def node_of(self, rank: int) -> str:
        """Name of the node on which `rank` (as renumbered) runs."""
        return self.nodes[rank // self.processes]

    def fabric_of(self, ranks: list[int] | tuple[int, ...], site: Site) -> Fabric | None:
        """The fabric for a group of `ranks`; None when one node holds them all (memory, NVLink or loopback)."""
        names = {self.node_of(rank) for rank in ranks}
        return site.shared_fabric(names) if len(names) > 1 else None

    @property
    def digest(self) -> str:
        """sha256 (hex) of all that the plan says; `source` does not count."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        content = asdict(self)
        del content["source"]
        return {"version": VERSION, **content}

    def to_json(self) -> str:
        return json.dumps({**self._content(), "digest": self.digest}, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write plan.json whole or not at all; HolmesError when the place cannot be written."""
        save(path, self.to_json(), "the plan")


def load_plan(path: str | Path) -> Plan:
    """Read and validate plan.json; HolmesError names the file and the key, and tells an edited file from a whole one."""
    return _plan(load_json(path, ADVICE))


def parse_plan(text: str, source: str) -> Plan:
    """`text` of a plan.json as a Plan; see load_plan."""
    return _plan(parse_json(text, source, ADVICE))


def _plan(top: Table) -> Plan:
    top.version(VERSION)
    source, digest = top.source, top.take("digest", str)
    plan = Plan(
        site_digest=top.take("site_digest", str),
        nodes=top.list("nodes", str),
        processes=top.take("processes", int),
        sizes=_sizes(top),
        transports=_transports(top.table("transports")),
        straddling=tuple(_straddle(table) for table in top.tables("straddling")),
        stage_layers=top.list("stage_layers", int),
        partition=top.take("partition", str),
        predicted=_numbers(top.table("predicted")),
        source=source,
    )
    top.done()
    if plan.processes < 1 or not plan.nodes:
        raise HolmesError(f"{source}: keys 'nodes' and 'processes' name no rank")
    if plan.digest != digest:
        raise HolmesError(f"{source}: key 'digest' does not match: the file was edited or cut; make it again with `holmes plan`")
    return plan


def _sizes(top: Table) -> Sizes | None:
    if top.values.get("sizes", {}) is None:
        top.read.add("sizes")
        return None
    table = top.table("sizes")
    names = ("pipeline", "tensor", "context", "expert", "data")
    values = {name: table.take(name, int) for name in names}
    order = table.take("order", str)
    table.done()
    try:
        return Sizes(**values, order=order)
    except HolmesError as error:
        raise HolmesError(f"{table.source}: key '{table.path}': {error}") from None


def _transports(table: Table) -> dict[str, tuple[str, ...]]:
    return {kind: table.list(kind, str) for kind in table.values}


def _numbers(table: Table) -> dict[str, float]:
    return {name: table.take(name, float) for name in table.values}


def _straddle(table: Table) -> Straddle:
    straddle = Straddle(
        table.take("kind", str),
        table.take("groups", int),
        table.list("example", str),
        table.take("fabric", str),
        table.take("seconds", float),
    )
    table.done()
    return straddle


def check_plan(plan: Plan, site: Site) -> Plan:
    """`plan` itself, after making sure that it was made for `site`; HolmesError names the difference."""
    here, planned = {node.name for node in site.nodes}, set(plan.nodes)
    if here != planned:
        missing, extra = sorted(planned - here), sorted(here - planned)
        parts = [f"the plan has node {missing[0]!r}, which did not report"] if missing else []
        parts += [f"node {extra[0]!r} reported and is not in the plan"] if extra else []
        raise HolmesError(f"{plan.source}: key 'nodes': {'; '.join(parts)}; make the plan for these nodes with `holmes plan`")
    if plan.processes != site.processes:
        raise HolmesError(
            f"{plan.source}: key 'processes' is {plan.processes}, but {site.processes} were started on each node"
            f" (world size {plan.world_size} in the plan, {site.world_size} here)"
        )
    if plan.site_digest != site.digest:
        raise HolmesError(
            f"{plan.source}: key 'site_digest': made for other clusters or rates than {site.source}; make it again with `holmes plan`"
        )
    return plan
