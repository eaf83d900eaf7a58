"""Hides and shrinks the messages between pipeline stages of megatron-core's 1F1B schedule.

Terms:

    stage link    the network path between two neighbouring pipeline stages: activations travel forward over
                  it, their gradients backward
    mailbox       object that sends messages without waiting, and posts receives before they are needed
                  (runtime/groups/mailbox.py)
    in flight     micro-batches of which a stage has run the forward pass, but not yet the backward pass
    slice         the part of an activation that one of t tensor-parallel ranks sends, 1 / t of its bytes

Hiding (feature megatron-stage-links). The mailbox transfers messages while the stages compute. To
cover a slow
stage link, a stage also runs more forward passes before its first backward pass: more micro-batches are then
in flight. megatron-core computes the number of these warm-up passes from the size of a process group.
_PlannedWarmUpGroup reports the size that yields the planned number.

Shrinking (feature megatron-slices). Without sequence parallelism, all tensor-parallel ranks of a stage have
the same activation, and megatron-core sends it from each of them. Between clusters each rank sends only its
slice, and the ranks of the receiving stage gather the slices inside their node.
--holmes-compress-activations bf16 or int8
also compresses the slices. A Wire (runtime/groups/wire.py) encodes and decodes the messages of one
neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Running, by_name
from holmes_ext.patches.megatron import core
from holmes_ext.patches.megatron.features import P2P_MODULE, SCHEDULES, SLICES, STAGE_LINKS
from holmes_ext.patches.megatron.p2p import PARAMETERS, mailbox_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups.mailbox import Mailbox, form_of
from holmes_ext.runtime.groups.receive_order import ListedOrder, ReceiveOrder, flight_of
from holmes_ext.runtime.groups.wire import PLAIN, Finish, Wire
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
            in_flight = max(
                in_flight, 2
            )  # with 1, the schedule would take this stage for the last one
        self.group = group
        self.in_flight = in_flight

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.rank() + self.in_flight


class _Step:
    """One training step's messages between this rank and the ranks of its neighbouring pipeline stages.

    The mailbox transfers these messages: it does not wait for sends, and posts receives in advance. A message
    is of kind "F" (activation of a forward pass) or of kind "B" (gradient of a backward pass).
    """

    def __init__(
        self, mailbox: Mailbox, receive_order: ReceiveOrder, stage: int, dtype: Any, device: Any
    ):
        self.mailbox = mailbox
        self.in_flight = receive_order.in_flight  # planned micro-batches in flight, by stage
        self.stage = stage
        self.dtype = dtype  # of the tensors that the schedule sends and receives
        self.device = device
        self.messages_per_pass = 1  # tensors that one pass sends to a neighbour
        self.sent_count = {"F": 0, "B": 0}
        self.received_count = {"F": 0, "B": 0}

    def announce(self, shapes: Sequence[Any]) -> None:
        """Give the mailbox the shapes of the tensors that each micro-batch sends and receives.

        The mailbox transfers the messages between this rank and its neighbouring pipeline stages. It posts
        receives of these shapes in advance, and raises an error if a tensor of another shape is to be sent.
        """
        import torch

        self.messages_per_pass = len(shapes)
        # Tensors without memory: only their shapes and dtypes are read.
        tensors = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes]
        for peer, direction in self.mailbox.neighbours.items():
            is_next_stage = direction == 1  # -1: the previous stage
            if is_next_stage:
                sent_forms = [
                    form_of(tensor) for tensor in tensors
                ]  # a form is a pair (shape, dtype)
            else:
                sent_forms = []  # sent gradients are not checked
            self.mailbox.announce(sent_forms, peer)

            wire = self.mailbox.wire_to(
                peer
            )  # encodes tensors for this neighbour, and decodes received ones
            received_forms = []
            for tensor in tensors:
                encoded_buffer, _ = wire.incoming(tensor)
                received_forms.append(form_of(encoded_buffer))
            self.mailbox.expect(received_forms, peer)  # receives of these are posted in advance

    def send(self, kind: str, tensor: Any, peer: int) -> None:
        """Send a tensor to a neighbouring pipeline stage without waiting, by the mailbox.

        Args:
            kind: "F" for an activation of a forward pass, "B" for a gradient of a backward pass.
            peer: Rank on the neighbouring stage.
        """
        micro_batch = self.sent_count[kind] // self.messages_per_pass
        self.sent_count[kind] += 1
        self.mailbox.sending_pass = (
            kind,
            micro_batch,
        )  # the pass that sends; mailbox.send() reads it
        self.mailbox.send(tensor, peer)
        is_last_message_of_pass = self.sent_count[kind] % self.messages_per_pass == 0
        if is_last_message_of_pass:
            self.mailbox.post_due_receives(
                kind, micro_batch
            )  # the mailbox may now post receives for later passes

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
        # arrived() lets the mailbox free their tensors.
        if kind == "B":
            # The gradient of a micro-batch is computed from the activation that this rank sent for it.
            self.mailbox.release_sent("F", micro_batch)
        else:
            # A stage with k micro-batches in flight runs forward pass m after backward pass m - k.
            in_flight_of_sender = self.in_flight[self.stage - 1]
            last_used_gradient = micro_batch - in_flight_of_sender
            self.mailbox.release_sent("B", last_used_gradient)
        return tensor.requires_grad_()


#: The running training step, if the mailbox transfers its messages; else None. _schedule sets it. The other
#: wrappers of this module read it, and only call megatron-core's function while it is None.
_step: _Step | None = None


def unsupported_feature(config: Any, arguments: dict[str, Any]) -> str | None:
    """Return a feature of the job, in words, with which the mailbox cannot transfer its messages, or None.

    The mailbox sends the messages between pipeline stages without waiting. It must know in advance which
    tensors come. All ranks of a pipeline get the same answer.

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
        "micro-batches are recomputed by their number in flight": (
            config.num_microbatches_with_partial_activation_checkpoints is not None
        ),
    }
    for feature, used in is_used.items():
        if used:
            return feature
    return None


