"""Shell scripts and scripts for Slurm, which `holmes plan` and `holmes doctor` read like a command."""

import shlex
from pathlib import Path

import clusters
import pytest

from holmes_ext.cluster.nic import Nic
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.doctor.command.check import check_command
from holmes_ext.doctor.command.command_words import split_command
from holmes_ext.doctor.command.launch import read_launches, stated_nodes
from holmes_ext.doctor.command.launch_options import (
    allocation_options,
    allocation_variables,
    gpus_on_node,
)
from holmes_ext.doctor.command.shell_text import batch_options, simple_commands

#: Four nodes with 8 GPUs each.
SPEC = clusters.spec("ib ib 1600Gb/s a[1-2]", "roce roce 800Gb/s b[1-2]", processes=8)
#: A script for Slurm as Megatron-LM's users write it: an array of options, sizes from Slurm's variables.
JOB = """#!/bin/bash
#SBATCH --job-name=torchrun   # the name of a launcher
#SBATCH --nodes=4             # all
#SBATCH --gres=gpu:h100:8
##SBATCH --nodes=9

export NCCL_DEBUG=WARN
GPUS_PER_NODE=8
WORLD_SIZE=$(($GPUS_PER_NODE*$SLURM_NNODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes ${SLURM_NNODES:-1}   # of the job
    --rdzv_endpoint $(scontrol show hostnames | head -1):6000
)
cat > hosts <<EOT
it's a1 slots=8
EOT
#SBATCH --nodes=7
srun torchrun "${DISTRIBUTED_ARGS[@]}" train.py --holmes --world $WORLD_SIZE "$@"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Make a working directory with a training script and JOB in a file."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("job.sbatch").write_text(JOB)


def problems(line, environ=None, node=None):
    """Problems of a command against SPEC, without the one that a program is not installed here."""
    found = check_command(shlex.split(line), SPEC, environ or {}, node)
    return [
        f"{f.about}: {f.what}"
        for f in found
        if f.level == "problem" and "no such program" not in f.what
    ]


@pytest.mark.parametrize(
    "line", ["sbatch job.sbatch x 1", "sbatch -p gpu job.sbatch x 1", "job.sbatch x 1"]
)
def test_a_script_for_slurm_is_read(line):
    command = split_command(line.split())
    assert command.script == "train.py"
    assert command.arguments == ("--holmes", "--world", "32", "x", "1")
    start = stated_nodes(command)
    assert (start.nodes, start.processes) == (4, 8)
    assert gpus_on_node(command.launcher, {}) == 8
    assert problems(line) == []


def test_options_of_sbatch_replace_those_in_the_script():
    command = split_command(["sbatch", "-N2", "job.sbatch"])
    assert stated_nodes(command).nodes == 2
    assert command.arguments[:3] == ("--holmes", "--world", "16")
    # srun starts one torchrun on each of the 2 nodes, and each waits for 2.
    launches = read_launches(command.launcher, {})
    assert [launch.nodes for launch in launches] == [2, 2]


def test_only_the_lines_before_the_first_command_count():
    assert batch_options(JOB) == ["--job-name=torchrun", "--nodes=4", "--gres=gpu:h100:8"]
    assert allocation_options(batch_options(JOB)) == ["--nodes=4", "--gres=gpu:h100:8"]
    assert batch_options("#SBATCH --comment='not closed\n#SBATCH -N 2\n") == ["-N", "2"]


@pytest.mark.parametrize(
    "options, variables",
    [
        ("-N 4", {"SLURM_NNODES": "4"}),
        ("--nodes=4-4 --ntasks-per-node=8", {"SLURM_NNODES": "4", "SLURM_NTASKS": "32"}),
        ("--nodes 2-4", {}),
        ("-n 32", {"SLURM_NTASKS": "32"}),
        ("--gpus-per-node=8", {"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_NODE": "8"}),
        ("--gpus-per-node=h100:4", {"SLURM_GPUS_ON_NODE": "4"}),
        ("--gres=gpu:8", {"SLURM_GPUS_ON_NODE": "8"}),
        ("--gres=nvme:1,gpu:a100:4(S:0-1)", {"SLURM_GPUS_ON_NODE": "4"}),
        ("--gres=gres/gpu:2", {"SLURM_GPUS_ON_NODE": "2"}),
        ("--gres=gpu", {"SLURM_GPUS_ON_NODE": "1"}),
        ("-N 4 --gpus=32", {"SLURM_GPUS_ON_NODE": "8"}),
        ("-N 4 -G h100:32", {"SLURM_GPUS_ON_NODE": "8"}),
        ("-w gpu[1-2]", {"SLURM_JOB_NODELIST": "gpu[1-2]"}),
        ("--constraint=gpu:8 --time 4", {}),
    ],
)
def test_variables_that_slurm_sets_in_a_job(options, variables):
    found = allocation_variables(["sbatch", *options.split()])
    assert {name: found.get(name) for name in variables} == variables
    assert variables or not found


def test_a_heterogeneous_job_keeps_what_its_components_have_alike():
    """How many nodes a step has is then up to srun --het-group, so no number of nodes is taken."""
    text = "#SBATCH -N 2 --gres=gpu:8\n#SBATCH hetjob\n#SBATCH -N 2 --gres=gpu:8\n"
    assert allocation_options(batch_options(text)) == ["--gres=gpu:8"]
    other = text.replace("gpu:8\n#SBATCH het", "gpu:4\n#SBATCH het")
    assert allocation_options(batch_options(other)) == []


@pytest.mark.parametrize(
    "lines, command, problem",
    [
        ("-N 4", "srun torchrun --nnodes 2 --nproc-per-node 8", "starts torchrun 4 times"),
        ("-N 4 --ntasks-per-node=8", "srun torchrun --nnodes 4", "starts torchrun 32 times"),
        (
            "-N 4 --gres=gpu:4",
            "srun torchrun --nnodes 4 --nproc-per-node 8",
            "Slurm gives the job 4",
        ),
        ("-N 4", "srun --gpus-per-node=4 --ntasks-per-node=8 python", "Slurm gives the job 4 GPUs"),
        (
            "-N 4 --gpus=16",
            "srun torchrun --nnodes 4 --nproc-per-node gpu",
            "is 4, but node a1 has 8",
        ),
        ("-N 5", "srun --ntasks-per-node 8 python", "is 5, but the clusters have 4 nodes"),
        ("-N 4 --ntasks-per-node=4", "srun python", "is 4, but node a1 has 8 processes"),
        ("-w x[1-2]", "srun -w x[1-2] --ntasks-per-node 8 python", "x1, x2 are in no cluster"),
    ],
)
def test_a_script_that_contradicts_itself_or_the_clusters(lines, command, problem):
    Path("job").write_text(f"#!/bin/sh\n#SBATCH {lines}\n{command} train.py --holmes\n")
    (found,) = problems("sbatch job")
    assert problem in found


@pytest.mark.parametrize(
    "lines, command",
    [
        ("-N 4", "srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8"),
        ("-N 4 --ntasks-per-node=8 --gpus-per-node=8", "srun python"),
        (
            "-N 4 -n 4 --gres=gpu:8",
            "srun torchrun --nnodes $SLURM_JOB_NUM_NODES --nproc-per-node gpu",
        ),
        ("-N 4 --ntasks-per-node=8", "srun -n 4 --ntasks-per-node=1 torchrun --nnodes 4"),
        ("-n 32", "srun -N 4 python"),
        ("-N 4 --gpus=32", "srun torchrun --nnodes 4 --nproc-per-node $SLURM_GPUS_ON_NODE"),
        ("-N 4", "srun -n 1 torchrun --nnodes 1 --nproc-per-node 8"),
        ("-N 4", "mpirun --hostfile made_by_the_script -np 32 python"),
        ("-N 4", "deepspeed --hostfile=made_by_the_script"),
        ("-N 2\n#SBATCH hetjob\n#SBATCH -N 2", "srun --het-group=0-1 --ntasks-per-node=8 python"),
    ],
)
def test_a_script_that_fits_has_no_problem(lines, command):
    Path("job").write_text(f"#!/bin/sh\n#SBATCH {lines}\n{command} train.py --holmes\n")
    assert problems("sbatch job") == []


def test_variables_of_the_surrounding_allocation_are_defaults_of_srun():
    words = ["srun", "torchrun", "--nnodes", "2"]
    environ = {"SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8"}
    assert read_launches(words, environ)[0].nodes == 4
    assert read_launches(words, {**environ, "SLURM_STEP_ID": "0"})[0].nodes == 0
    assert gpus_on_node(words, environ) == 8


def test_other_scripts_are_read_too():
    """A shell script, one inside of another, and one that only sets up the environment."""
    Path("inner.sh").write_text("exec torchrun --nnodes ${1:-1} train.py --steps $2\n")
    Path("outer.sh").write_text("source setup.sh\nbash inner.sh 2 50\n")
    Path("setup.sh").write_text("module load cuda\n")
    for line in ("bash -x outer.sh", "./outer.sh", "srun -N 2 outer.sh", "setup.sh outer.sh"):
        command = split_command(line.split())
        assert command.arguments == ("--steps", "50") and "--nnodes" in command.launcher, line
    assert (
        split_command(["torchrun", "train.py", "--script", "outer.sh"]).arguments[1] == "outer.sh"
    )


#: A script that submits the lines after sbatch <<EOF.
SUBMIT = """STEPS=50
COMMAND="cd /work; export A=1; python -u train.py --steps $STEPS"
sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=8
srun --mpi=pmix bash -c "${COMMAND}" 2>&1 | tee \\${SLURM_JOB_ID}.log
EOF
echo submitted
"""


def test_a_script_in_the_lines_after_sbatch_is_read():
    """Its #SBATCH lines count, and so do the variables of the script around it."""
    Path("submit.sh").write_text(SUBMIT)
    command = split_command(["bash", "submit.sh"])
    assert command.arguments == ("--steps", "50")
    assert stated_nodes(command).nodes == 4 and stated_nodes(command).processes == 8


