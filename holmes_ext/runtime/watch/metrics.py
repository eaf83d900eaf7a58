"""Exports metrics of a running job to Prometheus: --holmes-metrics, on local rank 0 of each node.

    PORT        http://127.0.0.1:PORT/metrics, for a Prometheus server or agent on this node
    HOST:PORT   the same at this node's address HOST; 0.0.0.0 for all addresses
    FILE.prom   the same text in a file, for the textfile collector of node_exporter. The file is replaced as
                a whole, at most once a second, and when the job ends.

Most values come from the documents that telemetry_file.py makes of training steps and of outer rounds. In an
outer round, jobs that are joined by --holmes-join exchange pseudo-gradients. The state of a NIC is read when
Prometheus asks for it. Counters begin at the start of the job. The package prometheus_client is optional: pip
install 'holmes_ext[metrics]'.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holmes_ext import __version__
from holmes_ext.cluster.node_report import lab_scale
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.runtime import session
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import Guest, Listener, address_text, listen
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.watch import nics
from holmes_ext.units import parse_address
from holmes_ext.words import tell_user, why

#: Seconds between two writes of the file.
_EVERY_S = 1.0
_MOST_REQUESTS = 16  # that are handled at the same time
_MOST_REQUESTS_OF_ADDRESS = 8
_REQUEST_S = 10.0  # longest time of a request
_MOST_REQUEST_BYTES = 8192
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus's text format


class Family(NamedTuple):
    """A metric of Prometheus. If its name ends in _total, it is a counter, else a gauge."""

    help: str
    labels: tuple[str, ...] = ()  # beside "node" and "cluster": all metrics have these


class Sample(NamedTuple):
    """Value of a Prometheus metric, with the values of its labels."""

    name: str
    labels: tuple[str, ...]  # values of the family's labels
    value: float


_GROUP = ("kind", "where", "fabric")
_DIRECTION = ("from", "to")
FAMILIES = {
    "holmes_job_info": Family(
        "always 1; the labels identify the job", ("rank", "world_size", "version")
    ),
    "holmes_steps_total": Family("steps that this rank has finished"),
    "holmes_step_seconds_total": Family("seconds that all finished steps took"),
    "holmes_last_step_seconds": Family("seconds of the last step"),
    "holmes_tokens_total": Family(
        "tokens that all ranks together have trained on, if the framework reports them"
    ),
    "holmes_exposed_seconds_total": Family(
        "seconds the program was blocked on communication", _GROUP
    ),
    "holmes_under_way_seconds_total": Family(
        "seconds with one or more operations under way", _GROUP
    ),
    "holmes_sent_bytes_total": Family("bytes that this rank's operations sent", _GROUP),
    "holmes_operations_total": Family(
        "collectives and messages, by kind of group and fabric", _GROUP
    ),
    "holmes_reducer_exposed_seconds_total": Family(
        "seconds the program was blocked on GradientReducer's threads"
    ),
    "holmes_between_sent_bytes_total": Family(
        "bytes that this rank sent from a cluster to another", _DIRECTION
    ),
    "holmes_between_exposed_seconds_total": Family(
        "seconds blocked on traffic between clusters", _DIRECTION
    ),
    "holmes_rounds_total": Family("rounds with joined jobs, by verdict", ("verdict",)),
    "holmes_round_sent_bytes_total": Family("bytes sent in rounds with joined jobs"),
    "holmes_round_seconds_total": Family("seconds that rounds with joined jobs were under way"),
    "holmes_round_exposed_seconds_total": Family("seconds the program was blocked on rounds"),
    "holmes_plan_changes_total": Family(
        "changes of the running job's plan; only on rank 0", ("in_flight",)
    ),
    "holmes_plan_predicted_step_seconds": Family(
        "seconds of a step that the plan's last change predicts"
    ),
    "holmes_nic_up": Family(
        "1: the NIC carries data now; 0: it has no link, or is down", ("nic", "fabric")
    ),
    "holmes_nic_errors_total": Family("the kernel's error counters of a NIC", ("nic", "counter")),
    "holmes_nic_bytes_total": Family(
        "bytes that an interface and its HCAs carried", ("interface",)
    ),
    "holmes_fabric_bits_per_second": Family(
        "rate of a node on a fabric, as the plan assumes", ("fabric",)
    ),
}


class Collector:
    """Collector of prometheus_client: sums over the documents of telemetry, and the current state of NICs."""

    def __init__(self) -> None:
        """Create a collector of Prometheus metrics that have no values yet."""
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}  # (metric, labels) -> value
        self._lock = threading.Lock()  # telemetry's thread and Prometheus's requests use the values

    def take(self, document: dict[str, Any]) -> None:
        """Update the Prometheus metrics by a line of the telemetry file.

        Args:
            document: The line, as a JSON object. It describes the value of one of these keys; lines
                with none of them are ignored: "step": a training step. "plan": a change of the
                running job's plan. "outer": an outer round: joined jobs exchange pseudo-gradients.
        """
        with self._lock:
            if "step" in document:
                self._take_step(document)
            elif "plan" in document:
                change = document["plan"]
                predicted_step_s = change["then_s"]  # predicted seconds of a step after the change
                self._values["holmes_plan_predicted_step_seconds", ()] = predicted_step_s
                in_flight = "+".join(map(str, change["in_flight"]))
                # The label names the change: how gradients are reduced ("sums"), or the
                # micro-batches in flight of each pipeline stage (e.g. "3+1" for two stages).
                self._add("plan_changes", 1, "sums" if change.get("sums") else in_flight)
            elif "outer" in document:
                figures = document["outer"]
                # "verdict": how the coordinator ended the round, e.g. "commit".
                self._add("rounds", 1, str(figures["verdict"]))
                self._add("round_sent_bytes", figures["bytes"])
                self._add("round_seconds", figures["seconds"])
                self._add("round_exposed_seconds", figures["exposed"])

    def _take_step(self, document: dict[str, Any]) -> None:
        """Add a training step's document to the counters. The caller holds the lock.

        Args:
            document: Line of the step in the telemetry file. Its times are in seconds.
        """
        seconds = document["end"] - document["begin"]
        self._values["holmes_last_step_seconds", ()] = seconds
        self._add("steps", 1)
        self._add("step_seconds", seconds)
        self._add("tokens", document["tokens"])

        # A row has sums over the operations of a kind of process group, such as "data", on one network.
        # `where` is "inside" or "across" clusters. There is no metric for the bytes of their tensors.
        for kind, fabric, where, operations, _payload, sent, busy, exposed in document["groups"]:
            labels = (kind, where, fabric)
            self._add("operations", operations, *labels)
            self._add("sent_bytes", sent, *labels)
            self._add("under_way_seconds", busy, *labels)
            self._add("exposed_seconds", exposed, *labels)

        # A row for each pair of clusters; no rows if no operation crossed clusters.
        for from_cluster, to_cluster, sent, exposed in document.get("between", ()):
            self._add("between_sent_bytes", sent, from_cluster, to_cluster)
            self._add("between_exposed_seconds", exposed, from_cluster, to_cluster)
        reduction = document.get("reduction") or {}
        if reduction.get("exposed"):
            self._add("reducer_exposed_seconds", reduction["exposed"])

    def _add(self, name: str, value: float, *labels: str) -> None:
        """Add `value` to the Prometheus counter holmes_NAME_total with these values of its labels."""
        key = (f"holmes_{name}_total", labels)
        self._values[key] = self._values.get(key, 0.0) + value

    def collect(self) -> Iterator[Any]:
        """Yield all metrics with their values. prometheus_client calls this method for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        current = session.active()
        if current is None:  # holmes has been switched off
            return
        with self._lock:
            values = dict(self._values)
        for sample in _current_samples(current):
            values[sample.name, sample.labels] = sample.value
        for name, family in FAMILIES.items():
            metric_class = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = metric_class(name, family.help, labels=("node", "cluster", *family.labels))
            for (sample_name, labels), value in sorted(values.items()):
                if sample_name == name:
                    metric.add_metric((current.node.name, current.node.cluster, *labels), value)
            if metric.samples:
                yield metric


