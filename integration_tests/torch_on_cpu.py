"""What torch's CUDA builds and older versions need to train on CPUs; nothing here knows of holmes.

Imported at start-up in the environments of benchmarks/matrix.py, whose torch is of any version.

    torch.accelerator   a CUDA build says "cuda" where there is no GPU; fully_shard's own mesh would be there
    fully_shard         2.6 to 2.8 average by ReduceOp.AVG, which gloo refuses, or takes for a sum; 2.6 to
                        2.9 want an event of torch.cpu.Stream, which gives none; 2.6 counts its copy of
                        gathered weights, on CPUs alone, as a change of what the backward pass needs
    torch's pipelining  2.6 and 2.7 forget all works of a batch but the last, and gloo a send whose work is
                        forgotten: the receiver waits for ever; 2.9 begins with eight bytes to each neighbour,
                        which waits for four: gloo ends the process
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

    def there(check_available=False):
        found = own()
        return found if found is not None and module.torch.get_device_module(found).is_available() else None

    module.current_accelerator = there


def _streams(module):
    if not hasattr(module.Stream, "record_event"):
        module.Stream.wait_event = lambda self, event: None
    module.Stream.record_event = lambda self, event=None: event or object()


def _fully_shard(module):
    torch, factors = module.torch, module._get_gradient_divide_factors
    copy = torch.ops.fsdp.split_with_sizes_copy

    # those of float16: sums, divided before and after
    def divide_factors(scatter_group, reduce_group, dtype, *more):
        return factors(scatter_group, reduce_group, torch.float16, *more)

    def copied(*args, out, **kwargs):
        with contextlib.ExitStack() as stack:
            for tensor in out:
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            return copy(*args, out=out, **kwargs)

    version = torch.__version__[:4]
    if version in ("2.6.", "2.7.", "2.8."):
        module._get_gradient_divide_factors = divide_factors
    if version == "2.6.":
        torch.ops.fsdp.split_with_sizes_copy = copied


def _pipelining(module):
    if hasattr(module, "_wait_batch_p2p"):  # 2.8
        return

    def _batch_p2p(p2p_ops, desc=None):
        return _Works(module.dist.batch_isend_irecv(p2p_ops)) if p2p_ops else None

    module._batch_p2p = _batch_p2p


def _first_messages(module):
    """Give the first messages between neighbouring pipeline stages one data type.

    torch 2.9 sends 8 bytes to each neighbour before the first step, and the neighbour receives them into 4.
    gloo then ends the process. As float tensors, both have 4 bytes.
    """
    original = getattr(module._PipelineStageBase, "_get_init_p2p_neighbors_ops", None)
    if original is None:  # torch 2.8 and older send no such messages
        return

    def with_float_tensors(self, *args, **kwargs):
        ops = original(self, *args, **kwargs)
        for op in ops:
            op.tensor = op.tensor.float()
        return ops

    module._PipelineStageBase._get_init_p2p_neighbors_ops = with_float_tensors


wrapt.register_post_import_hook(_accelerator, "torch.accelerator")
wrapt.register_post_import_hook(_streams, "torch.cpu")
wrapt.register_post_import_hook(_fully_shard, "torch.distributed.fsdp._fully_shard._fsdp_collectives")
wrapt.register_post_import_hook(_pipelining, "torch.distributed.pipelining.schedules")
wrapt.register_post_import_hook(_first_messages, "torch.distributed.pipelining.stage")