def test_words_after_the_text_of_a_shell_are_its_arguments():
    line = "srun bash -c 'exec torchrun --nnodes=$0 \"$@\"' 4 --rdzv-id=1 train.py --name 'x y' $1"
    command = split_command(shlex.split(line))
    assert command.launcher[-3:] == ("torchrun", "--nnodes=4", "--rdzv-id=1")
    assert command.arguments == ("--name", "x y", "$1")
    assert split_command(["bash", "-c", 'train.py "$@" --b']).arguments == ("--b",)


EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sbatch")), ids=lambda path: path.name)
def test_our_own_scripts_for_slurm_are_read(path):
    command = split_command(["sbatch", str(path)])
    start = stated_nodes(command)
    is_heterogeneous = path.stem.endswith("_het")  # the nodes of a step depend on --het-group
    assert command.script.endswith(".py") and command.unread == ()
    assert start.nodes == (0 if is_heterogeneous else 12)
    assert gpus_on_node(command.launcher, {}) in (0, 8)
    launches = read_launches(command.launcher, {})
    assert not any(launch.error for launch in launches)


def test_lines_after_a_quoted_word_keep_their_variables():
    lines = "bash <<\"END\"\nA=2\ntrain.py --a $A --b 'x y'\nEND\n"
    (words,) = simple_commands(f"A=1\n{lines}", {})
    assert words == ["bash", "-c", "A=2\ntrain.py --a $A --b 'x y'\n"]
    (words,) = simple_commands(f"A=1\n{lines}".replace('"END"', "END"), {})
    assert words == ["bash", "-c", "A=2\ntrain.py --a 1 --b 'x y'\n"]


