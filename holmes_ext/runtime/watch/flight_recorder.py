"""Tells the user where torch's flight recorder dumps a rank's last operations, and how to read the dumps.

The flight recorder is a buffer in every rank with the rank's last collectives and messages. When NCCL fails
or times out, torch dumps the buffer to a file on the rank's node. Which part of torch does so depends on the
backend of a process group:

    "nccl" of torch 2.13 and 2.14, and "nccl-legacy"
        The C++ class ProcessGroupNCCL writes the dump. Its monitoring thread starts this.
    "nccl" of torch 2.15, and other backends that support abort hooks
        torch registers a FlightRecorderHook with the backend. The backend calls its abort hooks when a
        collective fails or times out, and this hook writes the dump.

Environment variables of torch switch the dumps off and set their path. The names and defaults in this module
are those of torch 2.13 and newer. For older releases no message is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from holmes_ext.runtime.watch.nccl_errors import cuda_backends

_OLDEST_TORCH = Version("2.13")
#: Values, in lower case, with which an environment variable of torch switches a feature off.
_OFF = ("0", "n", "no", "f", "false")

# Each tuple lists the environment variables of one setting. torch renamed some variables from TORCH_NCCL_* to
# TORCH_FR_* and still reads the old names. The new name comes first and takes precedence if both are set.
_BUFFER_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # operations; 0: off
#: Path of a dump. torch appends the rank.
_PATH_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
#: Switch for the dumps of FlightRecorderHook.
_HOOK_DUMP_VARIABLES = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
#: Switches for the dumps of ProcessGroupNCCL and for the thread that starts them. They have no newer names.
_LEGACY_DUMP_VARIABLES = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_LEGACY_MONITORING_VARIABLES = ("TORCH_NCCL_ENABLE_MONITORING",)


def dump_hint(rank: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return a message that names this rank's dump file and the command that reads the dumps of all ranks.

    An empty string is returned if torch writes no dump on this rank, for example because the flight recorder
    is switched off or no process group uses NCCL.

    Args:
        rank: The global rank of this process.
        environ: The environment variables of this process.
    """
    import torch
    import torch.distributed as dist

    is_supported_torch = Version(torch.__version__) >= _OLDEST_TORCH
    if not is_supported_torch or not dist.is_nccl_available():
        return ""
    buffer_size = _first_value(environ, _BUFFER_SIZE_VARIABLES, default="2000")
    if buffer_size == "0":  # the flight recorder is off
        return ""
    if not any(_dumps_on_failure(group, backend, environ) for group, backend in cuda_backends()):
        return ""
    path_without_rank = Path(_first_value(environ, _PATH_VARIABLES, default=_default_path(environ)))
    return (
        f"when NCCL fails or times out, torch writes the last operations of rank {rank} to "
        f"{path_without_rank}{rank}; copy these files of all ranks to a folder, and read them with: "
        f"torchfrtrace --allow-incomplete-ranks --prefix {path_without_rank.name} FOLDER"
    )


def _dumps_on_failure(group: Any, backend: Any, environ: Mapping[str, str]) -> bool:
    """Return whether torch dumps the flight recorder's buffer when a process group fails or times out.

    Args:
        group: The process group.
        backend: The group's backend for CUDA tensors.
        environ: The environment variables of this process.
    """
    import torch.distributed as dist

    if isinstance(backend, dist.ProcessGroupNCCL):
        is_dump_enabled = _is_enabled(environ, _LEGACY_DUMP_VARIABLES)
        is_monitored = _is_enabled(environ, _LEGACY_MONITORING_VARIABLES)
        return is_dump_enabled and is_monitored

    # Groups with a FlightRecorderHook. torch has this dict since release 2.15.
    hook_by_group = getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", {})
    if group not in hook_by_group:
        return False
    # torch also registers a FlightRecorderHook with backends that have no abort hooks. It then fills the
    # buffer, but nothing calls it when a collective fails, so it never writes a dump.
    return backend.supports_abort_hooks and _is_enabled(environ, _HOOK_DUMP_VARIABLES)


def _default_path(environ: Mapping[str, str]) -> str:
    """Return torch's default path of a dump, to which torch appends the rank.

    The file is in the user's cache folder: $XDG_CACHE_HOME, or $HOME/.cache if that variable is not set.
    """
    home_cache = f"{environ.get('HOME', '/tmp')}/.cache"
    cache = environ.get("XDG_CACHE_HOME", home_cache)
    return f"{cache}/torch/comm_lib_trace_rank_"


def _is_enabled(environ: Mapping[str, str], variables: tuple[str, ...]) -> bool:
    """Return whether a switch of torch is on. It is on by default.

    Args:
        environ: The environment variables of this process.
        variables: Names of the switch. The first name that is set in `environ` decides.
    """
    return _first_value(environ, variables, default="1").lower() not in _OFF


def _first_value(environ: Mapping[str, str], variables: tuple[str, ...], default: str) -> str:
    """Return the value of the first of the `variables` that is set and not empty, else `default`."""
    for name in variables:
        if environ.get(name):
            return environ[name]
    return default
