"""Tests that the command that `holmes plan` prints has the step time that it promises.

Each command is planned, the new command for the best plan is read from the output, and `holmes plan`
predicts the step of this new command. Both steps must have the same printed digits.
"""

import json
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
from absent_modules import child_environment
from checkouts import checkout_or_skip

from holmes_ext.cli.main import main
from holmes_ext.planner.show.time_limit import TimeLimit

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = str(EXAMPLES / "clusters" / "two_clusters_8.toml")
MODEL = str(EXAMPLES / "models" / "deepspeed_demo.toml")
INPUTS = Path(__file__).parents[1] / "inputs"
#: A GPT that fits any GPU, without sizes and recomputation.
SMALL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
    "--max-position-embeddings 256 --vocab-size 5000 --micro-batch-size 1 --global-batch-size 32"
)
LM = f"torchrun --nproc-per-node 1 pretrain_gpt.py {SMALL} --bf16"
MDS = f"deepspeed pretrain_gpt.py {SMALL} --deepspeed --deepspeed_config ds.json"


@pytest.fixture(autouse=True)
def output_without_deadline(monkeypatch):
    """Let the output take the time that it needs, also on a busy machine, so that every step is predicted."""
    monkeypatch.setattr(TimeLimit, "simulations_end", inf)


def planned(capsys, command, *options, cluster=CLUSTER):
    """Return the JSON that `holmes plan` prints for a command."""
    arguments = ["plan", "--cluster", cluster, "--json", "--rows", "1", "--seconds", "3"]
    status = main([*arguments, *options, "--", *command])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


def check_round_trip(capsys, folder, command, limits, options=(), config=None, again=None):
    """Plan a command, run the printed one through `holmes plan`, and return the changes.

    Args:
        limits: Values of --limit, so that another plan than the command's is the best.
        options: Further options of `holmes plan`.
        config: Content of ds.json; None: the command names no ds_config.
        again: Options of the second run of `holmes plan`; None: those of the first.
    """
    if config is not None:
        (folder / "ds.json").write_text(json.dumps(config))
    limited = [word for limit in limits.split() for word in ("--limit", limit)]
    first = planned(capsys, command.split(), *limited, *options)
    (launch,) = first["launch"].values()
    edit = launch["edit"]
    assert not launch["lacks"] and edit is not None
    if edit["config"]:
        (folder / edit["config_file"]).write_text(json.dumps(edit["config"]))
    second_options = options if again is None else again
    second = planned(capsys, edit["command"], *limited, *second_options)
    assert f"{second['yours']['step_seconds']:.4g}" == f"{launch['step_s']:.4g}"
    return edit


