"""Tests Megatron-LM's own pretrain_gpt.py on two emulated clusters, with and without --holmes.

The script is that of a checkout of the repository, unmodified; tests/checkouts.py finds the checkout.
Megatron-LM is written for GPUs. Here it trains on CPUs, because a sitecustomize module loads
examples/megatron_core/on_cpu/megatron_cpu_shim.py into each process. When the script starts, it compiles its
data helpers, which needs pybind11, make and g++.
"""

import os
import re
import shutil
import sys
import sysconfig
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkouts import find_checkout, why_missing

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes

MEGATRON = find_checkout("Megatron-LM")
pytestmark = [
    pytest.mark.row("Megatron-LM's pretrain_gpt.py"),
    pytest.mark.skipif(MEGATRON is None, reason=why_missing("Megatron-LM")),
    pytest.mark.skipif(
        find_spec("pybind11") is None,
        reason="pretrain_gpt.py compiles its data helpers: pip install pybind11",
    ),
    pytest.mark.skipif(
        shutil.which("make") is None or shutil.which("g++") is None,
        reason="pretrain_gpt.py needs make and g++",
    ),
]

FLAGS = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 16 --train-iters 4 --lr 1e-3 --min-lr 1e-4
    --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 255
    --eval-iters 0 --eval-interval 1000 --log-interval 1
    --num-workers 0 --split 100,0,0 --attention-dropout 0 --hidden-dropout 0 --pipeline-model-parallel-size 2
    --transformer-impl local --distributed-backend gloo --no-rope-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion
