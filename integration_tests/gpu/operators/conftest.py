"""Makes pytest run this folder's tests on an emulated GPU.

    python -m pytest integration_tests/gpu/operators     needs the CUDA build of torch (make gpu)

The emulated GPU is a set of libraries in the place of CUDA's. A process must load them when it starts.
Therefore pytest replaces itself by a new pytest process with these libraries in LD_PRELOAD. It does so only
if the command line names no tests outside this folder. All other runs of pytest ignore this folder.
"""

import os
import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MARK = "HOLMES_TEST_EMULATED_GPU"


def has_cuda_build() -> bool:
    for folder in sys.path:
        version = Path(folder, "torch", "version.py")
        if version.exists():
            return re.search(r"^cuda.* = '", version.read_text(), re.MULTILINE) is not None
    return False


def emulated_environment() -> dict[str, str]:
    """Build the emulated GPU if needed, and return the environment of a process with two such GPUs."""
    from holmes_lab.gpu import recipes
    from holmes_lab.gpu.build import build
    from holmes_lab.gpu.cache import cache_folder
    from holmes_lab.gpu.compiler import find_compiler
    from holmes_lab.gpu.torch_build import find_torch

    torch = find_torch(sys.executable, os.environ)
    compiler = find_compiler()
    built = build(
        [recipes.runtime(compiler, torch.cuda), recipes.operators(compiler, torch)], cache_folder()
    )
    names = (f"libcudart.so.{torch.cuda[0]}", "libcuda.so.1", "libnvidia-ml.so.1")
    runtime = [built["runtime"] / name for name in names]
    site = ROOT / "lab" / "holmes_lab" / "site"
    return {
        **os.environ,
        MARK: "1",
        "LD_PRELOAD": " ".join(map(str, runtime)),
        "HOLMES_GPU_COUNT": "2",
        "HOLMES_GPU_OPERATORS": str(built["operators"] / "libholmes_operators.so"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")])),
    }


def pytest_configure(config):
    paths = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    only_this_folder = all(path.is_relative_to(HERE) for path in paths)
    if MARK in os.environ or not only_this_folder or not has_cuda_build():
        return
    config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
    os.execve(
        sys.executable,
        [sys.executable, "-m", "pytest", *config.invocation_params.args],
        emulated_environment(),
    )


def pytest_ignore_collect(collection_path, config):
    return None if MARK in os.environ else True


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()
