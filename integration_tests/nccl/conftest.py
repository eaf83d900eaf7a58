"""Starts the ranks of a case on this machine, and keeps the results for a report.

    one machine      four ranks share its GPUs, each a host of its own to NCCL and to holmes (NCCL_HOSTID,
                     HOLMES_NODE)
    emulated GPUs    the same with HOLMES_TEST_CARRIER=nccl (`make gpu`): NCCL's own host code, no GPU
    two nodes        HOLMES_NCCL_NODE=0 or 1 and MASTER_ADDR, the same command on both: two ranks on each

The report is written to the file in HOLMES_NCCL_REPORT.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import carriers
import clusters
import pytest
import ranks
import torch
from carriers import EMULATED
from sysfs_builder import Sysfs

from holmes_ext.cluster.addresses import egress_interface
from holmes_ext.cluster.nccl import file_settings, why_no_verbs
from holmes_ext.cluster.net_plugin import find_net_plugin
from holmes_ext.doctor.nccl import installed_nccl
from integration_tests.nccl.debug_lines import Said, read

ROOT = Path(__file__).resolve().parents[2]
GPU = EMULATED or bool(torch.version.cuda) and torch.cuda.is_available()
#: Number of GPUs of this machine. If they are emulated, each rank has this number.
GPUS = 2 if EMULATED else torch.cuda.device_count()
#: This node's number, None on one machine alone.
NODE = int(os.environ["HOLMES_NCCL_NODE"]) if "HOLMES_NCCL_NODE" in os.environ else None
NAMES = ("a0", "b0", "a1", "b1")  # in turn, as if the scheduler did not know of clusters
LIMIT_S = 240
_report: dict = {"cases": []}


def machine() -> dict:
    """Return a description of the machine on which the cases run."""
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if not EMULATED
        else ["emulated"]
    )
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if GPU else ""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NCCL_", "TORCH_NCCL_"))
    }
    return {
        "host": platform.node(),
        "node": NODE,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": nccl,
        "nccl package": str(installed_nccl()[1] or ""),
        "gpus": gpus,
        "hcas": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "no verbs": why_no_verbs(os.environ),
        "plugin": find_net_plugin(os.environ, os.environ.get("NCCL_NET_PLUGIN")).path,
        "files": file_settings(os.environ),
        "variables": variables,
    }


class Case:
    """Output of the ranks of a case."""

    def __init__(self, outputs: list[str], statuses: list[int]):
        self.outputs = outputs
        self.statuses = statuses
        results = []
        for output in outputs:
            for line in output.splitlines():
                if line.startswith('{"rank"'):
                    results.append((json.loads(line), output))
        results.sort(key=lambda pair: pair[0]["rank"])
        self.lines = [line for line, _ in results]  # the ranks' JSON lines, by rank
        self.said = [read(output) for _, output in results]  # NCCL's facts, by rank

    def check_holmes(self, flags: Sequence[str]) -> None:
        """Assert that holmes was active on each rank if the flags have --holmes, and not otherwise.

        Without holmes's .pth file, `--holmes` would be an argument of the script.
        """
        expected = "--holmes" in flags
        assert all(line["holmes"] == expected for line in self.lines), (expected, self.lines)

    def networks_as_asked(self) -> None:
        """Assert that NCCL used the network that holmes named for each group of several ranks."""
        for line, said in zip(self.lines, self.said, strict=True):
            made = [
                (communicator.ranks, communicator.network) for communicator in said.communicators
            ]
            for members, network in line["groups"]:
                if network and len(members) > 1:
                    assert (len(members), network) in made, (line, made)


def launch(
    case: str, directory: Path, *flags: str, number: int, gpus: int = 1, **environment: str
) -> Case:
    """Run a case, and kill ranks that run longer than LIMIT_S seconds.

    Args:
        number: Number of the case, for its port on two nodes.
        gpus: Number of GPUs of each host that this machine stands for.
        environment: Further environment variables.
    """
    script = [str(ROOT / "integration_tests/nccl/cases.py"), case, *flags]
    store = None  # must live until the ranks have ended
    if NODE is None:
        store, common = ranks.hosted_store()
        common |= carriers.environment(GPUS)
        ranks_environment = _ranks_of_one_machine(gpus)
    else:
        common = {"MASTER_PORT": str(29600 + number)}
        ranks_environment = _ranks_of_this_node(NODE)
    shared = {
        **os.environ,
        "WORLD_SIZE": "4",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        **common,
        **environment,
    }
    run = _forked if EMULATED else _started
    environments = [{**shared, **variables} for variables in ranks_environment]
    result = Case(*run(script, environments, directory))
    del store
    tails = [output[-6000:] for output in result.outputs] if any(result.statuses) else []
    _report["cases"].append(
        {
            "case": case,
            "flags": flags,
            "environment": environment,
            "statuses": result.statuses,
            "lines": result.lines,
            "nccl": [_as_json(said) for said in result.said],
            "tails": tails,
        }
    )
    result.check_holmes(flags)
    return result


def _ranks_of_one_machine(gpus: int) -> list[dict[str, str]]:
    """Return the variables of each of four ranks on one machine, which stands for several hosts.

    Args:
        gpus: Number of GPUs, and so of ranks, of each host.
    """
    hosts = [name for name in NAMES[: 4 // gpus] for _ in range(gpus)]  # by rank
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % gpus),
            "LOCAL_WORLD_SIZE": str(gpus),
            "NCCL_HOSTID": host,
            "HOLMES_NODE": host,
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "HOLMES_LAB_RANK": str(rank),
        }
        for rank, host in enumerate(hosts)
    ]


def _ranks_of_this_node(node: int) -> list[dict[str, str]]:
    """Return the variables of both ranks of one of two nodes."""
    variables = [
        {"RANK": str(2 * node + local), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "2"}
        for local in (0, 1)
    ]
    if torch.cuda.device_count() < 2:  # both ranks share a GPU: NCCL must take them for two hosts
        for rank in variables:
            rank["NCCL_HOSTID"] = f"{platform.node()}-{rank['LOCAL_RANK']}"
    return variables


def _as_json(said: Said) -> dict:
    """Return NCCL's facts about one process as an object of the report; sets become sorted lists."""
    communicators = [
        {**asdict(communicator), "devices": sorted(communicator.devices)}
        for communicator in said.communicators
    ]
    return {**asdict(said), "communicators": communicators}


