"""holmes_ext runs one training job over several GPU clusters whose NICs differ.

Add --holmes to the command of the job, or call enable() before init_process_group:

    import holmes_ext
    holmes_ext.enable()
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

#: Public name -> its module. A module is imported when its name is used first, so that importing holmes_ext
#: is fast.
_MODULE_OF = {
    "GradientReducer": "holmes_ext.runtime.reduce.reducer",
    "HolmesError": "holmes_ext.errors",
    "disable": "holmes_ext.job",
    "enable": "holmes_ext.job",
    "joined_state_dict": "holmes_ext.join.training",
    "load_joined_state_dict": "holmes_ext.join.training",
    "place_experts": "holmes_ext.planner.experts.program",
    "step_done": "holmes_ext.runtime.measure.telemetry",
}


def __getattr__(name: str) -> Any:
    if name == "initialize_model_parallel":
        # A drop-in replacement for the function of megatron.core.parallel_state, which enables holmes first.
        drop_in = import_module("holmes_ext.patches.megatron.drop_in").drop_in
        enable = import_module("holmes_ext.job").enable
        return drop_in(enable)
    if name == "_enable_on_nodes":  # for `holmes probe` and `holmes doctor` only
        return import_module("holmes_ext.job").enable_on_nodes
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'holmes_ext' has no attribute {name!r}")
