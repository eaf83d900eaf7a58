"""examples/megatron_core as a program of one's own that calls holmes_ext.initialize_model_parallel.

Takes the example's arguments. It differs from the example in that one call, and runs without --holmes.
"""

import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron_core"
sys.path.insert(0, str(EXAMPLE))

import train  # noqa: E402  (the example; it loads the CPU shim before megatron.core)
from options import parse_args  # noqa: E402

import holmes_ext  # noqa: E402

if __name__ == "__main__":
    train.parallel_state.initialize_model_parallel = holmes_ext.initialize_model_parallel
    train.train(*parse_args())
    train.torch.distributed.destroy_process_group()
