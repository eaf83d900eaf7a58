"""Tests that the command that `holmes plan` prints has the step time that it promises.

Each command is planned, the new command for the best plan is read from the output, and `holmes plan`
predicts the step of this new command. Both steps must have the same printed digits.
"""

import json
import os
from pathlib import Path

import pytest

from holmes_ext.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = str(EXAMPLES / "clusters" / "two_clusters_8.toml")
MODEL = str(EXAMPLES / "models" / "deepspeed_demo.toml")
#: A GPT that fits any GPU, without sizes and recomputation.
SMALL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
    "--max-position-embeddings 256 --vocab-size 5000 --micro-batch-size 1 --global-batch-size 32"
)
LM = f"torchrun --nproc-per-node 1 pretrain_gpt.py {SMALL} --bf16"
MDS = f"deepspeed pretrain_gpt.py {SMALL} --deepspeed --deepspeed_config ds.json"


def planned(capsys, command, *options):
    """Return the JSON that `holmes plan` prints for a command."""
    arguments = ["plan", "--cluster", CLUSTER, "--json", "--rows", "1", "--seconds", "3"]
    status = main([*arguments, *options, "--", *command])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


def check_round_trip(capsys, folder, command, limits, options=(), config=None):
    """Plan a command, run the printed one through `holmes plan`, and return (edit, first result).

    Args:
        limits: Values of --limit, so that another plan than the command's is the best.
        options: Further options of `holmes plan`.
        config: Content of ds.json; None: the command names no ds_config.
    """
    if config is not None:
        (folder / "ds.json").write_text(json.dumps(config))
    os.chdir(folder)
    limited = [word for limit in limits.split() for word in ("--limit", limit)]
    first = planned(capsys, command.split(), *limited, *options)
    (launch,) = first["launch"].values()
    edit = launch["edit"]
    assert not launch["lacks"] and edit is not None
    if edit["config"]:
        (folder / edit["config_file"]).write_text(json.dumps(edit["config"]))
    again = planned(capsys, edit["command"], *limited, *options)
    assert f"{again['yours']['step_seconds']:.4g}" == f"{launch['step_s']:.4g}"
    return edit, first


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


@pytest.mark.parametrize("name", MEGATRON_LM)
def test_printed_command_of_megatron_lm_has_the_promised_step(capsys, monkeypatch, tmp_path, name):
    command, limits, gone = MEGATRON_LM[name]
    monkeypatch.chdir(tmp_path)
    edit, _ = check_round_trip(capsys, tmp_path, command, limits)
    assert not set(gone.split()) & set(edit["command"])
