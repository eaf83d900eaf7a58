"""Lets stages of megatron-core's 1F1B schedule send without waiting, and send less between clusters.

A stage link is the connection between two neighbouring pipeline stages: activations travel forward over it,
their gradients backward. Two features change these messages.

Sends that do not wait (megatron-edges). The mailbox (runtime/groups/mailbox.py) does not wait for sends, and
posts receives in advance, so that messages travel while the stages compute. A slow stage link is hidden if a
stage runs more forward passes before its first backward pass: it then has more micro-batches in flight.
megatron-core's schedule computes that number of warm-up passes as pp_group.size() - pp_group.rank() - 1,
where pp_group is the group of its P2PCommunicator. _PlannedWarmUpGroup reports such a size that the result is
the plan's number.

Smaller messages (megatron-slices). Without sequence parallelism, all t tensor-parallel ranks of a stage have
the same activation, and send it t times. Between clusters each of them sends 1 / t of it, its slice, and the
receiving stage gathers the slices inside its node. --holmes-edges bf16 or int8 also compresses the slices. A
Wire (runtime/groups/wire.py) says how tensors travel to one neighbour, and encodes and decodes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Running, by_name
from holmes_ext.patches.megatron import core
from holmes_ext.patches.megatron.features import EDGES, P2P_MODULE, SCHEDULES, SLICES
from holmes_ext.patches.megatron.p2p import PARAMETERS, mailbox_of
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.runtime.groups.mailbox import Mailbox, form_of
from holmes_ext.runtime.groups.receive_order import ListedOrder, ReceiveOrder, flight_of
from holmes_ext.runtime.groups.wire import PLAIN, Finish, Wire


class _PlannedWarmUpGroup:
    """Pipeline group of such a size that the schedule warms up for `in_flight` micro-batches."""

    def __init__(self, group: Any, in_flight: int):
        is_last_stage = group.rank() == group.size() - 1
        if not is_last_stage:
            in_flight = max(in_flight, 2)  # with 1, the schedule would take this stage for the last one
        self.group = group
        self.in_flight = in_flight

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.rank() + self.in_flight


class _Step:
    """Messages of one training step between this rank and its neighbours, which the mailbox transfers.

    Kinds of messages are "F" for activations of a forward pass and "B" for gradients of a backward pass.
    """

    def __init__(self, box: Mailbox, flight: ReceiveOrder, stage: int, dtype: Any, device: Any):
        self.box = box
        self.in_flight = flight.in_flight  # planned micro-batches in flight, by stage
        self.stage = stage
        self.dtype = dtype  # of the tensors that the schedule sends and receives
        self.device = device
        self.messages_per_pass = 1  # tensors that one pass sends to a neighbour
        self.sent_count = {"F": 0, "B": 0}
        self.received_count = {"F": 0, "B": 0}

    def announce(self, shapes: Sequence[Any]) -> None:
        """Announce to the mailbox the tensors that every micro-batch sends and receives."""
        import torch

        self.messages_per_pass = len(shapes)
        tensors = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes]
        for peer, direction in self.box.neighbours.items():
            is_next_stage = direction > 0
            sent_forms = [form_of(tensor) for tensor in tensors] if is_next_stage else ()
            self.box.announce(sent_forms, peer)
            wire = self.box.wire_to(peer)
            encoded_buffers = [wire.incoming(tensor)[0] for tensor in tensors]
            self.box.expect([form_of(buffer) for buffer in encoded_buffers], peer)

    def send(self, kind: str, tensor: Any, peer: int) -> None:
        """Send a tensor to a neighbour without waiting."""
        micro_batch = self.sent_count[kind] // self.messages_per_pass
        self.sent_count[kind] += 1
        self.box.unit = (kind, micro_batch)
        self.box.send(tensor, peer)
        is_last_message_of_pass = self.sent_count[kind] % self.messages_per_pass == 0
        if is_last_message_of_pass:
            self.box.passed(kind, micro_batch)

    def recv(self, kind: str, shape: Any, peer: int) -> Any:
        """Return the next tensor from a neighbour, once it is complete."""
        import torch

        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.box.recv(tensor, peer)
        micro_batch = self.received_count[kind] // self.messages_per_pass
        self.received_count[kind] += 1
        # A message that has come shows that the neighbour has received earlier ones of this rank.
        if kind == "B":
            self.box.arrived("F", micro_batch)
        else:
            self.box.arrived("B", micro_batch - self.in_flight[self.stage - 1])
        return tensor.requires_grad_()


#: Training step whose messages the mailbox transfers now, or None. _schedule sets it. The wrappers of
#: functions that the schedule calls read it, and do nothing of their own while it is None.
_step: _Step | None = None


def unsupported(config: Any, arguments: dict[str, Any]) -> str | None:
    """Return why the mailbox cannot transfer the messages of a training step, or None if it can.

    All ranks of a pipeline get the same answer.

    Args:
        config: The model's configuration.
        arguments: Those of megatron-core's schedule function.
    """
    reasons = {
        "the script brings its own P2PCommunicator": arguments.get("p2p_communicator") is not None,
        "shapes of messages are adjusted by the script": arguments.get("adjust_tensor_shapes_fn") is not None,
        "sequence lengths vary": bool(config.variable_seq_lengths),
        "multi-token prediction has a stage of its own": bool(getattr(config, "mtp_standalone", False)),
        "ring exchange": bool(config.use_ring_exchange_p2p),
        "micro-batches are recomputed by their number in flight":
            config.num_microbatches_with_partial_activation_checkpoints is not None,
    }  # fmt: skip
    return next((reason for reason, is_given in reasons.items() if is_given), None)


@by_name
def _schedule(call, instance, model, num_microbatches, forward_only, p2p_communicator):
    """Run a training step with the plan's number of micro-batches in flight, and its messages by the mailbox.

    megatron-core's forward_backward_pipelining_without_interleaving runs one step of the 1F1B schedule. While
    it runs, `_step` is set: then the wrappers below, of functions that the schedule calls, change its number
    of warm-up passes and transfer its messages. When the step ends, all its messages have been transferred.

    In evaluation, or if the mailbox cannot be used (_new_step), megatron-core sends its messages itself.

    p2p_communicator is read through call.arguments(). It is among the parameters so that the feature is
    switched off with a version of the schedule that lacks it.

    Raises:
        HolmesError: the plan lists the order of all passes, which this schedule cannot follow.
    """
    global _step
    if forward_only:  # evaluation
        return call()
    step = _new_step(model, num_microbatches, call.arguments())
    if step is None:
        return call()
    _step = step
    try:
        result = call()
    finally:
        _step = None
    step.box.end()
    return result


def _new_step(model: Any, micro_batches: int, arguments: dict[str, Any]) -> _Step | None:
    """Open the mailbox for a training step; return None if megatron-core is to send the messages itself.

    Args:
        model: The model of this rank's stage, or a list of one.
        arguments: Those of the schedule function.

    Raises:
        HolmesError: the plan lists the order of all passes.
    """
    current = session.active()
    sizes = core.job.sizes
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
    plan = current.plan_for(sizes)
    receive_order = flight_of(plan, network_api_of(backend_of(pipeline_group)))
    if isinstance(receive_order, ListedOrder):
        raise HolmesError(
            "the plan lists passes (--holmes-passes auto), which megatron-core cannot run; make it --for "
            "deepspeed or torch, or without that option")
    if receive_order is None:  # the plan leaves the schedule as it is
        return None
    reason = unsupported(config, arguments)
    if reason is not None:
        tell(current, f"megatron-core's own pipeline sends are used: {reason}", once=True)
        return None
    if isinstance(pipeline_group, list):  # the rank is in several pipelines
        return None

    box = mailbox_of(pipeline_group)
    wires = wires_of(config)
    device = next(chunk.parameters()).device
    # The mailbox calls wire_to(neighbour) for every message, to encode or decode it.
    box.wire_to = lambda peer: wires.get(peer, PLAIN)
    box.begin(receive_order, micro_batches, torch.empty(0, device=device))
    return _Step(box, receive_order, pipeline_group.rank(), config.pipeline_dtype, device)


@by_name
def _plan_warm_up(call, instance):
    """Give a P2PCommunicator, once constructed, a group from which the schedule computes the planned warm-up.

    The schedule runs one forward pass for each micro-batch in flight before its first backward pass. It
    computes their number from the size of the communicator's group (see _PlannedWarmUpGroup). The
    communicator itself has been constructed with the real group.
    """
    call()
    if _step is not None:
        planned = _step.in_flight[_step.stage]
        instance.pp_group = _PlannedWarmUpGroup(instance.pp_group, planned)


@by_name
def _announce(call, instance):
    """Announce to the mailbox the shapes of the tensors that a micro-batch of this step sends and receives.

    megatron-core's get_tensor_shapes returns these shapes to the schedule. The mailbox posts receives for
    them in advance, and raises an error if a tensor of another shape is to be sent.
    """
    shapes = call()
    if _step is not None:
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
    """Transfer the messages of one P2PCommunicator._communicate by the mailbox, in a training step.

    The schedule sends and receives all its messages in this method, which waits for both. The mailbox does
    not wait for sends, and has posted the receives in advance.

    wait_on_reqs has no effect, because received tensors are complete on return. It is among the parameters so
    that refuse_unread_arguments() accepts it.

    Returns:
        The tensor from the previous stage, the tensor from the next stage, and None for requests to wait for.
    """
    step = _step
    if step is None:
        return call()
    call.refuse_unread_arguments()  # arguments that a later megatron-core adds would have no effect here
    if tensor_send_next is not None:
        step.send("F", tensor_send_next, instance.next_rank)
    if tensor_send_prev is not None:
        step.send("B", tensor_send_prev, instance.prev_rank)
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
    """Request for a message, whose wait() also decodes what was received."""

    def __init__(self, work: Any, finish: Finish | None, keep: Any = None):
        self._work = work  # the framework's request, or None if another request waits for the transfer
        self._finish = finish  # decodes the received message into the schedule's tensor, or None
        self._keep = keep  # tensors whose memory must not be freed before the message has been transferred

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
    """Return the Wire of each neighbour with which this rank exchanges slices or compressed activations.

    Messages to other neighbours travel as they are. All ranks of a stage get wires of the same kind.

    Args:
        config: The model's configuration.

    Returns:
        Rank of the neighbour -> Wire.
    """
    current = session.active()
    sizes = core.job.sizes
    if current is None or sizes is None or not registry().is_on(SLICES.name):
        return {}
    from megatron.core import parallel_state

    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    if isinstance(pipeline_group, list):  # the rank is in several pipelines
        return {}
    network_api = network_api_of(backend_of(pipeline_group))
    if not network_api:  # a backend that chooses its networks itself, such as MPI
        return {}
    stage_links = current.plan_for(sizes).traffic_of(network_api).edges  # link i is from stage i to the next
    ranks = group_ranks(pipeline_group)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    stage = ranks.index(current.rank)
    next_stage = (stage + 1) % len(ranks)  # of the last stage: the first one, in the interleaved schedule
    previous_stage = (stage - 1) % len(ranks)

    wires = {}
    for neighbour, link_index in ((next_stage, stage), (previous_stage, stage - 1)):
        link = stage_links[link_index % len(stage_links)]
        # With sequence parallelism the tensor ranks have different slices already.
        parts = 1 if config.sequence_parallel else link.slices
        if parts == 1 and link.narrow == "off":
            continue
        wires[ranks[neighbour]] = Wire(
            parts=parts,
            place=tensor_group.rank(),
            group=tensor_group,
            narrow=link.narrow,
            edge=f"stage {stage}'s edge to stage {neighbour}",
        )
    return wires


@by_name
def _exchange(call, instance, group):
    """Send and receive encoded tensors, slices or compressed ones, in place of those that the schedule gave.

    This wraps megatron-core's two functions that start transfers. _p2p_ops returns a dict of requests, and
    the schedule waits for each when it needs its tensor. _batched_p2p_ops returns a list, whose requests the
    schedule waits for in order.

    Returns:
        Requests of the same form, which also decode what was received.
    """
    from megatron.core import parallel_state

    wires = {}
    if group is parallel_state.get_pipeline_model_parallel_group():
        wires = wires_of(_running_communicators.instances[-1].config)
    arguments = call.arguments()
    encoded_arguments = {}  # name of an argument -> tensor to pass in its place
    decoders = {}  # name of a request, such as "recv_prev" -> function that decodes the received message
    sent_tensors = []
    for side in ("prev", "next"):
        wire = wires.get(arguments[f"{side}_pipeline_rank"])
        if wire is None:
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
    Patch(SLICES, f"{P2P_MODULE}:P2PCommunicator._communicate",
          "whether tensor ranks have whole tensors to send, its configuration says", _running_communicators,
          parameters=("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape")),
    *(Patch(SLICES, f"{P2P_MODULE}:{function}",
            "every tensor rank would send the same tensor to another cluster", _exchange,
            parameters=PARAMETERS)
      for function in ("_p2p_ops", "_batched_p2p_ops")),
    Patch(EDGES, f"{SCHEDULES}:get_tensor_shapes",
          "what is announced is what has to come, or nobody says what is wrong", _announce),
    Patch(EDGES, f"{SCHEDULES}:forward_backward_pipelining_without_interleaving",
          "where a step begins and ends; its sends block, and it keeps as few micro-batches in flight as "
          "free edges need",
          _schedule),
    Patch(EDGES, f"{P2P_MODULE}:P2PCommunicator.__init__",
          "the schedule takes the number of its warm-up passes from this group", _plan_warm_up,
          parameters=("pp_group", "config")),
    Patch(EDGES, f"{P2P_MODULE}:P2PCommunicator._communicate",
          "all that the schedule sends and receives passes here, and is waited for", _communicate),
)  # fmt: skip
