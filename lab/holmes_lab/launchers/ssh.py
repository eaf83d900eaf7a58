"""sshd in every host of a lab, and an ssh client there that reaches all of them without a question."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from holmes_ext.document import quoted
from holmes_ext.errors import HolmesError
from holmes_lab.process.ranks import Program
from holmes_lab.rights import program

PORT = 22
# bash reads ~/.bashrc in a session of sshd, unless it is not the outermost shell. A session of the lab has
# the lab's variables, not what that file makes of them (pyenv's `init` waits there for a lock, up to 60 s).
_NO_BASHRC = {"SHLVL": "1"}


def configure(directory: Path, variables: Mapping[str, Mapping[str, str]]) -> None:
    """Write keys and configurations into `directory`. variables: by host, what every session gets there."""
    for name in ("host_key", "key"):
        done = subprocess.run(
            [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise HolmesError(f"ssh-keygen: {done.stderr.strip() or done.returncode}")
    (directory / "ssh_config").write_text(
        f"Host *\n IdentityFile {directory}/key\n IdentitiesOnly yes\n BatchMode yes\n StrictHostKeyChecking "
        f"no\n UserKnownHostsFile /dev/null\n GlobalKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    # sshd lets nobody in whose account is locked
    (directory / "shadow").write_text("root:*:19000:0:99999:7:::\n")
    for host, own_variables in variables.items():
        (directory / f"sshd_config.{host}").write_text(
            "\n".join(
                [
                    f"Port {PORT}",
                    f"HostKey {directory}/host_key",
                    f"AuthorizedKeysFile {directory}/key.pub",
                    "StrictModes no",
                    "UsePAM no",
                    "PasswordAuthentication no",
                    "PermitRootLogin prohibit-password",
                    "PidFile none",
                    "UseDNS no",
                    "PrintMotd no",
                    "PrintLastLog no",
                    "MaxStartups 200",
                    "MaxSessions 200",
                    "SetEnv "
                    + " ".join(
                        quoted(f"{name}={value}")
                        for name, value in {**own_variables, **_NO_BASHRC}.items()
                    ),
                    "",
                ]
            )
        )


def prepare(directory: Path) -> str:
    """Shell commands that every host runs as root in its own mounts."""
    return (
        f"mkdir -p /run/sshd; mount --bind {directory}/ssh_config /etc/ssh/ssh_config;"
        f" mount --bind {directory}/shadow /etc/shadow;"
    )


def daemons(directory: Path, hosts: Sequence[str], env: Mapping[str, str]) -> list[Program]:
    sshd = program("sshd")  # by its whole path: it starts itself again for each connection
    return [
        Program(host, [sshd, "-D", "-e", "-f", f"{directory}/sshd_config.{host}"], env)
        for host in hosts
    ]
