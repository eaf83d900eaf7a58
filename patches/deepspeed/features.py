"""What holmes patches in DeepSpeed, the versions that it was run with, and the options that ask for it."""

from holmes_ext.patches.engine.patch import Feature

#: Where the insides of the pipeline engine and of the optimizers were read.
_READ = "deepspeed>=0.19.8,<0.20"
_ENGINE = "deepspeed>=0.19,<0.20"

P2P = Feature("deepspeed-p2p", _ENGINE, tried=("0.19.8",))
GRID_CHECK = Feature("deepspeed-grid-check", _ENGINE, tried=("0.19.8",))
PARTITION = Feature("deepspeed-partition", "deepspeed>=0.16,<0.20", tried=("0.19.8",))
CHECKPOINTS = Feature("deepspeed-checkpoints", _ENGINE, tried=("0.19.8",))
OVERLAP = Feature("overlap", _READ, tried=("0.19.8",), option="overlap", idle=("off",))
TWO_LEVEL = Feature("two-level", _READ, tried=("0.19.8",))
PROFILE = Feature("deepspeed-profile", _ENGINE, tried=("0.19.8",), option="profile", idle=("",))
JOINED = Feature("joined-deepspeed", _READ, tried=("0.19.8",), option="join", idle=("",), binding=True)
TELEMETRY = Feature("telemetry-deepspeed", _ENGINE, tried=("0.19.8",))
