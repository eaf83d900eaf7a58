"""Random sites of clusters whose sizes, NICs and GPUs differ, for subsets of their nodes."""

import random

from clusters import toml


def random_site(seed, nodes):
    """Draw clusters with this number of nodes in all.

    Returns:
        The generator of random numbers; the text of cluster.toml; the number of pipeline stages; the number
        of nodes that a job uses, a multiple of the stages.
    """
    rng = random.Random(seed)
    clusters, left = [], nodes
    while left:
        size = min(left, rng.randrange(1, nodes))
        left -= size
        name, kind = f"c{len(clusters)}", rng.choice(("ib", "roce", "ethernet"))
        rate = "-" if kind == "ethernet" else f"{rng.choice((100, 200, 400))}Gb/s"
        clusters.append(
            f"{name} {kind} {rate} {name}n[0-{size - 1}] gpu={rng.choice(('A100', 'H100'))}"
        )
    text = toml(*clusters, ethernet=f"{rng.choice((10, 25, 100))}Gb/s", processes=8)
    pipeline = rng.choice((1, 2, 4))
    nodes_of_stage = rng.randrange(1, max(2, nodes // 4))
    count = min(nodes, pipeline * nodes_of_stage)
    count -= count % pipeline
    return rng, text, pipeline, count or pipeline
