"""What holmes patches in torch, and the versions that it was run with."""

from functools import partial

from holmes_ext.patches.engine.patch import Feature

#: Of each minor release from 2.4 on the Python sources were compared: torch/distributed, _C/_distributed_c10d.pyi.
_READ = ("2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0")
_of = partial(Feature, versions="torch>=2.4", tried=("2.13.0",), read=_READ)

RANKS = _of("ranks", what="ranks follow the plan; rank 0 may live on another node")
NICS = _of("nics", what="every process group gets the fastest network of its members")
JOINED = Feature("joined-torch", "torch>=2.4", ("2.13.0",), "join", ("",), binding=True,
    what="jobs that join: weights, steps and parts of the data set")
TELEMETRY = _of("telemetry", what="times operations, for reports and the watchdog")
DDP = Feature("ddp", "torch>=2.4", tried=("2.13.0",),
    what="DistributedDataParallel sums in two levels across clusters")
FSDP = Feature("fsdp", "torch>=2.4", tried=("2.13.0",), what="FSDP: what sharding costs is told; hybrid shards")
PIPELINING = Feature("pipelining", "torch>=2.4", tried=("2.13.0",),
    what="torch's pipelining: stages on their fabric, reductions do not hold them up")
