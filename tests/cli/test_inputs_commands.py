"""Tests what `holmes plan -- COMMAND` makes of commands that people have, kept in tests/inputs."""

import json
import shlex
from pathlib import Path

import pytest

from holmes_ext.cli.main import main
from holmes_ext.cli.show.command_nodes import nodes_of_command
from holmes_ext.cluster.spec import load_spec

INPUTS = Path(__file__).resolve().parents[1] / "inputs"
TWO = str(INPUTS / "two.toml")  # clusters of two nodes with 8 A100 each
GPT = (
    "pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--micro-batch-size 1 --global-batch-size 64 --vocab-size 50257 --bf16"
)
#: Options for a search that ends at once.
SHORT = ["--seconds", "0.3", "--rows", "1", "--limit", "pipeline=1", "--limit", "tensor=1"]


@pytest.fixture
def planned(capsys, monkeypatch):
    """Return a function that runs `holmes plan` for a command: (status, standard output, errors)."""

    def run(command, *options, folder=INPUTS):
        monkeypatch.chdir(folder)
        status = main(["plan", "--cluster", TWO, *SHORT, *options, "--", *shlex.split(command)])
        output, errors = capsys.readouterr()
        return status, " ".join(output.split()), errors

    return run


def command_of(name):
    return (INPUTS / name / "command").read_text()


def test_the_last_ds_config_counts(planned):
    name = "duplicate_ds_config"
    status, output, _ = planned(command_of(name), folder=INPUTS / name)
    assert status == 0 and "ZeRO 0" in output and "ZeRO 2" not in output


def test_a_padded_vocabulary_counts(planned):
    _, output, _ = planned(command_of("unknown_changes_nothing"))
    assert "24 layers, 1.72e+09 parameters" in output


def test_a_hybrid_model_is_refused(planned):
    status, output, errors = planned(command_of("refused_without_caveats"))
    assert status == 2 and not output
    assert errors.startswith("holmes: --hybrid-override-pattern M-M-M-*-M-M-M-*-: a model with")
    assert errors.endswith("give one of about the same size with --model FILE\n")


def test_no_flag_is_advised_that_megatron_refuses(planned):
    status, _, errors = planned(command_of("advice_megatron_refuses"))
    assert status == 2 and "--num-layers" not in errors.replace("--decoder-num-layers", "")
    assert "--seq-length" not in errors


TOO_LARGE = GPT.replace("2048 --num-att", "32768 --num-att").replace("layers 24", "layers 200")


@pytest.mark.parametrize("options", [[], ["--sizes", "pipeline=5"], ["--json"]])
def test_a_refusal_is_preceded_by_what_was_read(options, planned):
    """Lines about the command go to standard error, so that --json prints no other text."""
    command = f"{TOO_LARGE} --my-flag 3 --mtp-num-layers 1"
    status, output, errors = planned(command, *options)
    assert status == 2 and not output
    *lines, error = errors.splitlines()
    assert error.startswith("holmes: ")
    assert [line for line in lines if line.startswith("read: 200 layers")]
    assert (
        "not counted: --mtp-num-layers: layers that predict further tokens are not counted" in lines
    )
    assert "not known to holmes, so their effect is not counted: --my-flag" in lines
    assert not [line for line in lines if "change nothing" in line]


def test_a_refused_model_is_preceded_by_what_was_read(planned):
    status, _, errors = planned(GPT.replace("--seq-length 2048", "--my-flag 3"))
    lines = errors.splitlines()
    assert status == 2 and lines[0].endswith("not counted: --my-flag")
    assert "but not --seq-length; add it" in lines[-1]


