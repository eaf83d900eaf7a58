"""Starts holmes on a rank, before the first line of the training script runs.

    1. This rank reports its node, NICs, flags and versions (exchange.py).
    2. Rank 0 makes the plan from all reports; every rank gets it.
    3. Neighbours test their connections (preflight.py); the plan avoids ports that fail.
    4. This rank takes its planned rank: environment variables such as RANK change.

The new rank is the first rank of its node, as plan.nodes orders the nodes, plus the local rank.
"""

from __future__ import annotations

import os
import platform
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from holmes_ext import __version__
from holmes_ext.cluster.node_report import (
    NodeReport,
    nccl_remarks,
    node_identity,
    node_name,
    report_node,
)
from holmes_ext.cluster.plugin_fabrics import without_plugin
from holmes_ext.cluster.resolve import (
    apart_by_subnet,
    slower_than_declared,
)
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.spec import short_name
from holmes_ext.errors import HolmesError
from holmes_ext.plan.plan import parse_plan
from holmes_ext.runtime import session
from holmes_ext.runtime.deadline import within
from holmes_ext.runtime.groups.transport import node_environment
from holmes_ext.runtime.start import launcher, preflight
from holmes_ext.runtime.start.exchange import exchange
from holmes_ext.runtime.start.store import left_layers, open_store
from holmes_ext.words import some_of

if TYPE_CHECKING:
    from holmes_ext.cluster.spec import SiteSpec
    from holmes_ext.runtime.planning import JobRequest, PlanMaker

#: Seconds that a rank with an error to report waits for the job's store.
_ERROR_SECONDS = 30.0
#: Seconds after the end of a wait for the store until the store counts as silent: it accepts connections
#: and does not answer, and torch's client would wait for ever.
_SILENT_SECONDS = 10.0
#: Seconds that ranks other than rank 0 may take longer for the exchange, and for the preflight.
_EXTRA_EXCHANGE_S = 15.0
_EXTRA_PREFLIGHT_S = 10.0
_MOST_NAMED_NODES = 4


