"""Versions that do not work together are named as that."""

import importlib.metadata
import sys

import pytest

from holmes_ext import job, patches
from holmes_ext.doctor import frameworks
from holmes_ext.patches import conflicts as rules


@pytest.fixture
def stated(monkeypatch):
    """Replace megatron-core's metadata by the given one."""
    told = [
        "torch>=2.6.0",
        "nltk; extra == 'mlm'",
        "numpy>=99; extra == 'dev'",
        "not a requirement!",
    ]
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: told if name == "megatron-core" else None
    )


@pytest.mark.parametrize(
    "installed, expected",
    [
        ({"deepspeed": "0.14.3", "torch": "2.4.0"}, ["deepspeed 0.14.3 with torch 2.4.0"]),
        ({"deepspeed": "0.14.4", "torch": "2.13.0+cpu"}, []),
        ({"deepspeed": "0.14.3", "torch": "2.3.1"}, []),
        (
            {"deepspeed": "0.18.9", "torch": "2.13.0+cpu"},
            ["deepspeed 0.18.9 with torch 2.13.0+cpu"],
        ),
        ({"deepspeed": "0.18.3", "torch": "2.13.0+cpu"}, []),
        ({"megatron-core": "0.16.1", "torch": "2.5.1"}, ["megatron-core 0.16.1 with torch 2.5.1"]),
        ({"megatron-core": "0.16.1", "torch": "2.13.0", "numpy": "1.0"}, []),
        ({"torch": "2.5.1"}, []),
        ({}, []),
    ],
)
def test_conflicts(stated, installed, expected):
    assert [which for which, *_ in rules.conflicts(installed.get)] == expected


def test_the_doctor_names_both_and_not_holmes(stated, monkeypatch):
    monkeypatch.setattr(
        frameworks,
        "conflicts",
        lambda: rules.conflicts({"deepspeed": "0.14.0", "torch": "2.6"}.get),
    )
    (finding,) = frameworks.check_version_conflicts()
    assert finding.level == "problem" and "deepspeed 0.14.0 with torch 2.6" in str(finding)
    assert "with or without holmes" in str(finding) and "deepspeed>=0.14.4" in str(finding)


def test_a_free_threaded_python_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        job.activate(["--holmes"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1 and "PYTHON_GIL=1" in told
    assert "PYTHON_GIL=1" in next(frameworks.check_version_conflicts()).mend
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True)
    assert not patches.without_gil()


def test_what_cannot_be_imported_is_the_frameworks_own_trouble():
    patch = next(patch for patch in frameworks_patches() if patch.feature.name == "overlap")
    reason = "ImportError while importing deepspeed.runtime.pipe.engine: cannot import name 'log'"
    fits = [frameworks.Fit(patch, "0.14.0", "off", reason)] * 2
    (finding,) = frameworks.check_patches(fits)
    assert "with or without holmes" in str(finding) and "feature" not in finding.what


def frameworks_patches():
    from holmes_ext.patches import all_patches

    return all_patches()
