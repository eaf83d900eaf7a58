"""Configures Slurm and its daemons on an emulated cluster.

Every host runs munged. The host "login" also runs slurmctld, and the nodes run slurmd. slurm.conf describes
the emulated cluster as follows:

    partitions   "all" (the default), and one for each cluster with the cluster's name
    features     each node has its cluster's NIC kind and name
    GPUs         one for each process of a node
    topology     a tree: one leaf switch for each cluster, and a spine above them
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from holmes_ext.cluster.spec import SiteSpec
from holmes_lab.network.shaping import LOGIN
from holmes_lab.process.ranks import Program
from holmes_lab.rights import program

#: Bytes of munge's key: MUNGE_KEY_LEN_DFL_BYTES of its source.
_KEY_BYTES = 128
#: CPUs of each node according to slurm.conf: jobs queue for nodes, not for the cores of this machine.
_CPUS = 256
_MUNGE_SOCKET = "/run/munge/munge.socket.2"
#: Port of slurmctld.
PORT = 6817


def configure(
    directory: Path,
    spec: SiteSpec,
    order: Sequence[str],
    processes: Mapping[str, int],
    variables: Mapping[str, Mapping[str, str]],
) -> None:
    """Write the configuration files of Slurm and the key of munge.

    Args:
        directory: Directory for the files.
        spec: The clusters and their nodes.
        order: Names of the nodes, in the order of slurm.conf.
        processes: Node -> its processes. A node has as many GPUs.
        variables: For each node, environment variables that every task there gets.
    """
    # Slurm requires a device file for each GPU; /dev/null serves.
    gpu_files = [directory / f"gpu{number}" for number in range(max(processes.values()))]
    for gpu_file in gpu_files:
        gpu_file.symlink_to(os.devnull)
    contents = {
        "slurm.conf": _slurm_conf(directory, spec, order, processes),
        "topology.conf": _topology_conf(spec),
        "gres.conf": "".join(
            f"NodeName={node} Name=gpu File={gpu_file}\n"
            for node in order
            for gpu_file in gpu_files[: processes[node]]
        ),
        # The nodes have no cgroups. The v1 plugin fails only when a cgroup is used.
        "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n",
        "task_prolog": _task_prolog(variables),
    }
    for name, content in contents.items():
        (directory / name).write_text(content)
    (directory / "task_prolog").chmod(0o755)
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(_KEY_BYTES))


def _slurm_conf(
    directory: Path, spec: SiteSpec, order: Sequence[str], processes: Mapping[str, int]
) -> str:
    """Return slurm.conf: settings, a line for each node, and a partition for each cluster."""
    settings = {
        "ClusterName": "lab",
        "SlurmctldHost": LOGIN,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={_MUNGE_SOCKET}",
        "StateSaveLocation": "/run/slurmctld",
        "SlurmdSpoolDir": "/run/slurmd",
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.pid",
        "MailProg": "/bin/true",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "TaskProlog": f"{directory}/task_prolog",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "JobCompType": "jobcomp/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",
        "TopologyPlugin": "topology/tree",
        "GresTypes": "gpu",
        "ReturnToService": "2",
        "KillWait": "10",
        "SlurmdTimeout": "15",
        "InactiveLimit": "0",
        "SlurmctldDebug": "info",
        "SlurmdDebug": "info",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_min_interval=0,bf_interval=1,batch_sched_delay=0",
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    for name in order:
        cluster = spec.cluster_of(name)
        features = [cluster.kind, cluster.name]
        if cluster.gpu:
            features.append(cluster.gpu)
        distinct_features = ",".join(dict.fromkeys(features))
        lines.append(
            f"NodeName={name} CPUs={_CPUS} RealMemory=1000000 Gres=gpu:{processes[name]}"
            f" Feature={distinct_features} State=UNKNOWN"
        )
    for cluster in spec.clusters:
        if cluster.name != "all":
            lines.append(f"PartitionName={cluster.name} Nodes={','.join(cluster.nodes)} State=UP")
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def _topology_conf(spec: SiteSpec) -> str:
    """Return topology.conf: a leaf switch for each cluster, and a spine that connects the leaves."""
    lines = []
    leaves = []
    for cluster in spec.clusters:
        leaf = f"leaf_{cluster.name}"
        leaves.append(leaf)
        lines.append(f"SwitchName={leaf} Nodes={','.join(cluster.nodes)}")
    lines.append(f"SwitchName=spine Switches={','.join(leaves)}")
    return "\n".join(lines) + "\n"


def _task_prolog(variables: Mapping[str, Mapping[str, str]]) -> str:
    """Return the script that Slurm runs before each task to extend the environment of the task.

    Slurm adds a variable for each line "export NAME=VALUE" that the script prints.
    """
    lines = ["#!/bin/sh", "case $SLURMD_NODENAME in"]
    for host, host_variables in variables.items():
        commands = [f"echo export {name}={value}" for name, value in host_variables.items()]
        lines.append(f"{host}) {'; '.join(commands)};;")
    lines.append("esac")
    return "\n".join(lines) + "\n"


def daemons(directory: Path, order: Sequence[str], env: Mapping[str, str]) -> list[Program]:
    """Return the programs that make up Slurm on the emulated hosts, ready to be started.

    They are munged on every host, slurmctld on the host "login", and slurmd on each node.

    Args:
        directory: Directory of the files that configure() has written.
        order: Names of all nodes. Each gets a munged and a slurmd, in this order in the result.
        env: Environment of the daemons.
    """
    slurm_env = {**env, "SLURM_CONF": str(directory / "slurm.conf")}
    munged_argv = [
        program("munged"),
        "--foreground",
        "--force",
        f"--key-file={directory}/munge.key",
        f"--socket={_MUNGE_SOCKET}",
        "--pid-file=/run/munge/munged.pid",
        "--log-file=/run/munge/munged.log",
        "--seed-file=/run/munge/munged.seed",
    ]
    slurmctld_argv = [program("slurmctld"), "-D", "-i"]
    slurmd = program("slurmd")
    # Slurm's daemons connect to munge when they start, so the shell waits for the socket of munged.
    wait_for_munge = f'until [ -S {_MUNGE_SOCKET} ]; do sleep 0.02; done; exec "$0" "$@"'

    programs = [Program(host, munged_argv, slurm_env) for host in (LOGIN, *order)]
    programs.append(Program(LOGIN, ["sh", "-c", wait_for_munge, *slurmctld_argv], slurm_env))
    for host in order:
        slurmd_argv = [slurmd, "-D", "-N", host]
        programs.append(Program(host, ["sh", "-c", wait_for_munge, *slurmd_argv], slurm_env))
    return programs