@by_name
def _schedule(call, instance, model, num_microbatches, forward_only, p2p_communicator):
    """Run a training step whose messages between stages are transferred by the mailbox.

    The mailbox sends without waiting, and posts receives in advance. This wrapper runs in place of
    megatron-core's forward_backward_pipelining_without_interleaving, which runs one step of the 1F1B
    schedule; call() runs that function. While it runs, the global `_step` is set. The other wrappers of this
    module read `_step`: they change the number of warm-up passes, and pass all messages to the mailbox.

    In evaluation, and in jobs that the mailbox does not support, megatron-core sends the messages itself.

    p2p_communicator is not read here. It is a parameter because holmes switches a feature off if the
    installed function lacks a parameter of the wrapper.

    Raises:
        HolmesError: holmes's plan lists the order of all passes (raised by _planned_receive_order).
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
        HolmesError: holmes's plan lists the order of all passes (raised by _planned_receive_order).
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
    receive_order = _planned_receive_order(current, sizes, pipeline_group)
    if receive_order is None:  # the plan leaves the schedule as it is
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
    # From begin() to end(), which _schedule calls, the mailbox transfers the messages of the step. The empty
    # tensor tells it the device on which it allocates receive buffers.
    mailbox.begin(receive_order, micro_batches, torch.empty(0, device=device))
    stage = pipeline_group.rank()
    return _Step(mailbox, receive_order, stage, dtype=config.pipeline_dtype, device=device)


def _planned_receive_order(
    current: session.Session, sizes: Sizes, pipeline_group: Any
) -> ReceiveOrder | None:
    """Return when pipeline stages post their receives, or None if holmes is not to change the schedule.

    holmes's plan for this job has such an order if stages are to have other numbers of micro-batches in
    flight than in megatron-core's own schedule.

    Raises:
        HolmesError: the plan lists the order of all passes, which megatron-core's schedule cannot follow.
    """
    receive_order = flight_of(current.plan_for(sizes), network_api_of(backend_of(pipeline_group)))
    if isinstance(receive_order, ListedOrder):
        raise HolmesError(
            "the plan lists passes (--holmes-schedule auto), which megatron-core cannot run; make it --for "
            "deepspeed or torch, or without that option"
        )
    return receive_order


@by_name
def _plan_warm_up(call, instance):
    """Make the 1F1B schedule run the planned number of warm-up passes.

    This wrapper runs in place of P2PCommunicator.__init__, which call() runs. The schedule makes a
    P2PCommunicator in every step, and computes its number of warm-up passes (forward passes before the first
    backward pass) from the size of the communicator's pp_group. Therefore pp_group is replaced here by a
    group that reports another size.
    """
    call()
    if _step is not None:  # a training step runs, whose messages the mailbox transfers
        planned_in_flight = _step.in_flight[_step.stage]
        instance.pp_group = _PlannedWarmUpGroup(instance.pp_group, planned_in_flight)


@by_name
def _announce(call, instance):
    """Give the mailbox the shapes of the tensors that each micro-batch sends and receives.

    This wrapper runs in place of megatron-core's get_tensor_shapes, which call() runs. The schedule calls
    that function before the first message of a step. The mailbox, which transfers the step's messages, posts
    receives of these shapes in advance, and raises an error if a tensor of another shape is to be sent.

    Returns:
        The shapes, unchanged.
    """
    shapes = call()
    if _step is not None:  # a training step runs, whose messages the mailbox transfers
        _step.announce(shapes)
    return shapes


@by_name
def _communicate(
    call,
    instance,
    tensor_send_next,
    tensor_send_prev,
    recv_prev,
    recv_next,
    tensor_shape,
    wait_on_reqs,
):
    """Pass the schedule's messages to the mailbox, which does not wait for sends.

    This wrapper runs in place of P2PCommunicator._communicate, through which megatron-core's 1F1B schedule
    sends and receives all its messages. If the mailbox does not transfer the messages now, such as in
    evaluation, call() runs that method.

    wait_on_reqs has no effect, because received tensors are complete on return. It is a parameter so that
    call.refuse_unread_arguments() accepts it.

    Returns:
        The tensor from the previous stage, the tensor from the next stage, and None for requests to wait for.
    """
    step = _step
    if step is None:  # the mailbox does not transfer the messages now
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


#: The P2PCommunicators whose _communicate() runs now, the innermost last. _exchange reads the configuration
#: of the last one: it wraps functions of a module, which have no communicator among their arguments.
_running_communicators = Running()


class _DecodingRequest:
    """Request of a send or receive, whose wait() also decodes the received message."""

    def __init__(self, work: Any, finish: Finish | None, keep: Any = None):
        self._work = work  # torch's request, or None if another request waits for the transfer
        self._finish = finish  # decodes the received message into the schedule's tensor, or None
        self._keep = (
            keep  # tensors whose memory must not be freed before the message has been transferred
        )

    def wait(self, *args: Any, **kwargs: Any) -> None:
        if self._work is not None:
            self._work.wait(*args, **kwargs)
        if self._finish is not None:
            self._finish()
        # A second wait() does nothing, and the tensors are freed.
        self._work = None
        self._finish = None
        self._keep = None


def wires_of(config: Any) -> dict[int, Wire]:
    """Return for each neighbouring pipeline stage the Wire that encodes and decodes its messages.

    A Wire cuts an activation into one slice for each tensor-parallel rank, or compresses it. A neighbour
    without a Wire exchanges whole, uncompressed tensors with this rank. All ranks of a stage get wires of the
    same kind.

    Args:
        config: The model's configuration.

    Returns:
        Rank of the neighbour -> Wire.
    """
    current = session.active()
    sizes = core.job.sizes  # parallel sizes
    if current is None or sizes is None or not registry().is_on(SLICES.name):
        return {}
    from megatron.core import parallel_state

    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    if isinstance(pipeline_group, list):  # the rank is in several pipelines
        return {}
    network_api = network_api_of(backend_of(pipeline_group))
    if not network_api:  # a backend that chooses its networks itself, such as MPI
        return {}
    stage_links = (
        current.plan_for(sizes).traffic_of(network_api).stage_links
    )  # link i is from stage i to the next
    ranks = group_ranks(pipeline_group)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    stage = ranks.index(current.rank)
    next_stage = (stage + 1) % len(
        ranks
    )  # of the last stage: the first one, in the interleaved schedule
    previous_stage = (stage - 1) % len(ranks)

    wires = {}
    for neighbour, link_index in ((next_stage, stage), (previous_stage, stage - 1)):
        link = stage_links[
            link_index % len(stage_links)
        ]  # index -1 is the last link, to the first stage
        # With sequence parallelism the tensor-parallel ranks have different slices already.
        parts = 1 if config.sequence_parallel else link.slices  # into which an activation is cut
        compression = link.compression  # "off", "bf16" or "int8"
        if parts == 1 and compression == "off":
            continue
        wires[ranks[neighbour]] = Wire(
            parts=parts,
            place=tensor_group.rank(),  # the slice that this rank sends
            group=tensor_group,  # over which received slices are gathered
            compression=compression,
            stage_link=f"stage {stage}'s stage link to stage {neighbour}",  # for error messages
        )
    return wires


@by_name
def _exchange(call, instance, group):
    """Encode the tensors that the schedule sends to other clusters, and decode those that it receives.

    An encoded tensor is this rank's slice of an activation, or compressed, or both. This wrapper runs in
    place of the two functions by which megatron-core starts transfers; call() runs the original with encoded
    tensors. _p2p_ops returns a dict of requests, and the schedule waits for each when it needs its tensor.
    _batched_p2p_ops returns a list of requests, for which the schedule waits in order.

    Returns:
        Requests in a dict or a list like that of the original, whose wait() also decodes.
    """
    from megatron.core import parallel_state

    wires = {}  # rank of a neighbour -> Wire, which encodes and decodes its messages
    is_pipeline_group = group is parallel_state.get_pipeline_model_parallel_group()
    if is_pipeline_group:
        wires = wires_of(
            _running_communicators.instances[-1].config
        )  # of the communicator that calls now
    arguments = call.arguments()
    encoded_arguments = {}  # name of an argument -> tensor to pass in its place
    decoders = {}  # name of a request, such as "recv_prev" -> function that decodes the received message
    sent_tensors = []
    for side in ("prev", "next"):
        wire = wires.get(arguments[f"{side}_pipeline_rank"])
        if wire is None:  # this neighbour exchanges whole tensors
            continue
        tensor_to_send = arguments[f"tensor_send_{side}"]
        if tensor_to_send is not None:
            encoded = wire.outgoing(tensor_to_send)
            encoded_arguments[f"tensor_send_{side}"] = encoded
            sent_tensors.append(encoded)
        tensor_to_fill = arguments[f"tensor_recv_{side}"]
        if tensor_to_fill is not None:
            buffer, decode = wire.incoming(tensor_to_fill)
            encoded_arguments[f"tensor_recv_{side}"] = buffer
            decoders[f"recv_{side}"] = decode

    requests = call(**encoded_arguments)
    return _decoding_requests(requests, decoders, sent_tensors)


def _decoding_requests(
    requests: dict[str, Any] | list[Any], decoders: dict[str, Finish], sent_tensors: list[Any]
) -> dict[str, Any] | list[Any]:
    """Return requests for which the schedule waits, and which then also decode the received messages.

    Args:
        requests: The requests of torch.distributed: a dict by names like "recv_prev", or a list in the order
            in which the schedule waits.
        decoders: Name of a request -> function that decodes its message.
        sent_tensors: Tensors that must be kept until they have been sent.
    """
    if isinstance(requests, dict):
        return {
            name: _DecodingRequest(work, decoders.get(name), keep=sent_tensors)
            for name, work in requests.items()
        }
    # The schedule waits in order: when it comes to the decoding requests, the transfers are complete.
    decoding = [_DecodingRequest(None, decode) for decode in decoders.values()]
    keeping = _DecodingRequest(None, None, keep=sent_tensors)
    return [*requests, *decoding, keeping]


PATCHES = (
    Patch(
        SLICES,
        f"{P2P_MODULE}:P2PCommunicator._communicate",
        "whether tensor ranks have whole tensors to send, its configuration says",
        _running_communicators,
        parameters=(
            "tensor_send_next",
            "tensor_send_prev",
            "recv_prev",
            "recv_next",
            "tensor_shape",
        ),
    ),
    *(
        Patch(
            SLICES,
            f"{P2P_MODULE}:{function}",
            "every tensor rank would send the same tensor to another cluster",
            _exchange,
            parameters=PARAMETERS,
        )
        for function in ("_p2p_ops", "_batched_p2p_ops")
    ),
    Patch(
        STAGE_LINKS,
        f"{SCHEDULES}:get_tensor_shapes",
        "what is announced is what has to come, or nobody says what is wrong",
        _announce,
    ),
    Patch(
        STAGE_LINKS,
        f"{SCHEDULES}:forward_backward_pipelining_without_interleaving",
        "where a step begins and ends; its sends block, and it keeps as few micro-batches in flight as "
        "free stage links need",
        _schedule,
    ),
    Patch(
        STAGE_LINKS,
        f"{P2P_MODULE}:P2PCommunicator.__init__",
        "the schedule takes the number of its warm-up passes from this group",
        _plan_warm_up,
        parameters=("pp_group", "config"),
    ),
    Patch(
        STAGE_LINKS,
        f"{P2P_MODULE}:P2PCommunicator._communicate",
        "all that the schedule sends and receives passes here, and is waited for",
        _communicate,
    ),
)
