"""What holmes patches in torch, and the versions that it was run with."""

from functools import partial

from holmes_ext.patches.engine.patch import Feature

#: Of each minor release from 2.4 on the Python sources were compared: torch/distributed, _C/_distributed_c10d.pyi.
_READ = ("2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0")
_of = partial(Feature, versions="torch>=2.4", tried=("2.13.0",), read=_READ)

RANKS = _of("ranks")
NICS = _of("nics")
JOINED = Feature("joined-torch", "torch>=2.4", ("2.13.0",), "join", ("",), binding=True)
TELEMETRY = _of("telemetry")
DDP = Feature("ddp", "torch>=2.13", tried=("2.13.0",))
FSDP = Feature("fsdp", "torch>=2.13", tried=("2.13.0",))
PIPELINING = Feature("pipelining", "torch>=2.13", tried=("2.13.0",))
