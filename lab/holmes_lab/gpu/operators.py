"""What happens when a program of an emulated GPU imports torch: its operators get kernels that the CPU
computes.

    torch._C        libholmes_operators.so is loaded: it remembers torch's
                    C++ Meta kernels before torch's Python part replaces them
    torch           the operators of the CUDA key get their kernels
                    (csrc/operators); torch.compile runs graphs eagerly
    triton          kernels run in triton's own interpreter

The program knows nothing of it. What differs from a GPU is said once, in one line, by the job's first rank.
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

#: The path of libholmes_operators.so, in the environment of a program on emulated GPUs.
VARIABLE = "HOLMES_GPU_OPERATORS"
#: "eager" (torch.compile traces, and runs what it has traced as it is) or "off" (TORCHDYNAMO_DISABLE=1).
COMPILE = "HOLMES_GPU_COMPILE"
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_FOR_DEVICE_CODE = ("inductor", "cudagraphs", "onnxrt", "tensorrt")  # backends of torch.compile


def install_when_imported(library: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Called at Python's start: prepares the environment, and hooks the imports. library:
    libholmes_operators.so."""
    environ.setdefault("TRITON_INTERPRET", "1")
    # operators that torch writes in triton: the CPU's instead
    environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")
    if environ.get(COMPILE) == "off":
        environ["TORCHDYNAMO_DISABLE"] = "1"
    drop_expandable_segments(environ)
    loaded: list[ctypes.CDLL] = []
    call_after_import(
        {
            "torch._C": lambda _: loaded.append(_load(library, environ)),
            "torch": lambda torch: _install(loaded[0], torch),
            "triton.runtime.interpreter": _tell_of_triton,
        }
    )


def drop_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Device memory has no virtual addresses of its own, so torch's allocator takes its ordinary segments."""
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
    """One line, once, of the job's first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"holmes: emulated GPU: {text}", file=sys.stderr, flush=True)


def _load(path: str, environ: MutableMapping[str, str]) -> ctypes.CDLL:
    drop_expandable_segments(environ)  # the program may have set it before its import
    library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    library.egpuOperatorsInstall.restype = ctypes.c_char_p
    library.egpuOperatorsPrepare()
    return library


def _install(library: ctypes.CDLL, torch: Any) -> None:
    problem = library.egpuOperatorsInstall().decode()
    if problem:
        sys.exit(
            f"holmes: emulated GPU: torch {torch.__version__} refuses the operators: {problem}"
        )
    torch._C._jit_override_can_fuse_on_gpu(False)  # TorchScript's fuser would compile device code
    torch.compile = _without_device_code(torch.compile)
    torch.cuda._lazy_call(_write_stacks_when_asked)  # in the process that uses CUDA, after a fork


def _write_stacks_when_asked() -> None:
    """The lab asks a job that hangs for its Python stacks (csrc/runtime/watch.cc)."""
    directory, rank = os.environ.get("HOLMES_GPU_WATCH"), os.environ.get("HOLMES_LAB_RANK")
    if (
        directory and rank and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    ):  # else it is the program's
        file = open(os.path.join(directory, f"rank{rank}.stack"), "a")
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def _without_device_code(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile whose backends that generate device code are "eager"."""

    @functools.wraps(original)
    def compile(model: Any = None, *, backend: Any = "inductor", **options: Any) -> Any:
        if backend is None or backend in _FOR_DEVICE_CODE:
            say(
                f'torch.compile traces but generates no code: backend "eager" ({COMPILE}=off: it does '
                f"nothing)"
            )
            backend = "eager"
            options.pop("mode", None)
            options.pop("options", None)
        return original(model, backend=backend, **options)

    return compile


def _tell_of_triton(interpreter: Any) -> None:
    original = interpreter.GridExecutor.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        say("triton kernels run in triton's interpreter, and wait for their streams")
        return original(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = __call__
