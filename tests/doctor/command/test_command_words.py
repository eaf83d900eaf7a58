"""Tests that the training script is found in commands with wrappers, shells and several launchers."""

import contextlib
import random
import shlex

import pytest

from holmes_ext.doctor.command.command_words import split_command
from holmes_ext.doctor.command.launch import stated_nodes
from holmes_ext.errors import HolmesError

SCRIPT = "pretrain_gpt.py --num-layers 24 --bf16"
#: Commands that all start SCRIPT with torchrun.
WRAPPED = [
    f"torchrun --nnodes 2 {SCRIPT}",
    f"bash -c 'torchrun --nnodes 2 {SCRIPT}'",
    f"sh -lc 'cd /work; torchrun --nnodes 2 {SCRIPT} > log 2>&1'",
    f"bash -euo pipefail -c 'torchrun --nnodes 2 {SCRIPT} | tee log'",
    f"bash -o pipefail --login -c 'torchrun --nnodes 2 {SCRIPT}'",
    f"/usr/bin/bash -c 'source env.sh && pip install -e . && torchrun --nnodes 2 {SCRIPT}'",
    f"bash -c 'python tools/prepare.py; torchrun --nnodes 2 {SCRIPT}'",
    f"bash -c 'torchrun --nnodes 2 {SCRIPT}; python tools/clean_up.py'",
    f"bash -c 'LAYERS=24; torchrun --nnodes 2 {SCRIPT.replace('24', '$LAYERS')}'",
    f"bash -c \"bash -c 'torchrun --nnodes 2 {SCRIPT}'\"",
    f"srun --nodes 2 --ntasks-per-node 1 bash -c 'torchrun --nnodes 2 {SCRIPT}'",
    f"srun --container-image=nvcr.io/nvidia/pytorch:25.01-py3 --container-mounts /a:/b --mpi=pmix "
    f"bash -c 'torchrun --nnodes 2 {SCRIPT}'",
    f"sbatch --wrap 'srun torchrun --nnodes 2 {SCRIPT}'",
    f"sbatch -N 2 '--wrap=srun torchrun --nnodes 2 {SCRIPT}'",
    f"env NCCL_DEBUG=INFO numactl --cpunodebind=0 nohup torchrun --nnodes 2 {SCRIPT}",
    f"nsys profile -t cuda -o out torchrun --nnodes 2 {SCRIPT}",
    f"singularity exec --nv -B /a:/b image.sif torchrun --nnodes 2 {SCRIPT}",
    f"apptainer exec --nv image.sif bash -c 'torchrun --nnodes 2 {SCRIPT}'",
    f"docker run --rm --gpus all -v /a:/b nvcr.io/x bash -lc 'torchrun --nnodes 2 {SCRIPT}'",
    f"enroot start --rw image torchrun --nnodes 2 {SCRIPT}",
    f"kubectl exec pod-0 -- torchrun --nnodes 2 {SCRIPT}",
    f"ray job submit --address http://a:1 -- torchrun --nnodes 2 {SCRIPT}",
    f"ssh node1 torchrun --nnodes 2 {SCRIPT}",
    f"ssh -p 22 -o A=b root@node1 'cd /work; torchrun --nnodes 2 {SCRIPT}'",
    f"'torchrun --nnodes 2 {SCRIPT}'",
    f"qrsh -inherit -V node1 eval 'torchrun --nnodes 2 {SCRIPT}'",
    f"uv run torchrun --nnodes 2 {SCRIPT}",
    f"python -u -m torch.distributed.run --nnodes 2 {SCRIPT}",
    f"python3 -m torch.distributed.launch --nnodes=2 {SCRIPT}",
]


@pytest.mark.parametrize("line", WRAPPED)
def test_the_script_is_found_inside_of_wrappers(line):
    command = split_command(shlex.split(line))
    assert command.script == "pretrain_gpt.py" and not command.hidden_model and not command.unread
    assert command.arguments == ("--num-layers", "24", "--bf16")
    assert stated_nodes(command).nodes == 2


@pytest.mark.parametrize(
    "line, module, arguments",
    [
        ("python -m my.train --x", "my.train", ("--x",)),
        ("torchrun --nnodes 2 -m my.train --x a.py", "my.train", ("--x", "a.py")),
        ("torchrun --module my.train -m 3", "my.train", ("-m", "3")),
        ("accelerate launch -m my.train", "my.train", ()),
        ("python -m torch.distributed.run --nnodes 2 -m my.train --x", "my.train", ("--x",)),
        ("numactl -m 0 python -m my.train", "my.train", ()),
    ],
)
def test_a_module_is_found_after_its_launcher(line, module, arguments):
    command = split_command(line.split())
    assert command.script == "" and command.launcher[-1] == module
    assert command.arguments == arguments


