"""Lower bounds on the messages between the pipeline stages of a placement."""

from __future__ import annotations

from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.placement import Placement


class Message(NamedTuple):
    """Lower bounds on the times of sending an activation from a stage to the next, in seconds."""

    #: From the first byte sent to the last byte received.
    total_s: float
    #: While the sender waits, if sends block.
    sender_blocked_s: float
    #: Between the ends of two messages that follow each other on the stage link.
    interval_s: float
    #: While the sender's NIC is busy, with this and the other messages that leave its node.
    sender_nic_s: float
    #: While the receiver's NIC is busy. A node with fewer ranks has fewer messages on its NIC.
    receiver_nic_s: float
    #: Name of the fabric that carries the message; "" inside a node.
    fabric: str


#: The message from a stage to itself (pipelines of a single stage).
NO_MESSAGE = Message(
    total_s=0.0,
    sender_blocked_s=0.0,
    interval_s=0.0,
    sender_nic_s=0.0,
    receiver_nic_s=0.0,
    fabric="",
)


class SlowestPipeline(NamedTuple):
    """Pipeline (the ranks with the same index in every stage) whose messages take longest."""

    rank_index: int  # of its rank among the ranks of each stage
    messages: list[Message]  # from each stage to the next; the last stage sends to the first


def slowest_messages(prices: Prices, placement: Placement, stage_count: int) -> SlowestPipeline:
    """Find the pipeline whose messages between stages take longest, and return it with these messages.

    A pipeline consists of the ranks with the same index in every stage. Pipelines differ if they
    lie on different node types.

    Args:
        prices: Times of communication.
        placement: Nodes of every stage.
        stage_count: Number of stages.
    """
    # Borders are the indices at which the node type changes on some stage; the last border is the
    # end. Between two borders all pipelines are equal, so the first of them represents all.
    pipelines = []
    for rank_index in placement.borders[:-1]:
        messages = [
            _message(prices, placement, stage_count, stage, rank_index)
            for stage in range(stage_count)
        ]
        pipelines.append(SlowestPipeline(rank_index, messages))
    return max(
        pipelines, key=lambda pipeline: sum(message.total_s for message in pipeline.messages)
    )


def _message(
    prices: Prices, placement: Placement, stage_count: int, stage: int, rank_index: int
) -> Message:
    """Return lower bounds on the time of an activation from a stage to the next; equal nodes share them.

    Args:
        prices: Times of communication.
        placement: Nodes of every stage.
        stage_count: Number of stages.
        stage: Sending stage; the last stage sends to the first.
        rank_index: Index of the sender among the ranks of the stage. It names a pipeline: the ranks
            with this index on all stages. Other pipelines on equal nodes send at the same time and
            share the NICs; those on other nodes do not count.
    """
    next_stage = (stage + 1) % stage_count
    if next_stage == stage:
        return NO_MESSAGE

    # A component is a set of neighbouring stages that share nodes (mostly a single stage).
    nodes_of_components = placement.parts
    stages_per_component = placement.stages_per_component

    # Equal keys mean equal nodes on both ends, so placements of a search share the result. The
    # message depends on rank_index, too: a stage may have ranks on nodes of several types.
    key = (
        nodes_of_components[stage // stages_per_component],
        nodes_of_components[next_stage // stages_per_component],
        stage % stages_per_component,
        next_stage - stage,
        rank_index,
    )
    return prices.remember(
        "message", key, lambda: _priced_message(prices, placement, stage, next_stage, rank_index)
    )


def _priced_message(
    prices: Prices, placement: Placement, stage: int, next_stage: int, rank_index: int
) -> Message:
    """Return the lower bounds on the message from `stage` to `next_stage`.

    Args:
        prices: Times of communication.
        placement: Nodes of every stage.
        stage: Sending stage.
        next_stage: Receiving stage.
        rank_index: Index of the sender among the ranks of the stage. It names a pipeline: the ranks
            with this index on all stages. Other pipelines on equal nodes send at the same time and
            share the NICs; those on other nodes do not count.
    """
    network = prices.network
    # A Fold keeps a representative of each set of equal ranks; pipelines on equal nodes form a class.
    fold, folded_stages = prices.fold(placement, stage, next_stage)
    stage_link = fold.stage_link(fold.pipeline_class_at(rank_index), *folded_stages)
    message_bytes = prices.job.block.activation_bytes

    # A load says how a message uses NICs and links, and its price: latency and seconds for a byte.
    load = network.message(stage_link, prices.link_bps(stage_link.node_types))
    if load.fabric is None:  # both stages are on the same node
        seconds = load.price.seconds(message_bytes)
        return NO_MESSAGE._replace(total_s=seconds, sender_blocked_s=seconds)
    if load.fabric.name == ETHERNET:
        # Over Ethernet, tensor parallel ranks send a slice of the message each (`slices`: how many
        # differ), and it may be compressed.
        compressed_share = prices.job.compressed_share(prices.rules.compression)
        message_bytes *= compressed_share / prices.slices(placement)

    # Seconds for the bytes at the rate that a single message reaches (`load.price`: latency, and
    # seconds for each byte). This rate may be below the NIC's own.
    interval_s = message_bytes * load.price.byte_s

    # Seconds for which a message occupies a NIC. The NIC's own rate counts here, as it may carry
    # several messages at once.
    message_nic_s = 8 * message_bytes / load.fabric.rate_bps
    return Message(
        total_s=load.price.seconds(message_bytes),
        # A blocked sender waits for all bytes to leave. Only the fabric's own latency counts: the
        # latency between clusters comes after that.
        sender_blocked_s=interval_s + load.fabric.latency_s,
        interval_s=interval_s,
        sender_nic_s=stage_link.leaving * message_nic_s,
        receiver_nic_s=stage_link.reaching * message_nic_s,
        fabric=load.fabric.name,
    )
