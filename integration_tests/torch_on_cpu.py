"""What torch's CUDA builds and older versions need to train on CPUs; nothing here knows of holmes.

Imported at start-up in the environments of benchmarks/matrix.py, whose torch is of any version.

    torch.accelerator   a CUDA build says "cuda" where there is no GPU, and fully_shard's own mesh would be there
    fully_shard         before 2.7 asks torch.cpu.Stream for record_event and wait_event, which it has not; its copy of
                        gathered weights counts as a change, on CPUs alone, of what backward needs; and it averages by
                        ReduceOp.AVG, which gloo does not know then
    torch's pipelining  before 2.8 forgets all works of a batch but the last, and gloo a send whose work is forgotten:
                        the receiver waits for ever
"""

from __future__ import annotations

import contextlib

import wrapt


class _Works(list):
    def wait(self):
        for work in self:
            work.wait()


def _accelerator(module):
    own = module.current_accelerator
    module.current_accelerator = lambda check_available=False: own() if module.is_available() else None


def _streams(module):
    if not hasattr(module.Stream, "record_event"):
        module.Stream.record_event = module.Stream.wait_event = lambda self, event=None: event or object()


def _gathered(module):
    torch = module.torch
    if not torch.__version__.startswith("2.6."):
        return
    own, factors = torch.ops.fsdp.split_with_sizes_copy, module._get_gradient_divide_factors

    def copy(*args, out, **kwargs):
        with contextlib.ExitStack() as stack:
            for tensor in out:
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            return own(*args, out=out, **kwargs)

    torch.ops.fsdp.split_with_sizes_copy = copy
    module._get_gradient_divide_factors = lambda scatter, reduce, dtype: factors(scatter, reduce, torch.float16)


def _pipelining(module):
    if hasattr(module, "_wait_batch_p2p"):  # 2.8
        return

    def _batch_p2p(p2p_ops, desc=None):
        return _Works(module.dist.batch_isend_irecv(p2p_ops)) if p2p_ops else None

    module._batch_p2p = _batch_p2p


wrapt.register_post_import_hook(_accelerator, "torch.accelerator")
wrapt.register_post_import_hook(_streams, "torch.cpu")
wrapt.register_post_import_hook(_gathered, "torch.distributed.fsdp._fully_shard._fsdp_collectives")
wrapt.register_post_import_hook(_pipelining, "torch.distributed.pipelining.schedules")
