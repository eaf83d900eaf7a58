"""Unmodified modules of slime, miles, verl and vLLM, imported without the packages that need GPUs.

The modules come from checkouts in the folder of tests/checkouts.py. What they import of ray, Megatron and so
on is replaced by stubs, which each test names. Without a checkout the test is skipped.
"""

import importlib
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from checkouts import checkouts_folder


@dataclass(frozen=True)
class Stack:
    """Repository whose modules the tests import."""

    name: str  # of its folder and its Python package
    url: str
    commit: str  # with which the tests were last run
    expected_file: str

    def folder_or_skip(self):
        """Return the folder of the checkout; skip the test that is running if there is none."""
        folder = checkouts_folder() / self.name
        if not (folder / self.expected_file).is_file():
            pytest.skip(f"no {folder}: git clone {self.url} {folder} (last run: {self.commit})")
        return folder


_UPDATE = "backends/megatron_utils/update_weight"
SLIME = Stack(
    name="slime",
    url="https://github.com/THUDM/slime",
    commit="624b824a898ab0ec1fcb4d373004c7f3852bf515",
    expected_file=f"slime/{_UPDATE}/update_weight_from_disk_delta.py",
)
MILES = Stack(
    name="miles",
    url="https://github.com/radixark/miles",
    commit="31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
    expected_file=f"miles/{_UPDATE}/update_weight_from_distributed/delta.py",
)
VERL = Stack(
    name="verl",
    url="https://github.com/verl-project/verl",
    commit="1dda039b9c6311889a9c9a26040677e1254814f9",
    expected_file="verl/checkpoint_engine/base.py",
)
VLLM = Stack(
    name="vllm",
    url="https://github.com/vllm-project/vllm",
    commit="v0.33.0, 4ba787ec9",
    expected_file="vllm/distributed/weight_transfer/factory.py",
)


#: Modules of examples/weights that another test must import anew.
_EXAMPLES = {"slime_hooks", "verl_engine", "vllm_engine", "weight_files"}


class Anything:
    """Stub of a class or function: can be called, indexed, used as a decorator, and has all attributes."""

    def __call__(self, *args, **kwargs):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return ()


class _StubModule(types.ModuleType):
    """Module that has every name that is imported from it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


@contextmanager
def imported(packages=(), stubs=None, paths=()):
    """Let modules be imported while the block runs; afterwards, sys.modules is as before.

    Args:
        packages: Pairs (name of a package, its folder): its modules can be imported, its __init__ is not run.
        stubs: Name of a module -> its attributes; it has any other name, too.
        paths: Folders for sys.path.
    """
    modules, path = dict(sys.modules), list(sys.path)
    sys.path[:0] = map(str, paths)
    try:
        for name, folder in packages:
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
        for name, attributes in (stubs or {}).items():
            stub = _StubModule(name)
            stub.__path__ = []
            stub.__dict__.update(attributes)
            sys.modules[name] = stub
        yield importlib.import_module
    finally:
        sys.path[:] = path
        roots = {name for name, _ in packages} | set(stubs or {}) | _EXAMPLES
        for name in list(sys.modules):
            if name in roots or name.partition(".")[0] in roots:
                del sys.modules[name]
        sys.modules.update({name: modules[name] for name in modules if name not in sys.modules})
