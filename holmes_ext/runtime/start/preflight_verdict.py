"""What the launcher's rank 0 makes of the preflight's findings: ports to leave out, or the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.traffic import NETWORK_APIS
from holmes_ext.runtime.planning import PlanMaker
from holmes_ext.words import some_of

#: (fabric, the node that tried, the node that was tried, "" or what went wrong)
Finding = tuple[str, str, str, str]


def decide(
    site: Site, plan: Plan, todo: Sequence[Any], findings: Sequence[Finding], options: Options,
    engine: EngineTraits, maker: PlanMaker,
) -> dict[str, Any]:
    """{"faults": [[node, fabric, what]], "lines": [text]}; HolmesError where that is to end the job."""
    first = {(pair.fabric, pair.first, pair.second): pair for pair in todo}
    lines = _not_tried(site, todo)
    bad = {finding: _tell(site, plan, first[finding[:3]], finding[3]) for finding in findings if finding[3]}
    if not bad:
        return {"faults": [], "lines": lines}
    if ethernet := [text for finding, text in bad.items() if finding[0] == ETHERNET]:
        way_out = "fix its cable, VLAN, addresses or firewall, or name the right interface in cluster.toml"
        needed = f"every node must reach the others over Ethernet: {way_out}"
        raise HolmesError(f"preflight: {some_of(ethernet, 3, '; ')}; {needed}")
    summary = f"preflight: {some_of(bad.values(), 3, '; ')}"
    if options.fallback == "fail":
        raise HolmesError(f"{summary}; fix that, or use --holmes-fallback ethernet to avoid it")
    faults = lost(findings)
    moved = _moved(plan, maker.on_ports(plan, site.without(faults), options, engine=engine))
    therefore = f"therefore {some_of(moved, 3, '; ')}" if moved else "no planned group needs it"
    lines = [f"{summary}; {therefore} (--holmes-fallback fail would end the job)", *lines]
    return {"faults": [[*end, f"found by the preflight: {why}"] for end, why in faults.items()],
            "lines": lines}


def lost(findings: Sequence[Finding]) -> dict[tuple[str, str], str]:
    """{(node, fabric): why} of the ports to leave out: of a node that no neighbour reaches; of both ends
    where that is not clear."""
    tried: dict[tuple[str, str], list[str]] = {}
    for fabric, first, second, problem in findings:
        for node in (first, second):
            tried.setdefault((node, fabric), []).append(problem)
    # With one neighbour both ends look the same: only a node that two or more do not reach can be told from
    # those.
    blamed = {end for end, problems in tried.items() if all(problems) and len(problems) > 1}
    faults: dict[tuple[str, str], str] = {}
    for fabric, first, second, problem in findings:
        ends = [(first, fabric), (second, fabric)]
        if problem:
            for end in [end for end in ends if end in blamed] or ends:
                other = second if end[0] == first else first
                faults.setdefault(end, f"between it and {other}: {problem}")
    return faults


def _tell(site: Site, plan: Plan, pair: Any, problem: str) -> str:
    """Both ends, the group, and what was tried."""
    ends = []
    for name in (pair.first, pair.second):
        port = site.node_by_name[name].port(pair.fabric)
        here = [rank for rank in pair.ranks if plan.node_of(rank) == name]
        ranks = str(here[0]) if len(here) == 1 else f"{here[0]} to {here[-1]}"
        ends.append(f"node {name} (rank {ranks}, {port.name}, {port.address})")
    group = f"for the {pair.kind} group of ranks {some_of(pair.ranks)}"
    return f"{ends[0]} does not reach {ends[1]} over {pair.fabric}, {group}: {problem}"


def _moved(before: Plan, after: Plan) -> list[str]:
    """The planned groups that travel on another fabric now."""
    lines = []
    for kind, ranks in before.groups():
        networks = [(before.fabric_of(ranks, network_api), after.fabric_of(ranks, network_api))
                    for network_api in NETWORK_APIS]
        if now := [new.name for old, new in networks if old and new and old.name != new.name]:
            lines.append(f"the {kind} group of ranks {some_of(ranks)} goes over {now[0]} on all its ranks")
    if not lines and before.sizes is None:  # the script makes its groups as it likes
        lines = ["every group that needs it goes over the next fastest fabric that its ranks share, on all "
                 "of them"]
    return lines


def _not_tried(site: Site, todo: Sequence[Any]) -> list[str]:
    """Fabrics on which sockets could not be tried, with an example."""
    without: dict[str, dict[str, str]] = {}  # fabric -> node -> its port
    for pair in todo:
        for node in (pair.first, pair.second):
            port = site.node_by_name[node].port(pair.fabric)
            if not port.address and pair.fabric != ETHERNET:
                without.setdefault(pair.fabric, {})[node] = port.name
    lines = []
    for fabric, nodes in without.items():
        (node, name), more = next(iter(nodes.items())), len(nodes) - 1
        others = f", and {more} more {'nodes have' if more > 1 else 'node has'} none" if more else ""
        text = f"{node} ({name}) has no IP address there{others}; the ports are up, no more is known"
        lines.append(f"preflight: not tried on {fabric}: {text}")
    return lines
