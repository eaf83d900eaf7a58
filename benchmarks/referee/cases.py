"""The cases of cases.toml: clusters, a model and a batch, and what the layers of the model take on each
GPU."""

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
    """text: its cluster.toml; run: of RUNS, what judges it beside the simulation."""

    name: str
    text: str
    spec: SiteSpec
    model: Model
    batch: int
    run: str

    def __post_init__(self) -> None:
        if self.run not in RUNS:
            raise HolmesError(
                f"case {self.name}: run is {self.run!r}, which is none of {', '.join(RUNS)}"
            )

    @cached_property
    def site(self) -> Site:
        return site_from_spec(self.spec)

    @property
    def framework(self) -> str:
        """Whose pipeline engine runs all plans of the case; its features are on for all of them."""
        return "deepspeed" if self.run == LAB else "megatron-lm"

    def gpu(self, cluster: str) -> Gpu:
        return self.model.gpu_of(cluster)

    @cached_property
    def gpu_kinds(self) -> tuple[Gpu, ...]:
        """Without their links: those that differ in what they compute and hold, the fastest first."""
        kinds = {replace(self.gpu(name), link_bps=0.0) for name in self.site.clusters}
        return tuple(sorted(kinds, key=lambda gpu: -gpu.flops))


def load_cases() -> dict[str, Case]:
    """By name, in the file's order; HolmesError names the file and the key."""
    top, loaded = (
        load_toml(FILE, "name a file of cases such as benchmarks/referee/cases.toml"),
        {},
    )
    sites, cases = top.table("site"), top.table("case")
    models = top.table("model")
    for name in list(cases.values):
        table = cases.table(name)
        model_name, batch = table.take("model", str), table.take("batch", int)
        site = table.take("site", str)
        text = sites.take(site, str)
        spec = parse_spec(text, f"{FILE.name}, site {site}")
        model = _model(models.table(model_name).values, model_name, batch)
        loaded[name] = Case(
            name, text, spec, on_clusters(model, spec), batch, table.take("run", str)
        )
        table.done()
    return loaded


def _model(values: dict, name: str, batch: int) -> Model:
    plain = {key: value for key, value in values.items() if key not in ("training", "gpu")}
    return Model(
        **plain, **values["training"], gpu=Gpu(**values["gpu"]), name=name, global_batch=batch
    )