def _current_samples(current: session.Session) -> Iterator[Sample]:
    """Yield the values that do not come from training steps: the job, its NICs and their rates.

    A Sample is the name of a metric, the values of its labels, and the value. The table FAMILIES has the
    names of each metric's labels. Error counters are those of the kernel, bytes those of the interface.
    """
    job_labels = (str(current.rank), str(current.process.world_size), __version__)
    yield Sample("holmes_job_info", job_labels, 1)
    ports = nics.in_use(current)
    for port in ports:
        problem = nics.trouble(port)  # in words, such as that it has no link; "" if it works
        is_up = not problem
        yield Sample("holmes_nic_up", (port.name, port.fabric), float(is_up))
    for name, counters in nics.counters(ports).items():
        for counter, value in counters.items():
            yield Sample("holmes_nic_errors_total", (name, counter), value)
    used_interfaces = {port.interface for port in ports}
    for interface, count in nics.bytes_carried(current.node).items():
        if interface in used_interfaces:
            yield Sample("holmes_nic_bytes_total", (interface,), count)
    rates = {fabric.name: fabric.rate_bps for fabric in current.site.fabrics}
    for port in ports:
        # The lab (holmes_lab) emulates networks on a single machine. They carry this multiple of their stated
        # rates; 1 on real networks.
        rate_bps = rates[port.fabric] * lab_scale(os.environ)
        yield Sample("holmes_fabric_bits_per_second", (port.fabric,), rate_bps)