#: Name of a case -> (command, limits of the search, words that the new command must not have).
MEGATRON_LM = {
    "dense": (f"{LM} --tensor-model-parallel-size 2", "tensor=1 pipeline=2", ""),
    "full recomputation": (
        f"{LM} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "recompute=none pipeline=2",
        "--recompute-granularity --recompute-method --recompute-num-layers",
    ),
    "selective recomputation": (
        f"{LM} --recompute-activations --pipeline-model-parallel-size 2",
        "recompute=full tensor=2",
        "--recompute-activations",
    ),
    "old flags of recomputation": (
        f"{LM} --activations-checkpoint-method uniform --activations-checkpoint-num-layers 2",
        "recompute=selective",
        "--activations-checkpoint-method --activations-checkpoint-num-layers",
    ),
    "recomputation that stays": (
        f"{LM} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "recompute=full pipeline=2",
        "",
    ),
    "chunks by layers": (
        f"{LM} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        "pipeline=2 virtual=4",
        "--num-virtual-stages-per-pipeline-rank",
    ),
    "chunks that go": (
        f"{LM} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--overlap-param-gather-with-optimizer-step",
        "pipeline=1",
        "--num-layers-per-virtual-pipeline-stage --overlap-param-gather-with-optimizer-step",
    ),
    "chunks that come": (
        f"{LM} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
        "pipeline=2 virtual=2 tensor=2",
        "--decoder-first-pipeline-num-layers",
    ),
    "layers of the stages": (
        f"{LM} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*5L",
        "pipeline=4 virtual=1",
        "--pipeline-model-parallel-layout",
    ),
    "distributed optimizer goes": (
        f"{LM} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "zero=0 pipeline=2",
        "--use-distributed-optimizer --overlap-param-gather",
    ),
    "distributed optimizer comes": (f"{LM} --overlap-grad-reduce", "zero=1 pipeline=2", ""),
    "Megatron-FSDP": (
        f"{LM} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --init-model-with-meta-device",
        "pipeline=2 zero=1",
        "--use-megatron-fsdp --data-parallel-sharding-strategy --ckpt-format",
    ),
    "FSDP2": (
        f"{LM} --use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format torch_dist",
        "pipeline=2 zero=1",
        "--use-torch-fsdp2",
    ),
    "context": (
        f"{LM} --context-parallel-size 2 --cp-comm-type a2a",
        "context=1 pipeline=2",
        "--cp-comm-type",
    ),
    "context comes": (f"{LM} --tensor-model-parallel-size 2", "context=2 tensor=1", ""),
    "sequence parallel goes": (
        f"{LM} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        "tensor=1",
        "--sequence-parallel --tp-comm-overlap",
    ),
    "sequence parallel stays": (
        f"{LM} --tensor-model-parallel-size 2 --sequence-parallel",
        "tensor=4",
        "",
    ),
    "experts": (
        f"{LM} --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 4",
        "expert=2 tensor=1",
        "",
    ),
    "experts and tensors": (
        f"{LM} --num-experts 4 --expert-tensor-parallel-size 1 --moe-layer-freq 2",
        "expert=2 tensor=2",
        "",
    ),
    "experts without sequence parallelism": (
        f"{LM} --num-experts 4 --tensor-model-parallel-size 2",
        "tensor=4 pipeline=1",
        "",
    ),
    "order of the ranks": (
        f"{LM} --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping",
        "order=tp-cp-ep-dp-pp pipeline=2 tensor=2",
        "--use-tp-pp-dp-mapping",
    ),
    "optimizer instances": (
        f"{LM} --use-distributed-optimizer --num-distributed-optimizer-instances 2",
        "reduction=flat pipeline=2",
        "--num-distributed-optimizer-instances",
    ),
    "optimizer instances come": (
        f"{LM} --use-distributed-optimizer --pipeline-model-parallel-size 2",
        "reduction=hierarchical clusters=data zero=1 pipeline=1",
        "",
    ),
    "flags of an earlier plan": (
        f"{LM} --holmes --holmes-cluster old.toml --holmes-sizes pipeline=2 --holmes-partition 3,5",
        "pipeline=1",
        "--holmes-sizes --holmes-partition old.toml",
    ),
    "same flag twice": (
        f"{LM} --tensor-model-parallel-size 4 --tensor-model-parallel-size=2",
        "tensor=1",
        "--tensor-model-parallel-size=2",
    ),
}


#: Name of a case -> words of the printed command, for the tests that have run.
printed: dict[str, list[str]] = {}


@pytest.mark.full(share=4)
@pytest.mark.parametrize("name", MEGATRON_LM)
def test_printed_command_of_megatron_lm_has_the_promised_step(capsys, monkeypatch, tmp_path, name):
    command, limits, gone = MEGATRON_LM[name]
    monkeypatch.chdir(tmp_path)
    edit = check_round_trip(capsys, tmp_path, command, limits)
    printed[name] = edit["command"]
    assert not set(gone.split()) & set(edit["command"])
    if "--num-experts" in command and "tensor=1" not in limits:
        assert "--sequence-parallel" in edit["command"]


