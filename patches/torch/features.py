"""What holmes patches in torch, and the versions that it was run with."""

from holmes_ext.patches.engine.patch import Feature

_TORCH = "torch>=2.4"

RANKS = Feature("ranks", _TORCH, tried=("2.13.0",))
NICS = Feature("nics", _TORCH, tried=("2.13.0",))
JOINED = Feature("joined-torch", _TORCH, tried=("2.13.0",), option="join", idle=("",), binding=True)
TELEMETRY = Feature("telemetry", _TORCH, tried=("2.13.0",))
