"""Tests the command-line flags with which `holmes` proposes to start the best plan of a search.

Checked are the flags, the limits of each framework, and that both Megatrons' own parsers accept them.
"""

import subprocess
import sys
from dataclasses import replace
from math import inf

import pytest
from absent_modules import child_environment
from checkouts import checkout_or_skip
from clusters import example

from holmes_ext.patches.megatron.command_line.describe import sizes_from_arguments
from holmes_ext.patches.traits import ENGINES
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import Rules
from holmes_ext.planner.launch_flags import launches, limited
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.space import Limits

MODEL = Model(
    layers=6, hidden=512, heads=8, sequence=128, vocabulary=8000, global_batch=16, gpu=Gpu(20e12)
)


def best(framework=None, model=MODEL, **allowed):
    limits = Limits({**(ENGINES[framework].limits if framework else {}), **allowed})
    return searched("three_clusters_8", model, 16, limits).best


def searched(name, model, batch, limits, seconds=inf):
    """Return the result of a search that proves no bound."""
    result = SearchResult(Network(example(name)), model, batch, limits, Rules(overlap=True))
    return search(result, seconds, prove=False)


def within(framework, allowed, has_experts=False):
    return limited(Limits(allowed), ENGINES[framework], framework, has_experts)


#: Sites where gradients best cross, and some stages lie in two clusters.
SITES = ("three_clusters_8", "three_links_6")


@pytest.mark.parametrize("framework", sorted(ENGINES))
def test_no_row_of_a_framework_is_one_that_it_cannot_start(framework):
    model, few = (
        replace(MODEL, experts=4, sequence=2048),
        {"recompute": ("none",), "micro_batch": (1,)},
    )
    for name in SITES:
        for one in searched(
            name, model, 48, within(framework, few, has_experts=True), seconds=0.5
        ).candidates:
            launch = launches(one, model, 48, False, "c.toml", "plan.json")[framework]
            assert not launch.lacks, (name, one)


@pytest.mark.parametrize("framework", ["megatron-lm", "torchtitan"])
def test_hierarchical_are_of_all_stages_and_with_a_sharded_optimizer(framework):
    allowed = {"clusters": ("data",), "zero": (0, 1) if framework == "megatron-lm" else (1,)}
    found = searched("two_clusters_8", MODEL, 64, within(framework, allowed)).candidates
    two = [one for one in found if "hierarchical" in one.reductions]
    assert two and all(
        one.shape.zero == 1 and set(one.reductions) == {"hierarchical"} for one in two
    )


@pytest.mark.parametrize("framework", sorted(ENGINES))
def test_what_is_searched_for_a_framework_can_be_started_with_it(framework):
    launch = launches(best(framework), MODEL, 16, True, "c.toml", "plan.json")[framework]
    assert not launch.lacks and ("--holmes-plan", "plan.json") in zip(
        launch.flags, launch.flags[1:]
    )


def test_sizes_are_read_back():
    one = best(
        tensor=(1,), pipeline=(2,), context=(2,), virtual=(3,), recompute=("full",), zero=(1,)
    )
    launch = launches(one, MODEL, 16, False, "c.toml", "plan.json")["megatron-lm"]
    sizes = sizes_from_arguments(list(launch.flags))
    assert (sizes.pipeline, sizes.tensor, sizes.context) == (2, 1, 2)
    text = " ".join(launch.flags)
    assert (
        "--num-virtual-stages-per-pipeline-rank 3" in text
        and "--recompute-granularity full --recompute-method uniform" in text
    )


def test_a_plan_of_listed_passes_asks_for_them():
    """Without the flag the job decides on 1F1B."""
    one = best("deepspeed", pipeline=(2,))
    for passes, asked in ((), False), (("F0 B0", "F0 I0 W0"), True):
        launch = launches(replace(one, schedule=passes), MODEL, 16, True, "c.toml", "plan.json")[
            "deepspeed"
        ]
        assert (("--holmes-schedule", "auto") in zip(launch.flags, launch.flags[1:])) == asked


