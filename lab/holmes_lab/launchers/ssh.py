"""Configures sshd and ssh on an emulated cluster, so that every host reaches the others without a prompt."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from holmes_ext.document import quoted
from holmes_ext.errors import HolmesError
from holmes_lab.process.ranks import Program
from holmes_lab.rights import program

PORT = 22
# bash reads ~/.bashrc in a session of sshd unless SHLVL says that the shell is nested. That file must not
# change the variables of a session, nor delay it (`pyenv init` waits for a lock for up to 60 s).
_NO_BASHRC = {"SHLVL": "1"}


def configure(directory: Path, variables: Mapping[str, Mapping[str, str]]) -> None:
    """Write the keys and the configuration files of sshd and ssh.

    The files in `directory` are:

        host_key, key         private keys of the hosts and of the user, and the public keys (.pub)
        ssh_config            mounted over /etc/ssh/ssh_config on each host (mount_script())
        shadow                mounted over /etc/shadow on each host, with root's account unlocked
        sshd_config.HOST      for the sshd of each host

    Args:
        directory: Directory for the files.
        variables: For each host, the environment variables of every session on that host.

    Raises:
        HolmesError: ssh-keygen failed.
    """
    for name in ("host_key", "key"):
        _generate_key(directory / name)
    (directory / "ssh_config").write_text(
        f"Host *\n IdentityFile {directory}/key\n IdentitiesOnly yes\n BatchMode yes\n StrictHostKeyChecking "
        f"no\n UserKnownHostsFile /dev/null\n GlobalKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    # sshd refuses a login to a locked account, and root is locked on many machines.
    (directory / "shadow").write_text("root:*:19000:0:99999:7:::\n")
    for host, host_variables in variables.items():
        # _NO_BASHRC sets SHLVL=1, so that bash does not read ~/.bashrc in a session of sshd.
        config = _sshd_config(directory, {**host_variables, **_NO_BASHRC})
        (directory / f"sshd_config.{host}").write_text(config)


def _generate_key(path: Path) -> None:
    """Write an SSH key without a passphrase to `path`, and its public key beside it.

    Raises:
        HolmesError: ssh-keygen failed.
    """
    completed = subprocess.run(
        [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(path)],
        capture_output=True,
        text=True,
    )
    if completed.returncode:
        raise HolmesError(f"ssh-keygen: {completed.stderr.strip() or completed.returncode}")


def _sshd_config(directory: Path, variables: Mapping[str, str]) -> str:
    """Return sshd's configuration file for a host.

    Args:
        directory: Directory of the keys.
        variables: Environment variables of every session on the host.
    """
    assignments = [quoted(f"{name}={value}") for name, value in variables.items()]
    lines = [
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
        f"SetEnv {' '.join(assignments)}",
    ]
    return "\n".join(lines) + "\n"


def mount_script(directory: Path) -> str:
    """Return shell commands that mount the files of `directory` over a host's ssh files in /etc."""
    return (
        f"mkdir -p /run/sshd; mount --bind {directory}/ssh_config /etc/ssh/ssh_config;"
        f" mount --bind {directory}/shadow /etc/shadow;"
    )


def daemons(directory: Path, hosts: Sequence[str], env: Mapping[str, str]) -> list[Program]:
    """Return the sshd of every host, as programs that can be started there."""
    sshd = program("sshd")  # the absolute path, because sshd executes itself for each connection
    programs = []
    for host in hosts:
        argv = [sshd, "-D", "-e", "-f", f"{directory}/sshd_config.{host}"]
        programs.append(Program(host, argv, env))
    return programs
