"""Reader of ELF libraries: values that are fixed when a library is linked, without loading it.

A C library with `struct { const char* name; ... } table = {"text", ...}` does not contain the address of
"text", because it is not known where the library will be loaded. It contains an entry for the loader, a
relocation: "at the offset of `table`, write the base address of the library + the offset of the text". These
functions follow the relocation instead of the loader. So the library's code never runs.

Layout: the ELF specification (elf(5)), for 64-bit little-endian machines: x86-64 and aarch64.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02\x01"  # 64-bit, little-endian
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_POINTER = struct.Struct("<Q")
_LOADED = 1  # type of a segment: mapped into memory
_INTERPRETER = 3  # type of a segment: path of the loader
_DYNAMIC_SYMBOLS = 11  # type of a section
_RELOCATIONS = 4  # type of a section
#: Type of a relocation "base address + addend" on x86-64 and on aarch64.
_RELATIVE = (8, 1027)
_LARGEST = 1 << 30  # bytes of a library that is read
_LONGEST_TEXT = 256


class Symbol(NamedTuple):
    """Exported name of a library."""

    name: str
    address: int  # from the base address of the library; 0 if another library has the symbol


class _Section(NamedTuple):
    type: int
    offset: int  # in the file
    size: int  # bytes
    linked: int  # number of the section with the names of this section's symbols


class Library:
    """An ELF library or program, as its file contains it."""

    def __init__(self, path: str | Path):
        """Read the ELF file of a library or a program (at most its first GiB).

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not a 64-bit little-endian ELF file, or it is damaged.
        """
        with open(path, "rb") as file:
            self._data = file.read(_LARGEST)
        if not self._data.startswith(_MAGIC):
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        try:
            header = _HEADER.unpack_from(self._data)
            segments_at, sections_at = header[5], header[6]
            segment_count, section_count = header[10], header[12]
            self._segments = [
                _SEGMENT.unpack_from(self._data, segments_at + number * _SEGMENT.size)
                for number in range(segment_count)
            ]
            self._sections = [
                self._section(sections_at + number * _SECTION.size)
                for number in range(section_count)
            ]
            self.symbols = self._read_symbols()
        except (struct.error, IndexError, OverflowError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def _section(self, offset: int) -> _Section:
        fields = _SECTION.unpack_from(self._data, offset)
        return _Section(type=fields[1], offset=fields[4], size=fields[5], linked=fields[6])

    def _read_symbols(self) -> list[Symbol]:
        """Return the symbols of the dynamic symbol table, in the order of the table."""
        symbols = []
        for section in self._sections:
            if section.type != _DYNAMIC_SYMBOLS:
                continue
            names_at = self._sections[section.linked].offset
            for offset in range(section.offset, section.offset + section.size, _SYMBOL.size):
                fields = _SYMBOL.unpack_from(self._data, offset)
                symbols.append(Symbol(self._text_at(names_at + fields[0]), address=fields[4]))
        return symbols

    @property
    def interpreter(self) -> str:
        """Path of the loader that starts a program, "" in a library."""
        for kind, _, offset, *_ in self._segments:
            if kind == _INTERPRETER:
                return self._text_at(offset)
        return ""

    def text_pointed_to(self, address: int) -> str:
        """Return the text to which a pointer in the library's data refers.

        The result is "" if the file does not show the text, for example because the library's code sets
        the pointer when it runs.

        Args:
            address: Address of the pointer, from the base address of the library.
        """
        try:
            return self._text_at(self._offset_of(self._pointer_at(address)))
        except (struct.error, ValueError, IndexError, OverflowError):
            return ""

    def _pointer_at(self, address: int) -> int:
        """Return the value that the loader writes at an address, minus the base address."""
        for section in self._sections:
            if section.type != _RELOCATIONS:
                continue
            for offset in range(section.offset, section.offset + section.size, _RELOCATION.size):
                at, info, addend = _RELOCATION.unpack_from(self._data, offset)
                if at != address:
                    continue
                kind, symbol = info & 0xFFFFFFFF, info >> 32
                base = 0 if kind in _RELATIVE else self.symbols[symbol].address
                return base + int(addend)
        # No relocation in the usual format has the address. There may be a relocation in the
        # compact format, DT_RELR. There the addend is not in the relocation, but in the file at the
        # address itself.
        (value,) = _POINTER.unpack_from(self._data, self._offset_of(address))
        return int(value)

    def _offset_of(self, address: int) -> int:
        """Return the position in the file of the byte that the loader puts at an address.

        Raises:
            ValueError: no segment of the file has the address.
        """
        for kind, _, offset, start, _, size, *_ in self._segments:
            if kind == _LOADED and start <= address < start + size:
                return int(offset + address - start)
        raise ValueError(f"no segment has the address {address:#x}")

    def _text_at(self, offset: int) -> str:
        end = self._data.index(b"\0", offset, offset + _LONGEST_TEXT)
        return self._data[offset:end].decode("utf-8", errors="replace")
