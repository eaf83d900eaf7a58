"""A model from its TOML file (examples/models/), and the GPUs that the clusters give it."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from holmes_ext.cluster.gpu import accelerator_of
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.document import Table, load_toml
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Gpu, Model

VERSION = 1


def on_clusters(model: Model, spec: SiteSpec) -> Model:
    """`model` with the GPUs of cluster.toml: its numbers, then [gpu.cluster.NAME], the GPU's name, [gpu]."""
    gpus = {}
    for cluster in spec.clusters:
        sources = (cluster.accelerator, model.gpus.get(cluster.name), accelerator_of(cluster.gpu), model.gpu)
        every = {item.name: [getattr(source, item.name, 0.0) for source in sources] for item in fields(Gpu)}
        gpus[cluster.name] = Gpu(**{name: next(filter(None, values), 0.0) for name, values in every.items()})
    return replace(model, gpus=gpus)


def load_model(path: str | Path) -> Model:
    """Read and validate a model TOML (examples/models/); HolmesError names the file and the key."""
    top = load_toml(path, "name a model's TOML, such as those of examples/models/")
    top.version(VERSION)
    training, gpu = top.table("training"), top.table("gpu", default={})
    values: dict[str, Any] = {}
    for item in fields(Model):
        if item.metadata:
            table = training if item.metadata["training"] else top
            required = item.default is MISSING
            kind = int if required else type(item.default)
            values[item.name] = table.take(item.name, kind, *(() if required else (item.default,)))
    clusters, default = gpu.table("cluster", default={}), _gpu(gpu, Gpu())
    gpus = {name: _gpu(clusters.table(name), default) for name in list(clusters.values)}
    for table in (top, training):
        table.done()
    return Model(**values, gpu=default, gpus=gpus, source=str(path))


def _gpu(table: Table, default: Gpu) -> Gpu:
    values = {name: table.take(name, float, getattr(default, name)) for name in ("flops", "memory_bytes")}
    table.done()
    try:
        return Gpu(**values)
    except HolmesError as error:
        raise HolmesError(f"{table.source}: key '{table.path}': {error}") from None
