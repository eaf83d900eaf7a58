"""Lets megatron-core train on a machine without CUDA.

The functions of torch.cuda are replaced by functions for the CPU, and process groups use gloo. There are two
ways to use the shim:

    import megatron_cpu_shim                               in a script, before megatron is imported
    PYTHONPATH=<directory made by write_sitecustomize()>   for scripts that cannot be edited, and for the
                                                           processes that they start

The import changes torch and one method of megatron. It does nothing if CUDA is available. Tests and examples
use the shim; no part of holmes_ext does. It was made for megatron-core 0.14 to 0.16 and Megatron-LM's main
branch. It does not support sequence parallelism (whose norm needs Transformer Engine or Apex), NCCL and CUDA
graphs.
"""

import contextlib
import functools
import os
import sys
import types

import wrapt

SITECUSTOMIZE = "import runpy, os\nrunpy.run_path({path!r}, run_name='megatron_cpu_shim')\n"


def write_sitecustomize(directory) -> str:
    """Write a file sitecustomize.py, which imports this shim, into a directory.

    Every Python process with the directory on its PYTHONPATH imports sitecustomize when it starts.

    Returns:
        The directory.
    """
    with open(os.path.join(directory, "sitecustomize.py"), "w", encoding="utf-8") as file:
        file.write(SITECUSTOMIZE.format(path=os.path.abspath(__file__)))
    return os.fspath(directory)


