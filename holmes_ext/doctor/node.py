"""All checks of a node for `holmes doctor`, in their order.

The functions that check_node() calls are in the modules beside this one. A new check is called there, too.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence

from holmes_ext import __version__, extensions
from holmes_ext.cluster.addresses import (
    captured_addresses,
    egress_interface,
    interface_addresses,
    read_limits,
)
from holmes_ext.cluster.net_plugin import nccl_of_node
from holmes_ext.cluster.node_report import NodeReport, node_identity, node_name
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.cluster.sysfs.node import read_nics
from holmes_ext.doctor import frameworks, nccl, variables
from holmes_ext.doctor.command.check import check_command, variables_of_command
from holmes_ext.doctor.finding import Finding
from holmes_ext.doctor.in_use import check_used_nics, mark_unused
from holmes_ext.doctor.nics import check_machine
from holmes_ext.doctor.side_by_side import NodeCheck, kind_of
from holmes_ext.doctor.tcp import check_tcp
from holmes_ext.patches import all_patches, installed_versions


def check_node(
    sysfs: str, words: Sequence[str], spec: SiteSpec | None, *, imports: bool
) -> NodeCheck:
    """Check this node alone, and return its NICs, versions and findings.

    Args:
        sysfs: Folder with the /sys tree to read: this machine's, or a copy of another machine's.
        words: The training command to check, [] if there is none.
        spec: Content of cluster.toml, None if there is none.
        imports: Import the frameworks and check the real functions, not their source.
    """
    is_live = os.path.realpath(sysfs) == "/sys"
    has_captured_addresses = not is_live and captured_addresses(sysfs) is not None
    # Other code finds a copy of another machine's /sys by HOLMES_SYSFS.
    environ = dict(os.environ)
    if not is_live:
        environ["HOLMES_SYSFS"] = sysfs
    name = node_name(os.environ)
    nics = read_nics(sysfs, None if has_captured_addresses else interface_addresses())
    node = NodeReport(
        name,
        identity=node_identity(),
        # No job, so no master: for loopback, egress_interface() returns the default route's device.
        ethernet=egress_interface("127.0.0.1") if is_live else "",
        nics=nics,
        nccl=nccl_of_node(environ, nics),
    )
    cluster_kind = kind_of(name, spec)  # "" if cluster.toml does not have this node

    # `skipped` is why jobs do not use a NIC. mark_unused() changes it for NICs that cluster.toml leaves out.
    marked_nics = mark_unused(nics, name, spec)
    unused = [
        marked.name for marked, nic in zip(marked_nics, nics) if marked.skipped != nic.skipped
    ]
    findings = check_used_nics(sysfs, marked_nics, is_live, is_in_cluster=bool(cluster_kind))
    findings += check_machine(nics, cluster_kind, is_live)
    job_environ = {**os.environ, **(variables_of_command(words) if words else {})}
    findings += variables.check_variables(job_environ, nics, unused)
    if spec and (spec.wan or spec.pairs):
        findings += check_tcp(spec, name, read_limits(), os.environ)
    findings += _check_frameworks(imports)
    if is_live:
        findings += frameworks.check_compilers(environ)
    if words:
        findings += check_command(words, spec, os.environ, node)
    for check in extensions.objects("doctor_checks").values():
        findings += check()
    findings += nccl.check_nccl(node.nccl, environ, nics, unused)
    versions = {
        "Python": platform.python_version(),
        "holmes_ext": __version__,
        **installed_versions(patch.feature for patch in all_patches()),
    }
    return NodeCheck(
        node,
        versions,
        settings=variables.settings(os.environ),
        findings=tuple(findings),
        nccl=tuple(nccl.handed_over(node, spec, environ)),  # lines with the settings for NCCL
    )


def _check_frameworks(imports: bool) -> list[Finding]:
    """Return the findings about the installed frameworks.

    Args:
        imports: Import the frameworks and check the real functions, not their source.
    """
    findings: list[Finding] = []
    # Frameworks print while they are imported.
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        # How each patch of holmes fits the framework: "fits", "off" with a reason, ...
        fits = (frameworks.fit_of(patch, check=imports) for patch in all_patches())
        findings += frameworks.check_patches(fits)
        if imports:
            findings += frameworks.check_replaced_functions(all_patches())
    findings += frameworks.check_version_conflicts()
    findings += frameworks.check_patching_libraries()
    return findings
