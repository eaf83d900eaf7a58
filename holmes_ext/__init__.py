"""holmes_ext: one training job over several GPU clusters whose NICs differ.

    import holmes_ext
    holmes_ext.enable()          # before init_process_group; or add --holmes to the command instead
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["GradientReducer", "HolmesError", "disable", "enable", "initialize_model_parallel", "step_done"]


def __getattr__(name: str) -> Any:
    """The public names, loaded when they are used: importing holmes_ext alone stays cheap."""
    if name in ("enable", "disable"):
        from holmes_ext import job

        return getattr(job, name)
    if name == "initialize_model_parallel":  # megatron.core.parallel_state's, imported only now
        from holmes_ext.job import initialize_model_parallel

        return initialize_model_parallel()
    if name == "GradientReducer":
        from holmes_ext.runtime.reduce.reducer import GradientReducer

        return GradientReducer
    if name == "step_done":
        from holmes_ext.runtime.measure.telemetry import step_done

        return step_done
    if name == "HolmesError":
        from holmes_ext.errors import HolmesError

        return HolmesError
    raise AttributeError(f"module 'holmes_ext' has no attribute {name!r}")
