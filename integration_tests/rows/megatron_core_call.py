"""Runs examples/megatron_core with holmes_ext.initialize_model_parallel in place of Megatron's function.

    megatron_core_call.py ARGUMENTS OF THE EXAMPLE [--call-holmes]

README's table offers this call as an alternative to `--holmes`. Without --call-holmes, the program
runs the example unchanged.
"""

import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron_core"
sys.path.insert(0, str(EXAMPLE))

import train  # noqa: E402  (the example; it loads the CPU shim before megatron.core)
from options import parse_args  # noqa: E402


class ParallelStateWithHolmes:
    """Stand-in for megatron.core.parallel_state whose initialize_model_parallel is holmes's."""

    def __init__(self, parallel_state):
        import holmes_ext

        self.parallel_state = parallel_state
        self.initialize_model_parallel = holmes_ext.initialize_model_parallel

    def __getattr__(self, name):
        """Return any other attribute of megatron.core.parallel_state."""
        return getattr(self.parallel_state, name)


if __name__ == "__main__":
    if "--call-holmes" in sys.argv:
        sys.argv.remove("--call-holmes")
        train.parallel_state = ParallelStateWithHolmes(train.parallel_state)
    train.train(*parse_args())
    train.torch.distributed.destroy_process_group()