@pytest.mark.parametrize(
    "line, program",
    [
        ("megatron sft --model Qwen/Qwen3-235B-A22B", "megatron sft"),
        ("NNODES=2 megatron pt --load x", "megatron pt"),
        ("swift sft --model x", "swift sft"),
        ("llamafactory-cli train llama3.yaml", "llamafactory-cli train"),
        ("srun -N 2 bash -c 'axolotl train config.yml'", "axolotl train"),
        ("accelerate launch -m axolotl.cli.train config.yml", "-m axolotl.cli.train"),
        ("tune run --nnodes 2 lora_finetune_distributed --config llama3/70B_lora", "tune run"),
        ("nemo llm pretrain --factory llama3_8b trainer.num_nodes=2", "nemo llm"),
        ("xtuner train config.py --deepspeed zero3", "xtuner train"),
        ("litgpt pretrain --config x.yaml", "litgpt pretrain"),
        ("python ./deepy.py train.py -d configs 20B.yml", "./deepy.py"),
        ("python -m pdb /opt/swift/cli/sft.py --model x", "/opt/swift/cli/sft.py"),
        ("torchrun -m torchtitan.train --job.config_file x.toml", "-m torchtitan.train"),
    ],
)
def test_a_console_command_says_what_it_hides_and_the_way_out(line, program):
    hides = split_command(shlex.split(line)).hidden_model
    assert hides.startswith(f"{program} takes the model ")
    assert "give --model FILE, --sizes" in hides and "\n" not in hides


@pytest.mark.parametrize(
    "line", ["srun -p megatron python a.py", "python a.py tune run", "torchrun nemo/a.py llm"]
)
def test_other_words_are_no_console_commands(line):
    assert not split_command(line.split()).hidden_model


@pytest.mark.parametrize(
    "line, message",
    [
        ("bash train.sh 4", "train.sh is a shell script"),
        ("sbatch -N 4 job.slurm", "job.slurm is a shell script"),
        ("srun ./run.sh --num-layers 4", "./run.sh is a shell script"),
        ("bash -c ''", "no training script"),
        ("bash -c 'echo hello'", "no training script"),
        ("torchrun --nnodes 2", "no training script"),
        ("ssh node1", "no training script"),
    ],
)
def test_a_command_without_a_script_is_refused(line, message):
    with pytest.raises(HolmesError, match=message):
        split_command(shlex.split(line))


def test_arguments_with_variables_of_a_shell_are_named():
    line = (
        "bash -c 'torchrun --nnodes $NNODES a.py --num-layers $LAYERS --lr=$LR $(cat args) --bf16'"
    )
    command = split_command(shlex.split(line))
    assert command.unread == ("--num-layers $LAYERS", "--lr=$LR", "$(cat args)")
    assert (
        stated_nodes(command).nodes_option == "--nnodes $NNODES" and not stated_nodes(command).nodes
    )


def test_values_for_keys_of_a_configuration_are_told_from_flags():
    line = "python train.py --config-name gpt trainer.num_nodes=4 +model.optim.lr=1 --x=a.b=c y=2"
    command = split_command(line.split())
    assert command.configured == ("trainer.num_nodes=4", "+model.optim.lr=1")


#: Words that commands and broken commands are made of.
FRAGMENTS = [
    *("srun", "-N", "4", "bash", "-c", "-lc", "torchrun", "--nnodes", "2:4", "ssh", "host", "a.py"),
    *(
        "-m",
        "x.y",
        "tune",
        "run",
        "eval",
        "--wrap",
        "cd /x; torchrun a.py $Y | tee",
        "'",
        "$(",
        "((",
    ),
    *(
        "mpirun",
        "-H",
        "a:8,b[",
        "-np",
        "A=B",
        "-o",
        "deepspeed",
        "--num_gpus",
        "megatron",
        "sft",
        "",
    ),
]


def test_no_words_end_in_another_error_than_that_of_a_command_without_a_script():
    """500 random commands are split, or refused with a HolmesError."""
    random_words = random.Random(1)
    for _ in range(500):
        words = random_words.choices(FRAGMENTS, k=random_words.randrange(1, 9))
        with contextlib.suppress(HolmesError):
            command = split_command(words)
            assert stated_nodes(command).nodes >= 0
            assert set(command.configured) | set(command.arguments) == set(command.arguments)
