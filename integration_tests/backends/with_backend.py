"""Runs a training script with another backend of torch.distributed than the script names.

    python with_backend.py BACKEND OTHER_DEVICES SCRIPT ARGUMENTS...

BACKEND is what init_process_group receives, e.g. "nccl2" or "cpu:gloo,cuda:nccl2".

With OTHER_DEVICES 1, the script uses another GPU than the one with the number LOCAL_RANK: the script reads
the next number from LOCAL_RANK, and torch.distributed still reads the number of the launcher. A job that
chooses its GPUs itself looks like that to torch. init_process_group receives the GPU as device_id. With
OTHER_DEVICES 0, nothing is changed.
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
    """Let the script read the next GPU's number from LOCAL_RANK, but not torch.distributed."""
    launched_local_rank = int(os.environ["LOCAL_RANK"])
    distributed_c10d.get_node_local_rank = lambda *args, **kwargs: launched_local_rank
    number = (launched_local_rank + 1) % torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(number)
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
