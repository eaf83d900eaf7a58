"""Commands of torchrun, deepspeed, mpirun, srun and accelerate, compared with the nodes of cluster.toml."""

import shlex
from pathlib import Path

import clusters
import pytest

from holmes_ext.cluster.spec import load_spec
from holmes_ext.doctor.command.check import check_command
from holmes_ext.doctor.command.command_words import split_command
from holmes_ext.doctor.command.launch import read_launches, stated_nodes
from holmes_ext.doctor.command.launch_check import check_launch, check_launchers, started_part
from holmes_ext.doctor.command.launch_options import exported_variables

#: Four nodes with 8 GPUs each, and a hostfile for them.
SPEC = clusters.spec("ib ib 1600Gb/s a[1-2]", "roce roce 800Gb/s b[1-2]", processes=8)
HOSTS = "a1 slots=8\na2 slots=8\nb1 slots=8\nb2 slots=8\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Make a working directory with hostfiles and configuration files of accelerate."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "hosts": HOSTS,
        "four": HOSTS.replace("=8", "=4"),
        "strange": "x01 slots=8\nx02 slots=8\n",
        "mpi_hosts": "a1 slots=8\na2 slots=8\n",
        "bad": "a1:8\n",
        "ranks": "".join(f"rank {n}=a{1 + n // 8} slot={n % 8}\n" for n in range(16)),
        "relative": "".join(f"rank {n}=+n{n // 8} slot={n % 8}\n" for n in range(16)),
        "far": "rank 0=+n7 slot=0\n",
        "addresses": "10.0.0.1 slots=8\n10.0.0.2 slots=8\n10.0.0.3 slots=8\n10.0.0.4 slots=8\n",
        "machines.yaml": "distributed_type: FSDP\nnum_machines: 4 # all\nnum_processes: 32\n",
        "machines.json": '{\n  "num_machines": 2,\n  "num_processes": 8\n}\n',
        "pdsh.yaml": "deepspeed_config:\n  deepspeed_hostfile: four\nnum_machines: 4\nnum_processes: 16\n",
    }.items():
        Path(name).write_text(text)
    return tmp_path


def findings(command, environ=None):
    launches = read_launches(shlex.split(command), environ or {})
    found = [*check_launchers(launches), *check_launch(launches, SPEC)]
    return [f"{f.level} {f.about}: {f.what}" for f in found]


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nnodes 4 --nproc-per-node 8",
        "torchrun --nnodes=4:4 --nproc_per_node=gpu",
        "torchrun --nnodes 1:4 --nproc_per_node 8",
        "python -m torch.distributed.run --nnodes 4 --nproc-per-node 8",
        "python -u -m torch.distributed.launch --nnodes=4 --nproc_per_node=8 --use_env",
        "torchrun --nnodes=$SLURM_NNODES --nproc_per_node 8",
        "deepspeed --hostfile hosts",
        "deepspeed -H hosts --num_gpus 8 --master_port 6000",
        "deepspeed --hostfile hosts --launcher openmpi",
        "mpirun -np 32 -H a1:8,a2:8,b1:8,b2:8 -x NCCL_DEBUG=INFO --mca btl ^openib python",
        "mpirun -n 32 --npernode 8 python",
        "mpirun -np 32 --map-by ppr:8:node --hostfile hosts",
        "mpiexec -n 32 -ppn 8 -hosts a1,a2,b1,b2",
        "mpirun -np 32 python",
        "srun --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 python -u",
        "srun -N4 -n32 python",
        "srun -N 4 torchrun --nnodes 4 --nproc-per-node 8",
        "srun --nodes 4 --ntasks-per-node 1 accelerate launch --num_machines 4 --num_processes 32",
        "mpirun -np 4 -H a1,a2,b1,b2 torchrun --nnodes=4 --nproc_per_node=8",
        "accelerate launch --config_file machines.yaml",
        "accelerate launch --num_machines 4 --num_processes 32 --use_deepspeed",
        "accelerate config",
        "accelerate launch --num_machines $NODES --num_processes 32",
        "python -m accelerate.commands.launch --num_machines 4 --num_processes 32",
        "horovodrun -np 32 -H a1:8,a2:8,b1:8,b2:8 python",
        # As public scripts have them (horovod, nccl-tests, mscclpp, LLaMA-Factory).
        "mpirun --allow-run-as-root -np 32 -H a1:8,a2:8,b1:8,b2:8 -bind-to none -map-by slot -mca pml ob1 "
        "-mca btl ^openib -mca btl_tcp_if_exclude lo,docker0 -x PATH -x LD_LIBRARY_PATH python",
        "/usr/local/mpi/bin/mpirun --allow-run-as-root -np 32 --bind-to numa -hostfile hosts -npernode 8",
        "mpirun --allow-run-as-root --oversubscribe -np 32 --bind-to numa -H a1,a2,b1,b2 "
        '-mca plm_rsh_args "-p 22 -q -o StrictHostKeyChecking=no" -x NCCL_IB_DISABLE=0',
        "deepspeed --hostfile=hosts --master_addr=10.0.0.1 --master_port=29500 --num_nodes=4 --num_gpus=8",
        "srun --ntasks-per-node $SLURM_NTASKS_PER_NODE -n $SLURM_NTASKS python",
        "python",
    ],
)
def test_a_command_that_fits_the_file_has_no_finding(command):
    assert findings(command) == []


