"""Interfaces of the code that makes the Plan.

The runtime reads the Plan and does not decide anything itself. job.py hands it the functions that make a Plan
when the job starts, and that complete it if the framework reports its parallel sizes only later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from holmes_ext.cluster.node_report import NodeReport
    from holmes_ext.cluster.site import Site
    from holmes_ext.cluster.spec import SiteSpec
    from holmes_ext.options import Options
    from holmes_ext.plan.cost.model import Model
    from holmes_ext.plan.engine import EngineTraits
    from holmes_ext.plan.plan import Plan
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.plan.traffic import ReductionSpec


class JobRequest(Protocol):
    """Job as one rank sees it at the start: options, model, framework and cluster file.

    The rank does not know the other nodes yet. Later, all ranks report their nodes and NICs to rank
    0. Rank 0 passes the reports to make_plan().
    """

    options: Options
    model: Model | None  # the model that is trained, if the user has described it
    engine: EngineTraits  # the features of holmes that the job's framework supports
    spec: SiteSpec | None  # content of cluster.toml, after read_files()
    digests: dict[str, str]  # kind of a file -> its digest. All ranks must have the same.

    def read_files(self) -> None:
        """Read the files that the options name, such as cluster.toml and the model's description."""

    def make_plan(self, nodes: list[NodeReport]) -> tuple[Site, Plan]:
        """Make the plan of a job from the reports of its nodes; return it with the nodes and networks."""

    def start_again(self, layers: str, sizes: Sizes | None) -> tuple[Options, list[str]]:
        """Return options that continue a restarted job with the layers its last run has chosen.

        "again": the restart has already happened, and this is the run after it. With
        --holmes-restart auto, a running job measures its layers. If other numbers of layers per
        stage would be faster, the job ends after a checkpoint. torchrun then starts it again, and
        this method puts these numbers into the options.

        Args:
            layers: Layers of each stage, as --holmes-partition takes them, such as "5,3"; "" if the
                last run has chosen none.
            sizes: Parallel sizes of the last run; None if unknown.

        Returns:
            The options of this run, and lines to print: the layers of this run, and the reason.
        """


class PlanMaker(Protocol):
    """Interface of the functions that derive a Plan from another Plan; plan/maker.py implements it."""

    def on_ports(self, plan: Plan, site: Site, options: Options, *, engine: EngineTraits) -> Plan:
        """Adapt a plan to `site`: the same nodes, without the NIC ports that a test has excluded."""

    def complete_plan(
        self, plan: Plan, sizes: Sizes, options: Options, model: Model | None, engine: EngineTraits
    ) -> Plan:
        """Adapt a plan to the parallel sizes that the framework has reported after the start."""

    def spec_of_group(
        self,
        plan: Plan,
        ranks: tuple[int, ...],
        network_api: str,
        options: Options,
        total_bytes: float,
        engine: EngineTraits,
    ) -> ReductionSpec:
        """Return how a group of ranks is to reduce gradients: algorithm, bucket size, codec, overlap.

        Args:
            plan: The plan of the job.
            ranks: Members of the group.
            network_api: How the group reaches the network: "verbs" (NCCL) or "sockets" (gloo).
            options: The job's options.
            total_bytes: Bytes of gradients that the group reduces in a training step.
            engine: What the job's framework supports.
        """

    def advice_on_spanning(self, plan: Plan, site: Site, sizes: Sizes, instances: int) -> str:
        """Return a line of advice on process groups that have ranks in several clusters; "" without any.

        The line names such groups, and suggests parallel sizes with which each group would have all
        its ranks in one cluster.

        Args:
            plan: The plan of the job.
            site: The nodes of the job.
            sizes: Parallel sizes that the framework initializes.
            instances: megatron-core's num_distributed_optimizer_instances: the data-parallel ranks
                form so many parts, and each part shards the optimizer state among its own ranks.
        """
