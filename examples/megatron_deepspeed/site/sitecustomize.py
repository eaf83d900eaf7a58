"""Lets Megatron-DeepSpeed (2025-07) run with current packages on a machine without GPUs.

holmes does not need this file. It is used as follows:

    PYTHONPATH=<this folder>   Python imports sitecustomize at start-up
    STAND_INS=1                without holmes: empty modules stand for packages that a GPT run imports and
                               never uses. Under --holmes, holmes does this (patches/megatron/unused.py).

Four functions are changed when their modules are imported:

    CoreAttention.forward            It views tensors that are not contiguous (micro-batches above 1).
    build_shm_op                     DeepSpeed's shared-memory op leaves its buffers in /dev/shm.
    DistributedAttention.forward     --ds-sequence-parallel-size without flash attention passes the mask in
                                     the position of another parameter.
    all_gather_into_tensor           The sequence-parallel loss uses shapes that gloo rejects.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

import wrapt

#: Imported by Megatron-DeepSpeed, or by what it imports, and never called by pretrain_gpt.py.
UNUSED = ("deepspeed.compression.compress", "torchvision")


class _Name:
    """Stand-in for an attribute of an unused module: a base class, a function or a decorator."""

    def __init__(self, *args, **kwargs):
        pass


class _Empty(types.ModuleType):
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        spec = importlib.util.find_spec(f"{self.__name__}.{name}")
        if spec and name.islower():
            return importlib.import_module(spec.name)
        return type(name, (_Name,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of empty modules for packages that are not installed.

    It is the last one on sys.meta_path, so it is called only for modules that no other finder finds.
    """

    def find_spec(self, name, path=None, target=None):
        is_unused = any(name == unused or name.startswith(unused + ".") for unused in UNUSED)
        if is_unused and os.environ.get("STAND_INS"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        pass


def _contiguous(wrapped, instance, args, kwargs):
    query, key, value, *rest = args
    return wrapped(query.contiguous(), key.contiguous(), value.contiguous(), *rest, **kwargs)


def _ulysses(wrapped, instance, args, kwargs):
    """Let Megatron-DeepSpeed call DeepSpeed's DistributedAttention.forward with its old signature.

    The old one is (query, key, value, mask). The present one is (query, key, value, batch_dim_idx,
    rotary_pos_emb, mask). The arguments are put into the present order.

    DeepSpeed expects an output [sequence, batch, heads, head size] of the local attention. CoreAttention
    joins the last two dimensions, so a hook separates them.
    """
    query, key, value, mask, *rest = args
    if isinstance(mask, int):  # it is batch_dim_idx: the caller uses the present signature
        return wrapped(*args, **kwargs)
    if not instance.local_attn._forward_hooks:
        instance.local_attn.register_forward_hook(
            lambda core, _, out: out.view(
                *out.shape[:2], core.num_attention_heads_per_partition, -1
            )
        )
    # 1: index of the batch dimension in [sequence, batch, ...]. None: no rotary embedding.
    return wrapped(query, key, value, 1, None, mask, *rest, **kwargs).flatten(2)


def _mend_attention(module):
    wrapt.wrap_function_wrapper(module, "CoreAttention.forward", _contiguous)


def _mend_ulysses(module):
    wrapt.wrap_function_wrapper(module, "DistributedAttention.forward", _ulysses)


def _flat(wrapped, instance, args, kwargs):
    def call(output_tensor, input_tensor, *rest, **more):
        return wrapped(output_tensor.view(-1), input_tensor.reshape(-1), *rest, **more)

    return call(*args, **kwargs)


def _mend_sequence_loss(module):
    wrapt.wrap_function_wrapper(module.torch.distributed, "all_gather_into_tensor", _flat)


def _mend_shm(module):
    module.build_shm_op = lambda: None


sys.meta_path.append(Finder())
wrapt.register_post_import_hook(_mend_attention, "megatron.model.transformer")
wrapt.register_post_import_hook(_mend_shm, "deepspeed.comm.torch")
wrapt.register_post_import_hook(_mend_ulysses, "deepspeed.sequence.layer")
wrapt.register_post_import_hook(
    _mend_sequence_loss, "megatron.core.sequence_parallel.cross_entropy"
)
