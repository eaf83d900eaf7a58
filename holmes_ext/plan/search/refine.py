"""What only some candidates of a search need: full cost tables, better partitions, and the terms of their memory."""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.plan.cost.memory import Memory, stage_memory, under_way
from holmes_ext.plan.cost.stage_costs import StageCosts
from holmes_ext.plan.search.bounds import Stages
from holmes_ext.units import format_bytes

#: Rounds of moving one layer.
ROUNDS = 40


def costs_of(stages: Stages) -> StageCosts:
    """The tables of plan/cost/stage_costs.py, as plan/search/partition.py and the simulation want them; of one chunk a stage, and without
    what ZeRO 2 and 3 send: partitions have none (they exclude a pipeline), the simulation sends it itself."""
    pricing, shape, layers = stages.pricing, stages.pricing.shape, stages.pricing.layers
    ground = pricing.ground
    forward, backward, reduce, transfer = [], [], [], []
    reduced, known = [pricing.reduced_bytes(layer) for layer in layers], {}
    for price, edge in zip(stages.prices, [*stages.edges, 0.0]):
        if price not in known:
            half = price.collective_s / 2
            blocks = [layer.kind == "block" for layer in layers]
            known[price] = (
                tuple(x.forward_flops / price.flops + (half if b else 0.0) for x, b in zip(layers, blocks)),
                tuple(x.backward_flops / price.flops + (half if b else 0.0) for x, b in zip(layers, blocks)),
                tuple(size * price.byte_s for size in reduced),
            )
        for rows, row in zip((forward, backward, reduce), known[price]):
            rows.append(row)
        transfer.append((edge,) * (len(layers) - 1) + (0.0,))
    names = [", ".join(dict.fromkeys(ground.site.clusters[index] for index, _ in content)) for content in stages.arrangement.contents]
    return StageCosts(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        reduction_s=tuple(reduce),
        transfer_s=tuple(transfer),
        micro_batches=shape.micro_batches,
        latency_s=tuple(price.latency_s for price in stages.prices),
        state_bytes=tuple(pricing.bytes_of(layer) for layer in layers),
        kept_bytes=tuple(layer.kept_bytes for layer in layers),
        limit_bytes=tuple(max(room, 1.0) for room in stages.room),
        tied_s=stages.tied_s,
        overlap=stages.overlap,
        names=tuple(f"stage {index} (cluster {name})" for index, name in enumerate(names)),
    )


def improve(stages: Stages, split: Sequence[int], step: float) -> tuple[tuple[int, ...], float]:
    """Move one layer from a stage to another as long as the step gets shorter."""
    split = list(split)
    for _ in range(ROUNDS):
        work = [n * (f + b) for n, f, b in zip(split, stages.forward, stages.backward)]
        fullest = sorted(range(stages.count), key=lambda s: -work[s])[:3] + [0, stages.count - 1]
        emptiest = sorted(range(stages.count), key=work.__getitem__)[:4] + [0, stages.count // 2, stages.count - 1]
        better = None
        for source in dict.fromkeys(fullest):
            for target in dict.fromkeys(emptiest):
                if source == target or split[source] < 2 or split[target] >= stages.most[target]:
                    continue
                split[source], split[target] = split[source] - 1, split[target] + 1
                found = stages.estimate(split)
                if found < step * (1 - 1e-12):
                    better, step = (source, target), found
                split[source], split[target] = split[source] + 1, split[target] - 1
        if better is None:
            break
        split[better[0]], split[better[1]] = split[better[0]] - 1, split[better[1]] + 1
    return tuple(split), step


def uniform_split(stages: Stages) -> tuple[int, ...]:
    return tuple(stages.layers // stages.count + (stage < stages.layers % stages.count) for stage in range(stages.count))


def describe_misfit(stages: Stages) -> str:
    """Which term of which stage is too large, and by how much, of the plan that comes nearest to fitting."""
    split = uniform_split(stages)
    memory = stages.memory_bytes(split)
    stage = max(range(stages.count), key=lambda index: memory[index] / stages.limits()[index])
    found, limit, shape = terms(stages, stage, split), stages.limits()[stage], stages.pricing.shape
    largest = found.largest
    fixes = {
        "weights": "more GPUs, or a larger tensor or pipeline size",
        "gradients": "more GPUs, or a larger tensor or pipeline size",
        "optimizer": "more GPUs, or ZeRO (limit zero)",
        "activations": "a smaller micro-batch, full recomputation, or more tensor or context parallelism",
        "working": "a smaller micro-batch, or more tensor or context parallelism",
    }
    return (
        f"{stages.pricing.model.name} fits nowhere: nearest is tensor {shape.tensor}, pipeline {shape.pipeline}, data {shape.data}, recompute"
        f" {shape.recompute}, ZeRO {shape.zero}, whose stage {stage} needs {format_bytes(memory[stage], 4)} of {format_bytes(limit, 4)}:"
        f" {largest} alone are {format_bytes(getattr(found, largest), 4)}, {format_bytes(memory[stage] - limit, 4)} are too much;"
        f" it needs {fixes[largest]}"
    )


def terms(stages: Stages, stage: int, split: Sequence[int]) -> Memory:
    """Memory of one stage, term by term."""
    pricing, shape = stages.pricing, stages.pricing.shape
    layers = [pricing.block] * split[stage]
    layers += [pricing.embedding] if stage == 0 else []
    layers += [pricing.output] if stage == stages.count - 1 else []
    keep = under_way(stage, stages.count, shape.virtual, shape.micro_batches)
    expert_shards = max(1, pricing.shards // shape.expert)
    return stage_memory(pricing.original, layers, shape.zero, pricing.shards, expert_shards, keep, pricing.working)
