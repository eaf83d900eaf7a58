"""Prints the start line of a job: its clusters, ranks, networks, reductions and patches."""

from __future__ import annotations

from holmes_ext.patches import registry
from holmes_ext.plan.plan import NOMINAL, more_bytes
from holmes_ext.plan.traffic import SOCKETS, VERBS
from holmes_ext.runtime.session import Session
from holmes_ext.units import format_bytes
from holmes_ext.words import counted, grouped, tell_user

_STAGE_LINK_FEATURES = {"deepspeed-stage-links", "megatron-stage-links"}
_SCHEDULE_FEATURES = {"deepspeed-stage-links", "torch-schedule"}
_TIED_FEATURES = {"deepspeed-tied", "megatron-tied"}


def show(current: Session, lines: list[str]) -> None:
    """Print the start line and further lines on rank 0."""
    if current.rank == 0:
        tell_user(describe(current))
        for line in lines:
            tell_user(line)


def describe(current: Session) -> str:
    """Return the start line of a job."""
    parts = (
        _describe_ranks(current),
        _describe_networks(current),
        _describe_stage_links(current),
        _note_on_assumed_model(current),
        _patches(),
    )
    return "; ".join(part for part in parts if part)


def _describe_ranks(current: Session) -> str:
    """Return the clusters and the order of ranks, in words.

    If known, the layers of the pipeline stages and the process groups that span clusters follow.

    Example: "2 clusters: a (2 nodes, ib) -> b (1 node, roce); world size 24, ranks renumbered".
    """
    site = current.site
    plan = current.plan
    clusters = []
    for name, nodes in plan.clusters.items():
        # The first port of a node is its fastest one.
        first_port = site.node_by_name[nodes[0]].ports[0]
        nic_kind = site.fabric_by_name[first_port.fabric].kind
        clusters.append(f"{name} ({counted(len(nodes), 'node')}, {nic_kind})")
    keeps_order = plan.nodes == tuple(node.name for node in site.nodes)
    order = "order kept" if keeps_order else "ranks renumbered"
    cluster_count = counted(len(clusters), "cluster")
    text = f"{cluster_count}: {' -> '.join(clusters)}; world size {site.world_size}, {order}"
    if plan.stage_layers:
        layers = "+".join(map(str, plan.stage_layers))
        text += f"; {plan.partition} stages of {layers} layers"
    # One item for each kind of group ("data", ...) of which some groups have ranks in two clusters.
    for spanning in plan.spanning:
        groups = counted(spanning.groups, f"{spanning.kind} group", "span")
        text += f"; {groups} clusters (on {spanning.fabric})"
    return text


def _describe_networks(current: Session) -> str:
    """Return the parallel sizes and the networks of the process groups; "" if the sizes are unknown.

    Example: "pipeline 2 x data 2; data groups on ib and roce, pipeline groups on ethernet".
    """
    plan = current.plan
    sizes = plan.sizes
    if sizes is None:
        return ""
    dimensions = []
    for dimension in ("pipeline", "tensor", "context", "data"):
        size = getattr(sizes, dimension)
        if size > 1:
            dimensions.append(f"{dimension} {size}")
    text = " x ".join(dimensions) or "one process"
    if sizes.pipeline > 1 and not plan.stage_layers:
        text += ", layers as the framework splits them"
    # gloo cannot use RDMA, so its groups may be on other networks.
    with_nccl = _groups_by_network(current, VERBS)
    with_gloo = _groups_by_network(current, SOCKETS)
    parts = [text, with_nccl]
    if with_gloo != with_nccl:
        parts.append(f"with gloo {with_gloo}")
    return "; ".join(part for part in parts if part)


def _groups_by_network(current: Session, network_api: str) -> str:
    """Return the kinds of process groups by the networks they use: "data groups on ib and roce".

    The groups of one kind may use different networks, each in its own cluster: hence "ib and roce".
    Groups inside one node are "on memory".

    Args:
        current: State of holmes in this process.
        network_api: VERBS for NCCL, SOCKETS for gloo.
    """
    sizes = current.plan.sizes
    fabric_by_name = current.site.fabric_by_name
    groups_on: dict[str, list[str]] = {}  # kinds of NICs, in words -> kinds of groups
    # transports: kind of group -> networks of its groups.
    for group_kind, fabrics in current.plan.traffic_of(network_api).transports.items():
        size = getattr(sizes, group_kind, None)  # None for "world"
        if size is not None and size <= 1:
            continue  # its groups have one rank
        nic_kinds = []
        for name in fabrics:
            # A name that is no fabric is that of a group inside one node.
            nic_kind = fabric_by_name[name].kind if name in fabric_by_name else "memory"
            if nic_kind not in nic_kinds:
                nic_kinds.append(nic_kind)
        groups_on.setdefault(" and ".join(nic_kinds), []).append(group_kind)
    texts = [f"{', '.join(groups)} groups on {network}" for network, groups in groups_on.items()]
    return ", ".join(texts)