def test_values_from_branches_and_loops_are_not_known():
    """Which branch runs is not known, so the variable stays, and is named as one without a value."""
    text = (
        "SIZE=7b; LAYERS=32\nif [ $SIZE = 70b ]; then LAYERS=80; fi\n"
        'ARGS=(--lr 1)\n[ -n "$FP8" ] && ARGS+=(--fp8)\n'
        "case $SIZE in\n 7b) HIDDEN=4096;; *) HIDDEN=8192;; esac\nDEPTH=3\n"
        "train.py --num-layers $LAYERS --hidden-size ${HIDDEN:-1} --depth $DEPTH ${ARGS[@]}\n"
    )
    words = simple_commands(text, {})[-1]
    assert words == [
        *("train.py", "--num-layers", "$LAYERS", "--hidden-size", "${HIDDEN:-1}"),
        *("--depth", "3", "${ARGS[@]}"),
    ]


def test_addresses_of_this_node_are_known_by_its_name():
    nic = Nic(kind="ethernet", device="eth0", netdevs=("eth0",), addresses=("10.0.0.1/24",))
    node = NodeReport("a1", identity="1", ethernet="eth0", nics=[nic])
    addresses = [f"10.0.0.{number} slots=8\n" for number in range(1, 5)]
    Path("hosts").write_text("".join(addresses))
    line = "mpirun -np 32 --hostfile hosts python train.py --holmes"
    found = [
        f.what for f in check_command(line.split(), SPEC, {}, node) if f.about[:8] == "hostfile"
    ]
    assert found == [
        "10.0.0.2, 10.0.0.3, 10.0.0.4: IP addresses are not compared with cluster.toml"
    ]
    Path("hosts").write_text("".join(addresses).replace("10.0.0.1 ", "10.0.0.9 "))
    found = [
        f.what for f in check_command(line.split(), SPEC, {}, node) if f.about[:8] == "hostfile"
    ]
    assert any("none is one of a1 (10.0.0.1)" in what for what in found)
