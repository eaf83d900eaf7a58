"""megatron-core's 1F1B without waits for sends, and with as many micro-batches in flight as hide its slow
edges, as patches/deepspeed/edges.py, whose text says why nobody waits for ever; and between clusters each
tensor rank sends its part of what all of them have.

The schedule (forward_backward_pipelining_without_interleaving) sends all through a P2PCommunicator, whose
_communicate goes through runtime/groups/mailbox.py, and takes the number of its warm-up passes from that
one's group: pp_group.size() - pp_group.rank() - 1. Here a group says that its size is rank +
in_flight[stage]; a stage is still the last exactly where in_flight is 1. Tensors that the schedule frees
after sending (deallocate_pipeline_outputs) live on in the mailbox until they have arrived.

Without sequence parallelism, which cuts them already, all t tensor ranks of a stage send the same activation,
and its gradient back: t times the bytes. Here each sends 1 / t and the receiving stage gathers inside its
node (runtime/groups/wire.py, which says why nobody waits for ever), under every schedule, through the mailbox
or not. --holmes-edges narrows what crosses in the same places."""

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


class _Group:
    """A pipeline group of such a size that the schedule warms up with `in_flight` micro-batches."""

    def __init__(self, group: Any, in_flight: int):
        last = group.rank() == group.size() - 1
        self.group = group
        self.in_flight = in_flight if last else max(in_flight, 2)  # no other stage may look like the last

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.rank() + self.in_flight


class _Step:
    """What one step of one pipeline has sent and received so far. each: of a micro-batch."""

    def __init__(self, box: Mailbox, flight: ReceiveOrder, stage: int, dtype: Any, device: Any):
        self.box, self.in_flight, self.stage = box, flight.in_flight, stage
        self.dtype, self.device, self.each = dtype, device, 1
        self.gone, self.came = {"F": 0, "B": 0}, {"F": 0, "B": 0}

    def announce(self, shapes: Sequence[Any]) -> None:
        """Of what the schedule sends, and receives, of every micro-batch."""
        import torch

        self.each = len(shapes)
        for peer, direction in self.box.neighbours.items():
            self.box.announce([(tuple(shape), self.dtype) for shape in shapes] if direction > 0 else (), peer)
            like = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes]
            self.box.expect([form_of(self.box.wire_to(peer).incoming(tensor)[0]) for tensor in like], peer)

    def send(self, kind: str, tensor: Any, peer: int) -> None:
        self.box.unit = kind, self.gone[kind] // self.each
        self.gone[kind] += 1
        self.box.send(tensor, peer)
        if self.gone[kind] % self.each == 0:
            self.box.passed(*self.box.unit)

    def recv(self, kind: str, shape: Any, peer: int) -> Any:
        import torch

        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.box.recv(tensor, peer)
        index, other = self.came[kind] // self.each, "B" if kind == "F" else "F"
        self.came[kind] += 1
        self.box.arrived(other, index if kind == "B" else index - self.in_flight[self.stage - 1])
        return tensor.requires_grad_()


_step: _Step | None = None