""".split()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return variables_in(tmp_path_factory.mktemp("environment"))


def variables_in(folder):
    """Return the environment variables with which Megatron-LM's scripts train on CPUs.

    PYTHONPATH loads the shim for CPUs into each process. PATH has `python3` and `python3-config` of this
    Python, which Megatron-LM's Makefile calls.

    Args:
        folder: An empty folder for the files that the variables name.
    """
    from megatron_cpu_shim import write_sitecustomize

    site, tools = folder / "site", folder / "bin"
    site.mkdir()
    tools.mkdir()
    python_folder = Path(sys.executable).parent
    if not (python_folder / "python3").exists():
        (tools / "python3").symlink_to(sys.executable)
    # The Makefile needs only the suffix of extension modules from python3-config.
    config = tools / "python3-config"
    config.write_text(f"#!/bin/sh\necho {sysconfig.get_config_var('EXT_SUFFIX')}\n")
    config.chmod(0o755)

    python_path = [write_sitecustomize(site), str(MEGATRON)]
    if os.environ.get("PYTHONPATH"):
        python_path.append(os.environ["PYTHONPATH"])
    return {
        "PYTHONPATH": os.pathsep.join(python_path),
        "PATH": os.pathsep.join([str(tools), str(python_folder), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def pretrain(two_clusters, environment, *flags):
    """Train with pretrain_gpt.py on all nodes.

    Returns:
        iteration -> (loss, gradient norm), and the output of all ranks as one text.
    """
    script = str(MEGATRON / "pretrain_gpt.py")
    result = two_clusters.run(
        script,
        *FLAGS,
        *flags,
        env=environment,
        preload=("megatron.training.training",),  # imported before the ranks are forked
        timeout=400,
    )
    text = "\n".join(result.outputs.values())
    assert result.returncode == 0, text[-4000:]
    # Megatron-LM prints such a line after each iteration.
    pattern = r"iteration\s+(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) "
    printed = {}
    for iteration, loss, norm in re.findall(pattern, text):
        printed[int(iteration)] = (float(loss), float(norm))
    return printed, text


def holmes(two_clusters, *more):
    return "--holmes", "--holmes-cluster", str(two_clusters.file), *more


@pytest.fixture(scope="module")
def stock(two_clusters, environment):
    before = two_clusters.lab.counters()
    steps, _ = pretrain(two_clusters, environment)
    return steps, two_clusters.sent(before)


def test_losses_are_stocks_and_gradients_leave_ethernet(two_clusters, environment, stock):
    before = two_clusters.lab.counters()
    steps, text = pretrain(two_clusters, environment, *holmes(two_clusters))
    assert steps == stock[0] and sorted(steps) == [1, 2, 3, 4] and steps[4][0] < steps[1][0]
    assert "feature megatron" not in text  # none is off
    for node, nics in two_clusters.sent(before).items():
        assert nics["eth0"] < 0.7 * stock[1][node]["eth0"], (node, nics)
        fast = max(mb for nic, mb in nics.items() if nic != "eth0")
        assert fast > 0.3 * stock[1][node]["eth0"], (node, nics)


@pytest.mark.full(share=4)
def test_a_checkpoint_of_another_plan_is_told_and_resumed(
    two_clusters, environment, stock, tmp_path
):
    """Two steps with 2 + 2 layers and two more with 3 + 1 have the losses of an uninterrupted job."""
    saved = "--save", str(tmp_path / "saved"), "--save-interval", "100"
    first, _ = pretrain(
        two_clusters, environment, *holmes(two_clusters), *saved, "--exit-interval", "2"
    )
    plan = build_plan(site_from_spec(two_clusters.spec), Sizes(pipeline=2))
    replace(plan, stage_layers=(3, 1), partition="speed").save(tmp_path / "plan.json")
    more = holmes(two_clusters, "--holmes-plan", str(tmp_path / "plan.json"))
    second, text = pretrain(
        two_clusters, environment, *more, "--load", saved[1], "--exit-on-missing-checkpoint"
    )
    assert sorted(first) == [1, 2] and sorted(second) == [3, 4]
    # In a resumed job, the second loss that Megatron-LM prints is the mean of the first two steps (without
    # holmes, too).
    loss_3, _ = second[3]
    mean_loss, norm_4 = second[4]
    second[4] = (2 * mean_loss - loss_3, norm_4)
    for step, (loss, norm) in {**first, **second}.items():
        assert (loss, norm) == pytest.approx(stock[0][step], abs=5e-6), step
    assert text.count("the checkpoint was saved under another plan") == 1
    assert "layers for each stage: megatron's own; here" in text and "3+1" in text
    # the arguments that Megatron-LM prints
    assert re.search(r"pipeline_model_parallel_layout \.+ Ettt\|tL", text)


def test_help_shows_the_flags(two_clusters, environment):
    _, text = pretrain(two_clusters, environment, *holmes(two_clusters), "--help")
    assert "\nholmes:\n" in text and "--holmes-cluster" in text and "--holmes-plan" in text


@pytest.mark.full(share=4)
def test_a_checkpoint_of_another_model_is_one_line(two_clusters, environment, tmp_path):
    """A job that loads a checkpoint of a model with other shapes ends with a message without a traceback."""
    checkpoint = str(tmp_path / "saved")
    pretrain(
        two_clusters,
        environment,
        *holmes(two_clusters),
        "--save",
        checkpoint,
        "--save-interval",
        "100",
        "--exit-interval",
        "1",
    )  # saves a checkpoint after the first iteration, and ends
    flags = [
        *FLAGS,
        *holmes(two_clusters),
        "--load",
        checkpoint,
        "--exit-on-missing-checkpoint",
        "--ffn-hidden-size",
        "96",
    ]  # the saved model has another size here
    script = str(MEGATRON / "pretrain_gpt.py")
    result = two_clusters.run(
        script, *flags, env=environment, preload=("megatron.training.training",), timeout=400
    )
    text = "\n".join(result.outputs.values())
    assert result.returncode == 2, text[-4000:]
    assert text.count("holmes: --load: the checkpoint is another model's: ") == 1
    assert "Global shape mismatch" in text  # the reason, as megatron-core gives it
    assert "Traceback" not in text
