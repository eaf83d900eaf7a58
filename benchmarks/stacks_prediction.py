"""Predicted steps of benchmarks/stacks.py's scenes, by plan/simulate/step.py.

One number is fitted for each stack, to stock's step on one fast cluster, which is no scene of the prediction. Networks
are as `holmes probe` measures them, and what a byte, a gathered one and a message cost the cores is measured beside it
(prediction_hosts.py), on the machine that runs the scenes: `stacks.py --scenes networks`, results/stacks_measured.json.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from emulated import even_costs, forward_s
from harness import Row
from prediction import CORES, Measured, probe
from prediction_hosts import measure_hosts, measure_software
from two_clusters import one_cluster_toml

from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.lab import interleave
from holmes_ext.lab.compare import all_rdma
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.nodes import stock_fabric
from holmes_ext.plan.simulate.execution import Execution
from holmes_ext.plan.simulate.step import simulate
from holmes_ext.plan.sizes import Sizes

LAYERS, HIDDEN, SEQUENCE, BYTES = 6, 272, 16, 256
#: DistributedDataParallel's bucket_cap_mb.
BUCKET = 25 * 2**20
STORE = Path(__file__).parent / "results" / "stacks_measured.json"
ONE = "one network"


def measure_networks(file: Path, store: Path = STORE) -> None:
    """What the store does not have of a cluster file's networks, and of all its nodes on one fast network."""
    spec = load_spec(file)
    measured = Measured.load(store)
    with tempfile.TemporaryDirectory() as directory:
        single = Path(directory, "cluster.toml")
        single.write_text(one_cluster_toml(all_rdma(spec).spec))
        for name, here in ((file.stem, file), (ONE, single)):
            own = load_spec(here)
            for kept, measure in ((measured.probes, partial(probe, file=here)), (measured.hosts, measure_hosts),
                                  (measured.software, measure_software)):
                if name not in kept:
                    kept[name] = measure(own)
                    measured.save(store)


@dataclass(frozen=True)
class Ground:
    """A cluster file's nodes as stock numbers them, as holmes does, and all of them on one fast network."""

    spec: SiteSpec
    links: Links
    one_links: Links

    @classmethod
    def of(cls, file: Path) -> Ground:
        measured = Measured.load(STORE)
        return cls(load_spec(file), measured.links(file.stem), measured.links(ONE))

    def placed(self, way: str) -> tuple[Site, tuple[str, ...], Links]:
        spec = all_rdma(self.spec).spec if way == "one cluster" else self.spec
        site = site_from_spec(spec)
        order = interleave(self.spec) if way == "stock" else tuple(node.name for node in site.nodes)
        return site, order, self.one_links if way == "one cluster" else self.links


def data_parallel(ground: Ground, way: str, flops: float, block_s: float) -> float:
    """DistributedDataParallel's step; way: "stock" (one ring on Ethernet), "holmes" (two levels), "one cluster"."""
    run = Execution("async", overlap="on", bucket_bytes=0 if way == "holmes" else BUCKET, block_s=block_s, cores=CORES,
                    two_level="direct" if way == "holmes" else "off")
    return _step(ground, way, flops, run, tied=True)


def sharded(ground: Ground, way: str, flops: float, block_s: float, hybrid: bool = False) -> float:
    """examples/fsdp2's step, sharded over all ranks or (hybrid) inside clusters: torch awaits each collective on CPUs,
    and gloo's reduce-scatter is an all-reduce."""
    run = Execution("async", zero=3, scatter=1.0, replicas="clusters" if hybrid else "", block_s=block_s, cores=CORES)
    return _step(ground, way, flops, run, tied=False)


def _step(ground: Ground, way: str, flops: float, run: Execution, tied: bool) -> float:
    site, order, links = ground.placed(way)
    gpt = Model(LAYERS, HIDDEN, 4, SEQUENCE, BYTES, micro_batches=1, activation_width=4, tied=tied)
    costs = even_costs(forward_s(HIDDEN, SEQUENCE, flops), LAYERS, 1, 1)
    only = stock_fabric(site) if way == "stock" else None
    return simulate(site, order, Sizes().complete(len(order)), gpt, run, links, only, costs).step_s


def fitted(predict: Callable[[float], float], measured: float) -> float:
    """The number, 0 or more, with which predict() is `measured`; predict grows with it."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if predict(middle) > measured else (middle, high)
    return low


def rows(scene: str, predicted: dict[str, float], measured: dict[str, float]) -> list[Row]:
    found = []
    for name, seconds in predicted.items():
        error = seconds / measured[name] - 1
        found += [Row.of(scene, f"predicted step {name}", seconds, "s", (seconds, seconds), True),
                  Row.of(scene, f"error of the prediction, {name}", abs(error), "of the measured", (error, error), True,
                         "<= 0.1")]
    return found
