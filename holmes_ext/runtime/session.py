"""State of the running job in this process: its plan, this process's rank, and the network of each group."""

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
    """The job as this process sees it: plan, nodes, this rank, process groups, key-value store.

    Each process makes a single Session when the job starts (start/rank.py). active() returns it.
    """

    options: Options
    #: This process, as its launcher numbered it.
    process: Process
    site: Site
    plan: Plan
    #: Rank of this process in the job; holmes may have changed the launcher's rank.
    rank: int
    #: The process groups that this rank is in.
    groups: list[GroupRecord] = field(default_factory=list)
    #: Backends of all these groups. A GroupRecord only has the backend of GPU tensors.
    backends: set[str] = field(default_factory=set)
    #: Prefix of the keys that this start of the job has in its store.
    key_prefix: str = "holmes/1"
    #: The job's key-value store; None in a job with a single process.
    store: Any = None
    #: The model that is trained; None if the user has not described it.
    model: Model | None = None
    #: Features of holmes that the job's framework supports.
    engine: EngineTraits = EngineTraits()
    #: Derives other plans from `plan`. None only in tests that need no other plan.
    maker: PlanMaker | None = None
    #: Name of a NCCL network -> the configuration file that forces it on all communicators of a node.
    forced_nets: dict[str, str] = field(default_factory=dict)
    #: A line for each NIC that is slower than cluster.toml says, that NCCL cannot use as planned, or that
    #: is down and in no port of `site`.
    nic_problems: tuple[str, ...] = ()
    #: Ranks of a group -> how it reduced gradients. watch/as_planned.py compares this with the plan.
    reductions: dict[tuple[int, ...], DoneReduction] = field(default_factory=dict)
    #: Micro-batches in flight of every pipeline stage; () if the framework uses its own schedule.
    in_flight: tuple[int, ...] = ()
    #: True with ZeRO 3: DeepSpeed reduces the gradients by itself, whatever the plan says.
    keeps_own_reduction: bool = False
    #: The plan with reductions that --holmes-adapt chose from measurements of this job; None before.
    #: `plan` and `_resized` contain these reductions, too, but do not show whether a reduction came from
    #: measurements. Reducers need that: they then replace their reduction.
    measured_plan: Plan | None = None
    #: Plans for parallel sizes other than those of `plan`.
    _resized: dict[Sizes, Plan] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        """Node that this process runs on."""
        return self.site.node_by_name[self.plan.node_of(self.rank)]

    def fabric_of(self, ranks: Iterable[int], backend: str) -> Fabric | None:
        """Return the fabric that the plan chooses for a group of ranks.

        Returns:
            None if all ranks are on one node, or if the backend chooses its networks itself.
        """
        network_api = network_api_of(backend)
        if not network_api:
            return None
        return self.plan.fabric_of(ranks, network_api)

    def transport(self, ranks: Iterable[int], backend: str) -> Transport:
        """Return the network that the plan chooses for a group of ranks, with this node's NIC."""
        if not network_api_of(backend):
            return Transport(f"chosen by {backend}", kind="", interface="", net_name="")
        return transport_on(self.fabric_of(ranks, backend), self.node)

    def plan_for(self, sizes: Sizes) -> Plan:
        """Return the plan for the parallel sizes that the framework initializes.

        This is `self.plan` if it was made for these sizes. Otherwise `self.plan` had no sizes or guessed
        ones, and its decisions are made again. Each result is kept for further calls.

        Args:
            sizes: Parallel sizes, including the data-parallel size.
        """
        if sizes == self.plan.sizes:
            return self.plan
        if sizes not in self._resized:
            self._resized[sizes] = self._plan_maker.complete_plan(
                self.plan, sizes, self.options, self.model, self.engine
            )
        return self._resized[sizes]

    def adopt(self, sizes: Sizes, plan: Plan, sums: bool = False) -> None:
        """Use another plan from now on: --holmes-adapt made it from measurements of the running job.

        Afterwards plan_for(sizes) returns the new plan. It is stored in `self.plan` if that has the
        same parallel sizes, else with the plans for other sizes.

        Args:
            sizes: Parallel sizes of the plan, including the data-parallel size.
            plan: The new plan.
            sums: Whether the plan also changes how gradients are summed (reduced). Then it is also
                stored in `measured_plan`. Reducers look there at the beginning of each step, and
                replace their reduction if it differs from the new plan.
        """
        if sums:
            self.measured_plan = plan
        if sizes == self.plan.sizes:
            self.plan = plan
        else:
            self._resized[sizes] = plan

    def stages(self, sizes: Sizes, backend: str) -> tuple[ReductionSpec, ...]:
        """Return, for each pipeline stage, how it reduces its gradients.

        Args:
            sizes: Parallel sizes of the job, including the data-parallel size.
            backend: Backend of the gradients' process groups, such as "nccl".
        """
        network_api = network_api_of(backend) or SOCKETS
        return self.plan_for(sizes).traffic_of(network_api).reductions

    def reduction(
        self,
        ranks: Iterable[int],
        backend: str,
        total_bytes: float = inf,
        compress: str | None = None,
    ) -> ReductionSpec:
        """Return how a process group reduces gradients, as planned or as chosen from measurements since.

        Args:
            ranks: Members of the group.
            backend: Backend of the group, such as "nccl".
            total_bytes: Bytes of gradients that the group reduces in a training step.
            compress: Codec for gradients between clusters; None for that of --holmes-compress-gradients.
        """
        options = self.options
        if compress is not None:
            options = replace(options, compress_gradients=compress)
        members = tuple(ranks)

        # None, unless measurements of this job have led to a reduction that was not planned.
        measured = self.reduction_from_measurements(members, backend)
        # A reduction from measurements was chosen for the codec of --holmes-compress-gradients. It
        # does not suit a caller that wants another codec (`compress`).
        if measured is not None and measured.compress == options.compress_gradients:
            return measured
        return self._plan_maker.spec_of_group(
            self.plan,
            members,
            # A backend that chooses its networks itself, such as MPI, is planned like gloo
            # (SOCKETS).
            network_api_of(backend) or SOCKETS,
            options,
            total_bytes,
            self.engine,
        )

    @property
    def _plan_maker(self) -> PlanMaker:
        assert self.maker is not None, "this Session has no functions that make plans"
        return self.maker

    def reduction_from_measurements(
        self, ranks: Iterable[int], backend: str
    ) -> ReductionSpec | None:
        """Return the reduction of a group that was chosen from measurements of this job; None if none was."""
        if self.measured_plan is None:
            return None
        stage = self.measured_plan.stage_of(ranks)
        if stage is None:
            return None
        return self.measured_plan.traffic_of(network_api_of(backend) or SOCKETS).reductions[stage]


