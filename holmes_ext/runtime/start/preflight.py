"""Before training: do the neighbours of every group reach each other over the NIC that was chosen for it?

    pairs of nodes       neighbours in the ring of every planned group,
                         one for each fabric; each over Ethernet too
    local rank 0         listens on its node's address of each fabric, connects to the other end of
                         its pairs from its own, and tells the launcher's rank 0 what did not
                         answer (all through the job's store)
    launcher's rank 0    decides, for all: nothing | these ports are left
                         out, on all ranks of a group | the job ends

Sockets only: what gloo uses, and NCCL over Ethernet. Of RDMA it shows that the fabric carries IP between the
two ports (IPoIB, RoCE's net device), not that verbs work; ports without an address cannot be tried at all,
which is said. Where a stream's window carries less than a link between clusters, one line says so
(cluster/addresses.py). Every wait has an end.

One rank of a node speaks for it: its neighbours report to it, and learn from it what was decided.

    local rank 0     listens on an abstract socket of the node, which
                     ends with its process and leaves nothing behind
    its neighbours   say their report          ->   heard
                     wait                      <-   the verdict; its document as a memory file's descriptor

So the job's store serves a node as it would serve one rank. A neighbour that is not heard within
HEARD_SECONDS speaks for itself: local rank 0 came without holmes or late, or is in another network namespace,
another user's or another job's. Whoever was heard was counted, so nobody is counted twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from holmes_ext.cluster.addresses import read_limits, shortfalls, sockets
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.plan.traffic import NETWORK_APIS
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import Listener, listen
from holmes_ext.runtime.start.store import awaited, gathered, put_in
from holmes_ext.words import some_of

if TYPE_CHECKING:
    from holmes_ext.cluster.site import Site
    from holmes_ext.options import Options
    from holmes_ext.plan.engine import EngineTraits
    from holmes_ext.plan.plan import Plan
    from holmes_ext.runtime.planning import PlanMaker
    from holmes_ext.runtime.sockets import Guest
    from holmes_ext.runtime.start.launcher import Process

#: How long a node's ranks wait for each other before those that are there speak, in seconds.
HEARD_SECONDS = 10.0
_HEARD = b"heard"
_LONGEST = 1 << 17  # bytes of a report, or of what is said without a document


def name_of(node: str, address: str, port: int) -> str:
    """Of the socket of a node in the job whose store is there."""
    said = f"{os.geteuid()} {node} {address}:{port}"
    return f"\0holmes-{hashlib.sha256(said.encode()).hexdigest()[:32]}"


class Neighbours:
    """On local rank 0: those that it speaks for."""

    def __init__(self, name: str):
        self._heard: list[socket.socket] = []
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(name)
            self._listener.listen(1024)
        except OSError:  # another process has that name: nobody is heard here
            self._close()

    def hear(self, count: int, seconds: float) -> list[bytes]:
        """What they report: so many, or those that came in so many seconds; who comes later is refused."""
        reports: list[bytes] = []
        limit = Deadline(seconds)
        while self._listener and len(reports) < count and (left := limit.left) > 0:
            self._listener.settimeout(left)
            with suppress(OSError):  # none came, or it went away before it was heard
                connection, _ = self._listener.accept()
                if _user_of(connection) != os.geteuid():
                    connection.close()
                    continue
                connection.settimeout(left)
                report = connection.recv(_LONGEST)
                connection.sendall(_HEARD)
                self._heard.append(connection)
                reports.append(report)
        self._close()
        return reports

    def tell(self, said: bytes, document: bytes = b"") -> None:
        """To all that were heard; ends what ties them to this one."""
        self._close()
        fd = os.memfd_create("holmes-verdict")
        with open(fd, "wb", buffering=0) as file:
            file.write(document)
            for connection in self._heard:
                with connection, suppress(OSError):  # it has ended
                    socket.send_fds(connection, [said], [fd])
        self._heard.clear()

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def speaker_hears(name: str, report: bytes, patience: float) -> socket.socket | None:
    """The connection to local rank 0 that has heard `report`; None: none in `patience` seconds."""
    limit = Deadline(patience)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(2 * HEARD_SECONDS)
        try:
            connection.connect(name)
            if _user_of(connection) == os.geteuid():
                connection.sendall(report)
                if connection.recv(len(_HEARD)) == _HEARD:
                    return connection
            limit = Deadline(0.0)  # one that is not for this rank, or ended
        except ConnectionRefusedError:  # not there yet
            pass
        except OSError:  # it did not hear: it speaks already, or is stopped
            limit = Deadline(0.0)
        connection.close()
        if limit.passed:
            return None
        time.sleep(0.02)


def told(connection: socket.socket, seconds: float) -> tuple[bytes, bytes]:
    """What the speaker says, and the document; (b"", b"") where it ended or was silent so long."""
    with connection:
        connection.settimeout(max(0.1, seconds))
        try:
            said, fds, _, _ = socket.recv_fds(connection, _LONGEST, 1)
        except OSError:
            return b"", b""
    document = b""
    for fd in fds:
        document = os.pread(fd, os.fstat(fd).st_size, 0)  # all neighbours share its position
        os.close(fd)
    return said, document


def _user_of(connection: socket.socket) -> int:
    """Who is at the other end."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return int(user)


