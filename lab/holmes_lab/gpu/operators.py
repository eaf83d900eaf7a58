"""Installs CPU kernels for torch's CUDA operators when a program on emulated GPUs imports torch.

The module is loaded when Python starts (holmes_lab/site), and acts after the program's imports:

    import of torch._C   libholmes_operators.so is loaded, and stores torch's C++ Meta kernels. A
                         Meta kernel computes only the shapes of an operator's results. The emulated
                         CUDA operators call them before they compute the results. This must be
                         early: the Python part of torch replaces some of these kernels by its own.
    import of torch      The CUDA operators get kernels that compute on the CPU (csrc/operators), and
                         torch.compile runs graphs without generating code.
    import of triton     Kernels run in triton's own interpreter.

The program itself is not changed. Each difference to a physical GPU is printed once, by the job's first rank.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

from holmes_lab.emulate.after_import import call_after_import

#: Environment variable with the path of libholmes_operators.so.
VARIABLE = "HOLMES_GPU_OPERATORS"
#: Environment variable for torch.compile: "eager" traces a model and runs the graph without generated code,
#: "off" does nothing (TORCHDYNAMO_DISABLE=1).
COMPILE_VARIABLE = "HOLMES_GPU_COMPILE"
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Backends of torch.compile that generate code for the GPU.
_CODE_GENERATORS = ("inductor", "cudagraphs", "onnxrt", "tensorrt")


def install_when_imported(library: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Prepare the environment of a program, and install the operators when it imports torch.

    This takes two steps, because the operators call torch's C++ Meta kernels, the functions that compute the
    shapes of results:

        after torch's C++ part (torch._C)    The library stores these kernels. Later, torch's Python
                                             part replaces some of them, and they could not be
                                             found.
        after all of torch                   The operators are installed, when torch has registered
                                             all operators that need a CPU kernel.

    Args:
        library: Path of libholmes_operators.so.
        environ: The environment of this process.
    """
    environ.setdefault("TRITON_INTERPRET", "1")  # triton runs kernels in an interpreter, on the CPU
    # Some of torch's operators have variants written in triton. Without these, the CPU kernels run.
    environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")
    if environ.get(COMPILE_VARIABLE) == "off":  # torch.compile is to do nothing
        environ["TORCHDYNAMO_DISABLE"] = "1"
    drop_expandable_segments(environ)  # emulated GPU memory cannot grow a segment
    loaded: list[ctypes.CDLL] = []  # the library, after the first step

    def after_torch_c(module: Any) -> None:
        loaded.append(_load(library, environ))

    def after_torch(torch: Any) -> None:
        _install(loaded[0], torch)

    call_after_import(
        {
            "torch._C": after_torch_c,
            "torch": after_torch,
            # The user should know that triton kernels do not run as on a GPU.
            "triton.runtime.interpreter": _announce_triton,
        }
    )


def drop_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Remove expandable_segments from the settings of torch's CUDA allocator.

    Expandable segments need virtual device addresses, and emulated memory has none. The allocator then uses
    ordinary segments.
    """
    for name in _ALLOCATOR_SETTINGS:
        settings = environ.get(name, "").split(",")
        kept = [
            setting for setting in settings if not setting.strip().startswith("expandable_segments")
        ]
        if len(kept) < len(settings):
            environ[name] = ",".join(kept)
            say(f"{name}: expandable_segments is ignored")


@functools.cache
def say(text: str) -> None:
    """Print a message once, and only on the job's first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"holmes: emulated GPU: {text}", file=sys.stderr, flush=True)


def _load(path: str, environ: MutableMapping[str, str]) -> ctypes.CDLL:
    """Load libholmes_operators.so, and let it store torch's C++ Meta kernels.

    A Meta kernel computes only the shapes of an operator's results. Each emulated operator first
    calls the stored Meta kernel, and then computes the results. The library must be loaded before
    torch's Python part replaces some of the Meta kernels by its own.

    Args:
        path: Path of the library.
        environ: The environment of this process.
    """
    # Emulated memory has no expandable segments: the setting for them is removed from those of torch's CUDA
    # allocator. The program may have set it before it imported torch.
    drop_expandable_segments(environ)
    library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    library.egpuOperatorsInstall.restype = ctypes.c_char_p  # called later, by _install()
    library.egpuOperatorsPrepare()  # stores the Meta kernels
    return library


def _install(library: ctypes.CDLL, torch: Any) -> None:
    """Install the kernels of the CUDA operators, and disable torch's compilers for GPU code.

    The process exits if torch rejects the kernels.
    """
    problem = library.egpuOperatorsInstall().decode()  # empty if torch accepts all kernels
    if problem:
        sys.exit(
            f"holmes: emulated GPU: torch {torch.__version__} refuses the operators: {problem}"
        )
    torch._C._jit_override_can_fuse_on_gpu(False)  # TorchScript's fuser would compile GPU code
    torch.compile = _without_code_generation(torch.compile)
    # A signal handler must be set in the process that uses CUDA, perhaps a later fork of this process.
    torch.cuda._lazy_call(_write_stacks_on_signal)


def _write_stacks_on_signal() -> None:
    """Write the Python stacks of this rank into a file whenever the process receives SIGUSR2.

    The thread that watches the rank (csrc/runtime/watch.cc) sends the signal when the job hangs. If the
    program uses SIGUSR2 itself, nothing changes.
    """
    directory = os.environ.get("HOLMES_GPU_WATCH")
    rank = os.environ.get("HOLMES_LAB_RANK")
    if not directory or not rank or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return
    # faulthandler needs the file for the rest of the process.
    file = open(os.path.join(directory, f"rank{rank}.stack"), "a")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def _without_code_generation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of torch.compile that uses backend "eager" instead of code generators."""

    @functools.wraps(original)
    def compile(model: Any = None, *, backend: Any = "inductor", **options: Any) -> Any:
        if backend is None or backend in _CODE_GENERATORS:
            say(
                'torch.compile traces but generates no code: backend "eager" '
                f"({COMPILE_VARIABLE}=off: it does nothing)"
            )
            backend = "eager"
            # The backend "eager" accepts neither.
            options.pop("mode", None)
            options.pop("options", None)
        return original(model, backend=backend, **options)

    return compile


def _announce_triton(interpreter: Any) -> None:
    """Wrap the launch of triton kernels, so that the first launch prints a message.

    The wrapper calls say() at each launch, which prints each text only once.

    Args:
        interpreter: The module triton.runtime.interpreter. Its GridExecutor is called for each launch.
    """
    launch = interpreter.GridExecutor.__call__

    @functools.wraps(launch)
    def announce_and_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        say("triton kernels run in triton's interpreter, and wait for their streams")
        return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = announce_and_launch
