"""How a simulated job runs: whose schedule and order of operations, what overlaps, what software takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from holmes_ext.errors import HolmesError

ENGINES = ("deepspeed", "megatron", "async", "ddp")
OVERLAPS = ("off", "first", "on")
TWO_LEVELS = ("off", "rings", "direct")


@dataclass(frozen=True)
class Execution:
    """virtual: chunks of a stage; above 1 the schedule is interleaved, else 1F1B; breadth_first: that order instead
    (plan/cost/pipeline.py). engine: whose sends, receives, buckets and order of reductions ("async": torch's
    pipelining, with GradientReducer's buckets; "ddp": with DistributedDataParallel's). stage_layers: blocks of each
    stage (interleaved: of each virtual stage, chunk by chunk), () for as even as can be. in_flight: micro-batches that
    each stage begins before its first backward ends, where sends do not block (patches/deepspeed/edges.py); () for 1F1B
    as the engine has it.

    overlap: of reductions with the last backward: "off", "first" (megatron's: the first stage in buckets, the others in
    one piece) or "on". bucket_bytes: 0 for plan/cost/buckets.py's rule; first_bucket_bytes: of the first one, where it
    is another (torch's dist._DEFAULT_FIRST_BUCKET_BYTES). two_level: of groups that straddle clusters: "off", or how
    the steps inside clusters are made: "rings" (NCCL) or "direct" (gloo). zero: 0 to 3; 2 and 3 without a pipeline,
    where every micro-batch's gradients are scattered layer by layer, and (3) weights gathered before each layer's
    forward and backward, while nothing is computed. scatter: what of an all-reduce's bytes a reduce-scatter moves
    (gloo's is an all-reduce: 1). replicas: "clusters" where ZeRO 2 and 3 shard inside each cluster and all-reduce each
    shard across (--holmes-fsdp hybrid), "" where over all ranks. gather_overlap: ZeRO-1's weights travel under the next
    forward.

    sums: all-reduces of one number over a stage's data-parallel ranks that the script makes at a step's end (its loss).

    cut: whether tensor ranks share out what crosses, and tied weights are summed in two levels, as holmes does it.

    buffer_bytes: messages up to this leave the sender's hands as soon as the receiver is there, because the transport
    has a buffer for them (TCP's, under gloo). notices: whether the word that a receiver waits travels behind what its
    process has just sent to the same peer (gloo: both over one connection). block_s, message_s, step_s: seconds that
    software adds to a block's forward or backward, a message, a step. parameter_s: optimizer's seconds of one
    parameter. cores: CPU cores that all ranks share for block_s, parameter_s, step_s and what links say of bytes sent,
    as in a lab on one machine; 0: every rank has its own.
    """

    engine: str = "megatron"
    virtual: int = 1
    breadth_first: bool = False
    stage_layers: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    overlap: str = "off"
    bucket_bytes: int = 0
    first_bucket_bytes: int = 0
    two_level: str = "off"
    zero: int = 0
    scatter: float = 0.5
    replicas: str = ""
    gather_overlap: bool = False
    buffer_bytes: int = 0
    notices: bool = False
    block_s: float = 0.0
    message_s: float = 0.0
    step_s: float = 0.0
    parameter_s: float = 2e-11
    sums: int = 0
    cut: bool = True
    cores: int = 0

    def __post_init__(self) -> None:
        for name, known in (("engine", ENGINES), ("overlap", OVERLAPS), ("two_level", TWO_LEVELS)):
            if getattr(self, name) not in known:
                raise HolmesError(f"{name} {getattr(self, name)!r} is none of {', '.join(known)}")
        if self.replicas not in ("", "clusters"):
            raise HolmesError(f"replicas {self.replicas!r} is neither '' nor 'clusters'")
        if self.zero not in (0, 1, 2, 3):
            raise HolmesError(f"zero is {self.zero}; ZeRO's stages are 0, 1, 2 and 3")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not 0 <= value < 1e9:
                raise HolmesError(f"{item.name} is {value}; it must be 0 or more, and finite")
        if self.in_flight and (self.virtual > 1 or self.breadth_first):
            schedule = "a breadth-first" if self.breadth_first else "an interleaved"
            raise HolmesError(f"in_flight is {self.in_flight}, but {schedule} schedule has its own order")
        if self.virtual < 1 or self.cores < 0 or self.sums < 0:
            raise HolmesError("virtual must be 1 or more, cores and sums 0 or more")

    def buckets_on(self, stage: int) -> bool:
        """Whether a stage's gradients leave in buckets under its last backward."""
        return self.zero < 2 and (self.overlap == "on" or (self.overlap == "first" and stage == 0))
