"""Tests what holmes sets in Megatron-LM's arguments, and how it checks Megatron-LM's checkpoints.

The parser and the arguments are stand-ins with the names of Megatron-LM's.
"""

import argparse
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from clusters import example

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches.megatron import flags, megatron_lm
from holmes_ext.patches.megatron.reduce import reduction as megatron_reduction
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process

SITE = example()


@pytest.fixture
def active(monkeypatch):
    """Return a function that makes a session with this plan the active one."""

    def activate(overlap="auto", **changes):
        options = Options(cluster="two.toml", overlap=overlap)
        plan = replace(build_plan(SITE, Sizes(pipeline=2), options=options), **changes)
        current = session.Session(
            options, Process(0, 4, 0, 1, "", 0, "test"), SITE, plan, 0, maker=maker
        )
        session.set_active(current)
        return current

    monkeypatch.setattr(megatron_reduction, "checkpoints_allow_buckets", False)
    monkeypatch.setattr(session, "_told", set())
    yield activate
    session.set_active(None)


def arguments(**changes):
    """Return the arguments of Megatron-LM's validate_args that matter here."""
    return SimpleNamespace(
        **{
            "hybrid_layer_pattern": None,
            "num_layers": 4,
            "pipeline_model_parallel_size": 2,
            "mtp_num_layers": None,
            "pipeline_model_parallel_layout": None,
            "num_virtual_stages_per_pipeline_rank": None,
            "num_layers_per_virtual_pipeline_stage": None,
            "distributed_backend": "gloo",
            "use_megatron_fsdp": False,
            "use_torch_fsdp2": False,
            "use_distributed_optimizer": False,
            "load": None,
            "save": None,
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
            "overlap_param_gather_with_optimizer_step": False,
            "align_grad_reduce": True,
            "dist_ckpt_optim_fully_reshardable": False,
            **changes,
        }
    )


def validated(**changes):
    args = arguments(**changes)
    megatron_lm._validate(lambda args: args, None, (args,), {})
    return args


def parse(*argv):
    def add_megatron_arguments(parser):
        percent = (
            "%" if sys.version_info < (3, 14) else "%%"
        )  # 3.14 refuses a bare one as it is added
        parser.add_argument("--ratio", help=f"so many {percent} mask tokens")
        return parser

    given = (argparse.ArgumentParser(prog="pretrain"),)
    parser = flags._add_flags_to_megatron_lm(add_megatron_arguments, None, given, {})
    return parser, parser.parse_args(argv)


def test_the_parser_shows_and_records_the_flags(active):
    current = active(stage_layers=(3, 1))
    parser, args = parse()
    assert args.holmes is True and args.holmes_cluster == "two.toml" and args.holmes_plan == ""
    assert args.holmes_plan_digest == current.plan.digest and args.holmes_stage_layers == [3, 1]
    text = parser.format_help()
    assert "\nholmes:\n" in text and "--holmes-cluster" in text and "so many % mask tokens" in text


def test_layers_and_overlap_are_set_as_arguments(active):
    active(stage_layers=(3, 1))
    args = validated()
    assert args.pipeline_model_parallel_layout == "Ettt|tL"
    assert args.overlap_grad_reduce and not args.align_grad_reduce and not args.overlap_param_gather
    assert validated(use_distributed_optimizer=True).overlap_param_gather


def test_the_users_own_split_and_other_model_classes_are_left_alone(active):
    active(stage_layers=(3, 1))
    assert (
        validated(pipeline_model_parallel_layout="Et|tttL").pipeline_model_parallel_layout
        == "Et|tttL"
    )
    assert validated(num_layers_per_virtual_pipeline_stage=1).pipeline_model_parallel_layout is None
    assert validated(hybrid_layer_pattern="M*M*").pipeline_model_parallel_layout is None
    assert not validated(use_megatron_fsdp=True).overlap_grad_reduce


