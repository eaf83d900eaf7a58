"""Lets torchtitan 0.2.2 and 0.3.0, which need GPUs, train on CPUs. It has nothing to do with holmes.

Python imports this module at its start if the folder is on PYTHONPATH. What it changes:

    torchtitan/models/moe/kernels.py       imports triton, which torch's CPU build does not have. The jobs
                                           have no experts, so an empty module is enough.
    torch.cpu                              gets the functions for names and memory of devices.
    FlexAttention (0.3.0)                  has no backward pass on CPUs. It is replaced by dense attention
                                           with the same mask.
    FSDPModule.set_gradient_divide_factor  makes FSDP reduce with PREMUL_SUM, which gloo does not support.
                                           FSDP divides before and after a plain sum instead.
"""

import collections
import importlib.abc
import importlib.machinery
import sys
import types

import wrapt

KERNELS = "torchtitan.models.moe.kernels"


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == KERNELS else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.generate_permute_indices = None
        return module

    def exec_module(self, module):
        pass


def _device_type(module):
    module._get_available_device_type = lambda: "cpu"


def _device(module):
    module.get_device_name = lambda device=None: "cpu"
    module.get_device_properties = lambda device=None: types.SimpleNamespace(
        name="cpu", total_memory=2**34
    )
    module.memory_stats = lambda device=None: collections.defaultdict(int)
    module.reset_peak_memory_stats = module.empty_cache = module.set_device = lambda device=None: (
        None
    )
    module.current_device = lambda: 0


def _attention(module):
    from torch.nn.attention.flex_attention import create_mask
    from torch.nn.functional import scaled_dot_product_attention

    def dense(q, k, v, *, block_mask, scale, enable_gqa, **more):
        mask = create_mask(
            block_mask.mask_mod, len(q), None, q.shape[-2], k.shape[-2], device="cpu"
        )
        return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None

    module.FlexAttention._compiled_flex_attn = staticmethod(dense)


def _fsdp(module):
    """Let FSDP reduce gradients with SUM: gloo has no PREMUL_SUM, which a divide factor would need."""
    original = module.FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.set_force_sum_reduction_for_comms(True)

    module.FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


sys.meta_path.insert(0, _Kernels())
wrapt.register_post_import_hook(_device_type, "torch._utils")
wrapt.register_post_import_hook(_device, "torch.cpu")
wrapt.register_post_import_hook(_fsdp, "torch.distributed.fsdp._fully_shard._fully_shard")
wrapt.register_post_import_hook(_attention, "torchtitan.models.common.attention")
