"""A Slurm for a lab: slurm.conf, topology.conf, gres.conf, and every host's daemons.

login   munged, slurmctld   partition "all" (default) and one for each cluster, called after it
nodes   munged, slurmd      feature: the cluster's kind and name; gres gpu: one for each process of a node
                            topology/tree: a switch for each cluster, one above them
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
#: CPUs that every node tells Slurm it has: jobs of a lab wait for nodes, not for the cores of this machine.
_CPUS = 256
_MUNGE = "/run/munge/munge.socket.2"
PORT = 6817  # slurmctld's


def configure(
    directory: Path,
    spec: SiteSpec,
    order: Sequence[str],
    processes: int,
    variables: Mapping[str, Mapping[str, str]],
) -> None:
    """Write what Slurm reads. order: of the nodes; processes: of a node; variables: of tasks, by host."""
    # Slurm wants devices to stand for them
    gpus = [directory / f"gpu{number}" for number in range(processes)]
    for file in gpus:
        file.symlink_to(os.devnull)
    files = {
        "slurm.conf": _slurm_conf(directory, spec, order, processes),
        "topology.conf": _topology_conf(spec),
        "gres.conf": "".join(f"Name=gpu File={file}\n" for file in gpus),
        # nodes have no cgroups; v1 asks at its use
        "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n",
        "task_prolog": _task_prolog(variables),
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    (directory / "task_prolog").chmod(0o755)
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(_KEY_BYTES))


def _slurm_conf(directory: Path, spec: SiteSpec, order: Sequence[str], processes: int) -> str:
    settings = {
        "ClusterName": "lab",
        "SlurmctldHost": LOGIN,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={_MUNGE}",
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
        features = ",".join(
            dict.fromkeys([cluster.kind, cluster.name, *filter(None, [cluster.gpu])])
        )
        lines.append(
            f"NodeName={name} CPUs={_CPUS} RealMemory=1000000 Gres=gpu:{processes}"
            f" Feature={features} State=UNKNOWN"
        )
    for cluster in spec.clusters:
        if cluster.name != "all":
            lines.append(f"PartitionName={cluster.name} Nodes={','.join(cluster.nodes)} State=UP")
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def _topology_conf(spec: SiteSpec) -> str:
    leaves = [
        f"SwitchName=leaf_{cluster.name} Nodes={','.join(cluster.nodes)}"
        for cluster in spec.clusters
    ]
    switches = ",".join(f"leaf_{cluster.name}" for cluster in spec.clusters)
    return "\n".join([*leaves, f"SwitchName=spine Switches={switches}"]) + "\n"


def _task_prolog(variables: Mapping[str, Mapping[str, str]]) -> str:
    """What it prints, Slurm puts into the environment of the task that it is about to start."""
    lines = ["#!/bin/sh", "case $SLURMD_NODENAME in"]
    for host, own_variables in variables.items():
        said = "; ".join(f"echo export {name}={value}" for name, value in own_variables.items())
        lines.append(f"{host}) {said};;")
    return "\n".join([*lines, "esac"]) + "\n"


def daemons(directory: Path, order: Sequence[str], env: Mapping[str, str]) -> list[Program]:
    """Those of all hosts."""
    munged, slurmctld, slurmd = program("munged"), program("slurmctld"), program("slurmd")
    env = {**env, "SLURM_CONF": str(directory / "slurm.conf")}
    munge = [
        munged,
        "--foreground",
        "--force",
        f"--key-file={directory}/munge.key",
        f"--socket={_MUNGE}",
        *(f"--{kind}-file=/run/munge/munged.{kind}" for kind in ("pid", "log", "seed")),
    ]
    after = f'until [ -S {_MUNGE} ]; do sleep 0.02; done; exec "$0" "$@"'  # they ask munge at once
    programs = [Program(host, munge, env) for host in (LOGIN, *order)]
    programs.append(Program(LOGIN, ["sh", "-c", after, slurmctld, "-D", "-i"], env))
    return programs + [
        Program(host, ["sh", "-c", after, slurmd, "-D", "-N", host], env) for host in order
    ]
