"""What megatron-core's versions have or lack: one table. All else that holmes uses is the same from 0.11 to 0.20."""

from __future__ import annotations

from packaging.version import Version

from holmes_ext.patches.megatron.features import loaded_version

#: what -> the first version that has it.
_SINCE = {
    # TransformerConfig.pipeline_model_parallel_layout: before, the first and the last stage alone can have layers of
    # their own
    "layout": "0.13.0",
    # buckets of the distributed optimizer that are padded are saved right (buckets.py)
    "padded buckets": "0.20.0",
}
#: Where sends and receives of a stage are: functions of p2p_communication, then methods of a class in it.
P2P_FUNCTIONS, P2P_CLASS = "<0.14", ">=0.14"


def has(what: str) -> bool:
    """Whether the megatron-core that the program imported has it."""
    return Version(str(loaded_version())) >= Version(_SINCE[what])