#: (fabric, the node that tried, the node that was tried, "" or what went wrong)
Finding = tuple[str, str, str, str]


def decide(
    site: Site,
    plan: Plan,
    todo: Sequence[Any],
    findings: Sequence[Finding],
    options: Options,
    engine: EngineTraits,
    maker: PlanMaker,
) -> dict[str, Any]:
    """{"faults": [[node, fabric, what]], "lines": [text]}; HolmesError where that is to end the job."""
    first = {(pair.fabric, pair.first, pair.second): pair for pair in todo}
    lines = _not_tried(site, todo)
    bad = {
        finding: _tell(site, plan, first[finding[:3]], finding[3])
        for finding in findings
        if finding[3]
    }
    if not bad:
        return {"faults": [], "lines": lines}
    if ethernet := [text for finding, text in bad.items() if finding[0] == ETHERNET]:
        way_out = "fix its cable, VLAN, addresses or firewall, or name the right interface in cluster.toml"
        needed = f"every node must reach the others over Ethernet: {way_out}"
        raise HolmesError(f"preflight: {some_of(ethernet, 3, '; ')}; {needed}")
    summary = f"preflight: {some_of(bad.values(), 3, '; ')}"
    if options.fallback == "fail":
        raise HolmesError(f"{summary}; fix that, or use --holmes-fallback ethernet to avoid it")
    faults = lost(findings)
    moved = _moved(plan, maker.on_ports(plan, site.without(faults), options, engine=engine))
    therefore = f"therefore {some_of(moved, 3, '; ')}" if moved else "no planned group needs it"
    lines = [f"{summary}; {therefore} (--holmes-fallback fail would end the job)", *lines]
    return {
        "faults": [[*end, f"found by the preflight: {why}"] for end, why in faults.items()],
        "lines": lines,
    }


def lost(findings: Sequence[Finding]) -> dict[tuple[str, str], str]:
    """{(node, fabric): why} of the ports to leave out: of a node that no neighbour reaches; of both ends
    where that is not clear."""
    tried: dict[tuple[str, str], list[str]] = {}
    for fabric, first, second, problem in findings:
        for node in (first, second):
            tried.setdefault((node, fabric), []).append(problem)
    # With one neighbour both ends look the same: only a node that two or more do not reach can be told from
    # those.
    blamed = {end for end, problems in tried.items() if all(problems) and len(problems) > 1}
    faults: dict[tuple[str, str], str] = {}
    for fabric, first, second, problem in findings:
        ends = [(first, fabric), (second, fabric)]
        if problem:
            for end in [end for end in ends if end in blamed] or ends:
                other = second if end[0] == first else first
                faults.setdefault(end, f"between it and {other}: {problem}")
    return faults


