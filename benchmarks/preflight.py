"""Measures the cost of a safe start: the preflight of 64 ranks, and the checks that run beside training.

    python benchmarks/preflight.py --json FILE

The cases:

    64 ranks    8 nodes x 8 processes, and 64 nodes x 1, in two emulated clusters, with pipeline 2 x tensor
                4 x data 8. Every rank is a process in its node's namespaces. The time runs from the plan
                until all ranks know the result of the preflight, for the slowest rank of each run. The
                whole start is measured with and without the preflight in turn.
    step        The case 2+2 of two_clusters.py (DeepSpeed's pipeline engine, emulated accelerator) in one
                launch. In blocks of steps, everything that runs beside the training (watch over the NICs,
                telemetry, watchdog) is on, off, and off again, in changing order. The difference of the two
                without it is the noise. The result is the median of the blocks' medians, and the spread is
                their quartiles.
    watch       CPU seconds of a look at the NICs. It happens every second
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
sys.path.insert(0, str(HERE))

BLOCK = 6  # steps of a block
NIC_PATIENCE_S = 20.0  # seconds after which a NIC that stays failed ends the job
#: How blocks follow each other, changed from cycle to cycle so that a drift of the machine favours none.
ORDERS = [("on", "off", "off again"), ("off again", "on", "off"), ("off", "off again", "on")]


def rank_main(cluster: str, flag: str) -> None:
    """Start holmes as one rank, and print how long the preflight and the whole start took.

    The line is {"preflight_s": seconds, "start_s": seconds, "lines": messages to the user}.

    Args:
        cluster: The cluster file.
        flag: Value of --holmes-preflight: "on" or "off".
    """
    from holmes_ext.options import Options
    from holmes_ext.plan import maker
    from holmes_ext.plan.maker import PlanRequest
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.runtime.start import launcher, preflight
    from holmes_ext.runtime.start import rank as start

    run, took = preflight.run, [0.0]

    def timed(*args):
        """Run the preflight, and store its seconds in `took`."""
        begin = time.monotonic()
        try:
            return run(*args)
        finally:
            took[0] = time.monotonic() - begin

    preflight.run = timed
    request = PlanRequest(Options(cluster=cluster, preflight=flag), Sizes(pipeline=2, tensor=4))
    begin = time.monotonic()
    agreed: dict = {}  # further values that must be equal on all ranks: none
    current, lines = start.start(request, maker, launcher.detect(os.environ), agreed)
    whole = time.monotonic() - begin
    # All ranks wait until the others have started, so that no rank's end disturbs their times.
    store = current.store
    store.set(f"done/{current.rank}", "")
    store.wait([f"done/{rank}" for rank in range(current.plan.world_size)])
    print(json.dumps({"preflight_s": took[0], "start_s": whole, "lines": lines}), flush=True)
    # Rank 0's process hosts the store: it ends last, after all others have used the store.
    store.set(f"told/{current.rank}", "")
    if current.process.rank == 0:
        store.wait([f"told/{rank}" for rank in range(current.plan.world_size)])
    os._exit(0)  # taking 64 interpreters with torch down would be most of the time


def preflights(per_node: int, runs: int) -> list:
    """Measure the start of 64 ranks with and without the preflight, and return the rows of results.

    The ranks are on 64 / `per_node` nodes in two emulated clusters, with InfiniBand and with RoCE.

    Args:
        per_node: Ranks on a node.
        runs: Starts with the preflight, and as many without it.
    """
    from harness import tell, toml
    from holmes_lab import Lab

    from holmes_ext.cluster.spec import load_spec

    case, times = f"{64 // per_node} nodes x {per_node}", {"on": [], "off": [], "preflight": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.toml"
        last = 32 // per_node - 1  # number of the last node of a cluster
        # A cluster: its name, the type and the rate of its fast network, and its nodes.
        clusters = (f"a ib 2Gb/s a[0-{last}]", f"b roce 2Gb/s b[0-{last}]")
        path.write_text(toml(*clusters, ethernet="1Gb/s", processes=per_node))
        with Lab(load_spec(path)) as lab:
            command = [sys.executable, __file__, "--rank", str(path)]
            modules = (
                "torch",
                *(f"holmes_ext.runtime.start.{name}" for name in ("rank", "preflight", "store")),
            )
            for run in range(runs):
                for flag in ("on", "off"):
                    result = lab.run([*command, flag], preload=modules, timeout=120)
                    assert result.returncode == 0, result.outputs
                    ranks = [json.loads(text.splitlines()[-1]) for text in result.stdout.values()]
                    # No rank may have a message for the user: nothing is wrong with the networks.
                    assert not any(rank["lines"] for rank in ranks), ranks[0]
                    times[flag].append(max(rank["start_s"] for rank in ranks))
                    if flag == "on":
                        times["preflight"].append(max(rank["preflight_s"] for rank in ranks))
                tell(f"{case}: run {run + 1} of {runs}: preflight {times['preflight'][-1]:.2f} s")
    rows = [_row(case, "preflight of 64 ranks", times["preflight"], "s", "<= 3")]
    return rows + [
        _row(case, f"start-up with preflight {flag}", times[flag], "s") for flag in ("on", "off")
    ]


def _row(case: str, metric: str, values: list[float], unit: str, target: str = ""):
    from harness import Row

    return Row.median(case, metric, values, unit=unit, emulated=True, target=target)


class BackgroundChecks:
    """Background checks of holmes during training: watch over the NICs, telemetry and watchdog."""

    def __init__(self):
        from holmes_ext.runtime.measure import telemetry
        from holmes_ext.runtime.watch import start_stop

        self.recorder, self.watchdog = telemetry.recorder, start_stop._Running.watchdog
        assert (
            self.recorder is not None and self.recorder.has_listeners and self.watchdog is not None
        )
        self.on = True

    def switch(self, on: bool) -> None:
        """Switch the watch over the NICs, telemetry and the watchdog on or off, between two steps.

        The watchdog ends a job that hangs. Telemetry hooks the optimizers, because a step ends with
        theirs.
        """
        from holmes_ext.runtime.measure import telemetry
        from holmes_ext.runtime.watch import start_stop

        if on == self.on:
            return
        self.on = on
        if on:
            start_stop.watch_nics(patience_s=NIC_PATIENCE_S)
            telemetry.set_recorder(self.recorder)
            start_stop.hook_optimizers(self.recorder)
            self.watchdog.start()
            return
        start_stop.unwatch_nics()
        telemetry.set_recorder(None)
        start_stop.unhook_optimizers()
        self.watchdog.stop()


def healthy_main(out: str, *command: str) -> None:
    """Run a rank of a training job with background checks on, off, and off again.

    The checks are the watch over the NICs, telemetry and the watchdog. They are switched between
    blocks of steps, and the seconds of each step are written to a file.

    Args:
        out: File for the times. Rank 0 writes it.
        command: The training script and its arguments.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    import runpy

    import torch.distributed as dist
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from holmes_ext.runtime.watch import failure

    checks, train_batch = BackgroundChecks(), PipelineEngine.train_batch
    timings = []  # (number of the block, "on" or "off" or "off again", seconds of a step)

    def timed(engine, *args, **kwargs):
        """Train one step with background checks on or off, and append its seconds to `timings`.

        The checks are the watch over the NICs, telemetry and the watchdog. The function replaces
        train_batch() of DeepSpeed's engine. Every BLOCK steps, the checks are switched to the next
        of "on", "off" and "off again".
        """
        block, step = divmod(engine.global_steps, BLOCK)
        which = ORDERS[block // 3 % len(ORDERS)][block % 3]  # three blocks are a cycle
        checks.switch(which == "on")
        dist.barrier()
        begin = time.perf_counter()
        loss = train_batch(engine, *args, **kwargs)
        if step and block > 2:  # the first step of a block and the first cycle are for warming up
            timings.append((block, which, time.perf_counter() - begin))
        return loss

    PipelineEngine.train_batch = timed
    end = dist.destroy_process_group

    def measure_nic_watch_and_end(*args):
        """Measure the CPU time of one check of the NICs, write all times, and end process groups.

        The function replaces deepspeed.comm.destroy_process_group: the training script calls that after its
        last step. While a job trains, a thread checks every second whether a NIC has failed. The time of one
        check is stored as (-1, "look", seconds), beside those of the steps.

        Args:
            args: For the replaced function.
        """
        watch = failure.NicWatch(patience_s=NIC_PATIENCE_S)
        looks = 500  # enough for the clock of a thread
        begin = time.thread_time()
        for second in range(looks):
            watch.poll(float(second))  # the time of the look: it looks once each second
        timings.append((-1, "look", (time.thread_time() - begin) / looks))
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(timings))
        end(*args)

    import deepspeed.comm

    deepspeed.comm.destroy_process_group = measure_nic_watch_and_end
    sys.path.insert(0, str(Path(command[0]).parent))
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")