@pytest.mark.parametrize(
    "command, nodes",
    [
        ("torchrun --nnodes 1 --nproc-per-node 8", "a1"),
        ("torchrun --nproc-per-node 8", "a1"),
        ("deepspeed --hostfile hosts --num_nodes 3", "a1, a2, b1"),
        ("deepspeed --hostfile hosts --include b1@b2", "b1, b2"),
        ("deepspeed --hostfile hosts --exclude a2", "a1, b1, b2"),
        ("deepspeed --num_gpus 8", "a1"),
        ('deepspeed --hostfile="" --include localhost:0,1,2,3,4,5,6,7', "a1"),
        ("deepspeed --include localhost:0,1,2,3,4,5,6,7", "a1"),
        ("mpirun -np 16 --hostfile hosts", "a1, a2"),
        ("mpirun -H b1:8,b2:8", "b1, b2"),
        ("mpirun -rf ranks python", "a1, a2"),
        ("mpirun -np 16 --rankfile ranks python", "a1, a2"),
        ("mpirun --map-by rankfile:file=ranks python", "a1, a2"),
        ("mpirun --hostfile hosts --rankfile relative python", "a1, a2"),
        ("srun --nodelist b[1-2] --ntasks-per-node 8", "b1, b2"),
        ("srun -N 2 --ntasks 16", "a1, a2"),
        ("accelerate launch --num_machines 2 --num_processes 16", "a1, a2"),
    ],
)
def test_a_command_may_start_fewer_nodes_than_the_file_has(command, nodes):
    """As the job itself: "2 of the 4 nodes of cluster.toml". Sizes are checked for these nodes."""
    (line,) = findings(command)
    count = len(nodes.split(", "))
    assert line.startswith("note ")
    assert line.endswith(f"the job has {count} of the 4 nodes of cluster.toml")
    part = started_part(SPEC, read_launches(shlex.split(command), {}))
    assert ", ".join(part.cluster_by_node) == nodes


