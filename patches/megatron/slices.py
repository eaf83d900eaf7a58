"""Shrinks the messages that pipeline stages of megatron-core send between clusters (feature megatron-slices).

Without sequence parallelism, all t tensor-parallel ranks of a stage have the same activation, and
megatron-core sends it from each of them. Between clusters each rank sends only a slice here, 1/t of the
bytes, and the ranks of the receiving stage gather the slices over the fast network inside their node:

    stage in cluster a         stage in cluster b
    rank 0   -- slice 0 -->    rank 2   |
    rank 1   -- slice 1 -->    rank 3   | all-gather: both ranks get the whole activation

--holmes-compress-activations bf16 or int8 also compresses the slices. A Wire (runtime/groups/wire.py)
encodes and decodes the messages of one neighbouring stage.

This module wraps megatron-core's functions that start sends and receives, and returns requests
whose wait() also decodes. If stage_links.py sends the messages of a training step in the background, it
uses the wires of this module instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, Running, by_name
from holmes_ext.patches.megatron import core
from holmes_ext.patches.megatron.features import P2P_MODULE, SLICES
from holmes_ext.patches.megatron.p2p import PARAMETERS
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups.wire import Finish, Wire

#: The P2PCommunicators whose _communicate() runs now, the innermost last. _exchange reads the configuration
#: of the last one: it wraps functions of a module, and these have no communicator among their arguments.
_running_communicators = Running()


class _DecodingRequest:
    """Request of a send or receive, whose wait() also decodes the received message.

    Args:
        work: torch's request, or None if another request waits for the transfer.
        finish: Decodes the received message into the schedule's tensor, or None.
        keep: Tensors whose memory must not be freed before the message has been transferred.
    """

    def __init__(self, work: Any, finish: Finish | None, keep: Any = None):
        self._work = work
        self._finish = finish
        self._keep = keep

    def wait(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the transfer, decode the message, and free the sent tensors. Later calls do nothing."""
        if self._work is not None:
            self._work.wait(*args, **kwargs)
        if self._finish is not None:
            self._finish()
        self._work = None
        self._finish = None
        self._keep = None


class _Neighbour(NamedTuple):
    """Neighbouring pipeline stage, and the position of its connection to this stage in the plan.

    The plan has a list with an entry for each connection of two neighbouring stages, called stage
    link. An entry says whether messages are cut into slices or compressed.
    """

    stage: int
    link_index: int  # in the plan's list of stage links


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

    # Entry i is the link from stage i to the next stage. The last stage is linked to the first, as the
    # interleaved schedule needs it.
    stage_links = current.plan_for(sizes).traffic_of(network_api).stage_links
    ranks = group_ranks(pipeline_group)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    stage = ranks.index(current.rank)
    next_neighbour = _Neighbour(stage=(stage + 1) % len(ranks), link_index=stage)
    previous_neighbour = _Neighbour(stage=(stage - 1) % len(ranks), link_index=stage - 1)

    wires = {}
    for neighbour in (next_neighbour, previous_neighbour):
        # The first stage's previous neighbour has link -1, the last entry. With two stages, the
        # plan has a single entry, for both neighbours.
        link = stage_links[neighbour.link_index % len(stage_links)]
        # With sequence parallelism the tensor-parallel ranks have different slices already.
        slices = 1 if config.sequence_parallel else link.slices
        compression = link.compression  # "off", "bf16" or "int8"
        if slices == 1 and compression == "off":
            continue
        wires[ranks[neighbour.stage]] = Wire(
            slices=slices,
            slice_index=tensor_group.rank(),  # the slice that this rank sends
            group=tensor_group,  # over which received slices are gathered
            compression=compression,
            stage_link=f"stage {stage}'s stage link to stage {neighbour.stage}",  # for error messages
        )
    return wires


@by_name
def _exchange(call: Call, instance: Any, group: Any) -> Any:
    """Encode the tensors that a pipeline stage sends to other clusters, and decode those it receives.

    An encoded tensor is this rank's slice of an activation, or compressed, or both. This wrapper runs in
    place of the two functions by which megatron-core starts transfers; call() runs the original with encoded
    tensors. _p2p_ops returns a dict of requests, and the schedule waits for each when it needs its tensor.
    _batched_p2p_ops returns a list of requests, for which the schedule waits in order.

    Args:
        group: The process group of the transfers. A program may use other groups for stages of its
            own. Messages in them are not encoded: the plan does not know them.

    Returns:
        Requests in a dict or a list like that of the original, whose wait() also decodes.
    """
    from megatron.core import parallel_state

    wires = {}  # rank of a neighbour -> Wire, which encodes and decodes its messages
    is_pipeline_group = group is parallel_state.get_pipeline_model_parallel_group()
    if is_pipeline_group:
        communicator = _running_communicators.instances[-1]  # the P2PCommunicator that sends now
        wires = wires_of(communicator.config)
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

    requests = call(**encoded_arguments)  # returns before the tensors have been sent
    # Nothing else refers to the encoded tensors. The requests keep them, so that their memory is
    # not used again before they have been sent.
    return _decoding_requests(requests, decoders, sent_tensors)


def _decoding_requests(
    requests: dict[str, Any] | list[Any], decoders: dict[str, Finish], sent_tensors: list[Any]
) -> dict[str, Any] | list[Any]:
    """Wrap requests of sends and receives so that waiting for them also decodes received messages.

    megatron-core's pipeline schedule waits for the returned requests as for torch's:

    - A dict has the same names. The wait() of each request waits for the transfer, then decodes.
    - A list has torch's requests first. Then follow requests that only decode. The schedule waits
      in order, so the transfers are complete by then.

    Args:
        requests: The requests of torch.distributed: a dict by names like "recv_prev", or a list in
            the order in which the schedule waits.
        decoders: Name of a request -> function without arguments that decodes its received message
            into the schedule's tensor.
        sent_tensors: Tensors that must be kept until they have been sent.
    """
    if isinstance(requests, dict):
        return {
            name: _DecodingRequest(work, decoders.get(name), keep=sent_tensors)
            for name, work in requests.items()
        }
    # The schedule waits in order: when it comes to the decoding requests, the transfers are complete.
    decoding = [_DecodingRequest(work=None, finish=decode) for decode in decoders.values()]
    keeping = _DecodingRequest(work=None, finish=None, keep=sent_tensors)
    return [*requests, *decoding, keeping]


PATCHES = (
    Patch(
        SLICES,
        f"{P2P_MODULE}:P2PCommunicator._communicate",
        "its configuration says whether the tensor-parallel ranks have the same tensor to send",
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
            "every tensor-parallel rank would send the same tensor to another cluster",
            _exchange,
            parameters=PARAMETERS,
        )
        for function in ("_p2p_ops", "_batched_p2p_ops")
    ),
)
