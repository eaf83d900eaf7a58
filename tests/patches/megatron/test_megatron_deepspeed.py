import argparse
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches.megatron import features, flags
from holmes_ext.patches.megatron.command_line.refusals import refused_first_rank
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime import session

#: Python 3.14 refuses a bare one as the argument is added: there these programs do not start.
PERCENT = "%" if sys.version_info < (3, 14) else "%%"
SESSION = SimpleNamespace(options=Options(cluster="c.toml"), plan=Plan("digest", ("a0", "b0"), 1))


def parser():
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("--rotary-percent", default=1.0, help=f"default 100{PERCENT}")
    return flags.suggest_similar_flags(flags.add_flags(made, SESSION))


def test_help_names_the_flags_though_a_text_has_a_bare_percent():
    text = parser().format_help()
    assert "--holmes-cluster" in text and "--holmes-plan" in text and "default 100%" in text


def test_a_wide_node_must_begin_at_a_multiple_of_its_gpus(monkeypatch):
    """Megatron-DeepSpeed asserts that the local rank is rank % GPUs of the node."""
    widths = {"a0": 4, "a1": 4, "b0": 8}
    plan = Plan("digest", ("a0", "b0", "a1"), 4, processes_of=widths)
    line = refused_first_rank(plan)
    assert "node b0 with 8 GPUs begins at rank 4, no multiple of 8" in line
    assert refused_first_rank(replace(plan, nodes=("a0", "a1", "b0"))) == ""
    monkeypatch.setattr(session, "_active", SimpleNamespace(plan=plan, store=None))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(HolmesError, match="begins at rank 4"):
        flags._add_flags_to_megatron_deepspeed(parse_args, None, (), {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # then it chooses no GPU
    assert flags._add_flags_to_megatron_deepspeed(parse_args, None, (), {}) == "parsed"


def parse_args(extra_args_provider=None):
    """Stands for megatron.arguments.parse_args."""
    return "parsed"


def test_args_hold_what_was_given():
    args = parser().parse_args([])
    assert args.holmes and args.holmes_cluster == "c.toml" and args.holmes_nodes == ["a0", "b0"]


def test_the_usage_error_names_the_near_miss(capsys):
    with pytest.raises(SystemExit) as end:
        parser().parse_args(["--holms-plan", "x"])
    assert end.value.code == 2
    assert (
        "unrecognized arguments: --holms-plan x; --holms-plan: did you mean --holmes-plan?"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        parser().parse_args(["--rotary"])
    assert "did you mean" not in capsys.readouterr().err


def test_the_vendored_megatron_core_is_not_taken_for_the_installed_one(tmp_path, monkeypatch):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for name in ("megatron", "megatron.core", "megatron.core.package_info"):
        monkeypatch.setitem(
            sys.modules, name, sys
        )  # so that it is put back, or removed, at the end
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "megatron" / "__init__.py").touch()
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("__version__ = '0.2.0'\n")
    assert features.loaded_version() == "0.2.0"  # the real one of that version: told to be too old
    (tmp_path / "megatron" / "arguments.py").write_text(
        "parser = deepspeed.add_config_arguments(parser)\n"
    )
    assert features.loaded_version() is None
