"""Runs a training script with another backend of torch.distributed than the script names.

    python with_backend.py BACKEND OTHER_DEVICES SCRIPT ARGUMENTS...

BACKEND is what init_process_group receives, e.g. "nccl2" or "cpu:gloo,cuda:nccl2".

OTHER_DEVICES is 1 or 0. With 1, each rank uses another GPU than the one with the number LOCAL_RANK, and
passes it to init_process_group as device_id, like a job that assigns GPUs to ranks in its own way.
"""

import os
import runpy
import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def use_backend(name: str) -> None:
    """Replace the backend in all later calls of init_process_group."""
    original = dist.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        return original(name, *args, **kwargs)

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group


def use_next_device() -> None:
    """Let the script use the GPU after the one with the number LOCAL_RANK.

    The script reads the number of its GPU from LOCAL_RANK, so the variable is changed. torch.distributed
    reads LOCAL_RANK, too. It must see the original number, as in a job that chooses its GPUs in another way.
    """
    original_local_rank = int(os.environ["LOCAL_RANK"])
    number = (original_local_rank + 1) % torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(number)
    # torch.distributed calls this function to read LOCAL_RANK.
    distributed_c10d.get_node_local_rank = lambda *args, **kwargs: original_local_rank
    original = dist.init_process_group

    def init_process_group(*args, **kwargs):
        kwargs["device_id"] = torch.device("cuda", number)
        return original(*args, **kwargs)

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group


if __name__ == "__main__":
    backend, other_devices, script, *arguments = sys.argv[1:]
    use_backend(backend)
    if other_devices == "1":
        use_next_device()
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))  # as if Python had started the script
    runpy.run_path(script, run_name="__main__")
