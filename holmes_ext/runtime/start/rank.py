"""Start-up of a rank: report, learn the plan, take the planned rank - all before the script's first line.

launcher's rank r, local rank l, on node n   ->   rank = position of n in plan.nodes x processes + l
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

#: How long a rank that has only an error to report waits for somebody to report it to, in seconds.
_ERROR_SECONDS = 30.0
#: How much longer than its own limit a wait for the store may take until the store is taken for a silent one.
_SILENT_SECONDS = 10.0


def start(
    request: JobRequest,
    maker: PlanMaker,
    process: launcher.Process,
    agreed: dict[str, Any],
    failure: HolmesError | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> tuple[session.Session, list[str]]:
    """Agree with all ranks, renumber this one in `environ`, and make the session active; returns it and lines
    for the user. agreed: what else must be the same on all ranks; failure: what went wrong on this rank so
    far, which ends the job. HolmesError (RemoteError where rank 0 tells)."""
    options, store, again = request.options, None, list[str]()
    report = _own_report(request, process, agreed, failure, environ)

    def decide(reports: list[dict[str, Any]], nodes: list[NodeReport]) -> dict[str, Any]:
        site, plan = request.make_plan(nodes)
        forced = {
            n.nccl.forced_net: f"{n.nccl.forced_in} of node {n.name}"
            for n in nodes
            if n.nccl.forced_net
        }
        remarks = [*_left_out(request.spec, site), *_down(nodes, site), *nccl_remarks(site, nodes)]
        lines = [*remarks, *apart_by_subnet(site)]
        document = {
            "plan": plan.to_json(),
            "source": plan.source,
            "lines": lines,
            "forced_nets": forced,
        }
        return {"site": site.to_dict(), **document}

    if process.world_size == 1:
        prefix, verdict = (
            "holmes/1",
            decide([report], [NodeReport.from_dict(report["nics_of_node"], 1)]),
        )
    else:
        silent, patience = (
            _silent(process, report),
            _ERROR_SECONDS if "error" in report else options.timeout_s,
        )
        try:
            store = within(2 * patience + _SILENT_SECONDS, silent, open_store, process, patience)
        except HolmesError:
            if "error" in report:  # nobody to tell it to
                raise HolmesError(report["error"]) from None
            raise
        if process.agent_store:  # it outlives a restart
            options, again = request.start_again(*left_layers(store))
        limit = options.timeout_s + 15 + _SILENT_SECONDS
        decision = within(
            limit, silent, exchange, store, process, report, decide, options.timeout_s
        )
        prefix, verdict = decision.round, decision.content()
    site, lines = Site.from_dict(verdict["site"]), [*again, *verdict["lines"]]
    plan = parse_plan(verdict["plan"], verdict["source"])
    here = next(
        node.name for node in site.nodes if short_name(node.name) == short_name(report["node"])
    )
    if store is not None and options.preflight == "on":
        limit = preflight.FINDINGS_S + 10 + _SILENT_SECONDS
        arguments = store, prefix, process, here, site, plan, options, request.engine, maker
        site, plan, said = within(limit, silent, preflight.run, *arguments)
        lines = [*lines, *said]
    rank = plan.nodes.index(here) * plan.processes + process.local_rank
    if process.launcher != launcher.NONE:
        environ.update(launcher.exported(process, rank, site.processes))
    environ.update({name: str(rank) for name in launcher.RANK_VARIABLES if name in environ})
    current = session.Session(
        options,
        process,
        site,
        plan,
        rank,
        round=prefix,
        store=store,
        model=request.model,
        engine=request.engine,
        maker=maker,
    )
    current.forced_nets = verdict["forced_nets"]
    session.set_active(current)
    return current, [*lines, *node_environment(current.node, environ)]


def _own_report(
    request: JobRequest,
    process: launcher.Process,
    agreed: dict[str, Any],
    failure: HolmesError | None,
    environ: MutableMapping[str, str],
) -> dict[str, Any]:
    """What this rank tells the others; an error on the way is the report."""
    base = {
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
        given = {
            f"{key} (flag --holmes-{key})": value for key, value in request.options.agreed().items()
        }
        versions = {"holmes_ext version": __version__, "Python version": platform.python_version()}
        alike = {**given, **request.digests, **versions, **agreed, "world size": process.world_size}
        report = {**base, "agreed": alike}
        if process.local_rank == 0:
            report["nics_of_node"] = report_node(environ, process.master_addr).to_dict()
        return report
    except HolmesError as error:
        if process.world_size == 1:
            raise
        return {**base, "error": str(error)}


def _left_out(spec: SiteSpec | None, site: Site) -> list[str]:
    """A line where cluster.toml knows more nodes than this job has."""
    here = {node.name for node in site.nodes}
    absent = (
        [name for cluster in spec.clusters for name in cluster.nodes if name not in here]
        if spec
        else []
    )
    if not absent:
        return []
    known = len(here) + len(absent)
    return [
        f"{len(here)} of the {known} nodes of {site.source}; not in this job: {some_of(absent, 4)}"
    ]


def _down(reports: list[NodeReport], site: Site) -> list[str]:
    """On every fast NIC that the plan does without as it is down, and those slower than declared."""
    slow = slower_than_declared(site, reports)
    lines = [f"node {name}: {text}; the plan counts on what the file says" for name, text in slow]
    for node in site.nodes:
        for port in node.ports:
            if port.fault:
                effect = "works with what is left" if port.usable else "uses Ethernet instead"
                text = f"node {node.name}: {port.fault}; on fabric {port.fabric} it {effect}"
                lines.append(f"{text} (--holmes-fallback fail would end the job)")
    if site.source == Site.source:  # worked out from the NICs that are up
        for report in reports:
            fast = [nic for nic in report.nics if nic.kind != "ethernet" and not nic.skipped]
            if fast and not any(nic.up for nic in fast):
                nic = f"{fast[0].name} ({fast[0].kind}) is {fast[0].state_text}"
                lines.append(f"node {report.name}: {nic}, so it uses Ethernet alone")
    return lines


def _silent(process: launcher.Process, report: dict[str, Any]) -> str:
    where = (
        f"the job's store at {process.master_addr}:{process.master_port} takes connections and does not "
        f"answer"
    )
    return (
        f"rank {process.rank} on {report['node']}: {where}; is rank 0 stopped, or another program on that "
        f"port?"
    )
