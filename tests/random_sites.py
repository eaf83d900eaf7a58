"""Draws random sites as running nodes report them, and sizes of jobs that fit them.

network() returns the network that a group of nodes should use, by a plain rule.
"""

from __future__ import annotations

import random

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.plan.sizes import Sizes

RATES = (10 * 10**9, 25 * 10**9, 100 * 10**9, 100 * 10**9)


def site(rng: random.Random) -> Site:
    """Draw 2 to 8 nodes in unequal clusters, on several fabrics or none.

    Some ports have no address, no HCA, or are out of use.
    """
    fast = [
        Fabric(f"f{i}", rng.choice(("ib", "roce")), rng.choice(RATES), 2e-6)
        for i in range(rng.randint(1, 3))
    ]
    fabrics = (Fabric(ETHERNET, "ethernet", rng.choice(RATES), 3e-5), *fast)
    processes, good, nodes = rng.choice((1, 2, 4)), rng.choice((0.6, 0.9, 1.0)), []
    for number in range(rng.randint(2, 8)):
        own = [fabric for fabric in fast if rng.random() < good]
        ports = [
            Port(
                fabric.name,
                f"i{fabric.name}",
                "10.1.0.1" if rng.random() < good else "",
                (f"mlx_{fabric.name}:1",) if rng.random() < good else (),
                usable=rng.random() < good,
            )
            for fabric in sorted(own, key=lambda fabric: fabric.preference, reverse=True)
        ]
        ports.append(Port(ETHERNET, "eth0", "10.0.0.1"))
        nodes.append(Node(f"n{number}", rng.choice("abc"), processes, tuple(ports)))
    return Site(tuple(nodes), fabrics)


def sizes(rng: random.Random, world: int) -> Sizes | None:
    """Draw complete sizes of a job with this number of ranks, or None."""
    if rng.random() < 0.1:
        return None

    def divisor(of: int) -> int:
        return rng.choice([n for n in range(1, of + 1) if of % n == 0])

    pipeline = divisor(world)
    tensor = divisor(world // pipeline)
    order = rng.choice(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"))
    return Sizes(pipeline, tensor, divisor(world // pipeline // tensor), order=order).complete(
        world
    )


def network(of: Site, names: set[str], backend: str) -> str:
    """Return the name of the fastest fabric that all these nodes can use with a backend.

    RDMA is preferred at equal rates.

    Args:
        names: Names of the nodes.
        backend: "gloo" or "nccl".
    """
    if len(names) == 1:
        return "local"

    def works(fabric: Fabric, node: Node) -> bool:
        port = next((port for port in node.ports if port.fabric == fabric.name), None)
        needed = port is not None and (port.address if backend == "gloo" else port.hcas)
        return fabric.name == ETHERNET or bool(needed) and port.usable

    found = [f for f in of.fabrics if all(works(f, of.node_by_name[name]) for name in names)]
    return max(found, key=lambda f: (f.rate_bps, f.name != ETHERNET, f.name)).name
