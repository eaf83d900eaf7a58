"""Starts the ranks of a case on this machine and keeps what they found for the report, `nccl-report.json`.

one machine   four ranks share its GPUs, each a host of its own
              to NCCL and to holmes (NCCL_HOSTID, HOLMES_NODE)
emulated GPUs the same, HOLMES_TEST_CARRIER=nccl (`make gpu`): NCCL's own host code, no GPU
two nodes     HOLMES_NCCL_NODE=0 or 1 and MASTER_ADDR, the same
              command on both: two ranks on each, on real NICs
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
from holmes_ext.cluster.nccl import file_settings, net_plugin, no_verbs
from holmes_ext.doctor.nccl import installed_nccl
from integration_tests.nccl.debug_lines import read

ROOT = Path(__file__).resolve().parents[2]
GPU = EMULATED or bool(torch.version.cuda) and torch.cuda.is_available()
#: Of this machine (each rank has as many, emulated).
GPUS = 2 if EMULATED else torch.cuda.device_count()
#: This node's number, None on one machine alone.
NODE = int(os.environ["HOLMES_NCCL_NODE"]) if "HOLMES_NCCL_NODE" in os.environ else None
NAMES = ("a0", "b0", "a1", "b1")  # in turn, as a scheduler that knows nothing launches them
LIMIT_S = 240
_report: dict = {"cases": []}


def machine() -> dict:
    """What the cases ran on."""
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
        "no verbs": no_verbs(os.environ),
        "plugin": net_plugin(os.environ),
        "files": file_settings(os.environ),
        "variables": variables,
    }


class Case:
    """What a case's ranks printed. lines: their JSON lines by rank; said: NCCL's, in the same order;
    outputs: all.
    """

    def __init__(self, outputs: list[str], statuses: list[int]):
        self.outputs, self.statuses = outputs, statuses
        found = [
            (json.loads(line), output)
            for output in outputs
            for line in output.splitlines()
            if line.startswith('{"rank"')
        ]
        found.sort(key=lambda pair: pair[0]["rank"])
        self.lines, self.said = [line for line, _ in found], [read(output) for _, output in found]

    def check_holmes(self, flags: Sequence[str]) -> None:
        """Each rank ran as its flags say: without the .pth file `--holmes` would be the script's own
        argument.
        """
        expected = "--holmes" in flags
        assert all(line["holmes"] == expected for line in self.lines), (expected, self.lines)

    def networks_as_asked(self) -> None:
        """Each group of several ranks that asked for a network by name has it: by NCCL's own word."""
        for line, said in zip(self.lines, self.said, strict=True):
            made = [(one.ranks, one.network) for one in said.communicators]
            for ranks_of, name in line["groups"]:
                if name and len(ranks_of) > 1:
                    assert (len(ranks_of), name) in made, (line, made)


def launch(
    case: str, directory: Path, *flags: str, number: int, gpus: int = 1, **environment: str
) -> Case:
    """Run a case; kills what runs longer than LIMIT_S seconds. number: of the case, for its port on two
    nodes; gpus: of each of the hosts that one machine stands for.
    """
    script = [str(ROOT / "integration_tests/nccl/cases.py"), case, *flags]
    store, common = None, {}
    if NODE is None:
        store, common = ranks.hosted_store()
        common |= carriers.environment(GPUS)
        own = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % gpus),
                "LOCAL_WORLD_SIZE": str(gpus),
                "NCCL_HOSTID": name,
                "HOLMES_NODE": name,
                "NCCL_P2P_DISABLE": "1",
                "NCCL_SHM_DISABLE": "1",
                "HOLMES_LAB_RANK": str(rank),
            }
            for rank, name in enumerate(name for name in NAMES[: 4 // gpus] for _ in range(gpus))
        ]
    else:
        common = {"MASTER_PORT": str(29600 + number)}
        own = [
            {"RANK": str(2 * NODE + local), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "2"}
            for local in (0, 1)
        ]
        if torch.cuda.device_count() < 2:
            for place in own:
                place["NCCL_HOSTID"] = f"{platform.node()}-{place['LOCAL_RANK']}"
    every = {
        "WORLD_SIZE": "4",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        **common,
        **environment,
    }
    run = _forked if EMULATED else _started
    done = Case(*run(script, [{**os.environ, **every, **place} for place in own], directory))
    del store
    said = [
        {
            **asdict(one),
            "communicators": [
                {**asdict(made), "devices": sorted(made.devices)} for made in one.communicators
            ],
        }
        for one in done.said
    ]
    tails = [output[-6000:] for output in done.outputs] if any(done.statuses) else []
    _report["cases"].append(
        {
            "case": case,
            "flags": flags,
            "environment": environment,
            "statuses": done.statuses,
            "lines": done.lines,
            "nccl": said,
            "tails": tails,
        }
    )
    done.check_holmes(flags)
    return done


def _started(
    script: list[str], environments: list[dict[str, str]], directory: Path
) -> tuple[list[str], list[int]]:
    """(outputs, statuses) of a Python for each environment."""
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
    # a full pipe would hold up its rank, and so all others
    with ThreadPoolExecutor(len(processes)) as readers:
        outputs = list(readers.map(_output_of, processes))
    return outputs, [process.returncode for process in processes]


def _forked(
    script: list[str], environments: list[dict[str, str]], directory: Path
) -> tuple[list[str], list[int]]:
    """The same of forks of one Python."""
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
            said, _ = process.communicate(json.dumps([script, environments]), timeout=LIMIT_S)
            statuses, late = json.loads(said), ""
        except subprocess.TimeoutExpired:
            process.kill()
            statuses, late = [-9] * len(logs), f"\nkilled after {LIMIT_S} s: it hung\n"
    return [log.read_text(errors="replace") + late for log in logs], statuses


def _output_of(process: subprocess.Popen) -> str:
    try:
        return process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"{process.communicate()[0]}\nkilled after {LIMIT_S} s: it hung\n"


@pytest.fixture
def emulated(tmp_path):
    """Flags and environment under which the four ranks are two clusters with InfiniBand NICs that do not
    exist, and what NCCL is asked for on them: emulated("Socket") makes jobs run without RDMA, emulated("")
    asks for "IB".
    """

    def make(
        net: str, hosts: tuple[str, str] = ("a0,a1", "b0,b1")
    ) -> tuple[list[str], dict[str, str]]:
        tree, more = Sysfs(tmp_path / "sys"), f" net={net}" if net else ""
        tree.hca("mlx5_0", tree.pci("0000:17:00.0", "mlx5_core"))
        tree.ib_port("mlx5_0", prefix="fe80:0000:0000:0001", lid=1)
        tree.virtual(egress_interface("127.0.0.1"))
        processes = 4 // len(",".join(hosts).split(","))
        lines = [f"{name} ib 100Gb/s {nodes}{more}" for name, nodes in zip("ab", hosts)]
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
