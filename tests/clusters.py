"""cluster.toml files, their specs and sites, for tests.

    toml("a ib 2Gb/s a[0-1]", "b roce 1.6Gb/s b0 fabric=spine", "c ethernet - c0,c1", ethernet="250Mb/s",
    processes=2)

A cluster is its name, kind, rate and nodes, then keys of its own; what every cluster has is given by name.
"""

from __future__ import annotations

import re

from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec, parse_spec
from holmes_ext.samples import examples

#: Two nodes with InfiniBand, two with RoCE; what most tests need.
TWO = ("a ib 2Gb/s a[0-1]", "b roce 1.6Gb/s b[0-1]")


def toml(*clusters: str, ethernet: str = "250Mb/s", **every: object) -> str:
    """Return the text of a cluster.toml; see the module's docstring for the arguments."""
    lines = ["version = 2", "[ethernet]", f'rate = "{ethernet}"']
    for cluster in clusters or TWO:
        name, kind, rate, nodes, *more = cluster.split()
        keys = {"name": name, "kind": kind, **({} if rate == "-" else {"rate": rate})}
        keys |= {key: value for key, _, value in (word.partition("=") for word in more)}
        listed = ", ".join(f'"{node}"' for node in nodes.split(","))
        lines += [
            "[[cluster]]",
            *(f"{key} = {_value(value)}" for key, value in (keys | every).items()),
        ]
        lines.append(f"nodes = [{listed}]")
    return "\n".join([*lines, ""])


def _value(value: object) -> str:
    return str(value) if re.fullmatch(r"[0-9.]+(e[0-9]+)?", str(value)) else f'"{value}"'


def spec(*clusters: str, **more: object) -> SiteSpec:
    return parse_spec(toml(*clusters, **more))


def site(*clusters: str, **more: object) -> Site:
    return site_from_spec(spec(*clusters, **more))


def example(name: str = "two_clusters_4") -> Site:
    """Return the site of a file in examples/clusters."""
    return site_from_spec(load_spec(examples() / "clusters" / f"{name}.toml"))
