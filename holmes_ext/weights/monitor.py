"""Rate and lag of each host that receives weights, for `holmes weights status` and Prometheus.

The lag is the time since the publication of the oldest newer version that the host does not have completely.
`holmes join serve` exports metrics if the variable HOLMES_WEIGHTS_METRICS is set:

    PORT        http://127.0.0.1:PORT/metrics, for a Prometheus server or agent on this host
    HOST:PORT   the same page at this host's address HOST; 0.0.0.0 for all addresses
    FILE.prom   the same text in a file, for the textfile collector of node_exporter

prometheus_client is optional: pip install 'holmes_ext[metrics]'.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.watch.metrics import Family, export
from holmes_ext.units import metrics_problem

#: Environment variable with the port or file for metrics.
METRICS_VARIABLE = "HOLMES_WEIGHTS_METRICS"
#: Seconds between two samples of the received bytes of all hosts.
_SAMPLE_S = 1.0
#: Number of samples for computing the rate of a host.
_SAMPLES = 3

_HOST = ("site", "host")
FAMILIES = {
    "holmes_weights_published_version": Family("newest published version"),
    "holmes_weights_committed_version": Family("version to which sites switch now"),
    "holmes_weights_sent_bytes_total": Family("bytes sent to a site over the WAN", ("site",)),
    "holmes_weights_staged_version": Family("newest complete version of a host", _HOST),
    "holmes_weights_current_version": Family("version that a host uses", _HOST),
    "holmes_weights_received_bytes_total": Family(
        "bytes that a host has received since its start, over the WAN or from a host of its site",
        (*_HOST, "source"),
    ),
    "holmes_weights_receive_bits_per_second": Family("rate at which a host receives", _HOST),
    "holmes_weights_lag_seconds": Family(
        "seconds for which a version has been published that a host does not have completely", _HOST
    ),
}


class ReceivedSample(NamedTuple):
    """Number of bytes that a host had received until some time. A rate is computed from two samples."""

    seconds: float  # time of the sample, by time.monotonic()
    received: int  # bytes since the start of the host's process


class Monitor:
    """Computes the rate and the lag of each host that receives published versions of the weights.

    The rate comes from samples of the bytes that a host has received. The lag is 0 if the host has the newest
    version. Otherwise it is the time since the publication of the oldest version that is newer than the
    host's newest.

    Args:
        status: Returns the status of the service (WeightsService.status), without rates and lags.
        published_at: Returns the publication time of a version, in seconds since 1970. None: the version was
            removed from the publisher's store.
        origin: Random identity of the folder of published versions, for the status.
    """

    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        published_at: Callable[[int], float | None],
        origin: str = "",
    ):
        self._status = status
        self._origin = origin
        self._published_at = published_at
        self._lock = threading.Lock()  # of the samples
        # Address of a host -> its newest samples.
        self._samples: dict[str, deque[ReceivedSample]] = {}

    def sample(self, now: float) -> None:
        """Take a sample of the bytes that each host has received until `now`, by time.monotonic()."""
        hosts = self._status()["hosts"]
        with self._lock:
            before = self._samples
            self._samples = {}  # without hosts that are gone
            for host in hosts:
                address = str(host["address"])
                samples = before.get(address) or deque(maxlen=_SAMPLES)
                samples.append(ReceivedSample(now, host["wan_bytes"] + host["site_bytes"]))
                self._samples[address] = samples

    def status(self) -> dict[str, Any]:
        """Return the published versions, and rate and lag of each host, for `holmes weights status`."""
        status = self._status()
        for host in status["hosts"]:
            host["bits_per_second"] = round(self._bits_per_second(str(host["address"])))
            host["lag_s"] = round(self._lag_s(host["newest"], status["versions"]), 1)
        return {"origin": self._origin, **status}

    def _bits_per_second(self, address: str) -> float:
        """Return the mean rate of the host with an address over the last samples, in bits/s."""
        with self._lock:
            samples = list(self._samples.get(address, ()))
        if not samples or samples[-1].seconds == samples[0].seconds:
            return 0.0
        received = samples[-1].received - samples[0].received
        return 8 * received / (samples[-1].seconds - samples[0].seconds)

    def _lag_s(self, newest: int | None, published: list[int]) -> float:
        """Return the seconds since the publication of the oldest version that a host still lacks.

        Args:
            newest: Newest complete version of the host; None: it has none.
            published: All published versions, in ascending order.

        Returns:
            0.0 if the host has the newest version.
        """
        lacking = [version for version in published if newest is None or version > newest]
        for version in lacking:
            published_at = self._published_at(version)
            if published_at is None:
                continue  # the version was removed a moment ago
            return max(0.0, time.time() - published_at)
        return 0.0

    def collect(self) -> Iterator[Any]:
        """Yield all metrics with their values. prometheus_client calls this method when it exports them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values = metric_values(self.status())
        for name, family in FAMILIES.items():
            metric_class = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = metric_class(name, family.help, labels=family.labels)
            for labels, value in sorted(values[name].items()):
                metric.add_metric(labels, value)
            if metric.samples:
                yield metric

    def take(self, document: dict[str, Any]) -> None:
        """Do nothing. export() calls it with new documents, but collect() reads the current state."""