def test_what_deepspeed_lacks_is_said():
    one = best(pipeline=(2,), context=(2,), virtual=(3,))
    for name in ("deepspeed", "megatron-deepspeed"):
        assert (
            "virtual 3 (limit virtual=1)" in launches(one, MODEL, 16, False, "c", "p")[name].lacks
        )


def test_deepspeeds_config():
    one = best("deepspeed", pipeline=(2,), zero=(1,))
    launch = launches(one, MODEL, 16, True, "c.toml", "plan.json")["deepspeed"]
    config, shape = launch.config, one.shape
    assert config["train_batch_size"] == 16 == shape.micro_batch * shape.micro_batches * shape.data
    assert (
        config["zero_optimization"] == {"stage": 1}
        and config["pipeline"]["stages"] == 2
        and "--holmes-overlap" in launch.flags
    )


PARSE = """
import argparse, sys, types
sys.path.insert(0, sys.argv[1])
import importlib
import os
# not on the command line: --holmes there would switch holmes on
kind, flags = sys.argv[2], os.environ["TEST_FLAGS"].split()
sys.argv = ["pretrain_gpt.py"]
from absent_modules import stand_in_for_absent_modules
stand_in_for_absent_modules()
if kind == "lm":
    from megatron.training.arguments import add_megatron_arguments
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
else:
    made = []
    real = argparse.ArgumentParser.parse_args
    def caught(self, *args, **kwargs):
        made.append(self)
        raise SystemExit(77)
    argparse.ArgumentParser.parse_args = caught
    import deepspeed
    package = types.ModuleType("megatron")  # not its __init__, which imports all of it
    package.__path__ = [os.path.join(sys.path[0], "megatron")]
    package.get_retro_args = package.get_args = lambda: None
    sys.modules["megatron"] = package
    arguments = importlib.import_module("megatron.arguments")
    try:
        arguments.parse_args()
    except SystemExit:
        pass
    argparse.ArgumentParser.parse_args = real
    parser = made[0]
found, unknown = parser.parse_known_args(flags)
print(sorted(set(unknown)), found.tensor_model_parallel_size, found.pipeline_model_parallel_size,
      found.micro_batch_size, found.global_batch_size)
"""


def parsed(kind, folder, flags):
    environ = child_environment(DS_ACCELERATOR="cpu", WORLD_SIZE="1", TEST_FLAGS=" ".join(flags))
    done = subprocess.run(
        [sys.executable, "-c", PARSE, folder, kind],
        capture_output=True,
        text=True,
        timeout=300,
        env=environ,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


HOLMES = [
    "--holmes",
    "--holmes-cluster",
    "--holmes-overlap",
    "--holmes-plan",
    "c.toml",
    "on",
    "plan.json",
]


def test_megatron_lms_own_parser():
    folder = str(checkout_or_skip("Megatron-LM"))
    moe = replace(MODEL, experts=4, sequence_parallel=True)
    one = best(
        "megatron-lm",
        moe,
        pipeline=(2,),
        tensor=(1,),
        virtual=(3,),
        recompute=("selective",),
        zero=(1,),
    )
    flags = launches(one, moe, 16, True, "c.toml", "plan.json")["megatron-lm"].flags
    unknown, *sizes = parsed("lm", folder, flags).rsplit(" ", 4)
    assert set(eval(unknown)) <= set(HOLMES) and sizes == [
        "1",
        "2",
        str(one.shape.micro_batch),
        "16",
    ]


def test_megatron_deepspeeds_own_parser():
    folder = str(checkout_or_skip("Megatron-DeepSpeed"))
    one = best("megatron-deepspeed", pipeline=(2,), recompute=("full",), zero=(1,))
    flags = launches(one, MODEL, 16, True, "c.toml", "plan.json")["megatron-deepspeed"].flags
    unknown, *sizes = parsed("ds", folder, flags).rsplit(" ", 4)
    assert set(eval(unknown)) <= set(HOLMES) and sizes == [
        str(one.shape.tensor),
        "2",
        str(one.shape.micro_batch),
        "16",
    ]
