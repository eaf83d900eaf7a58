"""Sends tensors as megatron-core's interleaved schedule does, and frees their memory while they are sent.

With deallocate_pipeline_outputs, the schedule sets `output.data` to a scalar after it has started to send an
output. The memory must not be used again until the output was sent.

Of two ranks, rank 0 sends to rank 1. Each rank prints a JSON line: {"rank", "is_right": whether the received
numbers are those that were sent}.
"""

import json
import os

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

MESSAGES = 3
ELEMENTS = 4_000_000  # 16 MB in a message, so that it is still being sent when its tensor is freed
OVERWRITTEN = -1.0


def exchange(communicator: P2PCommunicator, output: torch.Tensor | None) -> tuple:
    """Start to send an output to the next stage, or to receive one from the previous stage.

    Args:
        output: The tensor to send; None to receive.

    Returns:
        The tensor that is received (None for a sender), and megatron-core's requests by name.
    """
    return communicator.send_forward_recv_forward(
        output, recv_prev=output is None, tensor_shape=(ELEMENTS,), overlap_p2p_comm=True
    )


def send(communicator: P2PCommunicator, value: float) -> None:
    """Send a tensor of this value, and free its memory at once."""
    output = torch.full((ELEMENTS,), value, device="cuda")
    _, requests = exchange(communicator, output)
    output.data = torch.empty(1, device="cuda")
    # torch's allocator gives this tensor the memory of `output`, if it counts as free.
    later = torch.full((ELEMENTS,), OVERWRITTEN, device="cuda")
    requests["send_next"].wait()
    del later


def is_received(communicator: P2PCommunicator, value: float) -> bool:
    """Receive a tensor, and return whether all its numbers have this value."""
    received, requests = exchange(communicator, None)
    requests["recv_prev"].wait()
    return bool((received == value).all())


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = ModelParallelConfig(
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
    )
    communicator = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
    is_right = True
    for number in range(MESSAGES):
        if rank == 0:
            send(communicator, float(number))
        else:
            is_right = is_received(communicator, float(number)) and is_right
    torch.cuda.synchronize()
    print(json.dumps({"rank": rank, "is_right": is_right}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