@pytest.mark.parametrize(
    "command, line",
    [
        ("torchrun --nnodes 5", "problem --nnodes: is 5, but the clusters have 4 nodes"),
        (
            "torchrun --nnodes 4 --nproc-per-node 4",
            "problem --nproc-per-node: is 4, but node a1 has 8 processes in cluster.toml",
        ),
        (
            "deepspeed --hostfile four",
            "problem hostfile four: starts 4 processes on a1, but key 'processes' is 8 in cluster.toml",
        ),
        (
            "deepspeed --hostfile hosts --num_gpus 4",
            "problem hostfile hosts: starts 4 processes on a1, but key 'processes' is 8 in cluster.toml",
        ),
        (
            "deepspeed --hostfile hosts --exclude a1:0",
            "problem hostfile hosts: starts 7 processes on a1, but key 'processes' is 8 in cluster.toml",
        ),
        (
            "deepspeed --hostfile strange",
            "problem hostfile strange: x01, x02 are in no cluster of cluster.toml",
        ),
        (
            "deepspeed --hostfile gone",
            "problem deepspeed: there is no hostfile gone, so deepspeed would train on this node only",
        ),
        (
            "deepspeed --num_nodes 4",
            "problem deepspeed: --num_nodes is above 1, and there is no hostfile (--hostfile, /job/hostfile)",
        ),
        (
            "deepspeed --hostfile bad",
            "problem deepspeed: deepspeed ends with an error: bad: line 1: 'a1:8' is not like "
            "`gpu01 slots=8`",
        ),
        (
            "deepspeed --hostfile hosts --include a3",
            "problem deepspeed: deepspeed ends with an error: host 'a3' of the filter 'a3' is not in hosts",
        ),
        (
            "deepspeed --hostfile hosts --include a1:9",
            "problem deepspeed: deepspeed ends with an error: slot '9' of the filter 'a1:9' is not one of "
            "the 8 slots of a1",
        ),
        (
            "deepspeed --hostfile hosts --num_nodes 2 --include a1",
            "problem deepspeed: deepspeed ends with an error: --num_nodes and --num_gpus cannot be used with "
            "--include or --exclude",
        ),
        ("mpirun -np 16 -H x01:8,x02:8", "problem -H: x01, x02 are in no cluster of cluster.toml"),
        (
            "mpirun -np 16 -H a1:4,a2:4,b1:4,b2:4",
            "problem -H: starts 4 processes on a1, but key 'processes' is 8 in cluster.toml",
        ),
        (
            "mpirun -np 32 --hostfile mpi_hosts --bind-to none",
            "problem mpirun: -np is 32, but hostfile mpi_hosts has 16 slots: mpirun ends with "
            '"not enough slots"',
        ),
        (
            "mpirun -np 40",
            "problem -np: is 40, but the nodes of cluster.toml have 8 processes each, 32 together",
        ),
        (
            "mpirun -np 30",
            "problem -np: is 30, but the nodes of cluster.toml have 8 processes each, 32 together",
        ),
        (
            "mpirun -np 4 -H a1,a2,b1,b2 torchrun --nnodes=4 --nproc_per_node=4",
            "problem -H: starts 4 processes on a1, but key 'processes' is 8 in cluster.toml",
        ),
        ("srun --nodes 8", "problem --nodes: is 8, but the clusters have 4 nodes"),
        (
            "srun -N 4 --ntasks-per-node=4",
            "problem --ntasks-per-node: is 4, but node a1 has 8 processes in cluster.toml",
        ),
        (
            "srun --nodelist=c[1-4] --ntasks-per-node=8",
            "problem --nodelist: c1, c2, c3, c4 are in no cluster of cluster.toml",
        ),
        (
            "srun -N 4 torchrun --nnodes 2 --nproc-per-node 8",
            "problem --nnodes: is 2, but srun starts torchrun 4 times",
        ),
        (
            "srun -N 4 torchrun --nproc-per-node 8",
            "problem --nnodes: is 1, but srun starts torchrun 4 times",
        ),
        (
            "accelerate launch --num_machines 0 --num_processes 48",
            "problem accelerate: --num_machines is 0, and must be at least 1",
        ),
        (
            "accelerate launch --num_machines 6 --num_processes 48",
            "problem --num_machines: is 6, but the clusters have 4 nodes",
        ),
        (
            "accelerate launch --config_file machines.yaml --num_processes 16",
            "problem --num_processes: is 4, but node a1 has 8 processes in cluster.toml",
        ),
        (
            "accelerate launch --config_file machines.json",
            "problem --num_processes: is 4, but node a1 has 8 processes in cluster.toml",
        ),
        (
            "accelerate launch --config_file pdsh.yaml",
            "problem hostfile four: starts 4 processes on a1, but key 'processes' is 8 in cluster.toml",
        ),
        (
            "accelerate launch --config_file gone.yaml",
            "problem accelerate: there is no --config_file gone.yaml",
        ),
        (
            "accelerate launch --num_machines 4 --num_processes 30",
            "problem accelerate: --num_processes is 30, which is not a multiple of --num_machines 4: "
            "accelerate starts 7 on each, and the rest is missing",
        ),
    ],
)
def test_a_command_that_contradicts_the_file(command, line):
    assert line in findings(command)


