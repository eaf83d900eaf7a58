"""What a message from a stage to the next takes at least, simulated, of the pipelines of one column: those that lie in
the same clusters on every stage, the others being still."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from holmes_ext.plan.cost.network_old import all_reduce, message, passes
from holmes_ext.plan.search.arrangement import Arrangement
from holmes_ext.plan.search.pricing import Pricing

#: First rank of a stage, how many.
Column = tuple[int, int]


def least_edges(
    pricing: Pricing, arrangement: Arrangement, column: Column, inside: Sequence[float]
) -> list[tuple[float, float, float]]:
    """Seconds of an activation to the next stage at least, of them those in which who sends it is held up, and those in
    which it flows: of a column's pipelines, which send at the same time. The last one: from the last stage to the
    first. inside: seconds of each edge, for those that leave no node."""
    ground, size, step = pricing.ground, pricing.block.activation_bytes, pricing._step(arrangement.order)
    sharers, (low, width) = min(pricing.processes, step), column
    contents, found = arrangement.contents, []
    known: dict[object, tuple[float, float, float]] = pricing.known.setdefault(("edges", column, arrangement.order), {})
    for stage, (one, other) in enumerate(zip(contents, (*contents[1:], contents[0]))):
        if (stage + 1) * step % pricing.processes != 0 or len(contents) * step <= pricing.processes:
            found.append((inside[stage], inside[stage], 0.0))
            continue
        if (one, other) not in known:
            pair = cluster_at(one, low), cluster_at(other, low)
            fabric = ground.fabric(pair)
            (way,) = ground.crossing(fabric, pair, width) or ((),)
            price = message(fabric, sharers if width % sharers == 0 else 1, way=way)
            part = size / pricing._slices(fabric)  # of what tensor ranks share out
            flow = part * price.byte_s
            known[one, other] = price.seconds(part), flow + fabric.latency_s, flow
        found.append(known[one, other])
    return found


def columns(arrangement: Arrangement) -> tuple[Column, ...]:
    """Ranks of a stage that lie in one cluster on every stage."""
    each = (accumulate(ranks for _, ranks in content) for content in dict.fromkeys(arrangement.contents))
    borders = sorted({0, *(at for own in each for at in own)})
    return tuple((low, high - low) for low, high in zip(borders, borders[1:]))


def sent_both_ways(pricing: Pricing, arrangement: Arrangement, column: Column) -> list[float]:
    """Seconds in which the NIC of a stage sends an activation down and a gradient up, by stage; 0 where they do not
    leave through the same, and where networks were measured: a NIC may carry more then than one message."""
    ground, step, contents = pricing.ground, pricing._step(arrangement.order), arrangement.contents
    found, (low, width) = [0.0] * len(contents), column
    if ground.links.measured or step % pricing.processes:
        return found
    known: dict[object, float] = pricing.known.setdefault(("both ways", column, arrangement.order), {})
    for stage, near in enumerate(zip(contents, contents[1:], contents[2:]), 1):
        if near not in known:
            one, two, three = (cluster_at(content, low) for content in near)
            up, down = ground.fabric((one, two)), ground.fabric((two, three))
            price = message(down, pricing.processes if width % pricing.processes == 0 else 1)
            seconds = 2 * price.byte_s * pricing.block.activation_bytes / pricing._slices(down)
            known[near] = seconds if up.name == down.name else 0.0
        found[stage] = known[near]
    return found


def least_tied_s(pricing: Pricing, arrangement: Arrangement, column: Column) -> float:
    """Seconds of the all-reduce of a tied embedding's gradient between the last stage and the first at least: of a
    column's pipelines, all NICs being theirs (plan/simulate/flows.py's tied); 0 where the two may share a node."""
    ground, contents, tensor = pricing.ground, arrangement.contents, pricing.shape.tensor
    size, step, processes = pricing.model.tied_bytes(pricing.sizes), pricing._step(arrangement.order), pricing.processes
    if not size or (len(contents) - 1) * step < processes:
        return 0.0
    (low, width), first, last = column, contents[0], contents[-1]
    pair, sharers = (cluster_at(first, low), cluster_at(last, low)), min(processes, step)
    alike = max(processes, step) % sharers == 0 and sharers % tensor == 0  # pipelines of a node: one kind
    fabric, apart = ground.fabric(pair), ground.only is None and pair[0] != pair[1] and len(first) == len(last) == 1
    ways = ground.crossing(fabric, pair, width if alike else 1, ring=True)
    found = [size / (pricing.shards if apart else 1) * passes(fabric, sharers if alike else 1, ways)]
    if apart and alike and step > processes and not ground.links.measured:  # summed inside each stage first
        found += [all_reduce(pricing.shards, ground.fabric([own]), tensor).seconds(size) for own in pair]
    return max(found) + 2 * fabric.latency_s


def cluster_at(content: Sequence[tuple[int, int]], rank: int) -> int:
    """Whose rank of a stage it is."""
    for index, ranks in content:
        if rank < ranks:
            return index
        rank -= ranks
    raise AssertionError("a rank beyond the stage")
