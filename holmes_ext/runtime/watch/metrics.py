"""What Prometheus is told while a job runs: --holmes-metrics, by local rank 0 of each node.

    PORT        http://127.0.0.1:PORT/metrics, for a Prometheus, or its agent, on this node
    HOST:PORT   the same at this node's address HOST, 0.0.0.0 for all: for whoever reaches it
    FILE.prom   the same text in a file, for node_exporter's textfile collector; written whole, at most once a
                second, and when the job ends

All but the states of NICs comes from the documents that telemetry_file.py makes of steps and rounds; each NIC
is looked at when somebody asks. Counters count from the job's start. prometheus_client is an extra: pip
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
from holmes_ext.words import tell_user, why

#: Seconds between two writings of the file.
_EVERY_S = 1.0
#: Requests at a time, in all and from one address; seconds that one may take; bytes of one.
_ASKING, _ASKING_EACH = 16, 8
_REQUEST_S = 10.0
_LONGEST_REQUEST = 8192
#: Of Prometheus's text format.
_CONTENT = "text/plain; version=0.0.4; charset=utf-8"


class Family(NamedTuple):
    """A metric: a counter where its name ends in _total, else a gauge; labels beside node and cluster."""

    help: str
    labels: tuple[str, ...] = ()


_GROUP, _WAY = ("kind", "where", "fabric"), ("from", "to")
FAMILIES = {
    "holmes_job_info": Family("1; which job this is", ("rank", "world_size", "version")),
    "holmes_steps_total": Family("steps that this rank has finished"),
    "holmes_step_seconds_total": Family("seconds that these steps took"),
    "holmes_last_step_seconds": Family("seconds of the last step"),
    "holmes_tokens_total": Family(
        "tokens that all ranks together trained in, where the framework tells"
    ),
    "holmes_exposed_seconds_total": Family(
        "seconds the program was blocked on communication", _GROUP
    ),
    "holmes_under_way_seconds_total": Family("seconds with one or more of them under way", _GROUP),
    "holmes_sent_bytes_total": Family("bytes that this rank's operations sent", _GROUP),
    "holmes_operations_total": Family("operations of a kind of group, where, on a fabric", _GROUP),
    "holmes_reducer_exposed_seconds_total": Family(
        "seconds that GradientReducer's threads were waited for"
    ),
    "holmes_between_sent_bytes_total": Family(
        "bytes that this rank sent from a cluster to another", _WAY
    ),
    "holmes_between_exposed_seconds_total": Family(
        "seconds blocked on traffic between clusters", _WAY
    ),
    "holmes_rounds_total": Family("rounds with joined jobs, by how they ended", ("verdict",)),
    "holmes_round_sent_bytes_total": Family("bytes sent in rounds with joined jobs"),
    "holmes_round_seconds_total": Family("seconds that these rounds were under way"),
    "holmes_round_exposed_seconds_total": Family("seconds the program was blocked on rounds"),
    "holmes_plan_changes_total": Family(
        "changes of the running job's plan; of rank 0", ("in_flight",)
    ),
    "holmes_plan_predicted_step_seconds": Family(
        "seconds of a step that the last change was to bring"
    ),
    "holmes_nic_up": Family(
        "1: the NIC carries data now; 0: it has no link, or is down", ("nic", "fabric")
    ),
    "holmes_nic_errors_total": Family("the kernel's error counters of a NIC", ("nic", "counter")),
    "holmes_nic_bytes_total": Family(
        "bytes that an interface and its HCAs carried", ("interface",)
    ),
    "holmes_fabric_bits_per_second": Family(
        "a node's rate on a fabric, as planned with", ("fabric",)
    ),
}


class Collector:
    """prometheus_client's: sums over the documents taken, and what the NICs say when asked."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = threading.Lock()

    def take(self, document: dict[str, Any]) -> None:
        """A line of telemetry_file.py: of a step, or of a round with other jobs; others say nothing here."""
        with self._lock:
            if "step" in document:
                self._take_step(document)
            elif "plan" in document:
                change = document["plan"]
                self._sums["holmes_plan_predicted_step_seconds", ()] = change["then_s"]
                held = "+".join(map(str, change["in_flight"]))
                self._add("plan_changes", 1, "sums" if change.get("sums") else held)
            elif "outer" in document:
                figures = document["outer"]
                self._add("rounds", 1, str(figures["verdict"]))
                for name, key in (
                    ("sent_bytes", "bytes"),
                    ("seconds", "seconds"),
                    ("exposed_seconds", "exposed"),
                ):
                    self._add(f"round_{name}", figures[key])

    def _take_step(self, document: dict[str, Any]) -> None:
        seconds = document["end"] - document["begin"]
        self._sums["holmes_last_step_seconds", ()] = seconds
        self._add("steps", 1)
        self._add("step_seconds", seconds)
        self._add("tokens", document["tokens"])
        for kind, fabric, where, operations, _, sent, busy, exposed in document["groups"]:
            values = {"operations": operations, "sent_bytes": sent, "under_way_seconds": busy}
            values["exposed_seconds"] = exposed
            for name, value in values.items():
                self._add(name, value, kind, where, fabric)
        for source, target, sent, exposed in document.get("between", ()):
            self._add("between_sent_bytes", sent, source, target)
            self._add("between_exposed_seconds", exposed, source, target)
        if exposed := (document.get("reduction") or {}).get("exposed"):
            self._add("reducer_exposed_seconds", exposed)

    def _add(self, name: str, value: float, *labels: str) -> None:
        key = f"holmes_{name}_total", labels
        self._sums[key] = self._sums.get(key, 0.0) + value

    def collect(self) -> Iterator[Any]:
        """prometheus_client's metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        current = session.active()
        if current is None:  # it was switched off
            return
        with self._lock:
            values = dict(self._sums)
        values |= {(name, labels): value for name, labels, value in _of_now(current)}
        for name, family in FAMILIES.items():
            metric_class = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = metric_class(name, family.help, labels=("node", "cluster", *family.labels))
            for (family_name, labels), value in sorted(values.items()):
                if family_name == name:
                    metric.add_metric((current.node.name, current.node.cluster, *labels), value)
            if metric.samples:
                yield metric


def _of_now(current: session.Session) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """(metric, labels, value) of what does not come from steps."""
    yield "holmes_job_info", (str(current.rank), str(current.process.world_size), __version__), 1
    ports = nics.in_use(current)
    for port in ports:
        yield "holmes_nic_up", (port.name, port.fabric), float(not nics.trouble(port))
    for name, counters in nics.counters(ports).items():
        for counter, value in counters.items():
            yield "holmes_nic_errors_total", (name, counter), value
    used = {port.interface for port in ports}
    for interface, count in nics.bytes_carried(current.node).items():
        if interface in used:
            yield "holmes_nic_bytes_total", (interface,), count
    rates = {fabric.name: fabric.rate_bps for fabric in current.site.fabrics}
    for port in ports:
        yield (
            "holmes_fabric_bits_per_second",
            (port.fabric,),
            rates[port.fabric] * lab_scale(os.environ),
        )


class Metrics:
    """place: for the user; write: into the file, None where a port is open; shut: closes the port."""

    def __init__(
        self,
        collector: Collector,
        place: str,
        write: Callable[[], None] | None,
        shut: Callable[[], None],
    ):
        self.place, self._collector, self._write, self._shut = place, collector, write, shut
        self._written = float("-inf")

    def take(self, document: dict[str, Any]) -> None:
        """From telemetry's thread."""
        self._collector.take(document)
        if time.monotonic() - self._written >= _EVERY_S:
            self.write()

    def write(self) -> None:
        """The file, where there is one; what goes wrong ends it with one line, and training goes on."""
        if self._write is None:
            return
        self._written = time.monotonic()
        try:
            self._write()
        except OSError as error:
            tell_user(
                f"--holmes-metrics {self.place}: no more metrics ({why(error)}); training goes on"
            )
            self._write = None

    def close(self) -> None:
        self.write()
        self._shut()