def test_a_choice_of_nodes_that_is_refused_is_preceded_by_what_was_read(capsys):
    words = ["plan", "--nodes", "2", "--from-cluster", TWO, "--seconds", "1", "--"]
    assert main([*words, *TOO_LARGE.split(), "--my-flag"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "not known to holmes, so their effect is not counted: --my-flag" in lines


@pytest.mark.parametrize(
    "command",
    [
        f"srun --nodes 4 bash -c 'cd /work && torchrun --nnodes 4 --nproc-per-node 8 {GPT} --my-flag'",
        f"srun --nodes 4 singularity exec image.sif sh -lc 'torchrun {GPT} --my-flag > log 2>&1'",
    ],
)
def test_a_command_inside_of_a_shell_is_read(command, planned):
    status, output, _ = planned(command)
    assert status == 0 and "read: 24 layers, 1.32e+09 parameters" in output
    assert "not counted: --my-flag" in output and "--nodes 4" not in output


def test_flags_of_holmes_inside_of_a_shell_count(planned):
    command = f"bash -c 'torchrun {GPT} --holmes --holmes-compress-gradients int8'"
    status, output, _ = planned(command, "--json")
    reductions = json.loads(output)["plan"]["traffic"][0]["reductions"]
    assert status == 0 and {reduction["compress"] for reduction in reductions} == {"int8"}


def test_a_variable_without_a_value_is_named(planned):
    _, output, _ = planned(f"bash -c 'torchrun {GPT} --kv-channels $SIZE'")
    message = "not read: --kv-channels $SIZE: a variable without a value here; write the value"
    assert message in output


@pytest.mark.parametrize(
    "command, begin",
    [
        (
            "megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 2",
            "megatron sft takes the",
        ),
        ("llamafactory-cli train llama3.yaml", "llamafactory-cli train takes the model and its"),
        ("bash -c 'axolotl train config.yml'", "axolotl train takes the model and its settings"),
        (
            "bash train.sh",
            "bash train.sh: train.sh is a shell script, and there is no such file here",
        ),
        ("./my_trainer --steps 5", "./my_trainer --steps 5: no training script"),
    ],
)
def test_a_command_that_hides_its_model_is_refused_in_one_line(command, begin, planned):
    status, output, errors = planned(command)
    error = errors.splitlines()[-1]
    assert status == 2 and not output and error.startswith(f"holmes: {begin}") and "give" in error


def test_a_console_command_with_a_model_file_is_planned(planned):
    """Megatron's sizes are read, also from names with underscores; the checkpoint is not."""
    command = (
        "megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 --micro_batch_size 1"
    )
    model = Path(__file__).resolve().parents[2] / "examples" / "models" / "gpt_7.5b.toml"
    status, output, _ = planned(command, "--model", str(model), "--global-batch", "64")
    assert status == 0
    assert "not counted: megatron sft takes the model from a checkpoint, which holmes" in output
    assert "yours T2 D16" in output


def test_values_for_a_configuration_are_named(planned):
    model = Path(__file__).resolve().parents[2] / "examples" / "models" / "gpt_7.5b.toml"
    command = (
        "python megatron_gpt_pretraining.py trainer.num_nodes=4 model.tensor_model_parallel_size=2"
    )
    _, output, _ = planned(command, "--model", str(model), "--global-batch", "64")
    assert (
        "not read: trainer.num_nodes=4, model.tensor_model_parallel_size=2: only flags are"
        in output
    )


ALL = "the plan is for all 4 nodes of cluster.toml; --nodelist LIST before -- names the job's"


@pytest.mark.parametrize(
    "command, nodes, line",
    [
        (GPT, 4, ""),
        (f"python {GPT}", 4, ""),
        (f"torchrun --nnodes 4 --nproc-per-node 8 {GPT}", 4, ""),
        (f"torchrun --nnodes 2 {GPT}", 4, f"not counted: --nnodes 2: {ALL}"),
        (f"torchrun --nnodes=$N {GPT}", 4, f"not counted: --nnodes=$N: {ALL}"),
        (f"srun -N2 bash -c 'python {GPT}'", 4, f"not counted: -N2: {ALL}"),
        (f"deepspeed --num_nodes 8 {GPT}", 4, f"not counted: --num_nodes 8: {ALL}"),
        (f"srun -w a[1-2] python {GPT}", 2, "read: nodes a1, a2 of the 4 in"),
        (f"mpirun -H a1:8,b1:8 python {GPT}", 2, "read: nodes a1, b1 of the 4 in"),
        (f"mpirun -H c1:8,b1:8 python {GPT}", 4, "does not know c1; the plan is for all 4 nodes"),
        (
            f"torchrun --nproc-per-node 4 {GPT}",
            4,
            "not counted: --nproc-per-node 4: the plan is for the",
        ),
        (f"srun -N 4 --ntasks-per-node 8 python {GPT}", 4, ""),
    ],
)
def test_the_nodes_of_the_command_are_compared_with_the_file(command, nodes, line):
    spec, lines = nodes_of_command(shlex.split(command), load_spec(TWO))
    assert len(spec.cluster_by_node) == nodes
    assert line in lines[0] if line else not lines


def test_the_plan_is_for_the_nodes_that_the_command_names(planned):
    _, output, _ = planned(f"srun -w a[1-2] torchrun {GPT}")
    assert "model: 16 GPUs, 1 cluster" in output and "read: nodes a1, a2 of the 4 in" in output
    _, output, _ = planned(f"srun -w a[1-2] torchrun {GPT}", "--nodelist", "a1,b2")
    assert "model: 16 GPUs, 2 clusters" in output and "read: nodes" not in output