def _tell(site: Site, plan: Plan, pair: Any, problem: str) -> str:
    """Both ends, the group, and what was tried."""
    ends = []
    for name in (pair.first, pair.second):
        port = site.node_by_name[name].port(pair.fabric)
        here = [rank for rank in pair.ranks if plan.node_of(rank) == name]
        ranks = str(here[0]) if len(here) == 1 else f"{here[0]} to {here[-1]}"
        ends.append(f"node {name} (rank {ranks}, {port.name}, {port.address})")
    group = f"for the {pair.kind} group of ranks {some_of(pair.ranks)}"
    return f"{ends[0]} does not reach {ends[1]} over {pair.fabric}, {group}: {problem}"


def _moved(before: Plan, after: Plan) -> list[str]:
    """The planned groups that travel on another fabric now."""
    lines = []
    for kind, ranks in before.groups():
        networks = [
            (before.fabric_of(ranks, network_api), after.fabric_of(ranks, network_api))
            for network_api in NETWORK_APIS
        ]
        if now := [new.name for old, new in networks if old and new and old.name != new.name]:
            lines.append(
                f"the {kind} group of ranks {some_of(ranks)} goes over {now[0]} on all its ranks"
            )
    if not lines and before.sizes is None:  # the script makes its groups as it likes
        lines = [
            "every group that needs it goes over the next fastest fabric that its ranks share, on all "
            "of them"
        ]
    return lines


def _not_tried(site: Site, todo: Sequence[Any]) -> list[str]:
    """Fabrics on which sockets could not be tried, with an example."""
    without: dict[str, dict[str, str]] = {}  # fabric -> node -> its port
    for pair in todo:
        for node in (pair.first, pair.second):
            port = site.node_by_name[node].port(pair.fabric)
            if not port.address and pair.fabric != ETHERNET:
                without.setdefault(pair.fabric, {})[node] = port.name
    lines = []
    for fabric, nodes in without.items():
        (node, name), more = next(iter(nodes.items())), len(nodes) - 1
        others = (
            f", and {more} more {'nodes have' if more > 1 else 'node has'} none" if more else ""
        )
        text = (
            f"{node} ({name}) has no IP address there{others}; the ports are up, no more is known"
        )
        lines.append(f"preflight: not tried on {fabric}: {text}")
    return lines


#: Seconds: until the kernel at the other end must have answered (no process needs to run for that; two lost
#: packets are made good), until the process there must have, until a node must have said where it listens,
#: and until rank 0 must have every node's findings.
CONNECT_S, ANSWER_S, LISTEN_S, FINDINGS_S = 5.0, 10.0, 15.0, 25.0
#: Pairs that a node tries at a time, and others that may try it.
_THREADS, _ASKING = 16, 1024


@dataclass(frozen=True)
class Pair:
    """Two nodes that must reach each other over a fabric, and the first group (ranks) that needs it."""

    fabric: str
    first: str
    second: str
    kind: str
    ranks: tuple[int, ...]


def pairs(plan: Plan) -> list[Pair]:
    """What to try, the same list on every rank; each pair of nodes once for each fabric."""
    to_try: dict[tuple[str, frozenset[str]], Pair] = {}
    for kind, ranks in tried_groups(plan):
        for pair in zip(ranks, ranks[1:] + ranks[:1]):
            first, second = map(plan.node_of, pair)
            # two stages may have a group of their own
            groups = [ranks, pair] if kind == "pipeline" else [ranks]
            used = (
                [
                    plan.fabric_of(group, network_api)
                    for group in groups
                    for network_api in NETWORK_APIS
                ]
                if first != second
                else []
            )
            for name in dict.fromkeys(fabric.name for fabric in used if fabric is not None):
                to_try.setdefault(
                    (name, frozenset((first, second))), Pair(name, first, second, kind, ranks)
                )
    for known in list(to_try.values()):
        to_try.setdefault(
            (ETHERNET, frozenset((known.first, known.second))), replace(known, fabric=ETHERNET)
        )
    return list(to_try.values())