def open_metrics(options: Options, process: Process) -> Metrics | None:
    """Of this process, None where it tells nothing. HolmesError: no prometheus_client, the port is taken, the
    file's folder is not there."""
    if not options.metrics or process.local_rank:
        return None
    flag = f"--holmes-metrics {options.metrics}"
    try:
        from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile
    except ModuleNotFoundError:
        raise HolmesError(
            f"{flag}: prometheus_client is not installed; pip install 'holmes_ext[metrics]'"
        ) from None
    collector, registry = Collector(), CollectorRegistry(auto_describe=False)
    registry.register(collector)
    if options.metrics.endswith(".prom"):
        path = Path(options.metrics).absolute()
        if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
            raise HolmesError(
                f"{flag}: {path.parent} is no folder that can be written; name a file in node_exporter's"
                " --collector.textfile.directory"
            )
        return Metrics(
            collector, str(path), lambda: write_to_textfile(str(path), registry), lambda: None
        )
    host, port = options.metrics_address
    where = address_text(host, port)
    try:
        listening = listen(host, port)
    except OSError as error:
        raise HolmesError(
            f"{flag}: {where} cannot be listened on ({why(error)}); name another port, and each job of a"
            " node its own"
        ) from None
    limits = {"strangers": _ASKING, "per_address": _ASKING_EACH}
    listener = Listener(
        listening,
        lambda guest: _answer(guest, lambda: generate_latest(registry)),
        "holmes-metrics",
        **limits,
    )
    listener.start()
    return Metrics(collector, f"http://{where}/metrics", None, listener.close)


def _answer(guest: Guest, text: Callable[[], bytes]) -> None:
    """One HTTP request. OSError, also where it does not come whole within its deadline."""
    deadline, request = Deadline(_REQUEST_S, "a request"), b""
    while b"\r\n\r\n" not in request and len(request) < _LONGEST_REQUEST:
        deadline.limit(guest.socket)
        if not (some := guest.socket.recv(_LONGEST_REQUEST)):
            return
        request += some
    method, _, rest = request.partition(b" ")
    path = rest.split(b" ", 1)[0].partition(b"?")[0]
    status, body = (
        ("200 OK", text()) if path in (b"/metrics", b"/") else ("404 Not Found", b"see /metrics\n")
    )
    if method not in (b"GET", b"HEAD"):
        status, body = "405 Method Not Allowed", b"only GET\n"
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_CONTENT}\r\nContent-Length: {len(body)}\r\nConnection: "
        f"close\r\n\r\n"
    )
    data = memoryview(head.encode() + (b"" if method == b"HEAD" else body))
    while data:
        deadline.limit(guest.socket)
        data = data[guest.socket.send(data) :]
