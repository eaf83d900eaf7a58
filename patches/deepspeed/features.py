"""What holmes patches in DeepSpeed, the versions that it was run with, and the options that ask for it."""

from functools import partial

from holmes_ext.patches.engine.patch import Feature

#: The first and the last release of each minor one, whose functions and what they do were compared.
_READ = ("0.14.4", "0.14.5", "0.15.0", "0.15.4", "0.16.0", "0.17.0", "0.18.0", "0.18.9", "0.19.0")
_of = partial(Feature, versions="deepspeed>=0.14.4,<0.20", tried=("0.16.9", "0.17.6", "0.19.8"), read=_READ)

P2P = _of("deepspeed-p2p")
EDGES = _of("deepspeed-edges", option="inflight", idle=("off",))
GRID_CHECK = _of("deepspeed-grid-check")
PARTITION = _of("deepspeed-partition")
CHECKPOINTS = _of("deepspeed-checkpoints")
OVERLAP = _of("overlap", option="overlap", idle=("off",))
TWO_LEVEL = _of("two-level")
PROFILE = _of("deepspeed-profile", option="profile", idle=("",))
JOINED = _of("joined-deepspeed", option="join", idle=("",), binding=True)
TELEMETRY = _of("telemetry-deepspeed")
