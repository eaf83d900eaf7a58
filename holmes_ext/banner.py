"""What a job says when it starts: clusters, ranks, networks, reductions, patches in a line; and more."""

from __future__ import annotations

from holmes_ext.patches import registry
from holmes_ext.plan.decide import more_bytes
from holmes_ext.plan.plan import NOMINAL
from holmes_ext.plan.traffic import SOCKETS, VERBS
from holmes_ext.runtime.session import Session
from holmes_ext.units import format_bytes
from holmes_ext.words import grouped, tell_user


def show(current: Session, lines: list[str]) -> None:
    """On rank 0."""
    if current.rank == 0:
        for line in (describe(current), *lines):
            tell_user(line)


def describe(current: Session) -> str:
    """Clusters, order of the nodes, stages and layers, which groups use which NIC, what is patched or not."""
    parts = (
        _ranks(current),
        _networks(current),
        _stage_links(current),
        _reductions(current),
        _patches(),
    )
    return "; ".join(filter(None, parts))


def _ranks(current: Session) -> str:
    site, plan = current.site, current.plan
    clusters = []
    for name, nodes in plan.clusters.items():
        fabric = site.fabric_by_name[site.node_by_name[nodes[0]].ports[0].fabric]
        clusters.append(
            f"{name} ({len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}, {fabric.kind})"
        )
    moved = (
        "order kept"
        if plan.nodes == tuple(node.name for node in site.nodes)
        else "ranks renumbered"
    )
    count = f"{len(clusters)} cluster{'s' * (len(clusters) > 1)}"
    text = f"{count}: {' -> '.join(clusters)}; world size {site.world_size}, {moved}"
    if plan.stage_layers:
        text += f"; {plan.partition} stages of {'+'.join(map(str, plan.stage_layers))} layers"
    for spanning in plan.spanning:
        text += f"; {spanning.groups} {spanning.kind} groups span clusters (on {spanning.fabric})"
    return text


def _networks(current: Session) -> str:
    """ "pipeline 2 x data 2, layers as the framework splits them; data groups on ib and roce, pipeline on
    ethernet"."""
    plan, sizes = current.plan, current.plan.sizes
    if sizes is None:
        return ""
    axes = ("pipeline", "tensor", "context", "data")
    text = (
        " x ".join(f"{axis} {size}" for axis in axes if (size := getattr(sizes, axis)) > 1)
        or "one process"
    )
    if sizes.pipeline > 1 and not plan.stage_layers:
        text += ", layers as the framework splits them"
    verbs, sockets = _used(current, VERBS), _used(current, SOCKETS)
    return "; ".join(
        filter(None, (text, verbs, f"with gloo {sockets}" if sockets != verbs else ""))
    )


def _used(current: Session, network_api: str) -> str:
    kinds: dict[str, list[str]] = {}
    known = current.site.fabric_by_name
    for kind, fabrics in current.plan.traffic_of(network_api).transports.items():
        if getattr(current.plan.sizes, kind, 2) > 1:  # "world" has no size of its own
            names = dict.fromkeys(
                known[name].kind if name in known else "memory" for name in fabrics
            )
            kinds.setdefault(" and ".join(names), []).append(kind)
    return ", ".join(f"{', '.join(kind)} groups on {where}" for where, kind in kinds.items())


def _stage_links(current: Session) -> str:
    """What a patched pipeline's stage links do, what that costs in memory, and what is cut."""
    plan, on, parts = current.plan, set(registry().summary()[0]), []
    if not plan.traffic:
        return ""
    traffic = plan.traffic_of(SOCKETS)
    if (held := traffic.in_flight) and on & {"deepspeed-stage-links", "megatron-stage-links"}:
        parts.append("pipeline sends do not block")
        if any(one > own for one, own in zip(held, range(len(held), 0, -1))):
            more = max(more_bytes(plan), default=0.0)
            cost = f", {format_bytes(more)} more on the fullest stage" if more else ""
            parts[-1] += (
                f", {'+'.join(map(str, held))} micro-batches in flight hide the stage links{cost}"
            )
    if traffic.schedule and on & {"deepspeed-stage-links", "torch-schedule"}:
        parts.append("passes as the plan lists them, gradients of weights put off")
    if (
        "megatron-slices" in on
        and (slices := max((stage_link.slices for stage_link in traffic.stage_links), default=1))
        > 1
    ):
        parts.append(
            f"{slices} tensor ranks each send a slice of replicated activations across clusters"
        )
    compression = {stage_link.compression for stage_link in traffic.stage_links} - {"off"}
    if compression:
        parts.append(f"stage links that cross in {compression.pop()}")
    if on & {"deepspeed-tied", "megatron-tied"} and traffic.tied:
        parts.append("tied weights summed hierarchically")
    return "; ".join(parts)


def _reductions(current: Session) -> str:
    """Of whose model the plan thinks when it overlaps reductions, where nobody told it one."""
    plan = current.plan
    decided = (
        current.options.overlap == "auto"
        and plan.sizes is not None
        and plan.sizes.data * plan.sizes.context > 1
    )
    return "reductions planned for a nominal model" if decided and plan.basis == NOMINAL else ""


def _patches() -> str:
    """Features that are on, those that do not fit, and versions that nobody tried."""
    on, off = registry().summary()
    parts = [f"patched: {', '.join(on) or 'nothing'}", *registry().beyond_tried()]
    for version, names in registry().untried().items():
        parts.append(f"tried with {version} at your own risk: {', '.join(names)}")
    if off:
        of_reason = grouped((reason, name) for name, reason in off.items())
        told = (f"{', '.join(names)} ({reason})" for reason, names in of_reason.items())
        parts.append(f"not patched: {', '.join(told)}")
    return "; ".join(parts)
