"""Tests that modules with patches are imported only when the program imports the framework that they patch.

The framework `fw<N>` and the module with its patches `fw<N>_patches` are written to disk for each test.
"""

import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
import textwrap

import pytest

from holmes_ext import patches
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches.engine.patch import Feature, PatchModule
from holmes_ext.patches.engine.registry import Registry
from holmes_ext.patches.torch.groups import _difference

#: Frameworks that a DDP job on PyTorch does not use, and modules of holmes that only they, pipelines, metrics
#: or telemetry need.
UNUSED_BY_DDP = (
    "holmes_ext.patches.megatron.core",
    "holmes_ext.patches.megatron.drop_in",
    "holmes_ext.patches.megatron.stage_links",
    "holmes_ext.patches.megatron.telemetry",
    "holmes_ext.patches.deepspeed.stage_links",
    "holmes_ext.patches.deepspeed.p2p",
    "holmes_ext.patches.deepspeed.reduce",
    "holmes_ext.patches.lightning.ranks",
    "holmes_ext.patches.torch.late_start",
    "holmes_ext.patches.torch.schedule",
    "holmes_ext.patches.torch.pipelining",
    "holmes_ext.runtime.groups.mailbox",
    "holmes_ext.runtime.measure.telemetry_file",
    "holmes_ext.runtime.watch.metrics",
    "holmes_ext.adapt.learning",
    "holmes_ext.join.training",
)
DDP_JOB = """
    import sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print("loaded:", *sorted(name for name in sys.modules if name.startswith("holmes_ext")))
    dist.destroy_process_group()
"""
PATCHES = """
    import holmes_modules_under_test as test
    from holmes_ext.patches.engine.patch import Patch

    def double(wrapped, instance, args, kwargs):
        return 2 * wrapped(*args, **kwargs)

    PATCHES = tuple(
        Patch(feature, target, "a test", wrap=double) for feature, target in test.TARGETS[__name__]
    )
"""
_number = itertools.count()


class FakeFramework:
    """Framework on disk, of version 1.5, whose function fw.comm.send returns its argument."""

    def __init__(self, folder, targets_by_module):
        self.folder = folder
        self.name = f"lazy_fw{next(_number)}"
        self.patches_name = f"{self.name}_patches"
        self._targets_by_module = targets_by_module
        self._write(f"{self.name}/__init__.py", "from .comm import send")
        self._write(f"{self.name}/comm.py", "def send(x): return x")
        self._write(f"{self.patches_name}.py", PATCHES)
        self._write(
            f"{self.name}-1.5.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {self.name}\nVersion: 1.5\n",
        )

    def _write(self, path, text):
        file = self.folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))

    def feature(self, name="f", **fields):
        return Feature(name, f"{self.name}>=1,<2", **fields)

    def registry(self, *features, target="comm:send"):
        """Return a registry that knows the features, whose patches are in the module with patches."""
        sys.modules.pop(self.patches_name, None)  # may have the patches of another registry
        self._targets_by_module[self.patches_name] = [
            (feature, f"{self.name}.{target}") for feature in features
        ]
        return Registry(modules=[PatchModule(self.patches_name, features, self.name)])

    def break_patches(self):
        self._write(f"{self.patches_name}.py", "1 / 0")

    def load(self):
        return importlib.import_module(self.name)

    @property
    def has_patches(self):
        """Whether the module with the patches is imported."""
        return self.patches_name in sys.modules


@pytest.fixture
def fw(tmp_path, monkeypatch):
    shared = type(sys)("holmes_modules_under_test")
    shared.TARGETS = {}
    monkeypatch.setitem(sys.modules, shared.__name__, shared)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("HOLMES_DISABLE", raising=False)
    finders = list(sys.meta_path)
    framework = FakeFramework(tmp_path, shared.TARGETS)
    yield framework
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if finder in finders or type(finder).__module__.startswith("wrapt")
    ]
    for name in [name for name in sys.modules if name.startswith(framework.name)]:
        del sys.modules[name]


def test_patches_are_imported_before_the_framework_runs(fw):
    registry = fw.registry(fw.feature())
    registry.enable_for_options(Options())
    assert not fw.has_patches and registry.summary() == (["f"], {})
    module = fw.load()
    assert fw.has_patches
    assert module.send(1) == module.comm.send(1) == 2  # __init__.py has copied the patched function
    assert [status.state for status in registry.statuses()] == ["applied"]
    registry.undo()
    assert module.send(1) == 1


