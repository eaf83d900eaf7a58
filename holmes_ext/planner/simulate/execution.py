"""Settings of a simulated step: schedule, overlap, and the time that software takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.reductions import ZERO_GRADIENTS
from holmes_ext.plan.engine import EngineTraits

#: Stages whose gradient reductions overlap with the last backward pass: none, the first, or all.
OVERLAPS = ("off", "first", "on")
ZERO_STAGES = (0, 1, 2, 3)
#: Numbers are below this.
MAX_VALUE = 1e9


@dataclass(frozen=True)
class Execution:
    """Behaviour of a job during a step, besides its placement and model."""

    engine: EngineTraits = EngineTraits()
    #: Chunks of a stage; above 1 the schedule is interleaved, else 1F1B.
    virtual: int = 1
    #: Pass all micro-batches through a chunk before the next chunk (plan/cost/pipeline.py).
    breadth_first: bool = False
    #: Blocks of each stage (interleaved: of the first chunk of every stage, then of the second,
    #: ...); () for an even split.
    stage_layers: tuple[int, ...] = ()
    #: Warm-up depth of each stage if sends do not block: micro-batches that it begins before its
    #: first backward pass ends; () for the framework's own 1F1B.
    in_flight: tuple[int, ...] = ()
    #: Order of the passes on each stage, instead of in_flight (plan/schedule.py).
    schedule: tuple[str, ...] = ()
    #: Reductions that overlap with the last backward pass: "off", "on", or "first" for the first
    #: stage only; the other stages reduce in one piece.
    overlap: str = "off"
    #: Size of a bucket of gradients; 0 for the rule of plan/buckets.py.
    bucket_bytes: int = 0
    #: Size of the first bucket; 0 for the same.
    first_bucket_bytes: int = 0
    #: Groups that span clusters use a hierarchical all-reduce, on stages whose name in `reductions`
    #: is "hierarchical"; () for all stages.
    hierarchical: bool = False
    reductions: tuple[str, ...] = ()
    #: Steps of a hierarchical all-reduce inside clusters are direct exchanges (gloo), not rings
    #: (NCCL).
    direct: bool = False
    #: Compression of gradients between clusters.
    compress: str = "off"
    #: ZeRO stage; 2 and 3 without a pipeline only.
    zero: int = 0
    #: Traffic of a reduce-scatter relative to an all-reduce (gloo's is an all-reduce: 1).
    scatter: float = 0.5
    #: "clusters" if ZeRO 2 and 3 shard inside each cluster, and all-reduce each shard between
    #: clusters.
    replicas: str = ""
    #: ZeRO 1 gathers the weights under the next forward pass.
    gather_overlap: bool = False
    #: Messages up to this size are buffered: the sender goes on as soon as the receiver is ready.
    buffer_bytes: int = 0
    #: A receiver's notice travels behind the message that its process has just sent to the same
    #: peer (gloo).
    notices: bool = False
    #: Seconds that software adds to a block's forward or backward pass, to a message, and to a
    #: step.
    block_s: float = 0.0
    message_s: float = 0.0
    step_s: float = 0.0
    #: Seconds of the optimizer for each parameter.
    parameter_s: float = 2e-11
    #: All-reduces of a single number over a stage's data parallel ranks that the script makes at the
    #: step's end.
    sums: int = 0
    #: Sharded weights and gradients travel while other layers compute.
    prefetch: bool = False
    #: Tensor parallel ranks share out messages between clusters.
    cut: bool = True
    #: Tied weights use a hierarchical all-reduce if that is faster.
    tied: bool = True
    #: Compression of activations on the slow network.
    compression: str = "off"
    #: CPU cores that all ranks share for software and for bytes sent, as in the lab; 0 if every
    #: rank has its own core.
    cores: int = 0

    def __post_init__(self) -> None:
        """Raise HolmesError if a value is out of range, or two settings exclude each other.

        A `schedule` is a written list of passes for each stage; () if there is none. `in_flight` is
        the warm-up depth of each stage. `sums` counts all-reduces of a number at the step's end.
        `cores` is the number of CPU cores that all ranks share (0: each rank has its own).
        """
        if self.overlap not in OVERLAPS:
            raise HolmesError(f"overlap {self.overlap!r} is none of {', '.join(OVERLAPS)}")
        if self.replicas not in ("", "clusters"):
            raise HolmesError(f"replicas {self.replicas!r} is neither '' nor 'clusters'")
        if self.zero not in ZERO_STAGES:
            raise HolmesError(f"zero is {self.zero}; ZeRO's stages are 0, 1, 2 and 3")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not 0 <= value < MAX_VALUE:
                raise HolmesError(f"{item.name} is {value}; it must be 0 or more, and finite")
        is_plain = self.virtual <= 1 and not self.breadth_first
        if self.schedule and (not is_plain or self.overlap != "off" or self.zero >= ZERO_GRADIENTS):
            raise HolmesError(
                "passes of a plan have one chunk a stage, ZeRO 0 or 1, and no overlapped reductions"
            )
        if self.in_flight and not is_plain:
            schedule = "a breadth-first" if self.breadth_first else "an interleaved"
            raise HolmesError(
                f"in_flight is {self.in_flight}, but {schedule} schedule has its own order"
            )
        if self.virtual < 1 or self.cores < 0 or self.sums < 0:
            raise HolmesError("virtual must be 1 or more, cores and sums 0 or more")

    def is_hierarchical(self, stage: int) -> bool:
        """Return whether a stage's groups may use a hierarchical all-reduce."""
        return self.hierarchical and (
            not self.reductions or self.reductions[stage] == "hierarchical"
        )

    def buckets_on(self, stage: int) -> bool:
        """Return whether a stage's gradients are sent in buckets under its last backward pass."""
        overlaps = self.overlap == "on" or (self.overlap == "first" and stage == 0)
        return overlaps and self.zero < ZERO_GRADIENTS
