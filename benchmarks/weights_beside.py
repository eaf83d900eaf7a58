"""A training job beside the transfer of weights, for benchmarks/weights.py.

Two joined jobs, on the trainer's side and at the site, exchange rounds over the link over which the weights
go, and over the same uplink. Weights may take half of the link. Windows with and without a transfer
alternate, and the steps of the job in each of them are counted. During a transfer, the bytes that arrive
show that weights make way while a round is exchanged.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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
#: Hosts of the site that receive weights, and training's data: behind the link, whose buffer is long.
WEIGHTS_NODE, TRAINING_NODE = "s0h0", "s0t0"
_SAMPLE_S = 0.02
#: Share of the link from which on training counts as sending: its other messages are short.
_TRAINING_SHARE = 0.2


@dataclass(frozen=True)
class Rates:
    """Rates at which bytes arrived at the site, in bits/s."""

    training: float  # of training while it exchanged a round
    weights_beside: float  # of weights meanwhile
    weights_otherwise: float


class TrafficMeter:
    """Thread that samples the bytes which the hosts of the site have received.

    Args:
        lab: The lab.
    """

    def __init__(self, lab: Lab):
        self._lab = lab
        self._ended = threading.Event()
        self._samples: list[tuple[float, int, int]] = []  # time, bytes of weights, of training
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            counters = self._lab.counters()
            weights, training = (
                counters[node]["eth0"][0] for node in (WEIGHTS_NODE, TRAINING_NODE)
            )
            self._samples.append((time.monotonic(), weights, training))

    def rates(self) -> Rates:
        """End the thread, and return the rates."""
        self._ended.set()
        self._thread.join()
        return rates_of(self._samples)


def rates_of(samples: list[tuple[float, int, int]]) -> Rates:
    """Return the rates of training and of weights.

    Args:
        samples: Time in seconds, bytes of weights and bytes of training that have arrived until then.
    """
    seconds = {True: 0.0, False: 0.0}  # whether training was sending -> time
    bits = {True: 0, False: 0}  # of weights
    training_bits = 0
    for before, after in zip(samples, samples[1:], strict=False):
        elapsed_s = after[0] - before[0]
        training_bps = 8 * (after[2] - before[2]) / elapsed_s
        is_training = training_bps > _TRAINING_SHARE * NETWORK.rate_bps
        seconds[is_training] += elapsed_s
        bits[is_training] += 8 * (after[1] - before[1])
        if is_training:
            training_bits += 8 * (after[2] - before[2])
    if not all(seconds.values()):
        raise RuntimeError("no round was exchanged during a transfer, or rounds all the time")
    return Rates(
        training=training_bits / seconds[True],
        weights_beside=bits[True] / seconds[True],
        weights_otherwise=bits[False] / seconds[False],
    )


def measure(lab: Lab, folder: Path) -> dict[str, Any]:
    """Measure how much slower two joined jobs train while weights are sent over the same link.

    Windows of time without and with a transfer alternate.

    Args:
        lab: The emulated network NETWORK.
        folder: Folder for logs and weights.

    Returns:
        "alone" and "beside": steps per second in each window without and with a transfer. "shares": the
        part of the link's rate that each transfer has used, from 0 to 1. "training", "weights_beside":
        Mb/s of the jobs and of the weights while the jobs exchange a round. "weights_otherwise": Mb/s of
        the weights at other times.
    """
    rate = f"{SHARE * NETWORK.rate_bps / 1e6:.0f}Mb/s"
    hosts = WeightsHosts(lab, NETWORK, folder, HOLMES_WEIGHTS_RATE=rate)
    jobs: list[joined.LabJob] = []
    try:
        hosts.start("--outer", f"every={EVERY},fragments=1,compress=off")
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
        return _alternate(lab, hosts, folder, lambda: len(jobs[0].steps()))
    finally:
        for job in jobs:
            job.job.kill()
            job.job.wait()
        hosts.close()


def _alternate(
    lab: Lab, hosts: WeightsHosts, folder: Path, steps: Callable[[], int]
) -> dict[str, Any]:
    size = int(WINDOW_S * SHARE * NETWORK.rate_bps / 8)
    alone: list[float] = []
    beside: list[float] = []
    shares: list[float] = []
    rates: list[Rates] = []
    for version in range(1, WINDOWS + 1):
        made = folder / f"made{version}"
        made.mkdir()
        (made / "weights").write_bytes(os.urandom(size))
        alone.append(_steps_per_s(steps, lambda: time.sleep(WINDOW_S)))
        seconds: list[float] = []
        transfer = partial(_metered_transfer, lab, hosts, made, version, seconds, rates)
        beside.append(_steps_per_s(steps, transfer))
        shares.append(size * 8 / seconds[0] / NETWORK.rate_bps)
        tell(f"steps/s alone {alone[-1]:.2f}, beside {beside[-1]:.2f}, {rates[-1]}")
    return {
        "alone": alone,
        "beside": beside,
        "shares": shares,
        "training": [each.training / 1e6 for each in rates],
        "weights_beside": [each.weights_beside / 1e6 for each in rates],
        "weights_otherwise": [each.weights_otherwise / 1e6 for each in rates],
    }


def _metered_transfer(
    lab: Lab,
    hosts: WeightsHosts,
    folder: Path,
    version: int,
    seconds: list[float],
    rates: list[Rates],
) -> None:
    """Publish a version, and append the time and the rates of its transfer to the lists."""
    hosts.holmes("weights", "publish", str(folder), "--version", str(version))
    meter = TrafficMeter(lab)
    seconds.append(hosts.staged_after_s(version))
    rates.append(meter.rates())


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