class Metrics:
    """Metrics of this process and their export, through a port or into a file."""

    def __init__(
        self,
        collector: Any,
        flag: str,
        destination: str,
        write: Callable[[], None] | None,
        shut: Callable[[], None],
    ):
        """Combine a collector of metrics with the port or file of their export.

        Args:
            collector: Holds the values.
            flag: The user's option with its value, for messages.
            destination: URL of the port, or path of the file, for messages.
            write: Writes the file; None if a port is open.
            shut: Closes the port; does nothing for a file.
        """
        self.destination = destination
        self._flag = flag
        self._collector = collector
        self._write = write
        self._shut = shut
        self._written = float("-inf")  # time of the last write

    def take(self, document: dict[str, Any]) -> None:
        """Add a document of telemetry to the metrics, and write the file if it is old enough."""
        self._collector.take(document)
        if time.monotonic() - self._written >= _EVERY_S:
            self.write()

    def write(self) -> None:
        """Write all metrics, as Prometheus text, into the file if they are exported through one.

        If the metrics are exported through a port, nothing is done. After an error, a line is
        printed, and nothing is written any more.
        """
        if self._write is None:
            return
        self._written = time.monotonic()
        try:
            self._write()
        except OSError as error:
            tell_user(f"{self._flag}: no more metrics ({why(error)}); all else goes on")
            self._write = None  # later calls do nothing

    def close(self) -> None:
        """End the export of metrics: write the file for the last time, or close the port."""
        self.write()
        self._shut()


def _nothing_to_close() -> None:
    """Do nothing: metrics that are written into a file have no port to close."""


def open_metrics(options: Options, process: Process) -> Metrics | None:
    """Return the metrics that this process exports; None if it exports none.

    Raises:
        HolmesError: prometheus_client is not installed, the port is in use, or the file's folder cannot be
            written.
    """
    if not options.metrics or process.local_rank:
        return None
    return export(f"--holmes-metrics {options.metrics}", options.metrics, Collector())


def export(flag: str, destination: str, collector: Any) -> Metrics:
    """Export the metrics of a collector through a port or a file.

    Args:
        flag: The user's option with its value, for messages.
        destination: PORT, HOST:PORT or FILE.prom; its form has been checked.
        collector: Collector of prometheus_client. Its take() gets the documents of Metrics.take().

    Raises:
        HolmesError: prometheus_client is not installed, the port is in use, or the file's folder cannot be
            written.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile
    except ModuleNotFoundError:
        raise HolmesError(
            f"{flag}: prometheus_client is not installed; pip install 'holmes_ext[metrics]'"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    if destination.endswith(".prom"):
        path = Path(destination).absolute()
        if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
            raise HolmesError(
                f"{flag}: {path.parent} is no folder that can be written; name a file in node_exporter's"
                " --collector.textfile.directory"
            )

        def write() -> None:
            write_to_textfile(str(path), registry)

        return Metrics(collector, flag, str(path), write, _nothing_to_close)

    host, port = parse_address(destination)
    address = address_text(host, port)
    try:
        listening = listen(host, port)
    except OSError as error:
        raise HolmesError(
            f"{flag}: {address} cannot be listened on ({why(error)}); name another port, and each job of a"
            " node its own"
        ) from None

    def answer(guest: Guest) -> None:
        _answer(guest, lambda: generate_latest(registry))

    listener = Listener(
        listening,
        answer,
        "holmes-metrics",
        strangers=_MOST_REQUESTS,
        per_address=_MOST_REQUESTS_OF_ADDRESS,
    )
    listener.start()
    url = f"http://{address}/metrics"
    return Metrics(collector, flag, url, write=None, shut=listener.close)


def _answer(guest: Guest, metrics_text: Callable[[], bytes]) -> None:
    """Answer an HTTP request: metrics for GET or HEAD of /metrics, an error for others.

    Args:
        guest: Connection of the client.
        metrics_text: Returns all metrics in Prometheus's text format.

    Raises:
        OSError: The connection fails, or request and answer take longer than _REQUEST_S.
    """
    deadline = Deadline(_REQUEST_S, "a request")
    request = b""
    while b"\r\n\r\n" not in request and len(request) < _MOST_REQUEST_BYTES:
        deadline.limit(guest.socket)  # sets the socket's timeout to the time that is left
        received = guest.socket.recv(_MOST_REQUEST_BYTES)
        if not received:  # the client has closed the connection
            return
        request += received

    method, _, rest = request.partition(b" ")
    path = rest.split(b" ", 1)[0].partition(b"?")[0]  # without the query
    if path in (b"/metrics", b"/"):
        status = "200 OK"
        body = metrics_text()
    else:
        status = "404 Not Found"
        body = b"see /metrics\n"
    if method not in (b"GET", b"HEAD"):
        status = "405 Method Not Allowed"
        body = b"only GET\n"
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    answer = head.encode()
    if method != b"HEAD":
        answer += body
    remaining = memoryview(answer)
    while remaining:
        deadline.limit(guest.socket)
        sent = guest.socket.send(remaining)
        remaining = remaining[sent:]