def metric_values(status: dict[str, Any]) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values of all metrics for Prometheus.

    Several processes at a site may have the same host name, as in containers. They are exported as one host,
    with the lowest of their versions, the largest of their lags, and the sum of their bytes and rates.

    Args:
        status: Result of Monitor.status().

    Returns:
        For each metric of FAMILIES: values of the labels -> value of the metric. For example
        {"holmes_weights_staged_version": {("east", "node0"): 12}}, with the labels site and host.
    """
    values: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    if status["versions"]:
        values["holmes_weights_published_version"][()] = status["versions"][-1]
    if status["current"] is not None:
        values["holmes_weights_committed_version"][()] = status["current"]
    for site, count in status["sent_bytes"].items():
        values["holmes_weights_sent_bytes_total"][(site,)] = count

    for host in status["hosts"]:
        labels = (str(host["site"]), str(host["host"]))
        for state, version in (("staged", host["newest"]), ("current", host["current"])):
            if version is not None:
                versions = values[f"holmes_weights_{state}_version"]
                versions[labels] = min(version, versions.get(labels, version))
        lags = values["holmes_weights_lag_seconds"]
        lags[labels] = max(host["lag_s"], lags.get(labels, 0.0))
        rates = values["holmes_weights_receive_bits_per_second"]
        rates[labels] = host["bits_per_second"] + rates.get(labels, 0.0)
        received = values["holmes_weights_received_bytes_total"]
        for source in ("wan", "site"):
            bytes_before = received.get((*labels, source), 0)
            received[(*labels, source)] = bytes_before + host[f"{source}_bytes"]
    return values


@contextlib.contextmanager
def run_monitor(monitor: Monitor, environ: Mapping[str, str]) -> Iterator[None]:
    """Context manager that runs a monitor, and exports its metrics if HOLMES_WEIGHTS_METRICS is set.

    While the block runs, a thread takes a sample of the received bytes of all hosts every second.

    Args:
        monitor: The monitor.
        environ: Environment variables.

    Raises:
        HolmesError: HOLMES_WEIGHTS_METRICS cannot be used.
    """
    destination = environ.get(METRICS_VARIABLE, "")
    metrics = None
    if destination:
        problem = metrics_problem(destination)
        if problem:
            raise HolmesError(f"{METRICS_VARIABLE}: {destination!r:.100} {problem}")
        metrics = export(f"{METRICS_VARIABLE}={destination}", destination, monitor)
    ended = threading.Event()

    def sample_until_end() -> None:
        while not ended.wait(_SAMPLE_S):
            monitor.sample(time.monotonic())
            if metrics is not None:
                metrics.write()

    thread = threading.Thread(target=sample_until_end, name="holmes-weights-monitor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if metrics is not None:
            metrics.close()