def unsupported(config: Any, given: dict[str, Any]) -> str | None:
    """Why a step's schedule stays megatron-core's, or None. The same on all ranks of a pipeline."""
    reasons = {
        "the script brings its own P2PCommunicator": given.get("p2p_communicator") is not None,
        "shapes of messages are adjusted by the script": given.get("adjust_tensor_shapes_fn") is not None,
        "sequence lengths vary": bool(config.variable_seq_lengths),
        "multi-token prediction has a stage of its own": bool(getattr(config, "mtp_standalone", False)),
        "ring exchange": bool(config.use_ring_exchange_p2p),
        "micro-batches are recomputed by their number in flight":
            config.num_microbatches_with_partial_activation_checkpoints is not None,
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


@by_name
def _schedule(call, instance, model, num_microbatches, forward_only, p2p_communicator):
    """Run a training step with the plan's number of micro-batches in flight, its messages by the mailbox.

    forward_backward_pipelining_without_interleaving runs one step of megatron-core's 1F1B schedule. `_step`
    is set while it runs: the wrappers below, of functions that the schedule calls, then change its number of
    warm-up passes and its messages. When the step ends, all its messages have been transferred.

    Evaluation, jobs that no plan describes, and features of megatron-core that the mailbox does not support
    keep megatron-core's blocking messages.

    Raises:
        HolmesError: the plan lists every pass, which this schedule cannot run.
    """
    global _step
    current = session.active()
    sizes = core.job.sizes
    if current is None or sizes is None or forward_only or not network_api_of(backend_of()):
        return call()
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    chunk = model[0] if isinstance(model, list) else model
    config = get_model_config(chunk)
    group = parallel_state.get_pipeline_model_parallel_group()
    flight = flight_of(current.plan_for(sizes), network_api_of(backend_of(group)))
    if isinstance(flight, ListedOrder):
        raise HolmesError(
            "the plan lists passes (--holmes-passes auto), which megatron-core cannot run; make it --for "
            "deepspeed or torch, or without that option")
    reason = unsupported(config, call.arguments())
    if reason and flight:
        tell(current, f"megatron-core's own pipeline sends are used: {reason}", once=True)
    if reason or not flight or isinstance(group, list):
        return call()
    import torch

    box = mailbox_of(group)
    wires = wires_of(config)
    device = next(chunk.parameters()).device
    box.wire_to = lambda peer: wires.get(peer, PLAIN)
    box.begin(flight, num_microbatches, torch.empty(0, device=device))
    _step = _Step(box, flight, group.rank(), config.pipeline_dtype, device)
    try:
        result = call()
    finally:
        _step = None
    box.end()
    return result


@by_name
def _count_in_flight(call, instance):
    """Give a step's P2PCommunicator a pipeline group of such a size that the schedule warms up as planned.

    The schedule computes its number of warm-up passes from the size of the communicator's group. The
    communicator itself has been constructed with the real group.
    """
    call()
    if _step is not None:
        instance.pp_group = _Group(instance.pp_group, _step.in_flight[_step.stage])


@by_name
def _announce(call, instance):
    """Announce to the mailbox the shapes of the messages of every micro-batch in this step.

    The schedule calls get_tensor_shapes for the tensors that it sends and receives. The mailbox posts
    receives for these shapes in advance, and raises if a tensor of another shape is to be sent.
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
    """Transfer all messages of one P2PCommunicator._communicate through the mailbox, during a training step.

    megatron-core sends and receives here, and waits for both. The mailbox's sends do not wait, and its
    receives have been posted in advance. wait_on_reqs is among the parameters so that refuse_unknown()
    accepts it: it has no effect, because received tensors are complete on return.

    Returns:
        The tensor from the previous stage, the tensor from the next stage, and no requests.
    """
    step = _step
    if step is None:
        return call()
    call.refuse_unknown()
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


#: The P2PCommunicators whose _communicate() is running: their config says whether tensors are whole.
_communicators = Running()


class _Received:
    """Request for a message whose wait() also decodes what was received, once."""

    def __init__(self, work: Any, finish: Finish | None, keep: Any = None):
        self._work = work  # the framework's request, if there is one
        self._finish = finish  # decodes the message into the schedule's tensor
        self._keep = keep  # tensors that must live until the message has been transferred

    def wait(self, *args: Any, **kwargs: Any) -> None:
        if self._work is not None:
            self._work.wait(*args, **kwargs)
        if self._finish is not None:
            self._finish()
        self._work = self._finish = self._keep = None


def wires_of(config: Any) -> dict[int, Wire]:
    """Of this rank's neighbours; {} where all travels as it is. The same on all ranks of a stage."""
    current, sizes = session.active(), core.job.sizes
    if current is None or sizes is None or not registry().is_on(SLICES.name):
        return {}
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if isinstance(group, list) or not (network_api := network_api_of(backend_of(group))):
        return {}
    edges = current.plan_for(sizes).traffic_of(network_api).edges
    ranks = group_ranks(group)
    tensor = parallel_state.get_tensor_model_parallel_group()
    wires, stage = {}, ranks.index(current.rank)
    # the edge from the last to the first stage too
    for index, other in ((stage, stage + 1), (stage - 1, stage - 1)):
        planned = edges[index % len(edges)]
        parts, other = 1 if config.sequence_parallel else planned.slices, other % len(ranks)
        if parts > 1 or planned.narrow != "off":
            name = f"stage {stage}'s edge to stage {other}"
            wires[ranks[other]] = Wire(parts, tensor.rank(), tensor, planned.narrow, name)
    return wires


@by_name
def _exchange(call, instance, group):
    """Send and receive sliced or narrowed tensors in place of those that the schedule gave.

    A `Wire` says how tensors travel between two stages: each tensor rank sends its slice, or fewer bits. This
    wraps megatron-core's functions that start the transfers: _p2p_ops returns a dict of requests, each of
    which the schedule waits for when it needs the tensor; _batched_p2p_ops a list, waited for in order.

    Returns:
        Requests of the same form, which also decode what was received.
    """
    from megatron.core import parallel_state

    wires = {}
    if group is parallel_state.get_pipeline_model_parallel_group():
        wires = wires_of(_communicators.instances[-1].config)
    arguments = call.arguments()
    changed = {}  # arguments to replace, by name
    finishes = {}  # what decodes a received message, by the name of its request
    sent = []
    for side in ("prev", "next"):
        wire = wires.get(arguments[f"{side}_pipeline_rank"])
        if wire is None:
            continue
        send, recv = f"tensor_send_{side}", f"tensor_recv_{side}"
        if arguments[send] is not None:
            encoded = wire.outgoing(arguments[send])
            changed[send] = encoded
            sent.append(encoded)
        if arguments[recv] is not None:
            changed[recv], finishes[f"recv_{side}"] = wire.incoming(arguments[recv])
    requests = call(**changed)
    if isinstance(requests, dict):
        return {name: _Received(work, finishes.get(name), keep=sent) for name, work in requests.items()}
    # In order: when the schedule comes to the decoding requests, the framework's are complete.
    decoding = [_Received(None, finish) for finish in finishes.values()]
    return [*requests, *decoding, _Received(None, None, keep=sent)]


PATCHES = (
    Patch(SLICES, f"{P2P_MODULE}:P2PCommunicator._communicate",
          "whether tensor ranks have whole tensors to send, its configuration says", _communicators,
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
          "the schedule takes the number of its warm-up passes from this group", _count_in_flight,
          parameters=("pp_group", "config")),
    Patch(EDGES, f"{P2P_MODULE}:P2PCommunicator._communicate",
          "all that the schedule sends and receives passes here, and is waited for", _communicate),
)  # fmt: skip
