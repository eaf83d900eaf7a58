"""A training job beside the transfer of weights, for benchmarks/weights.py.

Two joined jobs, on the trainer's side and at the site, exchange rounds over the link over which the weights
go, and over the same uplink. Weights may take half of the link. Windows with and without a transfer
alternate, and the steps of the job in each of them are counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import tell
from holmes_lab import Lab, joined
from weights_lab import PORT, Network, WeightsHosts, wait_until

#: Trainer's host for the service and one that trains; a receiving host and one that trains at the site.
NETWORK = Network(sites=1, rate_bps=1e8, latency_ms=20, hosts=1, trainers=2, training_hosts=1)
SHARE = 0.5
#: Steps between two rounds.
EVERY = 16
#: FLOP/s of the emulated accelerator of each job: a step takes about 0.2 s.
FLOPS = 6e9
WINDOW_S = 20.0
WINDOWS = 4  # of each sort
_MOST_STEPS = 1_000_000


def measure(lab: Lab, folder: Path) -> dict[str, Any]:
    """Measure how much slower two joined jobs train while weights are sent over the same link.

    Windows of time without and with a transfer alternate.

    Args:
        lab: The emulated network NETWORK.
        folder: Folder for logs and weights.

    Returns:
        "alone" and "beside": steps per second in each window without and with a transfer. "shares": the
        part of the link's rate that each transfer has used, from 0 to 1.
    """
    rate = f"{SHARE * NETWORK.rate_bps / 1e6:.0f}Mb/s"
    hosts = WeightsHosts(lab, NETWORK, folder, HOLMES_WEIGHTS_RATE=rate)
    jobs: list[joined.LabJob] = []
    try:
        hosts.start("--outer", f"every={EVERY}")
        coordinator = joined.LabCoordinator(f"{hosts.address}:{PORT}", [], str(hosts.state))
        for name, node in (("home", "t1"), ("away", "s0t0")):
            jobs.append(
                joined.start(
                    lab,
                    name,
                    [node],
                    coordinator.flags(name),
                    steps=_MOST_STEPS,
                    seed=len(jobs),
                    log=folder / f"{name}.jsonl",
                    flops=FLOPS,
                    environment=coordinator.environment,
                )
            )
        wait_until(lambda: len(jobs[0].steps()) > 2 * EVERY)
        return _alternate(hosts, folder, lambda: len(jobs[0].steps()))
    finally:
        for job in jobs:
            job.job.kill()
            job.job.wait()
        hosts.close()


def _alternate(hosts: WeightsHosts, folder: Path, steps: Callable[[], int]) -> dict[str, Any]:
    size = int(WINDOW_S * SHARE * NETWORK.rate_bps / 8)
    alone: list[float] = []
    beside: list[float] = []
    shares: list[float] = []
    for version in range(1, WINDOWS + 1):
        made = folder / f"made{version}"
        made.mkdir()
        (made / "weights").write_bytes(os.urandom(size))
        alone.append(_steps_per_s(steps, lambda: time.sleep(WINDOW_S)))
        seconds: list[float] = []
        transfer = partial(hosts.publish, made, version)
        beside.append(_steps_per_s(steps, lambda: seconds.append(transfer())))  # noqa: B023
        shares.append(size * 8 / seconds[0] / NETWORK.rate_bps)
        tell(f"steps/s alone {alone[-1]:.2f}, beside {beside[-1]:.2f}, link {shares[-1]:.2f}")
    return {"alone": alone, "beside": beside, "shares": shares}


def _steps_per_s(steps: Callable[[], int], run: Callable[[], Any]) -> float:
    """Call run(), and return the training steps per second meanwhile.

    The time is extended to whole rounds of the joined jobs: it begins with a round, and ends with the first
    round that begins after run() has returned.

    Args:
        steps: Returns the number of steps that the job has made so far.
        run: Waits, or transfers weights.
    """
    first = _next_round(steps)
    begin = time.monotonic()
    run()
    last = _next_round(steps)
    return (last - first) / (time.monotonic() - begin)


def _next_round(steps: Callable[[], int]) -> int:
    """Wait until the job has made the first step of its next round; return the number of its steps.

    A round begins every EVERY steps.
    """
    now = steps()
    target = now - now % EVERY + EVERY + 1
    wait_until(lambda: steps() >= target)
    return target


def slower_percent(result: dict[str, Any]) -> list[float]:
    """Return by how many percent the job was slower during each transfer than in the window before.

    Args:
        result: Result of measure().
    """
    pairs = zip(result["alone"], result["beside"], strict=True)
    return [100 * (1 - beside / alone) for alone, beside in pairs]
