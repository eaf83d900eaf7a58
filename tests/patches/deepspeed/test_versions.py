"""Tests that patches/deepspeed/versions.py reads each setting as the installed DeepSpeed stores it."""

from types import SimpleNamespace

import pytest

from holmes_ext.patches.deepspeed import versions

ENGINE = SimpleNamespace(
    zenflow=object(),
    dynamic_shape=True,
    torch_autocast_enabled=lambda: True,
    is_deepcompile_enabled=lambda: True,
    checkpoint_engine=SimpleNamespace(is_decoupled=lambda: True),
    _config=SimpleNamespace(
        bfloat16_immediate_grad_update=False,
        bfloat16_config=SimpleNamespace(immediate_grad_update=True),
    ),
)


@pytest.mark.parametrize(
    "version, answer",
    [
        ("0.17.1", "old"),
        ("0.17.2a0+79aa17489c", "new"),
        ("0+unknown", "new"),
        (None, "new"),
    ],
)
def test_the_table_answers_as_the_installed_version(monkeypatch, version, answer):
    monkeypatch.setattr(versions, "installed_version", lambda _: version)
    readers = (versions.Reader("0", lambda _: "old"), versions.Reader("0.17.2", lambda _: "new"))
    monkeypatch.setitem(versions._TABLE, "test setting", readers)
    assert versions.read_by_version("test setting", ENGINE) == answer


@pytest.mark.parametrize(
    "name, first",
    [
        ("deepcompile", "0.16.6"),
        ("torch_autocast", "0.17.2"),
        ("zenflow", "0.17.5"),
        ("dynamic_shape", "0.15.0"),
        ("immediate_grad_update", "0.17.1"),
        ("decoupled_checkpoint", "0.17.1"),
    ],
)
def test_an_engine_is_asked_as_its_version_answers(monkeypatch, name, first):
    for version, answer in (
        ("0.14.5", False),
        (first, True),
        (f"{first}+abc", True),
        ("0.19.8", True),
    ):
        monkeypatch.setattr(versions, "installed_version", lambda _, version=version: version)
        assert versions.read_by_version(name, ENGINE) is answer, version


def test_gradients_that_are_not_where_they_are_reduced(monkeypatch):
    zero = SimpleNamespace(
        use_grad_accum_attribute=True,
        bit16_groups=[[], []],
        _use_compact_grad_partition_buffer=lambda group: group == 1,
    )
    for version, changed, answer in (
        ("0.19.7", False, True),
        ("0.19.8", False, True),
        ("0.19.8", True, False),
        ("0.19.7", True, True),
    ):
        zero._use_compact_grad_partition_buffer = (
            (lambda group: False) if changed else (lambda group: group == 1)
        )
        monkeypatch.setattr(versions, "installed_version", lambda _, version=version: version)
        assert versions.read_by_version("sums_outside_grad", zero) is answer, (version, changed)
