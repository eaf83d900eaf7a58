"""examples/megatron_core as a program that can call holmes_ext.initialize_model_parallel.

    megatron_core_call.py ARGUMENTS OF THE EXAMPLE [--call-holmes]

With --call-holmes it calls that function in place of megatron.core.parallel_state's. It runs without
--holmes.
"""

import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron_core"
sys.path.insert(0, str(EXAMPLE))

import train  # noqa: E402  (the example; it loads the CPU shim before megatron.core)
from options import parse_args  # noqa: E402


class CallsHolmes:
    """What the example sees as parallel_state: one function of it is holmes's."""

    def __init__(self, parallel_state):
        import holmes_ext

        self.parallel_state = parallel_state
        self.initialize_model_parallel = holmes_ext.initialize_model_parallel

    def __getattr__(self, name):
        return getattr(self.parallel_state, name)


if __name__ == "__main__":
    if "--call-holmes" in sys.argv:
        sys.argv.remove("--call-holmes")
        train.parallel_state = CallsHolmes(train.parallel_state)
    train.train(*parse_args())
    train.torch.distributed.destroy_process_group()