def start(
    request: JobRequest,
    maker: PlanMaker,
    process: launcher.Process,
    agreed: dict[str, Any],
    failure: HolmesError | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> tuple[session.Session, list[str]]:
    """Agree on a plan with all ranks, give this process its planned rank, and make its session active.

    Args:
        request: The flags of this rank, and the function that makes the plan.
        maker: Functions that derive another plan from a plan.
        process: This process, as the launcher numbered it.
        agreed: Values that must be the same on all ranks, in addition to flags and versions.
        failure: An error that this rank has met before. It ends the job on all ranks.
        environ: The environment variables. RANK and others are changed.

    Returns:
        The session, and lines for the user.

    Raises:
        HolmesError: The job cannot start. It is a RemoteError if rank 0 prints the message.
    """
    options = request.options
    report = _own_report(request, process, agreed, failure, environ)
    store = None
    restart_lines: list[str] = []

    def make_verdict(reports: list[dict[str, Any]], nodes: list[NodeReport]) -> dict[str, Any]:
        return _make_verdict(request, nodes)

    silent_store = _silent_store_message(process, report)
    if process.world_size == 1:
        key_prefix = "holmes/1"
        node_report = NodeReport.from_dict(report["nics_of_node"], 1)
        verdict = make_verdict([report], [node_report])
    else:
        store = _open_store(process, report, options.timeout_s, silent_store)
        if process.agent_store:
            # This store outlives a restart, so the job's previous start may have left layers.
            options, restart_lines = request.start_again(*left_layers(store))
        agreement = within(
            options.timeout_s + _EXTRA_EXCHANGE_S + _SILENT_SECONDS,
            silent_store,
            exchange,
            store,
            process,
            report,
            make_verdict,
            options.timeout_s,
        )
        key_prefix = agreement.key_prefix
        verdict = agreement.content()

    lines = [*restart_lines, *verdict["lines"]]
    site = Site.from_dict(verdict["site"])
    plan = parse_plan(verdict["plan"], verdict["source"])
    own_name = short_name(report["node"])
    node = next(node.name for node in site.nodes if short_name(node.name) == own_name)
    if store is not None and options.preflight == "on":
        site, plan, preflight_lines = within(
            preflight.FINDINGS_S + _EXTRA_PREFLIGHT_S + _SILENT_SECONDS,
            silent_store,
            preflight.run,
            store,
            key_prefix,
            process,
            node,
            site,
            plan,
            options,
            request.engine,
            maker,
        )
        lines += preflight_lines

    rank = plan.first_rank(node) + process.local_rank
    _set_rank(environ, process, rank, plan.processes_on(node))
    current = session.Session(
        options,
        process,
        site,
        plan,
        rank,
        key_prefix=key_prefix,
        store=store,
        model=request.model,
        engine=request.engine,
        maker=maker,
    )
    current.forced_nets = verdict["forced_nets"]
    current.nic_problems = tuple(verdict["nic_problems"])
    session.set_active(current)
    return current, [*lines, *node_environment(current.node, environ, site.fabrics)]


def _open_store(
    process: launcher.Process, report: dict[str, Any], timeout_s: float, silent_store: str
) -> Any:
    """Open the job's key-value store; if that fails, raise this rank's earlier error, if any.

    Args:
        process: This rank, as its launcher numbered it.
        report: This rank's report. The caller sends it to rank 0 later. Here only its key
            "error" matters: the message of a failure that has already happened on this rank.
        timeout_s: Seconds to wait for the store.
        silent_store: Message of the error if the store accepts connections and does not answer.

    Raises:
        HolmesError: The store cannot be reached. The message is report["error"], if the report has
            this key, because it cannot be reported any more.
    """
    patience_s = _ERROR_SECONDS if "error" in report else timeout_s
    # open_store() may wait twice: until the host listens, and until the store answers.
    limit_s = 2 * patience_s + _SILENT_SECONDS
    try:
        return within(limit_s, silent_store, open_store, process, patience_s)
    except HolmesError:
        if "error" in report:  # it cannot be reported to rank 0
            raise HolmesError(report["error"]) from None
        raise


def _make_verdict(request: JobRequest, nodes: list[NodeReport]) -> dict[str, Any]:
    """Make the plan for the nodes of a job, and return a JSON document with it for all ranks.

    The document is the "verdict": rank 0 decides how the job starts, and sends the decision to all.

    Args:
        request: Options and files of the job. The plan is made from them.
        nodes: NICs and processes of each node.

    Returns:
        "site": nodes, ports and fabrics. "plan" and "source": the plan, and where it comes from. "lines":
        lines for the user. "nic_problems": those of the lines that Session.nic_problems has.
        "forced_nets": name of a NCCL network -> the file that forces it.
    """
    site, plan = request.make_plan(nodes)
    if request.options.fallback == "fail":
        for line in without_plugin(site):
            raise HolmesError(f"{line}; mend that, or use --holmes-fallback ethernet to avoid it")
    forced_nets = {}
    for node in nodes:
        if node.nccl.forced_net:
            forced_nets[node.nccl.forced_net] = f"{node.nccl.forced_in} of node {node.name}"
    nic_problems = [
        *_weak_nics(nodes, site),
        *nccl_remarks(site, nodes),  # NICs that NCCL does not use as expected
    ]
    lines = [
        *_absent_nodes(request.spec, site),  # nodes of cluster.toml that are not in this job
        *_faulty_ports(site),
        *nic_problems,
        *apart_by_subnet(site),  # RoCE NICs that count as separate because of their IP subnets
    ]
    return {
        "site": site.to_dict(),
        "plan": plan.to_json(),
        "source": plan.source,
        "lines": lines,
        "nic_problems": nic_problems,
        "forced_nets": forced_nets,
    }


def _set_rank(
    environ: MutableMapping[str, str], process: launcher.Process, rank: int, processes: int
) -> None:
    """Set the environment variables that tell the training script its rank."""
    if process.launcher != launcher.NONE:
        environ.update(launcher.exported(process, rank, processes))
    for name in launcher.RANK_VARIABLES:
        if name in environ:
            environ[name] = str(rank)


def _own_report(
    request: JobRequest,
    process: launcher.Process,
    agreed: dict[str, Any],
    failure: HolmesError | None,
    environ: MutableMapping[str, str],
) -> dict[str, Any]:
    """Return this rank's report for rank 0; if it cannot be made, a report with the error.

    Args:
        request: Options and files of the job. The files are read here.
        process: This rank, as its launcher numbered it.
        agreed: Further values that must be the same on all ranks: name -> value.
        failure: An earlier error of this rank, to be reported; None if there was none.
        environ: Environment variables.

    Returns:
        "node", "identity" and "local_rank". Also "agreed": flags, digests of files and versions: they must be
        the same on all ranks. On local rank 0 also "nics_of_node". Or "error": a message.
    """
    report: dict[str, Any] = {
        "node": node_name(environ),
        "identity": node_identity(),
        "local_rank": process.local_rank,
    }
    try:
        if failure is not None:
            raise failure
        request.read_files()
        if request.spec is not None:
            launcher.check_hosts(launcher.launched_hosts(), request.spec)
        flags = {
            f"{key} (flag --holmes-{key})": value for key, value in request.options.agreed().items()
        }
        agreed_by_all = {
            **flags,
            **request.digests,
            "holmes_ext version": __version__,
            "Python version": platform.python_version(),
            **agreed,
            "world size": process.world_size,
        }
        nics = {}
        if process.local_rank == 0:
            nics = {"nics_of_node": report_node(environ, process.master_addr).to_dict()}
        return {**report, "agreed": agreed_by_all, **nics}
    except HolmesError as error:
        if process.world_size == 1:
            raise  # there is no other rank to report to
        return {**report, "error": str(error)}


def _absent_nodes(spec: SiteSpec | None, site: Site) -> list[str]:
    """Return a line that names nodes of cluster.toml that are not in this job; no line if all are."""
    if spec is None:
        return []
    present = {node.name for node in site.nodes}
    absent = [name for cluster in spec.clusters for name in cluster.nodes if name not in present]
    if not absent:
        return []
    total = len(present) + len(absent)
    names = some_of(absent, _MOST_NAMED_NODES)
    return [f"{len(present)} of the {total} nodes of {site.source}; not in this job: {names}"]


def _faulty_ports(site: Site) -> list[str]:
    """Return a line for every port with a fault."""
    lines = []
    for node in site.nodes:
        for port in node.ports:
            # port.fault: the problem in words, "" if there is none. port.usable: whether the port
            # can still be used in spite of it, e.g. with some of its NICs.
            if port.fault:
                effect = "works with what is left" if port.usable else "uses Ethernet instead"
                lines.append(
                    f"node {node.name}: {port.fault}; on fabric {port.fabric} it {effect} "
                    "(--holmes-fallback fail would end the job)"
                )
    return lines


def _weak_nics(reports: list[NodeReport], site: Site) -> list[str]:
    """Return a line for every fast NIC that is slower than declared, or down and in no port of the site.

    "Declared" is the rate in cluster.toml, the user's description of the cluster. The plan uses that
    rate even if the NIC reports a lower one.

    Args:
        reports: NICs of each node, as the node sees them.
        site: Nodes and ports of the job.
    """
    lines = [
        f"node {name}: {text}; the plan counts on what the file says"
        for name, text in slower_than_declared(site, reports)
    ]

    # Site.source is the default of this field: the site was made from the NICs, without
    # cluster.toml.
    is_derived_from_nics = site.source == Site.source
    if is_derived_from_nics:
        for report in reports:
            # skipped: the reason why holmes does not use a NIC at all, e.g. a virtual NIC; "" if it
            # does.
            fast_nics = [nic for nic in report.nics if nic.kind != "ethernet" and not nic.skipped]
            if fast_nics and not any(nic.up for nic in fast_nics):
                first = fast_nics[0]
                lines.append(
                    f"node {report.name}: {first.name} ({first.kind}) is {first.state_text}, so it uses "
                    "Ethernet alone"
                )
    return lines


def _silent_store_message(process: launcher.Process, report: dict[str, Any]) -> str:
    """Return the error for a store that accepts connections and does not answer."""
    return (
        f"the launcher's rank {process.rank} on {report['node']}: the job's store at "
        f"{process.master_addr}:{process.master_port} takes connections and does not answer; is rank 0 "
        "stopped, or another program on that port?"
    )
