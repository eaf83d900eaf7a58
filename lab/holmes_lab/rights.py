"""Requirements of the lab: programs, and the permission to create namespaces."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from holmes_ext.errors import HolmesError

#: Program that lab/launchers/ needs -> Debian package with the program.
PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "sinfo": "slurm-wlm",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "ssh": "openssh-client",
    "mpirun": "openmpi-bin",
    "pdsh": "pdsh",
    "mount": "util-linux",
}


def program(name: str) -> str:
    """Return the path of a program, also from the sbin folders (a user's PATH may lack them).

    Raises:
        HolmesError: the program is not installed.
    """
    path = shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    )
    if path is None and name in PACKAGES:
        raise HolmesError(
            f"the lab's launchers need `{name}`, which is missing; apt-get install "
            f"{PACKAGES[name]} (its service need not be started)"
        )
    if path is None:
        raise HolmesError(
            f"the lab needs `{name}`, which is missing; install iproute2 (iproute on Red Hat)"
        )
    return path


def denied(reason: str) -> str:
    """Return the reason why this machine does not permit namespaces, and the remedy.

    Args:
        reason: Error message of the kernel.
    """
    for sysctl, forbidding_value in (
        ("kernel.unprivileged_userns_clone", "0"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1"),
        ("user.max_user_namespaces", "0"),
    ):
        path = Path("/proc/sys") / sysctl.replace(".", "/")
        if path.exists() and path.read_text().strip() == forbidding_value:
            return (
                f"the lab needs root, or user namespaces, which {sysctl}={forbidding_value} forbids "
                f"({reason}); run it as root or set that"
            )
    return (
        f"the lab needs root, or unprivileged user namespaces, which this machine refuses ({reason}); "
        "run it as root"
    )