def test_patches_are_imported_at_once_if_the_framework_is(fw):
    module = fw.load()
    fw.registry(fw.feature()).enable(["f"])
    assert fw.has_patches and module.send(1) == 2


def test_a_search_for_the_framework_is_no_import(fw):
    fw.registry(fw.feature()).enable(["f"])
    assert importlib.util.find_spec(fw.name) is not None
    assert not fw.has_patches
    assert fw.load().send(1) == 2


def test_patches_of_features_that_are_off_are_not_imported(fw, monkeypatch):
    monkeypatch.setenv("HOLMES_DISABLE", "disabled")
    registry = fw.registry(
        fw.feature("disabled"), fw.feature("other", option="overlap", idle=("auto",))
    )
    registry.enable_for_options(Options())
    assert fw.load().send(1) == 1 and not fw.has_patches
    registry.enable(["other"])
    assert fw.load().send(1) == 2 and fw.has_patches


def test_undo_removes_the_finder_and_enabling_again_brings_it_back(fw):
    registry = fw.registry(fw.feature())
    before = list(sys.meta_path)
    registry.enable(["f"])
    assert sys.meta_path != before
    registry.undo()
    assert sys.meta_path == before
    registry.enable(["f"])
    assert fw.load().send(1) == 2


def test_patches_that_cannot_be_imported_switch_their_features_off(fw):
    fw.break_patches()
    registry = fw.registry(fw.feature())
    registry.enable(["f"])
    assert fw.load().send(1) == 1
    assert registry.summary() == ([], {"f": "ZeroDivisionError: division by zero"})


def test_a_required_feature_whose_patches_cannot_be_imported_ends_the_import(fw):
    fw.break_patches()
    fw.registry(fw.feature()).enable(["f"], required=True)
    with pytest.raises(HolmesError, match="feature f cannot be used: ZeroDivisionError"):
        fw.load()


def test_statuses_show_patches_that_wait_for_the_framework(fw):
    registry = fw.registry(fw.feature())
    registry.enable(["f"])
    assert [(status.target, status.state) for status in registry.statuses()] == [
        (f"{fw.name}.comm:send", "waiting")
    ]
    assert fw.load().send(1) == 2  # the framework is still watched


@pytest.mark.parametrize("version_of", [None, lambda: "1.5", lambda: None])
def test_a_rank_that_imported_the_framework_agrees_with_one_that_did_not(fw, version_of):
    early, late = [
        fw.registry(fw.feature(version_of=version_of), fw.feature("other")) for _ in range(2)
    ]
    late.enable(["f"])
    without = {"who": "rank 0", **late.states()}
    late.undo()
    early.enable(["f"])
    fw.load()
    states = {"who": "rank 1", **early.states()}
    assert _difference(states, without) == _difference(without, states) == ""
    assert states["other"] == "off"


def test_ranks_that_imported_other_versions_differ(fw):
    fw.load()
    states = []
    for version in "1.5", "1.6":
        registry = fw.registry(fw.feature(version_of=lambda version=version: version))
        registry.enable(["f"])
        states.append({"who": version, **registry.states()})
        registry.undo()
    assert "are patched differently: f: it is 'on 1.5' on 1.5" in _difference(*states)


def test_modules_declare_the_features_of_their_patches():
    names = []
    for module in patches.MODULES:
        found = importlib.import_module(module.name).PATCHES
        assert {patch.feature.name for patch in found} == {
            feature.name for feature in module.features
        }
        for patch in found:
            assert (
                f"{patch.module}.".startswith(f"{module.package}.") or module.package == "torch"
            ), patch
        names += [patch.feature.name for patch in found]
    assert list(dict.fromkeys(names)) == [feature.name for feature in patches.core_features()]


def test_modules_of_a_feature_wait_for_one_package():
    """The patches of a feature are applied all or not at all, so they must be imported together."""
    packages = {}
    for module in patches.MODULES:
        for feature in module.features:
            assert packages.setdefault(feature.name, module.package) == module.package


def test_a_ddp_job_loads_nothing_of_other_frameworks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(DDP_JOB))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOLMES")}
    command = [sys.executable, "-m", "holmes_ext", str(script), "--holmes"]
    job = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    (line,) = [line for line in job.stdout.splitlines() if line.startswith("loaded:")]
    loaded = line.split()[1:]
    assert "holmes_ext.patches.torch.ddp" in loaded
    assert not set(loaded) & set(UNUSED_BY_DDP)
    assert len(loaded) < 180