def test_nodes_with_different_numbers_of_gpus():
    """Each node has a torchrun command of its own; srun starts the same number everywhere."""
    spec = clusters.spec("a ib 1Gb/s a1 processes=8", "b ib 1Gb/s b1 processes=4")
    for command, count in (("torchrun --nnodes 2 --nproc-per-node 4", 0), ("srun -N 2 -n 8", 1)):
        launches = read_launches(shlex.split(command), {})
        assert len(list(check_launch(launches, spec))) == count


def test_the_nodes_that_the_ranks_of_mpirun_fill():
    """`mpirun -np 16` without hosts: two nodes with 8 processes each."""
    launches = read_launches(["mpirun", "-np", "16"], {})
    assert list(started_part(SPEC, launches).cluster_by_node) == ["a1", "a2"]


def test_variables_that_replace_options(tmp_path):
    """The launchers also read PET_* (torchrun) and a default file in the cache (accelerate)."""
    pet = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8"}
    assert findings("torchrun", pet) == []
    assert findings("torchrun", {**pet, "PET_NNODES": "5"}) == [
        "problem --nnodes: is 5, but the clusters have 4 nodes"
    ]
    cache = tmp_path / "accelerate" / "default_config.yaml"
    cache.parent.mkdir()
    cache.write_text("num_machines: 5\n")
    assert findings("accelerate launch", {"HF_HOME": str(tmp_path)}) == [
        "problem --num_machines: is 5, but the clusters have 4 nodes"
    ]


@pytest.mark.parametrize(
    "command, variables",
    [
        (
            "mpirun -np 2 -x NCCL_IB_HCA=mlx5 -x PATH -x HOLMES=1 python",
            {"NCCL_IB_HCA": "mlx5", "HOLMES": "1"},
        ),
        ("mpiexec -genv NCCL_DEBUG INFO -n 2 python", {"NCCL_DEBUG": "INFO"}),
        ("srun --export=ALL,NCCL_SOCKET_IFNAME=eth0 python", {"NCCL_SOCKET_IFNAME": "eth0"}),
        ("env A=1 B=2 torchrun", {"A": "1", "B": "2"}),
        ("A=1 torchrun --x C=3", {"A": "1"}),
        ("torchrun --nnodes 2", {}),
    ],
)
def test_variables_that_a_command_sets(command, variables):
    assert exported_variables(shlex.split(command)) == variables


@pytest.mark.parametrize(
    "launcher", ["deepspeed --hostfile", "mpirun -np 32 --hostfile", "mpirun -machinefile"]
)
def test_addresses_in_place_of_names_are_no_problem(launcher):
    (line,) = findings(f"{launcher} addresses")
    assert line.startswith("note hostfile addresses: 10.0.0.1, ") and "are not compared" in line


def test_a_rankfile_with_hosts_of_the_job_by_number():
    (launch,) = read_launches(["mpirun", "-rf", "relative"], {})
    assert launch.hosts == {} and not launch.error  # which hosts the job has is not said
    (line,) = findings("mpirun --hostfile mpi_hosts -rf far python")
    assert "far: line 1: +n7 is no host: the job has 2 hosts" in line


INPUTS = Path(__file__).parents[2] / "inputs"


def command_findings(command, spec):
    """Return the findings about a whole command, except that its launcher is not installed here."""
    found = check_command(command.split(), spec, {})
    return [f"{f.level} {f.what}" for f in found if "there is no such program" not in f.what]


