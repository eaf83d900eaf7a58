"""Start-up of a rank: report, learn the plan, take the planned rank - all before the script's first line.

    launcher's rank r, local rank l, on node n   ->   rank = position of n in plan.nodes x processes + l
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from holmes_ext import __version__
from holmes_ext.cluster.node_report import NodeReport, node_identity, node_name, report_node, short_name
from holmes_ext.cluster.resolve import resolve_site, slower_than_declared
from holmes_ext.cluster.site import Node, Site
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model, load_model, on_clusters
from holmes_ext.plan.plan import Plan, check_plan, load_plan, parse_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.transport import node_environment
from holmes_ext.runtime.start import hostfile, launcher
from holmes_ext.runtime.start.deadline import within
from holmes_ext.runtime.start.exchange import exchange

#: How long a rank that has only an error to report waits for somebody to report it to, in seconds.
_ERROR_SECONDS = 30.0
#: How much longer than its own limit a wait for the store may take until the store is taken for one that does not answer.
_SILENT_SECONDS = 10.0
#: Kept alive: the store's server lives in this object on the launcher's rank 0.
_stores: list[Any] = []


def start(
    options: Options,
    process: launcher.Process,
    sizes: Sizes | None,
    agreed: dict[str, Any],
    failure: HolmesError | None = None,
    environ: MutableMapping[str, str] = os.environ,
    model: Model | None = None,
    overlap: bool = False,
) -> tuple[session.Session, list[str]]:
    """Agree with all ranks, renumber this one in `environ`, and make the session active; returns it and lines for the user.

    agreed: what, besides flags and files, must be the same on all ranks. failure: what went wrong on this rank so far; it ends the
    job for all. model: of the job, where no file gives it. overlap: gradients are reduced under the last backward. Raises HolmesError (RemoteError where rank 0 tells).
    """
    report, files = _own_report(options, process, agreed, failure, environ)
    files = {**files, "model": files.get("model") or model, "overlap": overlap}
    if process.world_size == 1:
        verdict = _single(report, options, files, sizes)
    else:
        from holmes_ext.runtime.start import store as store_module

        try:
            patience = options.timeout_s if "error" not in report else _ERROR_SECONDS
            _stores.append(within(2 * patience + _SILENT_SECONDS, _silent(process, report), store_module.open_store, process, patience))
        except HolmesError:
            if "error" in report:  # nobody to tell it to
                raise HolmesError(report["error"]) from None
            raise

        def decide(reports: list[dict[str, Any]], nodes: list[NodeReport]) -> dict[str, Any]:
            site, plan = _plan(nodes, options, files, sizes)
            return {"site": site.to_dict(), "plan": plan.to_json(), "source": plan.source, "lines": _told(nodes, site, files["spec"])}

        silent, limit = _silent(process, report), options.timeout_s + 15 + _SILENT_SECONDS
        verdict = within(limit, silent, exchange, _stores[-1], process, report, decide, options.timeout_s)
    site, lines = Site.from_dict(verdict["site"]), verdict["lines"]
    plan = parse_plan(verdict["plan"], verdict["source"])
    here = _here(site, report["identity_name"])
    if process.world_size > 1 and options.preflight == "on":
        from holmes_ext.runtime.start import preflight

        arguments = (_stores[-1], verdict["round"], process, here.name, site, plan, options.fallback)
        site, plan, found = within(preflight.FINDINGS_S + 10 + _SILENT_SECONDS, silent, preflight.run, *arguments)
        lines = [*lines, *found]
    current, more = _follow(options, process, site, plan, here.name, environ)
    current.round = verdict["round"]
    return current, [*lines, *more]


def _own_report(
    options: Options,
    process: launcher.Process,
    agreed: dict[str, Any],
    failure: HolmesError | None,
    environ: MutableMapping[str, str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What this rank tells the others, and the files that it read; an error on the way is the report."""
    name = node_name(environ)
    base = {"node": name, "identity": node_identity(), "local_rank": process.local_rank, "identity_name": name}
    try:
        if failure is not None:
            raise failure
        files = _read_files(options)
        if files["spec"] is not None:
            hostfile.check_hosts(hostfile.launched_hosts(), files["spec"])
        given = {f"{key} (flag --holmes-{key})": value for key, value in options.agreed().items()}
        digests = {f"content of {key} file": files[f"{key}_digest"] for key in ("cluster", "plan", "model")}
        versions = {"holmes_ext version": __version__, "Python version": platform.python_version()}
        report = {**base, "agreed": {**given, **digests, **versions, **agreed, "world size": process.world_size}}
        if process.local_rank == 0:
            report["nics_of_node"] = report_node(environ, process.master_addr).to_dict()
        return report, files
    except HolmesError as error:
        if process.world_size == 1:
            raise
        return {**base, "error": str(error)}, {}


