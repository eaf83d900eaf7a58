"""Sends the messages between pipeline stages of megatron-core in the background.

The feature is called megatron-stage-links.

megatron-core's 1F1B schedule waits for its sends, and receives a tensor only when it needs it. If the network
between two stages is slow, the stages wait most of the time. This module changes both, and the schedule:

    transfers   A mailbox (runtime/groups/mailbox.py) sends without waiting, and posts receives in advance.
    schedule    A stage runs more forward passes (F) before its first backward pass (B). It can compute these
                while it waits for a gradient from the next stage:

                    1F1B      stage 0   F F B F B F B ...      planned   stage 0   F F F B F B F B ...
                              stage 1     F B F B F B ...                stage 1       F B F B F B ...

Steps of a training step:

1. The schedule function is called: _run_step_by_mailbox opens the mailbox for this step, and sets
   the global _step.
2. The schedule makes a P2PCommunicator. It computes its number of warm-up passes, the forward passes before
   the first backward pass, from the size of a process group. _PlannedWarmUpGroup reports the size that
   yields the planned number.
3. The schedule computes the shapes of its tensors: _announce passes them to the mailbox.
4. Each P2PCommunicator._communicate passes its tensors to the mailbox.
5. The schedule function returns: the mailbox waits until all messages have been sent.

A micro-batch is "in flight" on a stage after its forward pass and before its backward pass there. Let k[s] be
the number of micro-batches in flight of stage s. The plan has k[s] >= k[s + 1]. Therefore no stage waits for
ever:

- Stage s runs the backward pass of micro-batch m right after the forward pass of micro-batch m + k[s] - 1.
- The backward pass needs a gradient from stage s + 1. That stage computes it right after the forward pass of
  micro-batch m + k[s + 1] - 1. It needs an activation from stage s for this pass.
- Stage s has sent this activation before its own backward pass, because k[s] >= k[s + 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name
from holmes_ext.patches.megatron import core
from holmes_ext.patches.megatron.features import P2P_MODULE, SCHEDULES, STAGE_LINKS
from holmes_ext.patches.megatron.p2p import mailbox_of
from holmes_ext.patches.megatron.slices import wires_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, network_api_of
from holmes_ext.runtime.groups.mailbox import Mailbox, message_spec
from holmes_ext.runtime.groups.receive_order import ListedOrder, Order1F1B, pipeline_order_of
from holmes_ext.runtime.groups.wire import PLAIN
from holmes_ext.runtime.session import tell


class _PlannedWarmUpGroup:
    """Pipeline group that reports another size, so that megatron-core runs the planned warm-up passes.

    Warm-up passes are the forward passes before the 1F1B schedule alternates forward and backward passes.
    megatron-core computes their number as size() - rank() - 1, which is in_flight - 1 here. The first
    alternating forward pass then brings the stage to `in_flight` micro-batches in flight.
    """

    def __init__(self, group: Any, in_flight: int):
        is_last_stage = group.rank() == group.size() - 1
        if not is_last_stage:
            # With 1, the schedule would take this stage for the last one.
            in_flight = max(in_flight, 2)
        self.group = group
        self.in_flight = in_flight

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.rank() + self.in_flight


class _Step:
    """Messages of a training step between this rank and the ranks of its neighbouring pipeline stages.

    The mailbox transfers these messages: it does not wait for sends, and posts receives in advance. A message
    is of kind "F" (activation of a forward pass) or of kind "B" (gradient of a backward pass).
    """

    def __init__(
        self, mailbox: Mailbox, pass_order: Order1F1B, stage: int, dtype: Any, device: Any
    ):
        self.mailbox = mailbox
        self.in_flight = pass_order.in_flight  # planned micro-batches in flight, by stage
        self.stage = stage
        self.dtype = dtype  # of the tensors that the schedule sends and receives
        self.device = device
        self.messages_per_pass = 1  # tensors that one pass sends to a neighbour
        self.sent_count = {"F": 0, "B": 0}
        self.received_count = {"F": 0, "B": 0}

    def announce(self, shapes: Sequence[Any]) -> None:
        """Give the mailbox the shapes of the tensors that each micro-batch sends and receives.

        The mailbox transfers the messages between this rank and its neighbouring pipeline stages. It posts
        receives of these shapes in advance. It raises an error if an activation of another shape is to be
        sent, because the next stage would wait for it without end.

        Args:
            shapes: Shape of each tensor of a micro-batch. A gradient has the shape of its activation.
        """
        import torch

        self.messages_per_pass = len(shapes)
        # Tensors without memory: only their shapes and dtypes are read.
        tensors = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes]
        for peer, direction in self.mailbox.neighbours.items():
            is_next_stage = direction == 1  # -1 is the previous stage
            if is_next_stage:
                # message_spec() returns the shape and dtype of a tensor.
                sent_specs = [message_spec(tensor) for tensor in tensors]
            else:
                # Gradients need no check: each has the shape of an activation that was received.
                sent_specs = []
            self.mailbox.announce(sent_specs, peer)  # send() compares messages with these

            # A received message may be encoded, e.g. as int8. incoming() makes the buffer for it, and a
            # function that decodes it into the tensor. Only the shape of the buffer is needed here.
            wire = self.mailbox.wire_to(peer)
            received_specs = []
            for tensor in tensors:
                encoded_buffer, _decode = wire.incoming(tensor)
                received_specs.append(message_spec(encoded_buffer))
            self.mailbox.expect(received_specs, peer)  # receives of these are posted in advance

    def send(self, kind: str, tensor: Any, peer: int) -> None:
        """Send a tensor to a neighbouring pipeline stage without waiting for the end of the transfer.

        Args:
            kind: "F" for an activation of a forward pass, "B" for a gradient of a backward pass.
            peer: Rank on the neighbouring stage.
        """
        micro_batch = self.sent_count[kind] // self.messages_per_pass
        self.sent_count[kind] += 1
        # mailbox.send() labels the message with the pass that sends it.
        self.mailbox.sending_pass = (kind, micro_batch)
        self.mailbox.send(tensor, peer)
        is_last_message_of_pass = self.sent_count[kind] % self.messages_per_pass == 0
        if is_last_message_of_pass:
            # The mailbox may now post receives for later passes.
            self.mailbox.post_due_receives(kind, micro_batch)

    def recv(self, kind: str, shape: Any, peer: int) -> Any:
        """Wait for the next message of a neighbouring pipeline stage, and return the received tensor.

        Args:
            kind: "F" for an activation of a forward pass, "B" for a gradient of a backward pass.
            peer: Rank on the neighbouring stage.
        """
        import torch

        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.mailbox.recv(tensor, peer)
        micro_batch = self.received_count[kind] // self.messages_per_pass
        self.received_count[kind] += 1

        # The received message proves that the neighbour has received some earlier messages of this rank.
        # release_sent() lets the mailbox free the tensors of these messages.
        if kind == "B":
            # The next stage has computed this gradient from the activation that this rank sent for
            # the same micro-batch. So that activation and all before it have arrived.
            self.mailbox.release_sent("F", micro_batch)
        else:
            # The previous stage has at most k micro-batches in flight. So before its forward pass
            # of micro-batch m, which has sent this activation, it has run the backward pass of
            # micro-batch m - k. For that it needed this rank's gradient of m - k. (For m < k
            # nothing is released.)
            in_flight_of_sender = self.in_flight[self.stage - 1]  # k
            last_used_gradient = micro_batch - in_flight_of_sender
            self.mailbox.release_sent("B", last_used_gradient)
        return tensor.requires_grad_()  # as the schedule expects it for autograd


#: The running training step, if the mailbox transfers its messages; else None.
#: _run_step_by_mailbox sets it. The other wrappers of this module read it, and only call
#: megatron-core's function while it is None.
_step: _Step | None = None


def unsupported_feature(config: Any, arguments: dict[str, Any]) -> str | None:
    """Return the name of a feature of the job that the mailbox does not support, or None.

    The mailbox sends the messages between pipeline stages without waiting. It needs the shapes of
    the tensors in advance. All ranks of a pipeline get the same answer.

    Args:
        config: The model's configuration.
        arguments: The arguments of megatron-core's schedule function, by name.
    """
    is_used = {
        "the script brings its own P2PCommunicator": arguments.get("p2p_communicator") is not None,
        "shapes of messages are adjusted by the script": arguments.get("adjust_tensor_shapes_fn")
        is not None,
        "sequence lengths vary": bool(config.variable_seq_lengths),
        "multi-token prediction has a stage of its own": bool(
            getattr(config, "mtp_standalone", False)
        ),
        "ring exchange": bool(config.use_ring_exchange_p2p),
        # With this setting, megatron-core's number of micro-batches in flight decides which of them
        # are recomputed. But the plan changes that number.
        "micro-batches are recomputed by their number in flight": (
            config.num_microbatches_with_partial_activation_checkpoints is not None
        ),
    }
    for feature, used in is_used.items():
        if used:
            return feature
    return None


@by_name
def _run_step_by_mailbox(
    call: Call,
    instance: Any,
    model: Any,
    num_microbatches: Any,
    forward_only: Any,
    p2p_communicator: Any,
) -> Any:
    """Run a step of megatron-core's 1F1B schedule with messages that travel in the background.

    The mailbox transfers the messages: it sends without waiting, and posts receives in advance. In
    evaluation, and in jobs that the mailbox does not support, megatron-core transfers them itself.

    This wrapper runs in place of megatron-core's schedule function,
    forward_backward_pipelining_without_interleaving; call() runs the original. The wrapper sets the
    global `_step` until that function returns. Meanwhile the other wrappers of this module read
    `_step`. They change the number of warm-up passes, and pass all messages to the mailbox.

    Args:
        model: The model of this rank's stage, or a list of one.
        num_microbatches: Number of micro-batches in the step.
        forward_only: True in evaluation.
        p2p_communicator: Not read. Its name in this signature makes the schedule function's
            parameter p2p_communicator a requirement: without it, holmes switches this feature off.

    Raises:
        HolmesError: holmes's plan lists the order of all passes (--holmes-schedule auto).
            megatron-core's 1F1B schedule cannot follow a list: only its number of warm-up passes
            can be changed (raised by _planned_pass_order).
    """
    global _step
    if forward_only:  # evaluation
        return call()
    step = _new_step(model, num_microbatches, call.arguments())
    if step is None:
        return call()
    _step = step  # from here on, the other wrappers of this module use the mailbox
    try:
        result = call()
    finally:
        _step = None  # megatron-core sends its messages itself again
    step.mailbox.end()  # waits until all messages of the step have been sent; _new_step called begin()
    return result


def _new_step(model: Any, micro_batches: int, arguments: dict[str, Any]) -> _Step | None:
    """Open the mailbox for a training step; return None if megatron-core is to send the messages itself.

    The mailbox sends the messages between pipeline stages without waiting, and posts receives in advance.

    Args:
        model: The model of this rank's stage, or a list of one.
        arguments: The arguments of megatron-core's schedule function, by name.

    Raises:
        HolmesError: holmes's plan lists the order of all passes. megatron-core's 1F1B schedule
            cannot follow it (raised by _planned_pass_order).
    """
    current = session.active()
    sizes = core.job.sizes  # parallel sizes
    if current is None or sizes is None:  # no plan describes this job
        return None
    if not network_api_of(backend_of()):  # a backend that chooses its networks itself, such as MPI
        return None
    import torch
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    chunk = model[0] if isinstance(model, list) else model
    config = get_model_config(chunk)
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    pass_order = _planned_pass_order(current, sizes, pipeline_group)
    if pass_order is None:  # the plan leaves the schedule as it is
        return None
    unsupported = unsupported_feature(config, arguments)
    if unsupported is not None:
        tell(current, f"megatron-core's own pipeline sends are used: {unsupported}", once=True)
        return None
    if isinstance(pipeline_group, list):  # the rank is in several pipelines
        return None

    mailbox = mailbox_of(pipeline_group)
    wires = wires_of(config)
    device = next(chunk.parameters()).device

    # Mailbox.send and recv call wire_to() for the Wire that encodes or decodes. PLAIN changes nothing.
    mailbox.wire_to = lambda peer: wires.get(peer, PLAIN)
    # From begin() to end(), the mailbox transfers the messages of the step. _run_step_by_mailbox
    # calls end(). The receive buffers are allocated on the device of the empty tensor.
    mailbox.begin(pass_order, micro_batches, torch.empty(0, device=device))
    stage = pipeline_group.rank()
    return _Step(mailbox, pass_order, stage, dtype=config.pipeline_dtype, device=device)


def _planned_pass_order(
    current: session.Session, sizes: Sizes, pipeline_group: Any
) -> Order1F1B | None:
    """Return the planned 1F1B order of passes, or None if holmes is not to change the schedule.

    A micro-batch is in flight on a stage from its forward pass to its backward pass. holmes's plan may have
    more micro-batches in flight than megatron-core's own schedule. Their number on each stage determines
    the order of its forward and backward passes. The mailbox receives the messages of the stage. It reads
    from the order when it can post the receive of a message: after a certain pass.

    Args:
        current: Session of holmes in this process, with the plan.
        sizes: Parallel sizes of the job.
        pipeline_group: Process group of the pipeline.

    Raises:
        HolmesError: the plan lists the order of all passes. megatron-core's schedule cannot follow it.
    """
    order = pipeline_order_of(current.plan_for(sizes), network_api_of(backend_of(pipeline_group)))
    # A plan gives either the number of micro-batches in flight (Order1F1B), or a list of all passes.
    if isinstance(order, ListedOrder):
        raise HolmesError(
            "the plan lists passes (--holmes-schedule auto), which megatron-core cannot run; make it --for "
            "deepspeed or torch, or without that option"
        )
    return order


@by_name
def _plan_warm_up(call: Call, instance: Any) -> Any:
    """Make the 1F1B schedule run the planned number of warm-up passes.

    Warm-up passes are the forward passes before the schedule alternates forward and backward
    passes. With k - 1 of them, the first alternating forward pass brings the stage to k
    micro-batches in flight. k is the planned number.

    The schedule computes its number of warm-up passes as pp_group.size() - pp_group.rank() - 1. It
    makes a P2PCommunicator in every step, and takes pp_group from that object. This wrapper runs in
    place of P2PCommunicator.__init__; call() runs the original. The wrapper replaces pp_group by an
    object with the size rank() + k. The result of the schedule's formula is then k - 1.
    """
    call()
    if _step is not None:  # _run_step_by_mailbox() runs a training step now
        planned_in_flight = _step.in_flight[_step.stage]  # k
        instance.pp_group = _PlannedWarmUpGroup(instance.pp_group, planned_in_flight)


@by_name
def _announce(call: Call, instance: Any) -> Any:
    """Give the mailbox the shapes of the tensors that each micro-batch sends and receives.

    This wrapper runs in place of megatron-core's get_tensor_shapes; call() runs the original. The schedule
    calls that function before the first message of a step. The mailbox transfers the step's messages. It
    posts receives of these shapes in advance, and raises an error if a tensor of another shape is to be sent.

    Returns:
        The shapes, unchanged.
    """
    shapes = call()
    if _step is not None:  # a training step runs, whose messages the mailbox transfers
        _step.announce(shapes)
    return shapes


@by_name
def _communicate(
    call: Call,
    instance: Any,
    tensor_send_next: Any,
    tensor_send_prev: Any,
    recv_prev: Any,
    recv_next: Any,
    tensor_shape: Any,
    wait_on_reqs: Any,
) -> Any:
    """Pass the schedule's messages to the mailbox, which does not wait for sends.

    This wrapper runs in place of P2PCommunicator._communicate. megatron-core's 1F1B schedule sends and
    receives all its messages by that method. The methods of _Step pass them to the mailbox. The global
    `_step` is None outside of training steps, e.g. in evaluation: call() then runs the original method.

    wait_on_reqs has no effect, because received tensors are complete on return. It is a parameter so that
    call.refuse_unread_arguments() accepts it.

    Returns:
        The tensor from the previous stage, the tensor from the next stage, and None for requests to wait for.
    """
    step = _step  # set by _run_step_by_mailbox() while a training step runs
    if step is None:
        return call()

    # This raises if a later megatron-core passes arguments that this wrapper does not have.
    call.refuse_unread_arguments()
    if tensor_send_next is not None:
        step.send("F", tensor_send_next, instance.next_rank)  # "F": activation of a forward pass
    if tensor_send_prev is not None:
        step.send("B", tensor_send_prev, instance.prev_rank)  # "B": gradient of a backward pass
    from_previous = None
    if recv_prev:
        from_previous = step.recv("F", tensor_shape, instance.prev_rank)
    from_next = None
    if recv_next:
        from_next = step.recv("B", tensor_shape, instance.next_rank)
    return from_previous, from_next, None


PATCHES = (
    Patch(
        STAGE_LINKS,
        f"{SCHEDULES}:get_tensor_shapes",
        "a tensor of another shape than the announced one would never arrive, without any error",
        _announce,
    ),
    Patch(
        STAGE_LINKS,
        f"{SCHEDULES}:forward_backward_pipelining_without_interleaving",
        "where a step begins and ends; its sends block, and it has as few micro-batches in flight as "
        "suffice if messages take no time",
        _run_step_by_mailbox,
    ),
    Patch(
        STAGE_LINKS,
        f"{P2P_MODULE}:P2PCommunicator.__init__",
        "the schedule computes its number of warm-up passes from the group in this object",
        _plan_warm_up,
        parameters=("pp_group", "config"),
    ),
    Patch(
        STAGE_LINKS,
        f"{P2P_MODULE}:P2PCommunicator._communicate",
        "the schedule sends and receives all messages by this method, and waits for each",
        _communicate,
    ),
)