def healthy_steps(cycles: int) -> list:
    """Measure training steps with and without the background checks of holmes.

    The checks are the watch over the NICs, telemetry and the watchdog. The rows of results are
    returned.

    Args:
        cycles: Number of cycles of three blocks of steps: on, off, and off again (the noise).
    """
    from harness import Row, tell
    from holmes_lab import Lab, interleave
    from two_clusters import CASES, script

    from holmes_ext.cluster.spec import load_spec
    from holmes_ext.samples import examples

    case = next(case for case in CASES if case.name == "2+2")
    file = examples() / "clusters" / case.file
    spec = load_spec(file)
    with Lab(spec, realtime=True) as lab, tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--step",
            f"{folder}/found",
            *script(case),
            "--steps",
            str(3 * (cycles + 1) * BLOCK),
            "--holmes",
            "--holmes-cluster",
            str(file),
            "--holmes-sizes",
            f"pipeline={case.stages}",
            "--holmes-telemetry",
            folder,
        ]
        tell(f"step: {3 * (cycles + 1)} blocks of {BLOCK} steps")
        result = lab.run(
            command,
            order=interleave(spec),
            preload=("torch", "deepspeed"),
            timeout=230,
            env={"DS_ACCELERATOR": "cpu"},
            accelerator={"flops": case.flops, "classes": ["Block"]},
        )
        assert result.returncode == 0, result.outputs
        timings = json.loads(Path(folder, "found").read_text())
    blocks: dict[int, tuple[str, list[float]]] = {}
    for block, which, seconds in timings:
        blocks.setdefault(block, (which, []))[1].append(seconds)
    _, (look_s,) = blocks.pop(-1)  # the look at the NICs is stored as block -1
    look = look_s * 100  # percent of a core, since there is one look each second
    by = {
        which: [statistics.median(times) for name, times in blocks.values() if name == which]
        for which in ORDERS[0]
    }
    more = [(on / off - 1) * 100 for on, off in zip(by["on"], by["off"])]
    noise = [(again / off - 1) * 100 for again, off in zip(by["off again"], by["off"])]
    return [
        *(
            Row.median("step", f"healthy step, everything {which}", times, unit="s", emulated=True)
            for which, times in by.items()
        ),
        Row.of(
            "step",
            "everything on against off, more",
            statistics.median(more),
            unit="%",
            spread=_quartiles(more),
            emulated=True,
            target="<= 0.5",
        ),
        Row.of(
            "step",
            "off again against off, more (A/A, noise)",
            statistics.median(noise),
            unit="%",
            spread=_quartiles(noise),
            emulated=True,
        ),
        Row.median(
            "watch",
            "share of a core, one look each second",
            [look],
            unit="%",
            emulated=False,
            target="<= 0.5",
        ),
    ]


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    import harness

    arguments = harness.parser(__doc__)
    arguments.add_argument(
        "--runs", type=int, default=5, help="launches with and without preflight"
    )
    arguments.add_argument(
        "--cycles",
        type=int,
        default=16,
        help=f"of the case step: each has {BLOCK} steps with the checks on, off, and off again",
    )
    args = arguments.parse_args()
    # "8": 8 nodes of 8 ranks. "64": 64 nodes of one rank. "step": the checks that run beside
    # training.
    chosen = [name for name in args.cases.split(",") if name] or ["8", "64", "step"]
    rows = []
    if "8" in chosen:
        rows += preflights(per_node=8, runs=args.runs)
    if "64" in chosen:
        rows += preflights(per_node=1, runs=args.runs)
    if "step" in chosen:
        rows += healthy_steps(args.cycles)
    return harness.finish(rows, args.json, "Preflight, and a healthy step with everything on")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    elif sys.argv[1:2] == ["--step"]:
        healthy_main(*sys.argv[2:])
    else:
        sys.exit(main())