VALIDATE = """
import argparse, json, os, sys
from unittest.mock import MagicMock
sys.path.insert(0, sys.argv[1])
from absent_modules import stand_in_for_absent_modules
stand_in_for_absent_modules()
import torch
torch.cuda.get_device_capability = lambda *given: (8, 0)
torch.cuda.get_device_properties = lambda *given: MagicMock(major=8, minor=0)
from megatron.training import arguments
OTHERS = "--tokenizer-type NullTokenizer --train-iters 1 --lr 0.1 --use-cpu-initialization".split()
problems = {}
for name, words in json.loads(os.environ["TEST_COMMANDS"]).items():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    args, unknown = parser.parse_known_args([*words, *OTHERS])
    unknown = [word for word in unknown if word.startswith("--") and "holmes" not in word]
    args.rank, args.world_size = 0, 8
    try:
        arguments.validate_args(args)
    except Exception as error:
        problems[name] = repr(error)
    if unknown:
        problems[name] = unknown
print(json.dumps(problems))
"""


@pytest.mark.full(share=4)
def test_megatron_lm_accepts_the_printed_commands(tmp_path):
    """Its own validate_args() ends with an error for flags that do not go together."""
    folder = str(checkout_or_skip("Megatron-LM"))
    commands = {
        name: words[words.index("pretrain_gpt.py") + 1 :] for name, words in printed.items()
    }
    if not commands:
        pytest.skip("the tests that print the commands have not run in this process")
    environment = child_environment(
        CUDA_DEVICE_MAX_CONNECTIONS="1", WORLD_SIZE="8", TEST_COMMANDS=json.dumps(commands)
    )
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE, folder],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def zero(stage, **more):
    """Return a ds_config with a ZeRO stage."""
    batch = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 1}
    return {**batch, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0, **more}


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 12}}
BF16 = {"bf16": {"enabled": True}}
#: Name of a case -> (command, ds_config, limits, words that the new command must not have).
MEGATRON_DEEPSPEED = {
    "ZeRO 1, half precision": (
        f"{MDS} --fp16 --tensor-model-parallel-size 2 --zero-stage 1",
        zero(1, **FP16),
        "pipeline=2 tensor=1",
        "",
    ),
    "ZeRO 2 becomes a pipeline": (
        f"{MDS} --bf16 --no-pipeline-parallel --zero-stage 2",
        zero(2, **BF16),
        "pipeline=2 zero=1",
        "--no-pipeline-parallel",
    ),
    "ZeRO 3": (
        f"{MDS} --bf16 --no-pipeline-parallel --zero-stage 3",
        zero(3, **BF16),
        "zero=2",
        "",
    ),
    "pipeline becomes ZeRO 3": (
        f"{MDS} --bf16 --pipeline-model-parallel-size 2",
        zero(1, **BF16),
        "pipeline=1 zero=3",
        "",
    ),
    "checkpointed activations": (
        f"{MDS} --bf16 --checkpoint-activations --deepspeed-activation-checkpointing "
        "--partition-activations --tensor-model-parallel-size 2",
        zero(0, **BF16),
        "recompute=none pipeline=2",
        "--checkpoint-activations --deepspeed-activation-checkpointing --partition-activations",
    ),
    "overlap in two places": (
        f"{MDS} --bf16 --no-pipeline-parallel",
        zero(1, **BF16) | {"zero_optimization": {"stage": 1, "overlap_comm": False}},
        "pipeline=2 zero=1",
        "",
    ),
    "Ulysses": (
        f"{MDS} --bf16 --ds-sequence-parallel-size 2 --no-pipeline-parallel",
        zero(1, **BF16),
        "tensor=2",
        "--ds-sequence-parallel-size",
    ),
}


@pytest.mark.full(share=4)
@pytest.mark.parametrize("name", MEGATRON_DEEPSPEED)
def test_printed_command_and_ds_config_have_the_promised_step(capsys, monkeypatch, tmp_path, name):
    command, config, limits, gone = MEGATRON_DEEPSPEED[name]
    monkeypatch.chdir(tmp_path)
    edit = check_round_trip(capsys, tmp_path, command, limits, config=config)
    assert not set(gone.split()) & set(edit["command"])
    for key in ("fp16", "bf16", "gradient_clipping"):
        assert edit["config"].get(key) == config.get(key)


