"""Lets CUDA builds and older versions of torch train on CPUs. It has nothing to do with holmes.

benchmarks/matrix.py makes environments with torch 2.6 and newer, in which each Python imports this module at
its start. What it changes in torch:

    torch.accelerator   A CUDA build names the device "cuda" even without a GPU. fully_shard would then make
                        its mesh there.
    fully_shard         torch 2.6 to 2.8 average with ReduceOp.AVG, which gloo does not support. torch 2.6 to
                        2.9 need events of torch.cpu.Stream, which has none. On CPUs, torch 2.6 counts its
                        copy of gathered weights as a change of tensors that the backward pass needs.
    pipelining          torch 2.6 and 2.7 keep only the last work of a batch of messages. gloo forgets a send
                        without its work, and the receiver waits forever. torch 2.9 first sends 8 bytes to
                        each neighbour, which receives 4: gloo ends the process.
"""

from __future__ import annotations

import contextlib

import wrapt


class _Works(list):
    def wait(self):
        for work in self:
            work.wait()


def _accelerator(module):
    original = module.current_accelerator

    def current_accelerator(check_available=False):
        accelerator = original()
        if accelerator is None:
            return None
        is_available = module.torch.get_device_module(accelerator).is_available()
        return accelerator if is_available else None

    module.current_accelerator = current_accelerator


def _streams(module):
    if not hasattr(module.Stream, "record_event"):
        module.Stream.wait_event = lambda self, event: None
    module.Stream.record_event = lambda self, event=None: event or object()


def _fully_shard(module):
    torch = module.torch
    original_factors = module._get_gradient_divide_factors
    original_copy = torch.ops.fsdp.split_with_sizes_copy

    # For float16, torch divides before and after a sum, instead of averaging.
    def divide_factors(scatter_group, reduce_group, dtype, *more):
        return original_factors(scatter_group, reduce_group, torch.float16, *more)

    def copied(*args, out, **kwargs):
        with contextlib.ExitStack() as stack:
            for tensor in out:
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            return original_copy(*args, out=out, **kwargs)

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
wrapt.register_post_import_hook(
    _fully_shard, "torch.distributed.fsdp._fully_shard._fsdp_collectives"
)
wrapt.register_post_import_hook(_pipelining, "torch.distributed.pipelining.schedules")
wrapt.register_post_import_hook(_first_messages, "torch.distributed.pipelining.stage")
