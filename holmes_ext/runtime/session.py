"""The running job under holmes: its plan, who this process is in it, which transport each group got."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from holmes_ext.errors import HolmesError
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.runtime.backend import network_api_of
from holmes_ext.runtime.groups.transport import Transport, transport_on
from holmes_ext.words import tell_user

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric
    from holmes_ext.cluster.site import Node, Site
    from holmes_ext.options import Options
    from holmes_ext.plan.cost.model import Model
    from holmes_ext.plan.plan import Plan
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.plan.traffic import ReductionSpec
    from holmes_ext.runtime.planning import PlanMaker
    from holmes_ext.runtime.start.launcher import Process


@dataclass
class Session:
    """State of one activated process. rank: as renumbered; process.rank: as the launcher numbered it. store:
    the job's, None for one process; round: prefix of this start's keys in it. model: of the job, None where
    nobody told it; engine: what its framework does; forced_nets: network -> the file of NCCL's that forces it
    on all communicators of a node."""

    options: Options
    process: Process
    site: Site
    plan: Plan
    rank: int
    groups: list[GroupRecord] = field(default_factory=list)
    #: Of all these groups; a record has the one that its GPU's tensors travel by.
    backends: set[str] = field(default_factory=set)
    round: str = "holmes/1"
    store: Any = None
    model: Model | None = None
    engine: EngineTraits = EngineTraits()
    #: Derives other plans from `plan`. None only in tests of what needs no other plan.
    maker: PlanMaker | None = None
    forced_nets: dict[str, str] = field(default_factory=dict)
    #: What this rank did of what the plan decides (watch/as_planned.py compares): ranks of a group -> how it
    #: summed gradients; micro-batches in flight of every stage, () under the framework's own schedule.
    reductions: dict[tuple[int, ...], DoneReduction] = field(default_factory=dict)
    in_flight: tuple[int, ...] = ()
    #: True with ZeRO 3: DeepSpeed reduces the gradients by itself, whatever the plan says.
    keeps_own_reduction: bool = False
    #: The plan that was decided again of what the job measured of its sums (adapt); None before.
    learned: Plan | None = None
    _resized: dict[Sizes, Plan] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        return self.site.node_by_name[self.plan.node_of(self.rank)]

    def fabric_of(self, ranks: Iterable[int], backend: str) -> Fabric | None:
        """Of a group of `ranks`, planned; None inside a node, and where the backend chooses."""
        return (
            self.plan.fabric_of(ranks, network_api_of(backend)) if network_api_of(backend) else None
        )

    def transport(self, ranks: Iterable[int], backend: str) -> Transport:
        """The same as this node sees it."""
        if not network_api_of(backend):
            return Transport(f"chosen by {backend}", "", "", "")
        return transport_on(self.fabric_of(ranks, backend), self.node)

    def plan_for(self, sizes: Sizes) -> Plan:
        """The plan; where it has no sizes, or guessed ones, what it decides for the framework's
        (complete)."""
        if sizes == self.plan.sizes:
            return self.plan
        if sizes not in self._resized:
            self._resized[sizes] = self._maker.complete_plan(
                self.plan, sizes, self.options, self.model, self.engine
            )
        return self._resized[sizes]

    def adopt(self, sizes: Sizes, plan: Plan, sums: bool = False) -> None:
        """`plan` counts now, of complete `sizes`: what it has learned (adapt); sums: of gradients."""
        self.learned = plan if sums else self.learned
        if sizes == self.plan.sizes:
            self.plan = plan
        else:
            self._resized[sizes] = plan

    def stages(self, sizes: Sizes, backend: str) -> tuple[ReductionSpec, ...]:
        """How each stage of a job of complete `sizes` reduces its gradients by `backend`."""
        return self.plan_for(sizes).traffic_of(network_api_of(backend) or SOCKETS).reductions

    def reduction(
        self,
        ranks: Iterable[int],
        backend: str,
        total_bytes: float = inf,
        compress: str | None = None,
    ) -> ReductionSpec:
        """How a group sums total_bytes of gradients in a step; compress: instead of
        --holmes-compress-gradients."""
        options = (
            self.options if compress is None else replace(self.options, compress_gradients=compress)
        )
        network_api = network_api_of(backend) or SOCKETS
        members = tuple(ranks)
        again = self.decided_again(members, backend)
        if again is not None and again.compress == options.compress_gradients:
            return again
        return self._maker.spec_of_group(
            self.plan, members, network_api, options, total_bytes, self.engine
        )

    @property
    def _maker(self) -> PlanMaker:
        assert self.maker is not None, "this Session has no functions that make plans"
        return self.maker

    def decided_again(self, ranks: Iterable[int], backend: str) -> ReductionSpec | None:
        """How a group of `ranks` sums by what the job has measured; None where nothing was decided of it."""
        if self.learned is None or (stage := self.learned.stage_of(ranks)) is None:
            return None
        return self.learned.traffic_of(network_api_of(backend) or SOCKETS).reductions[stage]


@dataclass(frozen=True)
class GroupRecord:
    """One process group that this rank is in, and what it travels on."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    transport: Transport


@dataclass(frozen=True)
class DoneReduction:
    """planned: what was read of the plan; bytes: of the largest sum in one piece, or of a step; hierarchical:
    else one ring; overlap: under the last backward; reported: the user knows why it differs; follows: the
    plan's changes."""

    planned: ReductionSpec
    bytes: float
    hierarchical: bool
    overlap: bool
    reported: bool = False
    follows: bool = False


def note_reduction(
    ranks: Iterable[int], planned: ReductionSpec | None, size: float, **how: Any
) -> None:
    """`ranks` have summed gradients; of several sums the largest counts. how: of DoneReduction. Only where
    holmes is on and the group has two ranks."""
    key = tuple(ranks)
    if _active is not None and planned is not None and len(key) > 1:
        noted = _active.reductions.get(key)
        if noted is None or size >= noted.bytes:
            _active.reductions[key] = DoneReduction(planned, size, **how)


_active: Session | None = None


def active() -> Session | None:
    """The session of this process, or None when holmes is off."""
    return _active


def set_active(session: Session | None) -> None:
    global _active
    _active = session


def require() -> Session:
    if _active is None:
        raise HolmesError(
            "holmes is not active in this process; start it with --holmes or call holmes_ext.enable()"
        )
    return _active


_told: set[str] = set()


def tell(current: Session, text: str, once: str | Literal[True] = "") -> None:
    """On rank 0; a text about `once` (True: the same text) only the first time in this process."""
    about = text if once is True else once
    if text and current.rank == 0 and about not in _told:
        tell_user(text)
        _told.update(filter(None, [about]))