#: Name of a case -> (ds_config, limits).
DEEPSPEED_SCRIPTS = {
    "pipeline comes": (zero(1, **FP16), "pipeline=2 zero=1"),
    "pipeline goes": (zero(1, pipeline={"stages": 2, "partition": "type:block"}), "pipeline=1"),
    "recomputation goes": (
        zero(1, pipeline={"stages": 2, "activation_checkpoint_interval": 1}),
        "pipeline=4 recompute=none",
    ),
    "recomputation comes": (zero(1, pipeline={"stages": 2}), "pipeline=2 recompute=full"),
    "uneven layers": (zero(0, pipeline={"stages": 2}), "pipeline=4 zero=0 tensor=1"),
}


@pytest.mark.full(share=4)
@pytest.mark.parametrize("name", DEEPSPEED_SCRIPTS)
def test_printed_command_of_a_deepspeed_script_has_the_promised_step(
    capsys, monkeypatch, tmp_path, name
):
    config, limits = DEEPSPEED_SCRIPTS[name]
    monkeypatch.chdir(tmp_path)
    command = "deepspeed train.py --deepspeed_config ds.json"
    check_round_trip(capsys, tmp_path, command, limits, ["--model", MODEL], config)


@pytest.mark.parametrize(
    "option, flag", [("--inflight", "--holmes-inflight"), ("--overlap", "--holmes-overlap")]
)
def test_options_of_holmes_plan_become_flags_of_the_command(
    capsys, monkeypatch, tmp_path, option, flag
):
    monkeypatch.chdir(tmp_path)
    command = f"{LM} --tensor-model-parallel-size 2"
    edit = check_round_trip(
        capsys, tmp_path, command, "pipeline=2 tensor=1", [option, "off"], again=[]
    )
    assert (flag, "off") in zip(edit["command"], edit["command"][1:])


def test_split_backward_passes_become_a_flag_of_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    edit = check_round_trip(
        capsys,
        tmp_path,
        "train.py --deepspeed_config ds.json",
        "pipeline=4 tensor=1",
        # Without an end before the order of passes is found; the search itself takes a second.
        ["--schedule", "auto", "--model", MODEL, "--seconds", "60"],
        config=zero(0, pipeline={"stages": 2}),
        again=["--model", MODEL],
    )
    assert ("--holmes-schedule", "auto") in zip(edit["command"], edit["command"][1:])


def test_command_with_a_plan_file_has_the_order_of_nodes_of_the_plan(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = f"{LM} --tensor-model-parallel-size 2 --sequence-parallel"
    output = ["--output", "plan.json"]
    edit = check_round_trip(capsys, tmp_path, command, "tensor=4", output, again=[])
    assert ("--holmes-plan", "plan.json") in zip(edit["command"], edit["command"][1:])


def test_flags_of_recomputation_are_taken_out(capsys, monkeypatch):
    """With the other flags only appended, the step takes 13.15 s instead of the promised 10.04 s."""
    monkeypatch.setenv("COLUMNS", "200")
    cluster = str(INPUTS / "two.toml")
    command = (INPUTS / "recompute_stays" / "command").read_text().split()
    limits = ["--limit", "tensor=1,pipeline=2,micro_batch=1,recompute=none,virtual=1"]
    first = planned(capsys, command, *limits, cluster=cluster)
    launch = first["launch"]["megatron-lm"]
    edit = launch["edit"]
    assert edit["flags"]["remove"] == [
        "--recompute-granularity full",
        "--recompute-method uniform",
        "--recompute-num-layers 1",
    ]
    assert ["--tensor-model-parallel-size", "4", "1"] in edit["flags"]["change"]
    second = planned(capsys, edit["command"], *limits, cluster=cluster)
    assert f"{second['yours']['step_seconds']:.4g}" == f"{launch['step_s']:.4g}"
    assert launch["step_s"] < 0.8 * first["yours"]["step_seconds"]
    # What is printed without --json.
    main(["plan", "--cluster", cluster, *limits, "--print-command", "--", *command])
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "  remove --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "  change --tensor-model-parallel-size 4 -> 1",
    ):
        assert line in lines, line
    whole = lines[lines.index("megatron-lm: the new command") + 1]
    assert whole.startswith("pretrain_gpt.py --num-layers 40 ") and "--recompute" not in whole
