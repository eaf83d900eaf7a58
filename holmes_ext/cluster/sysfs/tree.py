"""Reading files of a /sys tree: the running machine's, or one captured on another machine.

The kernel's attributes are short one-line text files. A captured tree may be damaged in any way, so every
reading either gives a value, or None where the kernel itself has nothing to say, or a HolmesError that names
the file. What `tar` makes of a sysfs tree is understood: it pads files with NULs to the 4096 bytes that the
kernel claims (and stores only NULs for a file whose reading fails with EINVAL).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from holmes_ext.cluster.nic import DEVICE_NAME, PCI_ADDRESS
from holmes_ext.errors import HolmesError
from holmes_ext.words import why

T = TypeVar("T")
_LARGEST = 65536  # bytes; the kernel allows one page, and pages have at most 64 KiB
# What the kernel answers for an attribute that has no value now (speed of a port without link, ...)
_NOTHING = {errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.ENETDOWN}


class Tree:
    """A /sys tree. Paths are relative to its root ("class/net/eth0/mtu")."""

    def __init__(self, root: str | Path = "/sys"):
        """HolmesError when `root` is no directory or holds neither class/net nor class/infiniband."""
        self.root = Path(root)
        try:
            self.real_root = os.path.realpath(root, strict=True)
        except (OSError, ValueError) as error:
            raise HolmesError(f"{root}: {why(error)}; give the root of a /sys tree") from None
        if not any(self.is_dir(path) for path in ("class/net", "class/infiniband")):
            raise HolmesError(
                f"{root}: is not the root of a /sys tree: it has neither class/net nor class/infiniband"
            )

    @property
    def live(self) -> bool:
        """Whether this is the running machine's own /sys."""
        return str(self.real_root) == "/sys"

    def error(self, path: str, problem: str) -> HolmesError:
        return HolmesError(f"{os.path.join(self.root, path)}: {problem}")

    def _at(self, path: str) -> str:
        return os.path.join(self.real_root, path)

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(self._at(path))

    def names(self, path: str) -> tuple[str, ...]:
        """Sorted device names in a directory, () without one; HolmesError for others."""
        try:
            names = sorted(os.listdir(self._at(path)))
        except FileNotFoundError:
            if os.path.lexists(self._at(path)):
                what = "is a link to nothing; capture the tree again with what it points to"
                raise self.error(path, what) from None
            return ()
        except (OSError, ValueError) as error:
            raise self.error(path, f"cannot be listed: {why(error)}") from None
        return self.devices(path, names)

    def devices(self, path: str, names: Collection[str]) -> tuple[str, ...]:
        """`names` that were read at `path`, each checked to be a possible device name."""
        for name in names:
            if not DEVICE_NAME.fullmatch(name):
                raise self.error(path, f"holds or points to {name!a:.80}, which is no device name")
        return tuple(names)

    def text(self, path: str) -> str | None:
        """Of an attribute, without surrounding space; None when there is none. HolmesError: it is no readable
        regular file of text (a directory, a link, binary data, longer than a page)."""
        data = (self._read(path) or b"").rstrip(b"\0")
        if len(data) > _LARGEST:
            raise self.error(path, f"is longer than {_LARGEST} bytes: no file of /sys is")
        text = data.decode("latin-1").strip()
        if not text.isascii() or not all(c.isprintable() or c in "\n\t" for c in text):
            raise self.error(path, "holds binary data instead of text")
        return text or None

    def needed_text(self, path: str) -> str:
        """Like `text`, of an attribute that every device has."""
        return self._needed(path, self.text(path))

    def _needed(self, path: str, value: T | None) -> T:
        if value is None:
            raise self.error(path, "is missing or empty")
        return value

    def _read(self, path: str) -> bytes | None:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            if not stat.S_ISREG(os.lstat(self._at(path)).st_mode):
                raise self.error(path, "is not a regular file")
            with open(os.open(self._at(path), flags), "rb") as file:
                return file.read(_LARGEST + 1)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _NOTHING:
                return None
            raise self.error(path, f"cannot be read: {why(error)}") from None

    def device_name(self, path: str) -> str:
        """The text of an attribute that holds a device name, "" when it has none."""
        text = self.text(path)
        return self.devices(path, [text])[0] if text else ""

    def number(self, path: str, pattern: str = r"-?[0-9]{1,18}") -> int | None:
        """A decimal or 0x number that matches `pattern`; None when there is none."""
        text = self.text(path)
        if text is None:
            return None
        if not re.fullmatch(pattern, text, re.ASCII):
            raise self.error(path, f"{text!a:.80} is not the number that belongs here")
        return int(text, 0) if text.startswith("0x") else int(text)

    def needed_number(self, path: str, pattern: str = r"-?[0-9]{1,18}") -> int:
        """Like `number`, of an attribute that every device has."""
        return self._needed(path, self.number(path, pattern))

    def uevent(self, path: str) -> dict[str, str]:
        """The KEY=VALUE lines of a directory's uevent file; empty when there is none."""
        file = f"{path}/uevent"
        pairs = {}
        for line in (self.text(file) or "").splitlines():
            key, equals, value = line.partition("=")
            if not equals or not key:
                raise self.error(file, f"line {line!a:.80} is not KEY=VALUE")
            pairs[key] = value
        return pairs

    def link_name(self, path: str, key: str) -> str:
        """The device that a link points to (of one copied as a directory `key` of its uevent), or ""."""
        try:
            name = os.path.basename(os.readlink(self._at(path)))
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) != errno.EINVAL:  # EINVAL: exists, but is no link
                raise self.error(path, f"cannot be read: {why(error)}") from None
            if not self.is_dir(path):
                raise self.error(path, "is neither a link nor a directory") from None
            name = self.uevent(path).get(key, "")
            if not name:
                raise self.error(f"{path}/uevent", f"does not say {key}=") from None
        return self.devices(path, [name])[0]

    def resolve(self, path: str) -> str:
        """Where a path leads after all links, relative to the root.

        Raises HolmesError when it leads nowhere, round in a circle, or out of the tree (an absolute link in a
        captured tree would read the wrong machine).
        """
        try:
            real = os.path.realpath(self._at(path), strict=True)
        except (OSError, ValueError) as error:
            advice = "capture the tree again with what it points to"
            raise self.error(path, f"leads nowhere: {why(error)}; {advice}") from None
        if os.path.commonpath([real, self.real_root]) != self.real_root:
            raise self.error(path, f"leads out of the tree, to {real!a:.200}")
        return os.path.relpath(real, self.real_root)

    def pci_address(self, device: str) -> str:
        """PCI address of a device directory or of the nearest PCI device above it, "" when there is none."""
        said = self.uevent(device).get("PCI_SLOT_NAME", "")
        if said:
            if not PCI_ADDRESS.fullmatch(said):
                raise self.error(
                    f"{device}/uevent", f"PCI_SLOT_NAME={said!a:.80} is no PCI address"
                )
            return said
        above = [part for part in self.resolve(device).split("/") if PCI_ADDRESS.fullmatch(part)]
        return above[-1] if above else ""
