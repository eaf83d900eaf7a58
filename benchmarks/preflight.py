"""What starting safely costs: the preflight of 64 ranks in emulated clusters, and a healthy step with the NIC watch on.

    python benchmarks/preflight.py --json FILE

"64 ranks": 8 nodes x 8 processes, and 64 nodes x 1, two clusters, pipeline 2 x tensor 4 x data 8; every rank is a process in its node's namespaces.
Seconds from the plan's verdict until all ranks have the preflight's, the slowest rank of each run; and the whole start with and without, in turn.
"step": 4 processes on loopback, a matrix product and an all-reduce; blocks of steps with and without the watch in turn, and pairs of two
blocks without (what the machine's noise makes). "watch": CPU seconds of one look at the NICs, of which there is one each second.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

RUNS, BLOCKS, STEPS = 5, 40, 40
TOML = """version = 1
[ethernet]
rate = "1Gb/s"
[[cluster]]
name = "a"
kind = "ib"
rate = "2Gb/s"
nodes = ["a[0-{last}]"]
processes = {processes}
[[cluster]]
name = "b"
kind = "roce"
rate = "2Gb/s"
nodes = ["b[0-{last}]"]
processes = {processes}
"""


def rank_main(cluster: str, flag: str) -> None:
    """One rank in the lab: start holmes, print seconds of the preflight and of the whole start."""
    from holmes_ext.options import Options
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.runtime import launcher, preflight, start

    run, took = preflight.run, [0.0]

    def timed(*args):
        begin = time.monotonic()
        try:
            return run(*args)
        finally:
            took[0] = time.monotonic() - begin

    preflight.run = timed
    begin = time.monotonic()
    current, lines = start.start(Options(cluster=cluster, preflight=flag), launcher.detect(os.environ), Sizes(pipeline=2, tensor=4), {})
    whole = time.monotonic() - begin
    store = start._stores[-1]  # rank 0's process hosts it: wait for all before it ends
    store.set(f"done/{current.rank}", "")
    store.wait([f"done/{rank}" for rank in range(current.plan.world_size)])
    print(json.dumps({"preflight_s": took[0], "start_s": whole, "lines": lines}), flush=True)
    time.sleep(0.2)


def preflights(per_node: int) -> list:
    from harness import tell

    from holmes_ext.cluster.spec import load_spec
    from holmes_ext.lab import Lab

    scene, times = f"{64 // per_node} nodes x {per_node}", {"on": [], "off": [], "preflight": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.toml"
        path.write_text(TOML.format(last=32 // per_node - 1, processes=per_node))
        with Lab(load_spec(path)) as lab:
            command = [sys.executable, __file__, "--rank", str(path)]
            modules = ("torch", *(f"holmes_ext.runtime.{name}" for name in ("start", "preflight", "store")))
            for run in range(RUNS):
                for flag in ("on", "off"):
                    result = lab.run([*command, flag], preload=modules, timeout=120)
                    assert result.returncode == 0, result.outputs
                    told = [json.loads(text.splitlines()[-1]) for text in result.stdout.values()]
                    assert not any(rank["lines"] for rank in told), told[0]
                    times[flag].append(max(rank["start_s"] for rank in told))
                    if flag == "on":
                        times["preflight"].append(max(rank["preflight_s"] for rank in told))
                tell(f"{scene}: run {run + 1} of {RUNS}: preflight {times['preflight'][-1]:.2f} s")
    rows = [_row(scene, "preflight of 64 ranks", times["preflight"], "s", "<= 3")]
    return rows + [_row(scene, f"start-up with preflight {flag}", times[flag], "s") for flag in ("on", "off")]


def _row(scene: str, metric: str, values: list[float], unit: str, target: str = ""):
    from harness import Row

    return Row.of(scene, metric, statistics.median(values), unit, (min(values), max(values)), True, target)


def steps_of(rank: int) -> list[tuple[str, float]]:
    """("on", "off" or "off again", seconds of a step) of every block."""
    import torch
    import torch.distributed as dist

    from holmes_ext.cluster.site import ETHERNET, Fabric, Node, Port, Site
    from holmes_ext.options import Options
    from holmes_ext.plan.plan import Plan
    from holmes_ext.runtime import nic_watch, session
    from holmes_ext.runtime.launcher import Process
    from holmes_ext.runtime.session import GroupRecord
    from holmes_ext.runtime.transport import Transport

    node = Node("n", "a", 4, (Port("fast", "lo", "127.0.0.1"), Port(ETHERNET, "lo", "127.0.0.1")))
    site = Site((node,), (Fabric(ETHERNET, "ethernet", 10**9, 3e-5), Fabric("fast", "roce", 10**9, 3e-6)))
    current = session.Session(Options(), Process(rank, 4, rank, 4, "127.0.0.1", 1, "benchmark"), site, Plan(site.digest, ("n",), 4), rank)
    current.groups += [GroupRecord(name, (0, 1, 2, 3), "gloo", Transport(name, "roce", "lo", "")) for name in ("fast", ETHERNET)]
    session.set_active(current)
    a, b, gradients = torch.randn(256, 256), torch.randn(256, 256), torch.ones(100_000)
    found = []
    for block in range(BLOCKS):
        # the order within a pair changes, so that a drift of the machine favours neither
        for which in [("on", "off", "off again"), ("off again", "on", "off"), ("off", "off again", "on")][block % 3]:
            if which == "on":
                nic_watch.start(20.0)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                for _ in range(4):
                    a @ b
                dist.all_reduce(gradients)
                gradients.fill_(1)
            found.append((which, (time.perf_counter() - begin) / STEPS))
            nic_watch.stop()
    begin = time.thread_time()
    watch = nic_watch.NicWatch(20.0)
    for number in range(500):
        watch.look(float(number))
    found.append(("look", (time.thread_time() - begin) / 500))
    session.set_active(None)
    return found


def healthy_steps() -> list:
    from harness import Row

    from ranks import run_ranks

    found = run_ranks(steps_of, 4, timeout_s=240)[0]
    by = {which: [seconds for name, seconds in found if name == which] for which in ("on", "off", "off again", "look")}
    ratio = [(on / off - 1) * 100 for on, off in zip(by["on"], by["off"])]
    noise = [(again / off - 1) * 100 for again, off in zip(by["off again"], by["off"])]
    look = by["look"][0] * 100
    return [
        Row.of("step", "median step without the watch", statistics.median(by["off"]), "s", (min(by["off"]), max(by["off"])), False),
        Row.of("step", "step with the watch, more", statistics.median(ratio), "%", (min(ratio), max(ratio)), False, "<= 0.5"),
        Row.of("step", "step without against without, more (noise)", statistics.median(noise), "%", (min(noise), max(noise)), False),
        Row.of("watch", "share of a core, one look each second", look, "%", (look, look), False, "<= 0.5"),
    ]


def main() -> int:
    import harness

    args = harness.parser(__doc__).parse_args()
    chosen = [name for name in args.scenes.split(",") if name] or ["8", "64", "step"]
    rows = []
    if "8" in chosen:
        rows += preflights(8)
    if "64" in chosen:
        rows += preflights(1)
    if "step" in chosen:
        rows += healthy_steps()
    return harness.finish(rows, args.json, "preflight and watch")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    else:
        sys.exit(main())
