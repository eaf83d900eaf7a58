"""What holmes patches in torch, and the versions that it was run with."""

from holmes_ext.patches.engine.patch import Feature

_TORCH = "torch>=2.4"

RANKS = Feature("ranks", _TORCH, tried=("2.13.0",))
#: 2.6 renamed a parameter of _new_process_group_helper, pg_options, to backend_options.
NICS = Feature("nics", "torch>=2.6", tried=("2.13.0",))
TELEMETRY = Feature("telemetry", _TORCH, tried=("2.13.0",))
