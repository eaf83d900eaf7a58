"""Reads the cases of cases.toml: clusters, a model, a batch size, and the speed of each cluster's GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import SiteSpec, parse_spec
from holmes_ext.document import load_toml
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Gpu, Model, on_clusters

FILE = Path(__file__).with_name("cases.toml")
RUNS = LAB, SIMULATION = "lab", "simulation"


@dataclass(frozen=True, eq=False)
class Case:
    """Planning problem that all planners solve."""

    name: str
    text: str  # of its cluster.toml
    spec: SiteSpec
    model: Model
    batch: int  # global batch size
    run: str  # LAB if the plans also run in the lab, else SIMULATION

    def __post_init__(self) -> None:
        if self.run not in RUNS:
            raise HolmesError(
                f"case {self.name}: run is {self.run!r}, which is none of {', '.join(RUNS)}"
            )

    @cached_property
    def site(self) -> Site:
        """The clusters with their nodes and networks."""
        return site_from_spec(self.spec)

    @property
    def framework(self) -> str:
        """The framework whose pipeline engine runs all plans of the case."""
        return "deepspeed" if self.run == LAB else "megatron-lm"

    def gpu(self, cluster: str) -> Gpu:
        """Return the GPU of a cluster."""
        return self.model.gpu_of(cluster)

    @cached_property
    def gpu_kinds(self) -> tuple[Gpu, ...]:
        """The different GPUs of the case without their links, the fastest first."""
        # Without links, GPUs of the same kind in different clusters are equal.
        kinds = {replace(self.gpu(name), link_bps=0.0) for name in self.site.clusters}
        return tuple(sorted(kinds, key=lambda gpu: -gpu.flops))


def load_cases() -> dict[str, Case]:
    """Return the planning problems of cases.toml by name, in the order of that file.

    Raises:
        HolmesError: The file is not valid. The message names the file and the key.
    """
    # The second argument is advice, for the message if the file cannot be read. A table's
    # take(key, type) returns a value, and done() raises if the table has a key that was not taken.
    top = load_toml(FILE, "name a file of cases such as benchmarks/referee/cases.toml")
    sites = top.table("site")
    cases = top.table("case")
    models = top.table("model")
    loaded = {}
    for name in list(cases.values):
        table = cases.table(name)
        model_name = table.take("model", str)
        batch = table.take("batch", int)
        site = table.take("site", str)
        text = sites.take(site, str)
        spec = parse_spec(text, f"{FILE.name}, site {site}")
        model = _model(models.table(model_name).values, model_name, batch)
        loaded[name] = Case(
            name=name,
            text=text,
            spec=spec,
            model=on_clusters(model, spec),  # with the GPUs of each cluster of the file
            batch=batch,
            run=table.take("run", str),
        )
        table.done()
    return loaded


def _model(values: dict, name: str, batch: int) -> Model:
    """Return the model of a table in cases.toml.

    Args:
        values: Content of the table, with the tables "training" and "gpu" in it.
        name: Name of the model.
        batch: Global batch size.
    """
    plain = {key: value for key, value in values.items() if key not in ("training", "gpu")}
    return Model(
        **plain, **values["training"], gpu=Gpu(**values["gpu"]), name=name, global_batch=batch
    )
