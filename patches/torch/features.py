"""What holmes patches in torch, and the versions that it was run with."""

from functools import partial

from holmes_ext.patches.engine.patch import Feature

_TRIED = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
_of = partial(Feature, versions="torch>=2.6", tried=_TRIED)
#: Of what is older the Python sources were compared: torch/distributed, _C/_distributed_c10d.pyi.
_older = partial(_of, versions="torch>=2.4", read=("2.4.1", "2.5.1"))

RANKS = _older("ranks", what="ranks follow the plan; rank 0 may live on another node")
NICS = _older("nics", what="every process group gets the fastest network of its members")
JOINED = _older("joined-torch", option="join", idle=("",), binding=True,
    what="jobs that join: weights, steps and parts of the data set")
TELEMETRY = _older("telemetry", what="times operations, for reports and the watchdog")
DDP = _of("ddp", what="DistributedDataParallel sums in two levels across clusters")
FSDP = _of("fsdp", what="FSDP: reports what sharding costs; hybrid sharding")
PASSES = _of("torch-passes", option="passes", idle=("1f1b",), versions="torch>=2.8", tried=_TRIED[2:],
             what="torch's pipelining: passes as the plan lists them")
PIPELINING = _of("pipelining",
                 what="torch's pipelining: stages on their fabric, reductions do not hold them up")