def tried_groups(plan: Plan) -> Iterable[tuple[str, tuple[int, ...]]]:
    """(kind, ranks) of every group of the plan; without sizes of the clusters and of all ranks."""
    if plan.sizes is None:
        yield from (
            ("cluster", tuple(ranks)) for ranks in plan.by_cluster(range(plan.world_size)).values()
        )
    yield from plan.groups()


def run(
    store: dist.Store,
    prefix: str,
    process: Process,
    host: str,
    site: Site,
    plan: Plan,
    options: Options,
    engine: EngineTraits,
    maker: PlanMaker,
) -> tuple[Site, Plan, list[str]]:
    """Try all pairs; the site and plan to go on with, the same on all ranks, and lines for the user.

    host: this rank's node as `site` calls it. HolmesError on the launcher's rank 0, RemoteError elsewhere,
    where Ethernet does not reach, or a fast NIC does not under --holmes-fallback fail; within half a minute.
    """
    prefix, limit = f"{prefix}/preflight", Deadline(FINDINGS_S)
    todo = pairs(plan) if process.local_rank == 0 else []
    listeners = None
    try:
        try:
            if process.local_rank == 0:
                listeners = Listeners(site, host, todo, token=prefix)
                store.set(f"{prefix}/ports/{host}", json.dumps(listeners.ports))
                report = (
                    host,
                    _try_mine(store, prefix, site, host, todo),
                    tcp_line(plan, site, host),
                )
                put_in(store, f"{prefix}/findings", json.dumps(report).encode(), 1, len(plan.nodes))
            if process.rank == 0:
                verdict = _judge(store, prefix, site, plan, todo, options, engine, maker, limit)
                store.set(f"{prefix}/verdict", json.dumps(verdict))
            said = awaited(store, f"{prefix}/verdict", FINDINGS_S + 10)
        except (dist.DistError, RuntimeError):
            said = b""
        if not said:
            raise HolmesError(
                f"preflight: rank {process.rank} on {host} got no verdict from the launcher's rank 0 at"
                f" {process.master_addr}:{process.master_port}; is it alive?"
            )
        verdict = json.loads(said)
    finally:
        if listeners is not None:
            listeners.close()
    if "error" in verdict:
        raise RemoteError(verdict["error"]) if process.rank else HolmesError(verdict["error"])
    if faults := {(node, fabric): fault for node, fabric, fault in verdict["faults"]}:
        site = site.without(faults)
        plan = maker.on_ports(plan, site, options, engine=engine)
    return site, plan, verdict["lines"]


class Listeners:
    """A listening socket for each fabric on which others try this node: who sends a line is answered with the
    node's name. ports: fabric -> port number, or why there is none."""

    def __init__(self, site: Site, host: str, todo: Iterable[Pair], token: str):
        self._listeners: list[Listener] = []
        self.ports: dict[str, int | str] = {}
        self._answer = json.dumps({"node": host, "token": token}).encode() + b"\n"
        for fabric in dict.fromkeys(pair.fabric for pair in todo if pair.second == host):
            if address := site.node_by_name[host].port(fabric).address:
                try:
                    listening = listen(address, 0)
                except OSError as error:
                    self.ports[fabric] = (
                        f"cannot listen on its own address {address}: {error.strerror}"
                    )
                    continue
                listener = Listener(listening, self._reply, "holmes-preflight", _ASKING, _ASKING)
                listener.start()
                self._listeners.append(listener)
                self.ports[fabric] = listener.port

    def _reply(self, guest: Guest) -> None:
        guest.socket.settimeout(ANSWER_S)
        guest.socket.makefile("rb").readline(4096)
        guest.socket.sendall(self._answer)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