def _started(
    script: list[str], environments: list[dict[str, str]], directory: Path
) -> tuple[list[str], list[int]]:
    """Start a Python for each environment, and return (outputs, exit statuses)."""
    processes = [
        subprocess.Popen(
            [sys.executable, *script],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=directory,
        )
        for environment in environments
    ]
    # All outputs are read at the same time: a full pipe would block its rank, and so all others.
    with ThreadPoolExecutor(len(processes)) as readers:
        outputs = list(readers.map(_output_of, processes))
    return outputs, [process.returncode for process in processes]


def _forked(
    script: list[str], environments: list[dict[str, str]], directory: Path
) -> tuple[list[str], list[int]]:
    """Fork a process of one Python for each environment, and return (outputs, exit statuses)."""
    command = [sys.executable, str(ROOT / "integration_tests/nccl/forked.py")]
    logs = [directory / f"{rank}.log" for rank in range(len(environments))]
    with subprocess.Popen(
        command,
        env=environments[0],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=directory,
    ) as process:
        try:
            printed, _ = process.communicate(json.dumps([script, environments]), timeout=LIMIT_S)
            statuses = json.loads(printed)
            note = ""
        except subprocess.TimeoutExpired:
            process.kill()
            statuses = [-9] * len(logs)
            note = f"\nkilled after {LIMIT_S} s: it hung\n"
    return [log.read_text(errors="replace") + note for log in logs], statuses


def _output_of(process: subprocess.Popen) -> str:
    try:
        return process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"{process.communicate()[0]}\nkilled after {LIMIT_S} s: it hung\n"


@pytest.fixture
def emulated(tmp_path):
    """Return a function that describes two clusters with InfiniBand NICs that do not exist.

    The function returns flags and environment variables for the four ranks. With "Socket", NCCL uses
    sockets instead of the NICs, so that jobs run without RDMA; with "", NCCL is asked for the network "IB".
    """

    def make(
        net: str, hosts: tuple[str, str] = ("a0,a1", "b0,b1")
    ) -> tuple[list[str], dict[str, str]]:
        tree = Sysfs(tmp_path / "sys")
        option = f" net={net}" if net else ""
        tree.hca("mlx5_0", tree.pci("0000:17:00.0", "mlx5_core"))
        tree.ib_port("mlx5_0", prefix="fe80:0000:0000:0001", lid=1)
        tree.virtual(egress_interface("127.0.0.1"))
        processes = 4 // len(",".join(hosts).split(","))
        lines = [f"{name} ib 100Gb/s {nodes}{option}" for name, nodes in zip("ab", hosts)]
        (tmp_path / "cluster.toml").write_text(
            clusters.toml(*lines, ethernet="10Gb/s", processes=processes)
        )
        flags = [
            "--holmes",
            "--holmes-cluster",
            str(tmp_path / "cluster.toml"),
            "--holmes-preflight",
            "off",
        ]
        return flags, {"HOLMES_SYSFS": str(tmp_path / "sys")}

    return make


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        text = str(report.longrepr)[-3000:] if report.longrepr else ""
        _report.setdefault("tests", []).append([item.name, report.when, report.outcome, text])


def pytest_sessionfinish(session):
    if path := os.environ.get("HOLMES_NCCL_REPORT"):
        Path(path).write_text(
            json.dumps({"machine": machine(), **_report}, indent=1, default=str) + "\n"
        )
        print(f"\nwrote {path}: send it back, whatever passed or failed", file=sys.stderr)
