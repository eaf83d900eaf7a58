"""The cell that the issue asks for, run: 4 stages over 2 clusters 40 ms apart, 16 micro-batches, DeepSpeed's
pipeline engine in the lab, an emulated accelerator whose forward passes take 40 ms and backward passes 80.

Three runs with the same samples: stock, holmes' 1F1B with as many micro-batches in flight as hide the edges,
and the passes that `--holmes-passes auto` lists, no stage holding more micro-batches than 1F1B's fullest one.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from harness import Row, tell

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.lab import interleave
from holmes_ext.lab.compare import Series, Variant, compare, max_loss_difference
from holmes_ext.lab.samples import examples
from holmes_ext.options import Options
from holmes_ext.patches.launch_flags import launches
from holmes_ext.patches.traits import ENGINES
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.rules import rules_of
from holmes_ext.plan.search.as_plan import plan_of
from holmes_ext.plan.search.result import Candidate, SearchResult
from holmes_ext.plan.search.simulated import in_passes, timed
from holmes_ext.plan.search.space import Shape

SITE = """version = 2
ethernet = {rate = "1Gb/s"}
cluster = [
  {name = "a", kind = "ib", rate = "2Gb/s", nodes = ["a[0-1]"]},
  {name = "b", kind = "ib", rate = "2Gb/s", nodes = ["b[0-1]"]},
]
between = [{clusters = ["a", "b"], rate = "1Gb/s", latency = "40ms"}]
"""
STAGES, LAYERS, MICRO_BATCHES, FORWARD_S = 4, 8, 16, 0.04
STEPS, SKIP, REPETITIONS = 10, 3, 2
NAME = "40 ms; 16 micro-batches; run in the lab"
STOCK, IN_FLIGHT, LISTED = "stock", "1F1B in flight", "listed passes"


def question() -> SearchResult:
    """Of a model whose stages take FORWARD_S for a forward pass of one sequence."""
    plain = Model(
        layers=LAYERS, hidden=128, heads=4, sequence=16, vocabulary=256, tied=False, activation_width=4,
        gradient_width=4, state_bytes=16.0, global_batch=MICRO_BATCHES,
    )  # fmt: skip
    block = replace(plain, micro_batch=1).costs()[1]
    model = replace(plain, gpu=Gpu(flops=block.forward_flops * LAYERS / STAGES / FORWARD_S))
    engine, spec = ENGINES["deepspeed"], parse_spec(SITE)
    rules = rules_of(engine, Options(passes="auto"), direct=True, overlap=True)
    return SearchResult(Network(site_from_spec(spec), Links.of_spec(spec)), model, MICRO_BATCHES, rules=rules,
                        engine=engine, stock_overlap=engine.overlaps)


def plans() -> tuple[SearchResult, dict[str, Candidate]]:
    """With 1F1B, and with listed passes."""
    asked = question()
    shape = Shape(STAGES, 1, 1, 1, 1, 1, 1, MICRO_BATCHES, "none", 0)
    nodes = [node.name for node in asked.network.site.nodes]
    placement = asked.network.placement(nodes, shape.sizes().complete(asked.network.world))
    one = timed(asked, asked.candidate(shape, placement, (LAYERS // STAGES,) * STAGES))
    listed = in_passes(asked, one)
    assert listed is not None, "listed passes are faster here"
    return asked, {IN_FLIGHT: one, LISTED: listed}


def run(folder: Path) -> tuple[dict[str, Candidate], dict[str, Series]]:
    asked, found = plans()
    spec, model, variants = parse_spec(SITE), asked.model, []
    cluster = folder / "cluster.toml"
    cluster.write_text(SITE)
    for name, one in found.items():
        plan, config = folder / f"{len(variants)}.json", folder / f"ds_config_{len(variants)}.json"
        plan_of(asked, one, Options(passes="auto")).save(str(plan))
        launch = launches(one, model, MICRO_BATCHES, True, str(cluster), str(plan))["deepspeed"]
        config.write_text(json.dumps(launch.config))
        flags = [str(config) if flag == "ds_config.json" else flag for flag in launch.flags]
        variants.append(Variant(name, spec, interleave(spec), tuple(flags)))
    nodes = tuple(node.name for node in asked.network.site.nodes)  # stock's are in the plan's order
    variants.append(Variant(STOCK, spec, nodes, ("--deepspeed_config", str(config))))
    size = ["--layers", model.layers, "--hidden", model.hidden, "--heads", model.heads, "--sequence",
            model.sequence, "--stages", STAGES]
    script = [str(examples() / "deepspeed_pipeline" / "train.py"), *map(str, size)]
    accelerator = {"flops": model.gpu.flops, "classes": ["Block"], "layout": "bsh"}
    return found, compare(variants, script, repetitions=REPETITIONS, steps=STEPS, skip=SKIP,
                          accelerator=accelerator, timeout=600.0,
                          on_run=lambda name, number: tell(f"{name}, run {number + 1}"))


def rows() -> list[Row]:
    """Measured, emulated."""
    with tempfile.TemporaryDirectory() as directory:
        plans_of, series = run(Path(directory))
    made = []
    for name, own in series.items():
        made.append(Row.of(NAME, f"{name}, measured step", own.median, "s", own.spread, True, busy=own.busy))
        if name in plans_of:
            error = plans_of[name].step_s / own.median - 1
            made.append(Row.median(NAME, f"{name}, predicted step", [plans_of[name].step_s], "s", False))
            made.append(Row.median(NAME, f"{name}, predicted against measured", [error], "fraction", True))
            apart = max_loss_difference(own, series[STOCK])
            made.append(Row.median(NAME, f"{name}, greatest difference of a loss from stock's", [apart], "",
                                   True))
    ratio = series[IN_FLIGHT].median / series[LISTED].median
    made.append(Row.median(NAME, "ratio, memory of the fullest", [ratio], "x", True, ">= 1.1",
                           busy=max(own.busy for own in series.values())))
    return made