@dataclass(frozen=True)
class GroupRecord:
    """Process group of torch.distributed that this rank is in, and the network that it uses."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    transport: Transport


@dataclass(frozen=True)
class DoneReduction:
    """Way in which a process group reduced its gradients, and the way that was planned."""

    planned: ReductionSpec
    #: Bytes of gradients: of the largest single reduction, or of all reductions of a training step.
    bytes: float
    #: True: hierarchical all-reduce. False: a single ring.
    hierarchical: bool
    #: Whether it overlapped the last backward pass.
    overlap: bool
    #: Whether a message has told the user why it differs from the plan.
    reported: bool = False
    #: Whether the reduction is replaced when --holmes-adapt changes the plan of the running job.
    follows_plan: bool = False


def note_reduction(
    ranks: Iterable[int], planned: ReductionSpec | None, size: float, **how: Any
) -> None:
    """Record how a process group has reduced gradients, for the comparison of the job with its plan.

    Of several reductions of a group, the largest is kept. Nothing is recorded if holmes is off, or if the
    group has only a single rank.

    Args:
        ranks: Members of the group.
        planned: The planned reduction; None if there is no plan for the group, and nothing is recorded.
        size: Bytes of gradients that were reduced.
        **how: Other fields of DoneReduction: hierarchical, overlap, follows_plan.
    """
    members = tuple(ranks)
    if _active is None or planned is None or len(members) <= 1:
        return
    previous = _active.reductions.get(members)
    if previous is None or size >= previous.bytes:
        _active.reductions[members] = DoneReduction(planned, size, **how)


_active: Session | None = None


def active() -> Session | None:
    """Return the session of this process; None if holmes is off."""
    return _active


def set_active(session: Session | None) -> None:
    """Make `session` the session of this process; None if holmes stops."""
    global _active
    _active = session


def require() -> Session:
    """Return the session of this process; raise HolmesError if holmes is off."""
    if _active is None:
        raise HolmesError(
            "holmes is not active in this process; start it with --holmes or call holmes_ext.enable()"
        )
    return _active


#: Topics and texts that tell() must not print again.
_told: set[str] = set()


def tell(current: Session, text: str, once: str | Literal[True] = "") -> None:
    """Print a line for the user, on rank 0 only.

    Args:
        current: The session of this process.
        text: The line; "" prints nothing.
        once: A topic: only the first line about it is printed. True: the same text is not printed twice. "":
            always print.
    """
    topic = text if once is True else once  # "": no topic
    if not text or current.rank != 0 or topic in _told:
        return
    tell_user(text)
    if topic:
        _told.add(topic)
