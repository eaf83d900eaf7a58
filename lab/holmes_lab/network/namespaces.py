"""System calls for Linux namespaces: unshare, setns, mount and prctl, called with ctypes.

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

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library, and raise OSError if it fails."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move the calling process into new namespaces; a new PID namespace holds only its later children."""
    _call("unshare", flags)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system.

    Args:
        source: Device, or a name that the file system ignores.
        target: Mount point.
        kind: Type of the file system; None to change an existing mount.
        flags: MS_ flags.
        data: Options of the file system.
    """
    _call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        None if kind is None else os.fsencode(kind),
        ctypes.c_ulong(flags),
        None if data is None else os.fsencode(data),
    )


def die_with_parent() -> None:
    """Let the kernel kill the calling process when the thread that forked it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Make orphaned descendants children of the calling process, so that it can end them."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def become_root_of_new_user_namespace(flags: int) -> None:
    """Move the calling process into a new user namespace, in which it is root, and into further new ones.

    Args:
        flags: CLONE_ flags of the further namespaces. A user without rights may create them together with a
            user namespace.
    """
    uid = os.getuid()
    gid = os.getgid()
    unshare(CLONE_NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter(holder: int, names: tuple[str, ...] = ("net", "uts", "mnt")) -> None:
    """Move the calling process, which must have a single thread, into namespaces of another process.

    Args:
        holder: PID of the other process. It keeps the namespaces alive.
        names: The namespaces, as in /proc/PID/ns.
    """
    descriptors = [
        os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names
    ]
    for descriptor in descriptors:
        _call("setns", descriptor, 0)
        os.close(descriptor)


def enter_for_children(process: int) -> None:
    """Start future children of the calling process in the PID namespace of another process.

    That namespace must be inside the PID namespace of the calling process.
    """
    descriptor = os.open(f"/proc/{process}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, CLONE_NEWPID)
    finally:
        os.close(descriptor)


@contextmanager
def own_proc() -> Iterator[None]:
    """Mount a /proc of the calling process's PID namespace for the time of a `with` block.

    Libraries such as psutil look up os.getpid() there. After an exception the mount stays: the
    process then ends, and a process with threads could not return to its old mount namespace.
    """
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
    """Prepare the new namespaces of an emulated node: host name, name resolution and file systems.

    The node gets /etc/hosts without DNS, and its own /proc, /sys and /dev/shm. /sys must be mounted
    again to show the node's NICs and their byte counters. With a private /dev/shm, nodes do not
    find each other's files, and the files of a framework are freed with the node.

    Args:
        hostname: Host name of the node.
        hosts: File that becomes /etc/hosts.
        nsswitch: File that becomes /etc/nsswitch.conf.
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


def interface_bytes(pid: int) -> dict[str, tuple[int, int]]:
    """Return interface -> (bytes received, bytes sent) in the network namespace of a process."""
    counters = {}
    with open(f"/proc/{pid}/net/dev") as file:
        for line in file.readlines()[2:]:  # behind two lines of titles
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            counters[name.strip()] = (int(fields[0]), int(fields[8]))
    return counters
