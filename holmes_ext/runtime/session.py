"""The running job under holmes: which plan is followed, who this process is in it, which transport each group got."""

from __future__ import annotations

from dataclasses import dataclass, field

from holmes_ext.cluster.site import Node, Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.cost.nodes import exposed_stages
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.groups.transport import Transport, choose
from holmes_ext.runtime.start.launcher import Process


@dataclass
class Session:
    """State of one activated process. rank: as renumbered; process.rank: as the launcher numbered it; round: prefix of its keys in the store."""

    options: Options
    process: Process
    site: Site
    plan: Plan
    rank: int
    groups: list[GroupRecord] = field(default_factory=list)
    round: str = "holmes/1"

    @property
    def node(self) -> Node:
        return self.site.node_by_name[self.plan.node_of(self.rank)]

    def transport(self, ranks: list[int] | tuple[int, ...], backend: str) -> Transport:
        """The transport of a group of (renumbered) `ranks`; an empty list is the default group, as torch has it."""
        nodes = {self.plan.node_of(rank) for rank in ranks} if ranks else set(self.plan.nodes)
        return choose(self.site, nodes, self.node, backend)

    def overlapped_stages(self, sizes: Sizes | None) -> tuple[bool, ...]:
        """For each stage whether --holmes-overlap auto reduces its gradients under the backward pass; () when the sizes are unknown or the user said off."""
        if sizes is None or self.options.overlap == "off":
            return ()
        return exposed_stages(self.site, self.plan.nodes, sizes)


@dataclass(frozen=True)
class GroupRecord:
    """One process group that this rank is in, and what it travels on."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    transport: Transport


_active: Session | None = None


def active() -> Session | None:
    """The session of this process, or None when holmes is off."""
    return _active


def set_active(session: Session | None) -> None:
    global _active
    _active = session


def require() -> Session:
    if _active is None:
        raise HolmesError("holmes is not active in this process; start it with --holmes or call holmes_ext.enable()")
    return _active
