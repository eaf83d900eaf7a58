"""Trains with the script examples/megatron_core/train.py, which calls initialize_model_parallel.

    megatron_core_call.py ARGUMENTS OF train.py [--call-holmes]

With --call-holmes, the script calls holmes_ext.initialize_model_parallel in place of the function of
megatron.core.parallel_state. That is one of two ways to switch holmes on; the other is the flag
--holmes. Without --call-holmes, the script runs as it is.
"""

import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron_core"
sys.path.insert(0, str(EXAMPLE))

import train  # noqa: E402  (the example; it loads the CPU shim before megatron.core)
from options import parse_args  # noqa: E402


class ParallelStateWithHolmes:
    """Stand-in for the module megatron.core.parallel_state, with another initialize_model_parallel.

    That function is the one of holmes_ext. All other attributes are those of the module.
    """

    def __init__(self, parallel_state):
        import holmes_ext

        self.parallel_state = parallel_state
        self.initialize_model_parallel = holmes_ext.initialize_model_parallel

    def __getattr__(self, name):
        """Return an attribute of megatron.core.parallel_state."""
        return getattr(self.parallel_state, name)


if __name__ == "__main__":
    if "--call-holmes" in sys.argv:
        sys.argv.remove("--call-holmes")
        train.parallel_state = ParallelStateWithHolmes(train.parallel_state)
    train.train(*parse_args())
    train.torch.distributed.destroy_process_group()
