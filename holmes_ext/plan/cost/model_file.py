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
#: Keys of a model file's [training].
TRAINING = (
    *("micro_batch", "micro_batches", "global_batch", "recompute", "flash", "sequence_parallel"),
    *("activation_width", "gradient_width", "state_bytes", "sharded_bytes"),
)
#: Key of a model file -> what it says; docs/plan.md shows it.
KEYS = {
    "name": "in tables and messages",
    "layers": "transformer blocks",
    "hidden": "width of an activation",
    "heads": "attention heads",
    "sequence": "tokens of a sequence",
    "vocabulary": "tokens that there are",
    "ffn": "width inside the MLP; 0: 4 x hidden",
    "groups": "key-value heads; 0: as many as heads",
    "head_size": "of a head; 0: hidden / heads",
    "gated": "the MLP is gated (SwiGLU)",
    "bias": "linear layers have one, and norms too",
    "tied": "the output has the embedding's weight",
    "positions": '"learned" (a table of max_positions rows), or "none" (rotary ones have no parameters)',
    "max_positions": "0: sequence",
    "experts": "of each block with experts; 0: none",
    "experts_per_token": "experts that a token goes to",
    "expert_ffn": "width inside an expert; 0: ffn",
    "shared_ffn": "of an expert that all tokens pass; 0: none",
    "expert_layers": "blocks with experts; 0: all",
    "micro_batch": "sequences of a micro-batch",
    "micro_batches": "of a step, on each rank; give this or global_batch",
    "global_batch": "sequences of a step, of all ranks",
    "recompute": '"none", "selective" or "full"',
    "flash": "attention keeps no scores",
    "sequence_parallel": "norms and dropout are split over the tensor ranks",
    "activation_width": "bytes of an element",
    "gradient_width": "bytes of an element",
    "state_bytes": "of a parameter on each rank: weight, gradient, optimizer",
    "sharded_bytes": "the same, divided by the data size: 12 with 6 of state_bytes for Adam under ZeRO 1",
}


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
        if item.name not in ("gpu", "gpus", "source"):
            table = training if item.name in TRAINING else top
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