@pytest.mark.parametrize("place", ["load", "save"])
def test_buckets_stay_where_a_checkpoint_depends_on_them(active, capsys, place):
    active()
    args = validated(use_distributed_optimizer=True, **{place: "somewhere"})
    assert (
        not args.overlap_grad_reduce
        and not args.overlap_param_gather
        and not megatron_reduction.checkpoints_allow_buckets
    )
    told = capsys.readouterr().err
    assert (
        told.count("buckets stay as they are") == told.count("\n") == 1
        and "--dist-ckpt-optim-fully-reshardable, or" in told
    )


@pytest.mark.parametrize("overlap, reshardable", [("auto", True), ("on", False)])
def test_buckets_are_planned_where_none_does_or_the_user_says_so(active, overlap, reshardable):
    active(overlap)
    args = validated(
        use_distributed_optimizer=True,
        save="there",
        load="there",
        dist_ckpt_optim_fully_reshardable=reshardable,
    )
    assert (
        args.overlap_grad_reduce
        and args.overlap_param_gather
        and megatron_reduction.checkpoints_allow_buckets == reshardable
    )


@pytest.mark.parametrize("digest, lines", [(None, 0), ("own", 0), ("0123456789", 1)])
def test_another_plans_checkpoint_is_told(active, capsys, digest, lines):
    current = active(stage_layers=(3, 1))
    saved = SimpleNamespace(
        holmes_plan_digest=current.plan.digest if digest == "own" else digest,
        holmes_stage_layers=[2, 2],
    )
    megatron_lm._compare_plans(lambda checkpoint_args: None, None, (), {"checkpoint_args": saved})
    told = capsys.readouterr().err
    assert (
        told.count("was saved under another plan (01234567, layers for each stage: 2+2; here")
        == lines
        and told.count("\n") == lines
    )


def test_parameters_that_the_check_of_a_checkpoint_gained_arrive(active):
    """Megatron-LM's check_checkpoint_args receives skip_args, a parameter that only newer versions have."""
    active()  # switches holmes on
    calls = []

    def check_checkpoint_args(checkpoint_args, skip_args=None):  # as in newer versions
        calls.append((checkpoint_args, skip_args))

    saved_args = SimpleNamespace()
    skipped = {"num_layers"}
    # holmes's wrapper of the check receives the function, no instance, and positional and keyword arguments.
    megatron_lm._compare_plans(check_checkpoint_args, None, (saved_args,), {"skip_args": skipped})
    megatron_lm._compare_plans(check_checkpoint_args, None, (saved_args, skipped), {})
    assert calls == [(saved_args, skipped), (saved_args, skipped)]


def test_another_models_checkpoint_is_refused_in_one_line(active):
    def check_checkpoint_args(checkpoint_args):
        raise AssertionError(
            "num_layers value from checkpoint (4) is not equal to the input argument value (8)."
        )

    active()
    with pytest.raises(
        HolmesError,
        match=r"--load: the checkpoint is another model's: num_layers value from checkpoint "
        r"\(4\)",
    ):
        megatron_lm._compare_plans(check_checkpoint_args, None, (SimpleNamespace(),), {})


class NoException(BaseException):
    """As torch.distributed.checkpoint's CheckpointException is."""


@pytest.mark.parametrize(
    "text",
    [
        "Global shape mismatch for loaded (torch.Size([64])) and expected ((128,)) tensor for key a.b",
        "CheckpointException ranks:dict_keys([1])\nKeyError: a.c from model not in state dict: ['a.b']",
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused_in_one_line(active, text):
    def load_checkpoint(*args, **kwargs):
        raise NoException(text)

    with pytest.raises(NoException):  # without holmes it stays as it is
        megatron_lm._load(load_checkpoint, None, (), {})
    active()
    with pytest.raises(
        HolmesError, match="--load: the checkpoint is another model's: .*a[.][bc]"
    ) as told:
        megatron_lm._load(load_checkpoint, None, (), {})
    assert "\n" not in str(told.value)


def test_other_errors_of_loading_stay_as_they_are(active):
    def load_checkpoint(*args, **kwargs):
        raise OSError("no space left")

    active()
    with pytest.raises(OSError):
        megatron_lm._load(load_checkpoint, None, (), {})
