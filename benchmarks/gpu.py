"""Measures the emulated GPU: its build, memory and speed, the bytes of NICs, and losses compared with CPUs.

    .venv-gpu/bin/python benchmarks/gpu.py --json FILE          (`make .venv-gpu` makes that environment)

The cases:

    build      `holmes lab build` into an empty cache, and again with the full cache
    rank       largest resident memory of a rank with torch, NCCL and a communicator of 2 nodes
    operator   time and CPU time of 2,000 additions of 16 numbers, including the wait for them, on an emulated
               GPU and on the CPU. The CPU time hardly depends on other programs on this machine.
    bytes      20 and 40 all-reduces of 4 MB over 3 nodes. The difference of the bytes that a NIC sends is
               compared with the theory of a ring, 2 (n - 1) / n x size for each all-reduce, over Ethernet
               and InfiniBand. The counters of the interfaces include headers.
    losses     unchanged training commands on 2 + 2 nodes with 2 GPUs each, compared with gloo on CPUs:
               DeepSpeed's ZeRO 0 to 3 and pipeline, transformers' Trainer; and Megatron-LM,
               Megatron-DeepSpeed and torchtitan if they are installed (integration_tests/gpu/commands.py)
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from emulated import emulated_gpus
from harness import Row, chosen_cases, finish, kept_rows, parser, tell, write
from holmes_lab import Lab
from holmes_lab.cores import core_times
from holmes_lab.gpu.cache import VARIABLE as CACHE
from holmes_lab.gpu.libraries import libraries

from holmes_ext.cluster.spec import parse_spec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / name)
    for name in (".", "tests", "integration_tests", "examples/megatron_core/on_cpu")
]
from clusters import spec  # noqa: E402

from integration_tests.gpu.conftest import TOML  # noqa: E402

SCRIPTS = ROOT / "integration_tests" / "gpu"
THREE = spec("a ib 4Gb/s a[0-2]", ethernet="1Gb/s")
MEGABYTES = 4.0  # of an all-reduce
ROUNDS = 20  # all-reduces of a run


def build() -> list[Row]:
    """Measure how long `holmes lab build` takes, with an empty and with a full cache.

    The command compiles the libraries of the emulated GPU into a cache folder, and checks NCCL's
    results. A job on emulated GPUs needs them. The rows have the seconds of the command and, for
    the empty cache, its CPU seconds.
    """
    with tempfile.TemporaryDirectory() as directory:
        seconds, cpu, busy, begin_times = [], [], [], core_times()
        for what in ("cold", "from the cache"):
            tell(f"build, {what}")
            begin = time.perf_counter()
            command = [
                sys.executable,
                "-m",
                "holmes_ext.cli.main",
                "lab",
                "build",
                "--python",
                sys.executable,
            ]
            subprocess.run(
                command, check=True, env={**os.environ, CACHE: directory}, stdout=subprocess.DEVNULL
            )
            seconds.append(time.perf_counter() - begin)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu.append(used.ru_utime + used.ru_stime)
            busy.append(core_times().busy_since(begin_times))
        begin = time.perf_counter()
        os.environ[CACHE] = directory
        libraries([sys.executable], os.environ)
        finding_s = time.perf_counter() - begin
        del os.environ[CACHE]
    # Share of the cores that other programs used.
    others = busy[0] - cpu[0] / seconds[0] / (os.cpu_count() or 1)
    return [
        Row.median(
            "build",
            "cold, NCCL's numbers tried",
            [seconds[0]],
            unit="s",
            emulated=False,
            target="<= 420",
            busy=busy[0] if others > 0.1 else None,
        ),
        Row.median(
            "build",
            "cold, CPU time (two cores have 840 s)",
            [cpu[0]],
            unit="s",
            emulated=False,
            target="<= 840",
        ),
        Row.median("build", "from the cache: the command", [seconds[1]], unit="s", emulated=False),
        Row.median(
            "build",
            "from the cache: finding it",
            [finding_s],
            unit="s",
            emulated=False,
            target="<= 1",
        ),
    ]


def rank() -> list[Row]:
    """Measure the largest resident memory of a rank on an emulated GPU.

    Two ranks, on the nodes a0 and a1, make two all-reduces over emulated InfiniBand. Each prints
    {"peak_mb": its largest resident memory}. Two ranks are enough: all ranks need equally much.
    """
    with Lab(THREE) as lab:  # THREE: the cluster of three nodes
        printed, _ = all_reduces(lab, rounds=2, network="IB", order=("a0", "a1"))
        peaks = [line["peak_mb"] for line in printed]
    return [
        Row.median(
            "rank",
            "peak of its resident memory",
            [peak / 1e3 for peak in peaks],
            unit="GB",
            emulated=False,
            target="<= 0.8",
        )
    ]


def operator() -> list[Row]:
    """Measure how much longer a small operator takes on an emulated GPU than on the CPU.

    The operator is an addition of 16 numbers. operator_cost.py prints {"cpu": [...], "gpu": [...]}:
    for each device, microseconds of wall time and of CPU time of all threads.

    The rows have emulated=False. They show real CPU work: that of launching an operator on the
    emulated GPU. No row contains the computing time of the emulated GPU itself.
    """
    with Lab(THREE) as lab:
        result = lab.run(
            [sys.executable, str(SCRIPTS / "operator_cost.py")], order=("a0",), gpus=emulated_gpus()
        )
        assert result.returncode == 0, result.outputs
        costs = json.loads(result.stdout[0])
    wall_on_cpu, cpu_on_cpu = costs["cpu"]
    wall_on_gpu, cpu_on_gpu = costs["gpu"]
    return [
        Row.median("operator", "on the CPU", [wall_on_cpu], unit="us", emulated=False),
        Row.median(
            "operator",
            "more on an emulated GPU",
            [wall_on_gpu - wall_on_cpu],
            unit="us",
            emulated=False,
            target="<= 10",
            busy=result.busy,
        ),
        Row.median(
            "operator",
            "more, CPU time of all threads",
            [cpu_on_gpu - cpu_on_cpu],
            unit="us",
            emulated=False,
            target="<= 10",
        ),
    ]


def nic_bytes() -> list[Row]:
    """Compare the bytes that each NIC sends in all-reduces with the theory of a ring."""
    rows = []
    theory = 2 * 2 / 3 * MEGABYTES * 1e6 * ROUNDS  # bytes that each of 3 nodes sends in a ring
    with Lab(THREE) as lab:
        for network, used in (("Socket", "eth0"), ("IB", "ib0")):
            tell(f"bytes, {network}")
            # Bytes of ROUNDS and of twice as many all-reduces: the difference contains no start-up.
            few, many = (all_reduces(lab, count * ROUNDS, network)[1] for count in (1, 2))
            sent = {
                nic: [many[node][nic] - few[node][nic] for node in many] for nic in ("eth0", "ib0")
            }
            other = "ib0" if used == "eth0" else "eth0"
            error = max(abs(size / theory - 1) for size in sent[used])
            beside = max(map(abs, sent[other])) / theory  # bytes that took the wrong network
            rows += [
                Row.median(
                    "bytes",
                    f"{network}: off a ring's theory",
                    [error],
                    unit="of it",
                    emulated=False,
                    target="<= 0.02",
                ),
                Row.median(
                    "bytes",
                    f"{network}: on the other NIC",
                    [beside],
                    unit="of it",
                    emulated=False,
                    target="<= 0.001",
                ),
            ]
    return rows


def all_reduces(
    lab: Lab, rounds: int, network: str, order: Sequence[str] | None = None
) -> tuple[list[dict], dict[str, dict[str, int]]]:
    """Run all-reduces of MEGABYTES on emulated GPUs.

    Args:
        lab: The emulated nodes.
        rounds: Number of all-reduces.
        network: Value of NCCL_NET: "Socket" or "IB".
        order: Nodes of the ranks; None: all nodes.

    Returns:
        The output of each rank, and node -> NIC -> bytes sent.
    """
    before = lab.counters()
    env = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_NET": network}
    command = [sys.executable, str(SCRIPTS / "nic_bytes.py"), str(rounds), str(MEGABYTES)]
    result = lab.run(command, order=order, gpus=emulated_gpus(), env=env, timeout=300)
    assert result.returncode == 0, result.outputs
    after = lab.counters()
    sent = {
        node: {nic: after[node][nic][1] - before[node][nic][1] for nic in nics}
        for node, nics in after.items()
    }
    return [json.loads(text.splitlines()[-1]) for text in result.stdout.values()], sent


def losses() -> list[Row]:
    """Compare the losses of training commands on emulated GPUs and on CPUs.

    The training commands are those of integration_tests/gpu/commands.py.
    """
    from integration_tests.gpu import commands

    rows = []
    with Lab(parse_spec(TOML)) as lab, tempfile.TemporaryDirectory() as directory:
        for command in commands.compared(Path(directory)):
            tell(f"losses, {command.name}")
            gpu, cpu = (
                command.losses(lab, "a0,b0,a1,b1", gpus) for gpus in (emulated_gpus(), None)
            )
            # The training has made steps, and the loss has fallen.
            assert len(gpu) == len(cpu) > 1 and gpu[-1] < gpu[0], (command.name, gpu, cpu)
            difference = max(abs(a - b) for a, b in zip(gpu, cpu))
            tell(f"  {difference:.2g}")
            rows.append(
                Row.median(
                    "losses",
                    command.name,
                    [difference],
                    unit="nats",
                    emulated=False,
                    target="<= 1e-6",
                )
            )
    return rows


CASES: dict[str, Callable[[], list[Row]]] = {
    "build": build,
    "rank": rank,
    "operator": operator,
    "bytes": nic_bytes,
    "losses": losses,
}


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    args = parser(__doc__.splitlines()[0]).parse_args()
    names = chosen_cases(args.cases, CASES)
    rows = kept_rows(args.json, names)
    for name in names:
        rows += CASES[name]()
        write(rows, args.json)
    return finish(rows, args.json, "The emulated GPU")


if __name__ == "__main__":
    raise SystemExit(main())
