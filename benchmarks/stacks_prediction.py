"""Predicts the steps of benchmarks/stacks.py by the simulator in planner/simulate/step.py.

A stack is a training library (DDP of transformers' Trainer or of Lightning, or FSDP2). A simulated
step has these inputs:

    GPUs            emulated, by FLOP/s
    networks        as `holmes probe` measures them in the lab
    communication   CPU time that the lab needs to send a byte, to gather a byte and to send a
                    message, measured by prediction_hosts.py on the machine that runs the cases
    library         CPU time of its own code. It is fitted, for each stack, to the step without
                    holmes on a single fast cluster. That step is not predicted.

`stacks.py --cases networks` makes the measurements, in results/stacks_measured.json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from emulated import even_costs, forward_s
from harness import Row
from holmes_lab import interleave
from holmes_lab.compare import all_rdma
from prediction import CORES, probe
from prediction_hosts import measure_hosts, measure_optimizer, measure_software
from two_clusters import one_cluster_toml

from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec, parse_spec
from holmes_ext.patches.torch.features import DDP, LOOP
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import stock_fabric
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate

LAYERS, HIDDEN, SEQUENCE, BYTES = 6, 272, 16, 256
#: DistributedDataParallel's bucket_cap_mb where none is given, and the limit of its first bucket then.
DDP_BUCKETS = {"bucket_bytes": 25 * 2**20, "first_bucket_bytes": 2**20}
STORE = Path(__file__).parent / "results" / "stacks_measured.json"
ONE_NETWORK = "one network"  # all nodes in a single cluster on the fast network
#: Fields of Links (plan/cost/links.py) -> name and unit in the results.
COSTS = {
    "host_message_s": ("CPU time of a message of hierarchical", "s"),
    "host_gather": ("CPU time of a gathered byte, of an all-reduced one's", "x"),
    "host_scatter": ("CPU time of a scattered byte, of an all-reduced one's", "x"),
}


@dataclass
class Networks:
    """Measurements of two networks, for the predicted steps of benchmarks/stacks.py.

    One is that of the clusters in a cluster file. In the other, named ONE_NETWORK, the same nodes
    are in a single cluster on the fast network.
    """

    #: Name of a network -> cluster file with the networks as `holmes probe` measured them.
    probes: dict[str, str] = field(default_factory=dict)
    parameter_s: float = 0.0  # CPU seconds of an optimizer step for each parameter
    #: For each repetition: name of a network -> CPU times of communication on it. A key without
    #: "host_" is a fabric ("ethernet" or a cluster): CPU seconds to send a byte over it. A key with
    #: "host_" is a field of Links: CPU time of a message, or of a gathered or scattered byte.
    turns: list[dict[str, dict[str, float]]] = field(default_factory=list)

    @classmethod
    def load(cls) -> Networks:
        """Return the measurements in the store; without the file, an object without measurements."""
        return cls(**json.loads(STORE.read_text())) if STORE.exists() else cls()

    def links(self, name: str) -> Links:
        """Return the measured links of a network, with the CPU costs of communication on it.

        Rates and latencies are those that `holmes probe` measured (`self.probes`: network ->
        cluster file). CPU costs are medians over the repetitions (`self.turns`: for each
        repetition, network -> cost -> CPU time).

        Args:
            name: Name of the cluster file, or ONE_NETWORK.
        """
        costs = {
            key: statistics.median(turn[name][key] for turn in self.turns)
            for key in self.turns[0][name]
        }
        links = Links.of_spec(parse_spec(self.probes[name]))
        # CPU seconds to send a byte over each fabric.
        measured = {
            fabric: replace(link, host_s=costs[fabric]) for fabric, link in links.measured.items()
        }
        # CPU costs of messages and collectives. They are the same on all fabrics.
        fields_of_links = {key: costs[key] for key in costs if key.startswith("host_")}
        return replace(links, measured=measured, **fields_of_links)

    def measure(self, file: Path, turns: int = 3) -> None:
        """Measure networks and CPU times on emulated clusters, if they are not stored already.

        Two networks are measured: the clusters of `file`, and the same nodes in a single fast
        cluster. Rates and latencies are stored in `self.probes`, and the CPU time of an optimizer
        step, for each parameter, in `self.parameter_s`. The store is for a single cluster file:
        CPU times in it are not measured again for another file.

        Args:
            file: The cluster file.
            turns: How often the CPU time of communication is measured. Each repetition (turn)
                measures both networks, because the speed of this machine changes with time. It is
                an entry of `self.turns`.
        """
        spec = load_spec(file)
        with tempfile.TemporaryDirectory() as directory:
            single = Path(directory, "cluster.toml")
            single.write_text(one_cluster_toml(all_rdma(spec).spec))
            networks = {file.stem: (spec, file), ONE_NETWORK: (load_spec(single), single)}
            for name in networks.keys() - self.probes.keys():
                self.probes[name] = probe(*networks[name])
                self._save()
            if not self.parameter_s:
                self.parameter_s = measure_optimizer(spec)
                self._save()
            while len(self.turns) < turns:
                self.turns.append(
                    {
                        name: {**measure_hosts(network_spec), **measure_software(network_spec)}
                        for name, (network_spec, _) in networks.items()
                    }
                )
                self._save()

    def rows(self) -> list[Row]:
        """Return rows with the measured CPU times, and their spread over the repetitions.

        The first row is the CPU time of the optimizer for each parameter. The others are the CPU
        times of sent bytes and of messages on each network.
        """
        table = [
            Row.of(
                "networks",
                "CPU time of a parameter",
                self.parameter_s,
                unit="s",
                spread=(self.parameter_s,) * 2,
                emulated=True,
            )
        ]
        # self.turns has an entry for each repetition: network -> key -> CPU time. A key of COSTS is
        # the cost of a message or collective. Any other key is a fabric ("ethernet" or a cluster),
        # with the CPU seconds to send a byte over it.
        for network, key in (
            (network, key) for network, costs in self.turns[0].items() for key in costs
        ):
            values = [turn[network][key] for turn in self.turns]
            what, unit = COSTS.get(key, (f"CPU time of a byte on {key}", "s"))
            table.append(
                Row.median("networks", f"{network}: {what}", values, unit=unit, emulated=True)
            )
        return table

    def _save(self) -> None:
        STORE.write_text(json.dumps(vars(self), indent=1) + "\n")


@dataclass(frozen=True)
class StackSite:
    """Nodes of a cluster file, with measured networks, for simulations with and without holmes.

    nodes_and_links() gives the nodes and networks of a job: without holmes (ranks of both clusters
    in turn), with holmes (ranks of a cluster next to each other), or with all nodes in a single
    fast cluster.
    """

    spec: SiteSpec
    links: Links  # measured, of the clusters
    one_links: Links  # measured, with all nodes in a single fast cluster
    parameter_s: float  # CPU seconds of an optimizer step for each parameter

    @classmethod
    def of(cls, file: Path) -> StackSite:
        """Return the nodes of a cluster file, with the measurements of its networks in the store."""
        networks = Networks.load()
        return cls(
            load_spec(file),
            networks.links(file.stem),
            networks.links(ONE_NETWORK),
            networks.parameter_s,
        )

    def nodes_and_links(self, way: str) -> tuple[Site, tuple[str, ...], Links]:
        """Return the site, its nodes in the order of their ranks, and its links.

        Args:
            way: "stock", "holmes" or "one cluster".
        """
        spec = all_rdma(self.spec).spec if way == "one cluster" else self.spec
        site = site_from_spec(spec)
        order = interleave(self.spec) if way == "stock" else tuple(node.name for node in site.nodes)
        return site, order, self.one_links if way == "one cluster" else self.links


def data_parallel(stack_site: StackSite, way: str, flops: float, parameter_s: float) -> float:
    """Return the predicted seconds of a step of DistributedDataParallel.

    Args:
        stack_site: The nodes and their networks.
        way: "stock" (one ring over Ethernet), "holmes" (hierarchical all-reduce) or "one cluster".
        flops: FLOP/s of an emulated GPU.
        parameter_s: CPU seconds of a step for each parameter, mainly for the gradient norm and the
            optimizer. (There is no such argument for DDP's code in the passes of a block. That code
            does not lengthen a pass: an emulated GPU sleeps until the time of the pass is over.)
    """
    run = Execution(
        DDP,
        overlap="on",
        parameter_s=parameter_s,
        sums=1,  # all-reduces of a single number by the script, at the end of a step
        cores=CORES,  # which all nodes share
    )
    if way == "holmes":
        # direct: inside clusters, gloo's ranks exchange directly and not in a ring.
        run = replace(run, hierarchical=True, direct=True)
    else:
        run = replace(run, **DDP_BUCKETS)
    return _step(stack_site, way, flops, run, tied=True)


def sharded(
    stack_site: StackSite, way: str, flops: float, block_s: float, hybrid: bool = False
) -> float:
    """Return the predicted seconds of a step of examples/fsdp2 (FSDP2 over gloo on CPUs).

    Args:
        stack_site: The nodes and their networks.
        way: "stock": ranks of both clusters in turn. "holmes": ranks of a cluster next to each
            other. "one cluster": all nodes in a single fast cluster.
        flops: FLOP/s of an emulated GPU.
        block_s: CPU seconds of FSDP's code (such as copying shards) in each forward or backward
            pass of a block.
        hybrid: Whether weights are sharded inside clusters only, and replicated between them.
    """
    run = Execution(
        LOOP,  # the traits of a plain loop: on CPUs, torch waits for each collective
        zero=3,  # weights, gradients and optimizer are sharded
        scatter=1.0,  # gloo's reduce-scatter sends as much as an all-reduce; a ring sends half
        replicas="clusters" if hybrid else "",  # "": one replica on all ranks
        block_s=block_s,
        sums=1,  # all-reduces of a single number by the script, at the end of a step
        parameter_s=stack_site.parameter_s,  # of the optimizer, measured
        cores=CORES,  # which all nodes share
    )
    return _step(stack_site, way, flops, run, tied=False)


def _step(stack_site: StackSite, way: str, flops: float, run: Execution, tied: bool) -> float:
    """Return the simulated seconds of a step of the model.

    Args:
        stack_site: The nodes and their networks.
        way: "stock": without holmes, ranks of both clusters in turn, all messages over Ethernet.
            "holmes": in the plan's order, each group on the fastest network of its ranks. "one
            cluster": without holmes, all nodes in one cluster on the fast network.
        flops: FLOP/s of an emulated GPU.
        run: How the stack communicates, and its CPU seconds.
        tied: Whether the output layer shares the weights of the embedding.
    """
    site, order, links = stack_site.nodes_and_links(way)
    gpt = Model(
        layers=LAYERS,
        hidden=HIDDEN,
        heads=4,
        sequence=SEQUENCE,
        vocabulary=BYTES,
        micro_batches=1,
        activation_width=4,
        tied=tied,
    )
    costs = even_costs(forward_s(HIDDEN, SEQUENCE, flops), layers=LAYERS, stages=1, micro_batches=1)
    # Without holmes, all messages use the network that reaches all nodes.
    only = stock_fabric(site) if way == "stock" else None
    return simulate(
        site,
        order,
        Sizes().complete(len(order)),
        gpt,
        execution=run,
        links=links,
        only=only,
        costs=costs,
    ).step_s


def fit_number(predict: Callable[[float], float], measured: float) -> float:
    """Return the number, 0 or more, with which predict(number) is the measured value.

    Args:
        predict: A function that grows with its argument.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if predict(middle) > measured else (middle, high)
    return low


def rows(case: str, predicted: dict[str, float], measured: dict[str, float]) -> list[Row]:
    """Return rows with predicted steps and their errors.

    Args:
        predicted, measured: Variant -> seconds of a step.
    """
    table = []
    for name, seconds in predicted.items():
        error = seconds / measured[name] - 1
        table += [
            Row.median(
                case,
                f"predicted step {name}",
                [seconds],
                unit="s",
                emulated=True,
            ),
            Row.of(
                case,
                f"error of the prediction, {name}",
                abs(error),
                unit="of the measured",
                spread=(error, error),
                emulated=True,
                target="<= 0.1",
            ),
        ]
    return table
