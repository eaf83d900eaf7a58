"""Says where torch's flight recorder writes its dumps, and which command reads them.

The flight recorder keeps the last operations of each rank. When NCCL fails or times out, each rank writes
them to a file of its node, a dump. Two parts of torch write dumps:

    ProcessGroupNCCL     the backend "nccl" until torch 2.14, and "nccl-legacy": in a thread that monitors it
    FlightRecorderHook   other backends with abort hooks since torch 2.15, such as "nccl" of torch 2.15

The names and defaults of the environment variables are those of torch 2.13 and newer. For older versions of
torch nothing is said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from holmes_ext.runtime.watch.nccl_errors import cuda_backends

_OLDEST_TORCH = Version("2.13")
#: torch's values of a variable that is a switch, for "off".
_OFF = ("0", "n", "no", "f", "false")
# Each tuple has the names of one setting. torch uses the first one that is set.
_BUFFER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # operations; 0: off
_DUMP_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # path, without the rank
_IS_DUMPED_BY_HOOK = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_IS_DUMPED_BY_NCCL = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_IS_NCCL_MONITORED = ("TORCH_NCCL_ENABLE_MONITORING",)


def dump_hint(rank: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return a message with the dump file of this rank and the command that reads the dumps of all ranks.

    "" is returned if this rank writes no dump: the flight recorder is off, or no process group uses NCCL.

    Args:
        rank: This rank, as torch numbers it.
    """
    import torch
    import torch.distributed as dist

    is_known_torch = Version(torch.__version__) >= _OLDEST_TORCH
    if not is_known_torch or not dist.is_nccl_available():
        return ""
    is_recording = _setting(environ, _BUFFER_SIZE, default="2000") != "0"
    writes_dump = any(_writes_dump(group, backend, environ) for group, backend in cuda_backends())
    if not is_recording or not writes_dump:
        return ""
    prefix = Path(_setting(environ, _DUMP_FILE, default=_default_prefix(environ)))
    return (
        f"when NCCL fails or times out, torch writes the last operations of rank {rank} to {prefix}{rank}; "
        "copy these files of all ranks to a folder, and read them with: "
        f"torchfrtrace --allow-incomplete-ranks --prefix {prefix.name} FOLDER"
    )


def _writes_dump(group: Any, backend: Any, environ: Mapping[str, str]) -> bool:
    """Return whether torch writes a dump when NCCL fails in a process group.

    Args:
        backend: The backend of the group for tensors on GPUs.
    """
    import torch.distributed as dist

    if isinstance(backend, dist.ProcessGroupNCCL):
        return _is_on(environ, _IS_DUMPED_BY_NCCL) and _is_on(environ, _IS_NCCL_MONITORED)
    hooks = getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", {})  # since torch 2.15
    # torch attaches its hook to a backend without abort hooks, too. The hook then only records.
    return group in hooks and backend.supports_abort_hooks and _is_on(environ, _IS_DUMPED_BY_HOOK)


def _default_prefix(environ: Mapping[str, str]) -> str:
    """Return the path of dumps, without the rank, that torch uses if no variable names one."""
    home_cache = f"{environ.get('HOME', '/tmp')}/.cache"
    return f"{environ.get('XDG_CACHE_HOME', home_cache)}/torch/comm_lib_trace_rank_"


def _is_on(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Return whether a switch of torch is on. All switches of this module are on by default."""
    return _setting(environ, names, default="1").lower() not in _OFF


def _setting(environ: Mapping[str, str], names: tuple[str, ...], default: str) -> str:
    """Return the value of the first environment variable that is set, or `default` if none is."""
    for name in names:
        if environ.get(name):
            return environ[name]
    return default