def _try_mine(store: Any, prefix: str, site: Site, host: str, todo: list[Pair]) -> list[Finding]:
    """Of the pairs that begin at `host`, all tried at the same time."""
    ports: dict[str, dict[str, Any]] = {}
    limit = Deadline(LISTEN_S)

    def attempt(pair: Pair) -> Finding:
        source, target = addresses(pair)
        port = ports[pair.second].get(
            pair.fabric, "the process there has not come to its preflight"
        )
        problem = port
        if not isinstance(port, str):
            problem = exchange_hello(source, target, port, host, pair.second, prefix)
        return pair.fabric, pair.first, pair.second, problem

    def addresses(pair: Pair) -> Iterator[str]:
        return (
            site.node_by_name[name].port(pair.fabric).address for name in (pair.first, pair.second)
        )

    mine = [pair for pair in todo if pair.first == host and all(addresses(pair))]
    for other in dict.fromkeys(pair.second for pair in mine):
        said = awaited(store, f"{prefix}/ports/{other}", max(0.05, limit.left))
        ports[other] = json.loads(said or b"{}")
    if not mine:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(mine))) as pool:
        return list(pool.map(attempt, mine))


def exchange_hello(source: str, target: str, port: int, me: str, other: str, token: str) -> str:
    """Have a message between two addresses answered by node `other` of this job; "" or what went wrong."""
    try:
        connection = socket.create_connection(
            (target, port), timeout=CONNECT_S, source_address=(source, 0)
        )
    except TimeoutError:
        return f"no answer to connect within {CONNECT_S:g} s"
    except OSError as error:
        return f"connect: {error.strerror or error}"
    with connection:
        try:
            connection.settimeout(ANSWER_S)
            connection.sendall(json.dumps({"node": me, "token": token}).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline(4096))
        except TimeoutError:
            return f"connected, but no answer within {ANSWER_S:g} s"
        except (OSError, ValueError) as error:
            return (
                f"connected, but the answer failed: "
                f"{getattr(error, 'strerror', None) or 'it is not of this job'}"
            )
    if answer == {"node": other, "token": token}:
        return ""
    if isinstance(answer, dict):
        return f"the address is answered by node {answer.get('node')!r}, so two nodes have it"
    return "not of this job"


def tcp_line(plan: Plan, site: Site, host: str) -> str:
    """Where TCP carries least of a link between clusters, and the way out; "": it carries all."""
    clusters = {name: len(nodes) for name, nodes in plan.clusters.items()}
    rate, here = site.fabric_by_name[ETHERNET].rate_bps, site.node_by_name[host].cluster
    if not plan.wan:
        return ""
    shortages = shortfalls(plan.wan, rate, clusters, here, read_limits(), sockets(os.environ))
    worst = min(shortages, key=lambda short: short.carries_bps / short.rate_bps, default=None)
    return f"node {host}: {worst.what}; {worst.mend}" if worst else ""


def _judge(
    store: Any,
    prefix: str,
    site: Site,
    plan: Plan,
    todo: list[Pair],
    options: Options,
    engine: EngineTraits,
    maker: PlanMaker,
    limit: Deadline,
) -> dict[str, Any]:
    """Rank 0: every node's findings -> what all go on with."""
    findings: list[Finding] = []
    short: list[str] = []
    reports = {
        node: report
        for node, *report in map(json.loads, gathered(store, f"{prefix}/findings", limit.left))
    }
    if missing := [node for node in plan.nodes if node not in reports]:
        # Who has not even said where it listens keeps its neighbours waiting: that one is to be named.
        node = next(
            (name for name in missing if not store.check([f"{prefix}/ports/{name}"])), missing[0]
        )
        who = f"node {node} (rank {plan.nodes.index(node) * plan.processes})"
        advice = "is its process alive? (--holmes-preflight off skips it)"
        return {"error": f"preflight: {who} did not finish it within {FINDINGS_S:g} s; {advice}"}
    for tried, tcp in (reports[node] for node in plan.nodes):  # in one order, whoever came first
        findings += map(tuple, tried)
        short += [tcp] if tcp else []
    try:
        verdict = decide(site, plan, todo, findings, options, engine, maker)
        alike = f" ({len(short)} nodes are short of it)" if len(short) > 1 else ""
        return {
            **verdict,
            "lines": [*verdict["lines"], *(f"preflight: TCP{alike}: {line}" for line in short[:1])],
        }
    except HolmesError as error:
        return {"error": str(error)}
