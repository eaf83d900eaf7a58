"""Damage to what holmes reads: bytes of a file, and trees of /sys with their links. For tests."""

import json
import os
import random
import shutil
from dataclasses import asdict

from sysfs_builder import CASES

from holmes_ext.cluster.nic import Nic
from holmes_ext.cluster.sysfs.node import read_nics
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError


def nic_of(values) -> Nic:
    """Return the NIC whose asdict() these values are."""
    return Table(values, "a NIC").into(Nic)


GARBAGE = [
    b"0\n",
    b"-1\n",
    b"up\n",
    b"99999999999999999999\n",
    b"0x\n",
    b"a=b\n",
    b"[]",
    b"../..\n",
    b"\0" * 4096,
]
NAMES = [
    "a b",
    "\udcff",
    "eth9",
    "x" * 100,
    "7",
    "lower_\n",
    "lower_bond0",
    "master",
    "device",
    "bonding",
]


def damage(path, original, kind, rng, paths) -> None:
    """Put something damaged at `path`, from where `original` was taken."""
    data = b""
    if os.path.isfile(original) and not os.path.islink(original):
        with open(original, "rb") as file:
            data = file.read()
    if kind == "truncate":
        data = data[: rng.randint(0, len(data))]
    elif kind == "garbage":
        data = rng.randbytes(rng.choice([1, 10, 5000]))
    elif kind == "byte" and data:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    elif kind == "text":
        data = rng.choice(GARBAGE)
    if kind in ("truncate", "garbage", "byte", "text"):
        with open(path, "wb") as file:
            file.write(data)
    elif kind == "directory":
        os.mkdir(path)
        os.mkdir(os.path.join(path, rng.choice(NAMES)))
    elif kind == "loop":
        os.symlink(os.path.basename(path), path)
    elif kind == "link":
        near = os.path.relpath(rng.choice(paths), os.path.dirname(path))
        os.symlink(rng.choice(["/", "..", "../..", "nothing", near, near]), path)
    elif kind == "fifo":
        os.mkfifo(path)  # "delete" leaves nothing


def remove(path) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


KINDS = ["truncate", "garbage", "byte", "text", "directory", "loop", "link", "fifo", "delete"]


def fuzz(base, rounds: int, seed: int) -> "tuple[int, int]":
    """Read the cases with one to three damages each, and count the rounds.

    Returns:
        (rounds read without an error, rounds refused)
    """
    rng = random.Random(seed)
    roots = [case(base / name) for name, case in CASES.items()]
    trees = [
        (root, sorted(os.path.join(d, n) for d, dirs, files in os.walk(root) for n in dirs + files))
        for root in roots
    ]
    saved, read, refused = base / "saved", 0, 0
    saved.mkdir()
    for _ in range(rounds):
        root, paths = rng.choice(trees)
        done = []
        try:
            for i in range(rng.randint(1, 3)):
                path = rng.choice(paths)
                if os.path.lexists(path) and os.path.realpath(
                    os.path.dirname(path)
                ) == os.path.dirname(path):
                    os.rename(path, saved / str(i))
                    done.append((path, saved / str(i)))
                    damage(path, saved / str(i), rng.choice(KINDS), rng, paths)
            for nic in read_nics(root):
                assert nic_of(json.loads(json.dumps(asdict(nic)))) == nic
            read += 1
        except HolmesError as error:
            assert str(root) in str(error) and "\n" not in str(error) and len(str(error)) < 600, (
                str(error)
            )
            refused += 1
        finally:
            for path, keep in reversed(done):
                remove(path)
                os.rename(keep, path)
    return read, refused


def test_damaged_trees_never_end_in_a_traceback(tmp_path):
    read, refused = fuzz(tmp_path, rounds=400, seed=1)
    assert read > 50 and refused > 50


JUNK = [
    b'"',
    b"[",
    b"]",
    b"{",
    b"}",
    b"=",
    b",",
    b"\n",
    b"-1",
    b"1e999",
    b"NaN",
    b"9" * 500,
    b"null",
    b"true",
    b"[[",
    b"'''",
    b"\x00",
    b"\xff\xfe",
    "é".encode(),
    b'"' + b"a" * 3000 + b'"',
    b"[" * 2000,
    b'{"a":' * 1500,
    b"0x10",
    b"2026-01-01",
    b"[0-99999999]",
    b'""',
    b"{}",
    b"[]",
]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return `data` after one to four cuts, insertions, exchanges of lines or single bytes."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice((0, 1, 3, 20, 200)))
        action = rng.randrange(6)
        if action == 0:
            data = data[:start] + data[stop:]
        elif action == 1:
            data = data[:start] + rng.choice(JUNK) + data[stop:]
        elif action == 2 and rng.random() < 0.3:
            data = data[:start]
        elif action == 3 and data:
            at = rng.randrange(len(data))
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif action == 4:
            lines = data.split(b"\n")
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
            data = b"\n".join(lines)
        else:
            data = data[:start] + data[start:stop] * 2 + data[stop:]
    return data