def _describe_stage_links(current: Session) -> str:
    """Return what holmes changes in the messages between pipeline stages, in words; "" for nothing.

    Each change of the plan is listed if the patch of the training framework that makes it is
    active.
    """
    plan = current.plan
    if not plan.traffic:
        return ""
    features_on, _ = registry().summary()
    active_features = set(features_on)
    # The plan has such decisions twice, for NCCL and for gloo, because gloo cannot use RDMA. They
    # are mostly the same, so only those for gloo (SOCKETS) are shown.
    traffic = plan.traffic_of(SOCKETS)
    parts = []
    if traffic.in_flight and active_features & _STAGE_LINK_FEATURES:
        parts.append(_describe_in_flight(current, traffic.in_flight))
    if traffic.schedule and active_features & _SCHEDULE_FEATURES:
        # The plan lists all passes of a stage in order (--holmes-schedule auto). It splits backward
        # passes: gradients of weights are computed later, while the stage would otherwise wait.
        parts.append("passes as the plan lists them, gradients of weights put off")
    if "megatron-slices" in active_features:
        slices = max((stage_link.slices for stage_link in traffic.stage_links), default=1)
        if slices > 1:
            parts.append(
                f"{slices} tensor ranks each send a slice of replicated activations across clusters"
            )
    # Messages between stages in different clusters may be compressed to bf16 or int8. A job has one
    # such format at most.
    compression = {stage_link.compression for stage_link in traffic.stage_links} - {"off"}
    if compression:
        parts.append(f"activations between clusters compressed to {compression.pop()}")
    if traffic.tied and active_features & _TIED_FEATURES:
        parts.append("tied weights summed hierarchically")
    return "; ".join(parts)


def _describe_in_flight(current: Session, in_flight: tuple[int, ...]) -> str:
    """Return a text on the pipeline's sends and its micro-batches in flight.

    Called if the plan has numbers of micro-batches in flight. Then holmes patches the engine's
    schedule so that sends do not wait. If a stage has more in flight than under 1F1B, the text also
    has the numbers and their memory.

    Args:
        current: State of holmes in this process.
        in_flight: Planned micro-batches in flight, by stage.
    """
    text = "pipeline sends do not block"
    stages = len(in_flight)
    # Under 1F1B, a stage has one micro-batch in flight for itself and each later stage.
    exceeds_1f1b = any(count > stages - stage for stage, count in enumerate(in_flight))
    if not exceeds_1f1b:
        return text
    counts = "+".join(map(str, in_flight))
    text += f", {counts} micro-batches in flight hide the stage links"
    # Activations beyond those of 1F1B, on the stage with most of them.
    extra_bytes = max(more_bytes(current.plan), default=0.0)
    if extra_bytes:
        text += f", {format_bytes(extra_bytes)} more on the fullest stage"
    return text


def _note_on_assumed_model(current: Session) -> str:
    """Return a note if the plan of gradient reductions is based on an assumed model, else "".

    Without a model, a fixed assumption about sizes and times ("nominal model") decides whether the
    reductions overlap the backward pass. If the user has decided that, there is no note.
    """
    plan = current.plan
    if current.options.overlap != "auto" or plan.sizes is None or plan.basis != NOMINAL:
        return ""
    has_reductions = plan.sizes.data * plan.sizes.context > 1
    return "reductions planned for a nominal model" if has_reductions else ""


def _patches() -> str:
    """Return which patches of the training framework are on and off, in words, for the start line.

    Frameworks whose version was not tested follow, and the reasons for patches that are off.
    """
    on, off = registry().summary()  # names of features (groups of patches); name -> reason
    parts = [f"patched: {', '.join(on) or 'nothing'}"]
    # Warnings about versions in the supported range that are newer than all that were tested.
    parts += registry().warnings_of_newer_frameworks()
    # Features that are on with a version outside of the supported range, because the user forced
    # them (--holmes-try).
    for version, features in registry().untried().items():
        parts.append(f"tried with {version} at your own risk: {', '.join(features)}")
    if off:
        features_by_reason = grouped((reason, feature) for feature, reason in off.items())
        texts = [
            f"{', '.join(features)} ({reason})" for reason, features in features_by_reason.items()
        ]
        parts.append(f"not patched: {', '.join(texts)}")
    return "; ".join(parts)