def test_nodes_of_accelerate_are_compared_in_a_whole_command():
    """The number of nodes is not compared if it is a variable."""
    command = "accelerate launch --num_machines 5 --num_processes 40 train.py --holmes"
    assert "problem is 5, but the clusters have 4 nodes" in command_findings(command, SPEC)
    found = command_findings(command.replace("5", "$NODES").replace("40", "32"), SPEC)
    assert not [line for line in found if "nodes" in line]


def test_a_hostfile_with_other_hosts_and_slots(monkeypatch):
    """Input ds_hostfile_unchecked: names, number and slots contradict the file."""
    monkeypatch.chdir(INPUTS / "ds_hostfile_unchecked")
    spec = load_spec(INPUTS / "two.toml")
    assert command_findings("deepspeed --hostfile hosts train.py --holmes", spec) == [
        f"note the job has 3 of the 4 nodes of {spec.source}",
        f"problem x01, x02, x03 are in no cluster of {spec.source}",
        f"problem starts 4 processes on x03, but key 'processes' is 8 on every node of {spec.source}",
    ]


def test_a_job_on_fewer_nodes_than_the_file_has(monkeypatch):
    """Input nnodes_fewer: the job runs on 1 of the 2 nodes, so doctor finds no problem."""
    monkeypatch.chdir(INPUTS / "nnodes_fewer")
    spec = load_spec("cluster.toml")
    assert command_findings("torchrun --nnodes 1 train.py --holmes", spec) == [
        "note the job has 1 of the 2 nodes of cluster.toml"
    ]


#: Command -> nodes, processes on each node, hosts that its options state (0 or (): not stated).
STATED = {
    "python a.py": (0, 0, ()),
    "torchrun --nnodes=4 --nproc_per_node 8 a.py": (4, 8, ()),
    "torchrun --nnodes 2:4 --nproc-per-node gpu a.py": (0, 0, ()),
    "torchrun --nnodes 4:4 a.py": (4, 0, ()),
    "srun --nodes=4 --ntasks-per-node=8 python a.py": (4, 8, ()),
    "srun -N4 -n32 python a.py": (4, 8, ()),
    "srun -N 2-4 python a.py": (0, 0, ()),
    "srun -n 32 --ntasks-per-node 8 python a.py": (4, 8, ()),
    "srun -w gpu[1-4] --ntasks-per-node 8 python a.py": (4, 8, ("gpu1", "gpu2", "gpu3", "gpu4")),
    "srun --nodes 4 --ntasks-per-node 1 torchrun --nnodes 4 --nproc-per-node 8 a.py": (4, 8, ()),
    "srun --nodes 4 -w gpu[1-4] torchrun --nnodes 2 a.py": (2, 0, ()),
    "deepspeed --num_nodes 2 --num_gpus 8 a.py": (2, 8, ()),
    "accelerate launch --num_machines 2 --num_processes 16 a.py": (2, 8, ()),
    "mpirun -np 16 -npernode 8 python a.py": (2, 8, ()),
    "mpirun -np 16 -H a1:8,a2:8 python a.py": (2, 8, ("a1", "a2")),
    "mpirun --np 16 --host a1,a2 python a.py": (2, 8, ("a1", "a2")),
    "horovodrun -np 16 -H a1:8,a2:8 python a.py": (2, 8, ("a1", "a2")),
    "NNODES=2 NPROC_PER_NODE=8 megatron sft --model x": (2, 8, ()),
    "tune run --nnodes 2 --nproc_per_node 8 recipe --config x": (2, 8, ()),
    "python -m torch.distributed.launch --nnodes 2 --nproc_per_node=4 a.py --nnodes 9": (2, 4, ()),
}


@pytest.mark.parametrize("line", STATED)
def test_nodes_and_processes_are_those_that_the_options_state(line):
    start = stated_nodes(split_command(line.split()))
    assert (start.nodes, start.processes, start.hosts) == STATED[line]
