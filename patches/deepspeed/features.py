"""What holmes patches in DeepSpeed, the versions that it was run with, and the options that ask for it."""

from functools import partial

from holmes_ext.patches.engine.patch import Feature

_of = partial(Feature, versions="deepspeed>=0.16,<0.20", tried=("0.16.9", "0.17.6", "0.18.9", "0.19.8"))

P2P = _of("deepspeed-p2p")
EDGES = _of("deepspeed-edges", option="inflight", idle=("off",))
GRID_CHECK = _of("deepspeed-grid-check")
PARTITION = _of("deepspeed-partition")
CHECKPOINTS = _of("deepspeed-checkpoints")
OVERLAP = _of("overlap", option="overlap", idle=("off",))
TWO_LEVEL = _of("two-level")
PROFILE = _of("deepspeed-profile", option="profile", idle=("",))
JOINED = Feature("joined-deepspeed", "deepspeed>=0.19.8,<0.20", ("0.19.8",), "join", ("",), binding=True)
TELEMETRY = _of("telemetry-deepspeed")
