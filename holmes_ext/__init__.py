"""holmes_ext: one training job over several GPU clusters whose NICs differ.

import holmes_ext
holmes_ext.enable()          # before init_process_group; or add --holmes to the command instead
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "GradientReducer",
    "HolmesError",
    "disable",
    "enable",
    "initialize_model_parallel",
    "joined_state_dict",
    "load_joined_state_dict",
    "place_experts",
    "step_done",
]

#: Public name -> its module, imported when the name is used: importing holmes_ext alone stays cheap.
_HOMES = {
    "GradientReducer": "holmes_ext.runtime.reduce.reducer",
    "HolmesError": "holmes_ext.errors",
    "disable": "holmes_ext.job",
    "enable": "holmes_ext.job",
    "enable_on_nodes": "holmes_ext.job",
    "joined_state_dict": "holmes_ext.join.training",
    "load_joined_state_dict": "holmes_ext.join.training",
    "place_experts": "holmes_ext.planner.experts.program",
    "step_done": "holmes_ext.runtime.measure.telemetry",
}


def __getattr__(name: str) -> Any:
    if name == "initialize_model_parallel":  # megatron.core.parallel_state's, imported only now
        drop_in = import_module("holmes_ext.patches.megatron.drop_in").drop_in
        return drop_in(import_module("holmes_ext.job").enable)
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'holmes_ext' has no attribute {name!r}")
