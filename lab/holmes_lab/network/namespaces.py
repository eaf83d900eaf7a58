"""Linux namespaces by ctypes: unshare, setns, mount and prctl (in os from Python 3.12 on).

Every function raises OSError with the kernel's errno.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move the caller into new namespaces (its future children, for CLONE_NEWPID)."""
    _call("unshare", flags)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encode = lambda text: None if text is None else os.fsencode(text)  # noqa: E731
    _call(
        "mount", encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(data)
    )


def die_with_parent() -> None:
    """SIGKILL for the caller when the thread that forked it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Orphaned descendants become children of the caller, which can then end them."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def become_root_of_new_user_namespace(flags: int) -> None:
    """unshare(flags) inside a new user namespace in which the caller is root."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter(holder: int, names: tuple[str, ...] = ("net", "uts", "mnt")) -> None:
    """Move the caller (single-threaded) into the namespaces of process `holder`."""
    descriptors = [
        os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names
    ]
    for descriptor in descriptors:
        _call("setns", descriptor, 0)
        os.close(descriptor)


def enter_for_children(process: int) -> None:
    """Let future children of the caller be in the PID namespace of `process`, which must be inside the
    caller's own."""
    descriptor = os.open(f"/proc/{process}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, CLONE_NEWPID)
    finally:
        os.close(descriptor)


@contextmanager
def own_proc() -> Iterator[None]:
    """Inside: a /proc of the caller's PID namespace, where it finds itself under os.getpid() (psutil looks).
    After an exception it stays: the caller then ends, and with threads there is no way back."""
    before = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    yield
    directory = os.getcwd()  # setns of a mount namespace moves the caller to its root
    _call("setns", before, 0)
    os.close(before)
    os.chdir(directory)


def furnish_node(hostname: str, hosts: str, nsswitch: str) -> None:
    """In a node's new namespaces: host name, /etc/hosts (and no DNS), and a /proc, /sys and /dev/shm of its
    own.

    /sys must be mounted again to show the node's own NICs (and their byte counters); a private /dev/shm keeps
    nodes from finding each other there, and frees what a framework leaves in it.
    """
    socket.sethostname(hostname)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    for source, target in ((hosts, "/etc/hosts"), (nsswitch, "/etc/nsswitch.conf")):
        if os.path.exists(target):  # nsswitch.conf is glibc's; another C library has none
            mount(source, target, None, MS_BIND)
    safe = MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("proc", "/proc", "proc", safe)
    mount("sysfs", "/sys", "sysfs", safe | MS_RDONLY)
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
