"""How a simulated job runs: its engine, what overlaps, what software takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from holmes_ext.errors import HolmesError
from holmes_ext.plan.engine import EngineTraits

OVERLAPS = ("off", "first", "on")


@dataclass(frozen=True)
class Execution:
    """What a job does in a step, besides what its placement and model say."""

    engine: EngineTraits = EngineTraits()
    #: Chunks of a stage; above 1 the schedule is interleaved, else 1F1B.
    virtual: int = 1
    #: All micro-batches of a chunk before the next one (plan/cost/pipeline.py).
    breadth_first: bool = False
    #: Blocks of each stage (interleaved: of each chunk of all stages in turn); () for as even as can be.
    stage_layers: tuple[int, ...] = ()
    #: Micro-batches that each stage begins before its first backward ends, where sends do not block; () for
    #: 1F1B as the engine has it.
    in_flight: tuple[int, ...] = ()
    #: Of each stage, in place of in_flight (plan/schedule.py).
    schedule: tuple[str, ...] = ()
    #: Of reductions with the last backward: "first" for the first stage only, the others in one piece.
    overlap: str = "off"
    #: 0: by the rule of plan/buckets.py; first: of the first bucket, where that is another.
    bucket_bytes: int = 0
    first_bucket_bytes: int = 0
    #: Groups that span clusters sum hierarchically, of the stages whose reduction has that name; () for
    #: all.
    hierarchical: bool = False
    reductions: tuple[str, ...] = ()
    #: The steps of a hierarchical all-reduce inside clusters are direct exchanges (gloo), not rings (NCCL).
    direct: bool = False
    compress: str = "off"
    #: 2 and 3 without a pipeline.
    zero: int = 0
    #: What of an all-reduce's bytes a reduce-scatter moves (gloo's is an all-reduce: 1).
    scatter: float = 0.5
    #: "clusters" where ZeRO 2 and 3 shard inside each cluster and all-reduce each shard across.
    replicas: str = ""
    #: ZeRO 1's weights travel under the next forward.
    gather_overlap: bool = False
    #: Messages up to this leave the sender's hands as soon as the receiver is there: the transport buffers
    #: them.
    buffer_bytes: int = 0
    #: The word that a receiver waits travels behind what its process has just sent to the same peer (gloo).
    notices: bool = False
    #: Seconds that software adds to a block's forward or backward, a message, a step; of one parameter's
    #: optimizer.
    block_s: float = 0.0
    message_s: float = 0.0
    step_s: float = 0.0
    parameter_s: float = 2e-11
    #: All-reduces of one number over a stage's data-parallel ranks that the script makes at a step's end.
    sums: int = 0
    #: Sharded weights and gradients travel while other layers compute.
    prefetch: bool = False
    #: Tensor ranks share out what crosses; tied weights are summed hierarchically where that is faster.
    cut: bool = True
    tied: bool = True
    #: What activations are rounded to on the slow network.
    compression: str = "off"
    #: CPU cores that all ranks share for software and for bytes sent, as in a lab; 0: every rank has its own.
    cores: int = 0

    def __post_init__(self) -> None:
        if self.overlap not in OVERLAPS:
            raise HolmesError(f"overlap {self.overlap!r} is none of {', '.join(OVERLAPS)}")
        if self.replicas not in ("", "clusters"):
            raise HolmesError(f"replicas {self.replicas!r} is neither '' nor 'clusters'")
        if self.zero not in (0, 1, 2, 3):
            raise HolmesError(f"zero is {self.zero}; ZeRO's stages are 0, 1, 2 and 3")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not 0 <= value < 1e9:
                raise HolmesError(f"{item.name} is {value}; it must be 0 or more, and finite")
        if self.schedule and (
            self.virtual > 1 or self.breadth_first or self.overlap != "off" or self.zero > 1
        ):
            raise HolmesError(
                "passes of a plan have one chunk a stage, ZeRO 0 or 1, and no overlapped reductions"
            )
        if self.in_flight and (self.virtual > 1 or self.breadth_first):
            schedule = "a breadth-first" if self.breadth_first else "an interleaved"
            raise HolmesError(
                f"in_flight is {self.in_flight}, but {schedule} schedule has its own order"
            )
        if self.virtual < 1 or self.cores < 0 or self.sums < 0:
            raise HolmesError("virtual must be 1 or more, cores and sums 0 or more")

    def is_hierarchical(self, stage: int) -> bool:
        """Whether a stage's groups may sum so."""
        return self.hierarchical and (
            not self.reductions or self.reductions[stage] == "hierarchical"
        )

    def buckets_on(self, stage: int) -> bool:
        """Whether a stage's gradients leave in buckets under its last backward."""
        return self.zero < 2 and (self.overlap == "on" or (self.overlap == "first" and stage == 0))
