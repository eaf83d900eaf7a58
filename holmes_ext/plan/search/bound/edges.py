"""What a message from a stage to the next takes at least, simulated: pipelines that lie elsewhere are still then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from holmes_ext.plan.cost.network import message
from holmes_ext.plan.search.arrangement import Arrangement
from holmes_ext.plan.search.pricing import Pricing


def least_edges(pricing: Pricing, arrangement: Arrangement) -> list[tuple[float, float, float]]:
    """Seconds of an activation to the next stage at least, of them those in which who sends it is held up, and those in
    which it flows: of pipelines that send at the same time, those that are alike, the others being still. The last one:
    from the last stage to the first."""
    ground, size, step = pricing.ground, pricing.block.activation_bytes, pricing._step(arrangement.order)
    sharers = min(pricing.processes, step)
    contents = arrangement.contents
    columns, found = _columns(contents), []
    key = "edges", columns, arrangement.order
    known: dict[object, tuple[float, float, float]] = pricing.known.setdefault(key, {})
    local = [*(edge.seconds(size) for edge in pricing.edges(arrangement)), 0.0]
    for stage, (one, other) in enumerate(zip(contents, (*contents[1:], contents[0]))):
        if (stage + 1) * step % pricing.processes != 0 or len(contents) * step <= pricing.processes:
            found.append((local[stage], local[stage], 0.0))
            continue
        if (one, other) not in known:
            every = []
            for low, width in columns:
                pair = _cluster_at(one, low), _cluster_at(other, low)
                fabric = ground.fabric(pair)
                (way,) = ground.crossing(fabric, pair, width) or ((),)
                price = message(fabric, sharers if width % sharers == 0 else 1, way=way)
                part = size / pricing._slices(fabric)  # of what tensor ranks share out
                flow = part * price.byte_s
                every.append((price.seconds(part), flow + fabric.latency_s, flow))
            known[one, other] = min(each[0] for each in every), min(e[1] for e in every), min(e[2] for e in every)
        found.append(known[one, other])
    return found


def _columns(contents: Sequence[Sequence[tuple[int, int]]]) -> tuple[tuple[int, int], ...]:
    """(first rank of a stage, how many) that lie in one cluster on every stage."""
    each = (accumulate(ranks for _, ranks in content) for content in dict.fromkeys(contents))
    borders = sorted({0, *(at for own in each for at in own)})
    return tuple((low, high - low) for low, high in zip(borders, borders[1:]))


def sent_both_ways(pricing: Pricing, arrangement: Arrangement) -> list[float]:
    """Seconds in which the NIC of a stage sends an activation down and a gradient up, by stage; 0 where they do not
    leave through the same, and where networks were measured: a NIC may carry more then than one message."""
    ground, step, contents = pricing.ground, pricing._step(arrangement.order), arrangement.contents
    found = [0.0] * len(contents)
    if ground.links.measured or step % pricing.processes:
        return found
    columns = _columns(contents)
    known: dict[object, float] = pricing.known.setdefault(("both ways", columns, arrangement.order), {})
    for stage, near in enumerate(zip(contents, contents[1:], contents[2:]), 1):
        if near not in known:
            every = []
            for low, width in columns:
                one, two, three = (_cluster_at(content, low) for content in near)
                up, down = ground.fabric((one, two)), ground.fabric((two, three))
                price = message(down, pricing.processes if width % pricing.processes == 0 else 1)
                seconds = 2 * price.byte_s * pricing.block.activation_bytes / pricing._slices(down)
                every.append(seconds if up.name == down.name else 0.0)
            known[near] = min(every)
        found[stage] = known[near]
    return found


def _cluster_at(content: Sequence[tuple[int, int]], rank: int) -> int:
    """Whose rank of a stage it is."""
    for index, ranks in content:
        if rank < ranks:
            return index
        rank -= ranks
    raise AssertionError("a rank beyond the stage")