def _read_files(options: Options) -> dict[str, Any]:
    files: dict[str, Any] = {"spec": None, "plan": None, "model": None, "cluster_digest": "", "plan_digest": "", "model_digest": ""}
    if options.cluster:
        files["spec"] = load_spec(options.cluster)
        files["cluster_digest"] = hashlib.sha256(Path(options.cluster).read_bytes()).hexdigest()[:16]
    if options.plan:
        files["plan"] = load_plan(options.plan)
        files["plan_digest"] = files["plan"].digest[:16]
    if options.model:
        files["model"] = load_model(options.model)
        files["model_digest"] = hashlib.sha256(Path(options.model).read_bytes()).hexdigest()[:16]
    return files


def _plan(
    nodes: list[NodeReport], options: Options, files: dict[str, Any], sizes: Sizes | None
) -> tuple[Site, Plan]:
    spec: SiteSpec | None = files["spec"]
    site = resolve_site(nodes, spec, options.fallback == "ethernet")
    if files["plan"] is not None:
        plan: Plan = check_plan(files["plan"], site)
        if sizes is not None and plan.sizes is not None and sizes.complete(site.world_size) != plan.sizes:
            raise HolmesError(f"{plan.source}: key 'sizes' is {_say(plan.sizes)}, but the job runs {_say(sizes)}")
        wanted = "explicit" if options.stage_layers else options.partition
        if "partition" in options.given and (wanted != plan.partition or options.stage_layers not in ((), plan.stage_layers)):
            raise HolmesError(f"{plan.source}: key 'partition' is {plan.partition!r}, but --holmes-partition asks for {options.partition!r}")
        return site, plan
    links = Links.of_spec(spec) if spec is not None else Links()
    if options.stage_layers:
        return site, build_plan(site, sizes, stage_layers=options.stage_layers, links=links)
    model: Model | None = files["model"]
    if model is not None and spec is not None:
        model = on_clusters(model, spec)
    return site, build_plan(site, sizes, partition=options.partition, model=model, overlap=files["overlap"], links=links)


def _say(sizes: Sizes) -> str:
    named = ("pipeline", "tensor", "context", "expert", "data")
    return ", ".join(f"{name} {getattr(sizes, name)}" for name in named if getattr(sizes, name) > 1) or "all 1"


def _single(report: dict, options: Options, files: dict, sizes: Sizes | None) -> dict[str, Any]:
    node = NodeReport.from_dict(report["nics_of_node"], 1)
    site, plan = _plan([node], options, files, sizes)
    return {"site": site.to_dict(), "plan": plan.to_json(), "source": plan.source, "lines": _told([node], site, files["spec"]), "round": "holmes/1"}


def _told(reports: list[NodeReport], site: Site, spec: SiteSpec | None) -> list[str]:
    """A line for every fast NIC that the plan does without because it is down, and for those slower than declared."""
    slow = slower_than_declared(reports, spec) if spec is not None else []
    lines = [f"node {name}: {text}; the plan counts on what the file says" for name, text in slow]
    for node in site.nodes:
        for port in node.ports:
            if port.fault:
                effect = "works with what is left" if port.usable else "uses Ethernet instead"
                lines.append(f"node {node.name}: {port.fault}; on fabric {port.fabric} it {effect} (--holmes-fallback fail would end the job)")
    if site.source == Site.source:  # worked out from the NICs that are up
        for report in reports:
            fast = [nic for nic in report.nics if nic.kind != "ethernet" and not nic.skipped]
            if fast and not any(nic.up for nic in fast):
                lines.append(f"node {report.name}: {fast[0].name} ({fast[0].kind}) is {fast[0].state_text}, so it uses Ethernet alone")
    return lines


def _silent(process: launcher.Process, report: dict[str, Any]) -> str:
    address = f"{process.master_addr}:{process.master_port}"
    return f"rank {process.rank} on {report['node']}: the job's store at {address} takes connections and does not answer; is rank 0 stopped, or another program on that port?"


def _here(site: Site, host: str) -> Node:
    return next(node for node in site.nodes if short_name(host) == short_name(node.name))


def _follow(
    options: Options,
    process: launcher.Process,
    site: Site,
    plan: Plan,
    host: str,
    environ: MutableMapping[str, str],
) -> tuple[session.Session, list[str]]:
    here = site.node_by_name[host]
    rank = plan.nodes.index(here.name) * plan.processes + process.local_rank
    if process.launcher != launcher.NONE:
        environ.update(launcher.exported(process, rank, site.processes))
    for name in launcher.RANK_VARIABLES:
        if name in environ:
            environ[name] = str(rank)
    lines = node_environment(site, here, environ)
    current = session.Session(options, process, site, plan, rank)
    session.set_active(current)
    return current, lines