def install() -> bool:
    """Change torch so that Megatron, which requires CUDA, trains on CPUs.

    Returns:
        Whether torch was changed: False if CUDA is available, or if torch has been changed before.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch.compile would generate code for CUDA
    import torch

    if torch.cuda.is_available() or getattr(torch.cuda, "_on_cpu", False):
        return False
    torch.cuda._on_cpu = True  # so that a second call changes nothing
    _devices(torch)  # torch.cuda reports one GPU
    _tensors(torch)  # tensors for a CUDA device are made on the CPU
    _moves(torch)  # .to("cuda") and .cuda() leave them there
    _tensor_types(torch)  # their types have the names of CUDA tensors
    _streams(torch)  # CUDA streams and events do nothing
    _random_state(torch)  # CUDA's random numbers are the CPU's
    _make_adam_resumable(torch)  # checkpoints of Adam's state can be loaded
    _experts()  # mixtures of experts run without Transformer Engine
    _modules(torch)  # stand-ins for modules that Megatron-LM imports but does not call on CPUs
    return True


def _devices(torch):
    """Make torch.cuda report one GPU, which is the CPU."""
    cpu = torch.device("cpu")
    properties = types.SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=2**36, multi_processor_count=1
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": cpu,
        "get_device_capability": (8, 0),
        "get_device_properties": properties,
        "get_device_name": "CPU",
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "memory_stats": {},
        "mem_get_info": (2**36, 2**36),
        "is_current_stream_capturing": False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "init",
        "_lazy_init",
        "reset_peak_memory_stats",
        "ipc_collect",
    ):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.device = lambda *args, **kwargs: contextlib.nullcontext()


def _off_cuda(device):
    """Return "cpu" for a CUDA device, and any other value unchanged.

    Args:
        device: A name ("cuda:0"), a torch.device, a number or None. A number is the index of a CUDA
            device, as for torch.
    """
    if isinstance(device, str):
        device_type = device.split(":")[0]  # "cuda" of "cuda:0"
    else:
        device_type = getattr(device, "type", device)
    # bool is a subclass of int, but no index of a device.
    is_number = isinstance(device_type, int) and not isinstance(device_type, bool)
    if device_type == "cuda" or is_number:
        return "cpu"
    return device


def _tensors(torch):
    """Make tensors for a CUDA device on the CPU."""

    def redirect(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if kwargs.get("device") is not None:
                kwargs["device"] = _off_cuda(kwargs["device"])
            return function(*args, **kwargs)

        return call

    for name in (
        "empty",
        "zeros",
        "ones",
        "full",
        "tensor",
        "rand",
        "randn",
        "randint",
        "arange",
        "eye",
        "linspace",
        "as_tensor",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randperm",
    ):
        setattr(torch, name, redirect(getattr(torch, name)))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, redirect(getattr(torch.Tensor, name)))


def _moves(torch):
    """Leave tensors and modules on the CPU when a program moves them to a CUDA device."""

    def moved(to):
        @functools.wraps(to)
        def call(self, *args, **kwargs):
            if args and not isinstance(args[0], (torch.Tensor, torch.dtype)):
                args = (_off_cuda(args[0]), *args[1:])
            if kwargs.get("device") is not None:
                kwargs["device"] = _off_cuda(kwargs["device"])
            return to(self, *args, **kwargs)

        return call

    # Builds of torch for CUDA need a driver to pin memory.
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = moved(kind.to)
        kind.cuda = lambda self, *args, **kwargs: self


def _tensor_types(torch):
    """Name tensors' types as on a CUDA device.

    Tensor.type() returns names like torch.cuda.FloatTensor, because megatron's optimizers compare them.
    """
    plain_type = torch.Tensor.type

    def cuda_type(self, *args, **kwargs):
        result = plain_type(self, *args, **kwargs)
        if isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = cuda_type
    for name in (
        "FloatTensor",
        "HalfTensor",
        "BFloat16Tensor",
        "DoubleTensor",
        "IntTensor",
        "LongTensor",
        "ByteTensor",
    ):
        if hasattr(torch, name):  # torch.cuda.LongTensor([...]), which batch broadcasts use
            setattr(torch.cuda, name, getattr(torch, name))


def _streams(torch):
    """Replace CUDA's streams and events by objects that do nothing.

    The CPU runs operations in their order anyway.
    """

    class Stream:
        cuda_stream = 0

        def __init__(self, *args, **kwargs):
            pass

        def __getattr__(self, name):  # wait_stream, synchronize, record_event, query, ...
            return lambda *args, **kwargs: Event() if name == "record_event" else True

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            return False

    class Event(Stream):
        def elapsed_time(self, end):
            return 0.0

    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda *args, _stream=Stream(), **kwargs: _stream)
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    torch.cuda.set_stream = lambda *args, **kwargs: None
    torch.Tensor.record_stream = lambda *args, **kwargs: None
    torch.cuda.nvtx = types.SimpleNamespace(
        range_push=lambda *a: None,
        range_pop=lambda *a: None,
        mark=lambda *a: None,
        range=lambda *a, **k: contextlib.nullcontext(),
    )


def _random_state(torch):
    """Make the CPU's random generator serve as CUDA's.

    This must run before megatron is imported: its tensor_parallel/random.py copies torch.cuda._lazy_call.
    """
    get_state = torch.get_rng_state
    set_state = torch.set_rng_state
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *args, **kwargs: get_state()
        module.set_rng_state = lambda state, *args, **kwargs: set_state(state)
        module.manual_seed = module.manual_seed_all = lambda seed: (
            torch.default_generator.manual_seed(int(seed))
        )
    torch.cuda.default_generators = (torch.default_generator,)
    torch.cuda._lazy_call = lambda call, **kwargs: call()

    class Index:
        """Stand-in for torch.cuda.default_generators: each index gives the CPU's generator.

        Megatron-LM indexes that sequence with torch.cuda.current_device(). The shim makes this a
        torch.device, which cannot index a tuple.
        """

        def __getitem__(self, _):
            return torch.default_generator

    torch.cuda.default_generators = Index()

    def warm_up(module):
        """Make the warm-up of Megatron-LM's fused kernels leave the CPU's generator unchanged.

        This replaces `_warmup_jit_function` of the module in place, right after the module is
        imported. On a GPU, the warm-up draws from the GPU's generator only. Weights that are then
        drawn on the CPU (--use-cpu-initialization) must be the same as with a GPU.

        Args:
            module: The imported megatron.training.initialize.
        """
        draw = module._warmup_jit_function

        def drawn(*args, **kwargs):
            with torch.random.fork_rng(devices=[]):
                draw(*args, **kwargs)

        module._warmup_jit_function = drawn

    wrapt.register_post_import_hook(warm_up, "megatron.training.initialize")


def _make_adam_resumable(torch):
    """Change torch's Adam so that Megatron can resume from a checkpoint with it.

    Megatron expects the behaviour of Transformer Engine's and Apex's Adam, which differ from torch's:
        - state_dict() before the first step has a state for each parameter: zeros, at step 0.
        - load_state_dict() gives each parameter a `step` tensor of its own. Megatron passes a single tensor
          for all parameters, which torch would advance once for each of them.
        - Megatron's distributed optimizer sets weights and moments of a parameter without its `step`, which
          must stay as it is.
    """
    # This check would call the CUDA driver, which CUDA builds of torch do not find without a GPU.
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None
    load = torch.optim.Optimizer.load_state_dict

    def load_with_own_steps(self, *args, **kwargs):
        result = load(self, *args, **kwargs)
        for state in self.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        return result

    torch.optim.Optimizer.load_state_dict = load_with_own_steps
    state_dict = torch.optim.Adam.state_dict

    def state_dict_with_zeros(self, *args, **kwargs):
        if not self.state:  # before the first step
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
        return state_dict(self, *args, **kwargs)

    torch.optim.Adam.state_dict = state_dict_with_zeros  # also for AdamW, a subclass of Adam

    def keep_step(module):
        set_state = module.DistributedOptimizer._set_main_param_and_optimizer_states

        def set_state_with_step(self, model_param, tensors, *args, **kwargs):
            group, index = self.model_param_group_index_map[model_param]
            parameter = self.optimizer.param_groups[group]["params"][index]
            step = self.optimizer.state[parameter]["step"]
            # Megatron's method copies a tensor for each key of the state, also for "step".
            return set_state(self, model_param, {"step": step.clone(), **tensors}, *args, **kwargs)

        module.DistributedOptimizer._set_main_param_and_optimizer_states = set_state_with_step

    # keep_step is called with the module once Megatron imports it.
    wrapt.register_post_import_hook(keep_step, "megatron.core.optimizer.distrib_optimizer")


def _experts():
    """Make mixtures of experts work without Transformer Engine and CUDA.

    When megatron-core's moe_utils is imported, two things are changed in the module. The name
    te_general_gemm, which exists only with Transformer Engine and is read by 0.16, becomes None.
    maybe_move_tensor_to_cpu(as_numpy=True) returns a numpy array for CPU tensors, too. Unchanged,
    it converts GPU tensors only, but the token dispatcher needs an array for all_to_all_single.
    """

    def mend(module):
        """Change moe_utils right after its import, as described above."""
        if not hasattr(module, "te_general_gemm"):
            module.te_general_gemm = None
        move = getattr(module, "maybe_move_tensor_to_cpu", None)
        if move is not None:

            @functools.wraps(move)
            def moved(tensor, as_numpy=False, **kwargs):
                """Move a tensor to the CPU; with as_numpy, return a numpy array in any case."""
                result = move(tensor, as_numpy=as_numpy, **kwargs)
                return result.numpy() if as_numpy and hasattr(result, "numpy") else result

            module.maybe_move_tensor_to_cpu = moved

    wrapt.register_post_import_hook(mend, "megatron.core.transformer.moe.moe_utils")


def _modules(torch):
    """Provide what Megatron-LM imports or decorates with, but does not need on a CPU.

    - triton, if it is not installed: empty modules. torch is told that there is no triton.
    - torch.compile: returns the function unchanged, since there is no compiler for the CPU.
    - typing.override, before Python 3.12: a decorator that changes nothing.
    """
    import importlib.util
    import typing

    import torch.utils._triton
    import torch.utils.flop_counter  # noqa: F401 - it would use classes of the empty triton below

    def compile(model=None, **kwargs):
        return model if model is not None else lambda function: function

    torch.compile = compile

    if not hasattr(typing, "override"):  # Python before 3.12
        typing.override = lambda method: method
    if importlib.util.find_spec("triton") is None:
        # torch must not use the empty module.
        torch.utils._triton.has_triton_package = torch.utils._triton.has_triton = lambda: False
        sys.meta_path.append(_DummyFinder("triton"))


class _DummyFinder:
    """Finder that provides empty modules for a package and everything below it.

    Every attribute of such a module is a decorator that changes nothing.
    """

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        from importlib.machinery import ModuleSpec

        if name == self.package or name.startswith(f"{self.package}."):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Dummy(spec.name)

    def exec_module(self, module):
        pass


class _Dummy(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: (
            args[0] if args and callable(args[0]) else lambda function: function
        )


install()
