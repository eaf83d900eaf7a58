"""Reader of the files in a /sys tree: this machine's tree, or a tree that was captured on another machine.

The attributes of the kernel are short text files of one line. A captured tree may be damaged in any
way. So each method returns a value, or None if the kernel itself has no value, or raises a
HolmesError that names the file.

`tar` pads files of /sys with NULs up to the 4096 bytes that the kernel reports as their size, and
stores nothing but NULs for a file that cannot be read (EINVAL). Both are accepted.
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
#: Largest file in bytes: the kernel writes at most one page, and pages have at most 64 KiB.
_LARGEST = 65536
#: Errors of the kernel for an attribute that has no value now, such as the speed of a port without
#: a link.
_NO_VALUE = {errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.ENETDOWN}


class Tree:
    """A /sys tree. All paths are relative to the root, such as "class/net/eth0/mtu"."""

    def __init__(self, root: str | Path = "/sys"):
        """Open the tree at `root`.

        Raises:
            HolmesError: the root is not a folder, or has neither class/net nor class/infiniband.
        """
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
        """True if this is the /sys of the running machine."""
        return str(self.real_root) == "/sys"

    def error(self, path: str, problem: str) -> HolmesError:
        """Return an error that names a file of the tree."""
        return HolmesError(f"{os.path.join(self.root, path)}: {problem}")

    def _absolute(self, path: str) -> str:
        return os.path.join(self.real_root, path)

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a folder, or a link to a folder."""
        return os.path.isdir(self._absolute(path))

    def names(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a folder, () if the folder does not exist.

        Raises:
            HolmesError: the folder cannot be listed, or a name is not a possible device name.
        """
        try:
            names = sorted(os.listdir(self._absolute(path)))
        except FileNotFoundError:
            if os.path.lexists(self._absolute(path)):
                problem = "is a link to nothing; capture the tree again with what it points to"
                raise self.error(path, problem) from None
            return ()
        except (OSError, ValueError) as error:
            raise self.error(path, f"cannot be listed: {why(error)}") from None
        return self.checked_names(path, names)

    def checked_names(self, path: str, names: Collection[str]) -> tuple[str, ...]:
        """Check names that were read from the tree, and return them.

        Args:
            path: File, folder or link that has the names, for the error message.
            names: The names.

        Raises:
            HolmesError: a name is not a possible device name.
        """
        for name in names:
            if not DEVICE_NAME.fullmatch(name):
                raise self.error(path, f"holds or points to {name!a:.80}, which is no device name")
        return tuple(names)

    def text(self, path: str) -> str | None:
        """Return the text of an attribute without surrounding space, None if it has no value.

        Raises:
            HolmesError: the path is no readable regular file of text (a folder, a link, binary
                data), or the file is longer than a page.
        """
        data = (self._read(path) or b"").rstrip(b"\0")
        if len(data) > _LARGEST:
            raise self.error(path, f"is longer than {_LARGEST} bytes: no file of /sys is")
        text = data.decode("latin-1").strip()
        is_printable = all(letter.isprintable() or letter in "\n\t" for letter in text)
        if not text.isascii() or not is_printable:
            raise self.error(path, "holds binary data instead of text")
        return text or None

    def needed_text(self, path: str) -> str:
        """Return the text of an attribute that every device has.

        Raises:
            HolmesError: the attribute has no value, or is not a readable file of text.
        """
        return self._needed(path, self.text(path))

    def _needed(self, path: str, value: T | None) -> T:
        """Return the value of a path, or raise HolmesError if there is none."""
        if value is None:
            raise self.error(path, "is missing or empty")
        return value

    def _read(self, path: str) -> bytes | None:
        """Return the content of a regular file, None if the kernel has no value for it.

        Longer content is cut after _LARGEST + 1 bytes.

        Raises:
            HolmesError: the path is not a regular file, or it cannot be read.
        """
        # Not following links, and not waiting for a pipe: a captured tree may have anything.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        absolute = self._absolute(path)
        try:
            if not stat.S_ISREG(os.lstat(absolute).st_mode):
                raise self.error(path, "is not a regular file")
            with open(os.open(absolute, flags), "rb") as file:
                return file.read(_LARGEST + 1)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _NO_VALUE:
                return None
            raise self.error(path, f"cannot be read: {why(error)}") from None

    def device_name(self, path: str) -> str:
        """Return the device name in an attribute, "" if it has no value.

        Raises:
            HolmesError: the text is not a possible device name, or the attribute is not a readable
                file of text.
        """
        text = self.text(path)
        if not text:
            return ""
        (name,) = self.checked_names(path, [text])
        return name

    def number(self, path: str, pattern: str = r"-?[0-9]{1,18}") -> int | None:
        """Return the decimal or hexadecimal (0x) number in an attribute, None if it has no value.

        Args:
            path: Path of the attribute.
            pattern: Regular expression that the text must match.

        Raises:
            HolmesError: the text does not match, or the attribute is not a readable file of text.
        """
        text = self.text(path)
        if text is None:
            return None
        if not re.fullmatch(pattern, text, re.ASCII):
            raise self.error(path, f"{text!a:.80} is not the number that belongs here")
        return int(text, 0) if text.startswith("0x") else int(text)

    def needed_number(self, path: str, pattern: str = r"-?[0-9]{1,18}") -> int:
        """Return the number in an attribute that every device has.

        Args:
            path: Path of the attribute.
            pattern: Regular expression that the text must match.

        Raises:
            HolmesError: the attribute has no value, its text does not match, or it is not a
                readable file of text.
        """
        return self._needed(path, self.number(path, pattern))

    def uevent(self, path: str) -> dict[str, str]:
        """Return the KEY=VALUE lines in the uevent file of a folder as a dict, {} without the file.

        Raises:
            HolmesError: a line is not KEY=VALUE, or uevent is not a readable file of text.
        """
        file = f"{path}/uevent"
        values = {}
        for line in (self.text(file) or "").splitlines():
            key, equals, value = line.partition("=")
            if not equals or not key:
                raise self.error(file, f"line {line!a:.80} is not KEY=VALUE")
            values[key] = value
        return values

    def link_name(self, path: str, key: str) -> str:
        """Return the device that a link points to, "" if there is no link.

        A tree may have been copied with a folder in place of the link.

        Args:
            path: Path of the link.
            key: Key in the uevent of such a folder that has the device name.

        Raises:
            HolmesError: the path is neither a link nor a folder, or the name is not a possible
                device name.
        """
        try:
            name = os.path.basename(os.readlink(self._absolute(path)))
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) != errno.EINVAL:  # EINVAL: exists, but is no link
                raise self.error(path, f"cannot be read: {why(error)}") from None
            name = self._name_in_uevent(path, key)
        return self.checked_names(path, [name])[0]

    def _name_in_uevent(self, path: str, key: str) -> str:
        """Return the value of a key in the uevent file of a folder, such as "eth0" for INTERFACE.

        A copied tree may have a folder where /sys has a link to a device. link_name() calls this
        method after it could not read the link.

        Args:
            path: The folder. The caller knows that it is no link.
            key: The key, such as INTERFACE.

        Raises:
            HolmesError: the path is not a folder, or its uevent does not have the key.
        """
        # `from None`: without the error of reading the link, since link_name() handles it.
        if not self.is_dir(path):
            raise self.error(path, "is neither a link nor a directory") from None
        name = self.uevent(path).get(key, "")
        if not name:
            raise self.error(f"{path}/uevent", f"does not say {key}=") from None
        return name

    def resolve(self, path: str) -> str:
        """Return a path with all links followed, relative to the root.

        Raises:
            HolmesError: a link points to nothing, in a circle, or out of the tree. (An absolute
                link in a captured tree would read the wrong machine.)
        """
        try:
            real_path = os.path.realpath(self._absolute(path), strict=True)
        except (OSError, ValueError) as error:
            advice = "capture the tree again with what it points to"
            raise self.error(path, f"leads nowhere: {why(error)}; {advice}") from None
        if os.path.commonpath([real_path, self.real_root]) != self.real_root:
            raise self.error(path, f"leads out of the tree, to {real_path!a:.200}")
        return os.path.relpath(real_path, self.real_root)

    def pci_address(self, device: str) -> str:
        """Return the PCI address of a device or of the nearest device above it, "" without one.

        Args:
            device: Path of the device.

        Raises:
            HolmesError: the uevent of the device has something else as its PCI address.
        """
        slot_name = self.uevent(device).get("PCI_SLOT_NAME", "")
        if slot_name:
            if not PCI_ADDRESS.fullmatch(slot_name):
                raise self.error(
                    f"{device}/uevent", f"PCI_SLOT_NAME={slot_name!a:.80} is no PCI address"
                )
            return slot_name
        parts = self.resolve(device).split("/")
        addresses = [part for part in parts if PCI_ADDRESS.fullmatch(part)]
        return addresses[-1] if addresses else ""
