"""Writes requirements/locked/*.txt: versions of all that requirements/*.txt need, and hashes of their files.

    make locks               after a change of requirements/*.txt; versions that they do not name stay
    make locks UPGRADE=1     the newest versions of what they do not name

uv finds the versions on PyPI, once for all Pythons from 3.10 to 3.14. pip then installs from these files with
--require-hashes: a file that is not the one of the day of `make locks` is refused. The files of a package are
its wheels for CPython on Linux (x86_64 and aarch64). Its source is among them only where one of these
Pythons has no wheel, because pip runs code of a source when it installs it.

torch is not in the locks of what runs on it (dev, gpu), because its hash depends on the index that it comes
from: CPU builds lie elsewhere than on PyPI. PyPI's own build is in torch.txt, with CUDA's libraries.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

FOLDER = Path(__file__).resolve().parent
LOCKED = FOLDER / "locked"
MINORS = range(10, 15)  # Python 3.10 to 3.14
MACHINES = ("x86_64", "aarch64")
#: "name-1.0-cp311-cp311-manylinux_2_28_x86_64.whl": tags of the interpreter, its ABI and the platform.
WHEEL = re.compile(r"-(?P<python>[\w.]+)-(?P<abi>[\w.]+)-(?P<platform>[\w.]+)\.whl$")
HEADER = "# Written by `make locks` (requirements/lock.py) from requirements/{}.txt: do not edit.\n"


@dataclass(frozen=True)
class Lock:
    """One file of requirements/locked, made from the file of requirements/ with the same name."""

    name: str
    oldest_python: str = "3.10"
    versions_of: str = ""  # another lock, whose versions this one takes
    with_dependencies: bool = True
    with_torch: bool = False


LOCKS = (
    Lock("build", with_dependencies=False),
    Lock("dev"),
    Lock("no-deps", with_dependencies=False),
    Lock("docs", oldest_python="3.11.5", versions_of="dev"),
    Lock("gpu", versions_of="dev"),
    Lock("torch", versions_of="gpu", with_torch=True),
    Lock("torchtitan", with_dependencies=False),
)


def main() -> None:
    """Write the files of LOCKS, or only those whose names (such as "dev") are on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("uv", help="path of the program uv")
    parser.add_argument("names", nargs="*", help="which locks to write (all)")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args()
    LOCKED.mkdir(exist_ok=True)
    for lock in LOCKS:
        if options.names and lock.name not in options.names:
            continue
        packages = resolve(options.uv, lock, options.upgrade)
        lines = [HEADER.format(lock.name), *(requirement(package) for package in packages)]
        (LOCKED / f"{lock.name}.txt").write_text("".join(lines))
        # pip builds these from source when it installs them, with the tools of locked/build.txt.
        to_build = [package["name"] for package in packages if needs_source(package)]
        if to_build:
            names = ", ".join(to_build)
            print(f"{lock.name}.txt: no wheel for some Python, built by locked/build.txt: {names}")


def resolve(uv: str, lock: Lock, upgrade: bool) -> list[dict[str, Any]]:
    """Return the packages that a lock needs, each as in pylock.toml (PEP 751).

    Args:
        uv: Path of the program uv.
        lock: The lock.
        upgrade: Whether to take the newest versions of packages that requirements/*.txt do not name.
    """
    source = FOLDER / f"{lock.name}.txt"
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("" if upgrade else versions_to_keep(lock))
        excluded = Path(folder, "excluded.txt")
        excluded.write_text("" if lock.with_torch else "torch\n")
        output = Path(folder, "pylock.toml")
        command = [uv, "pip", "compile", "--quiet", "--universal", "--no-python-downloads"]
        command += ["--python-version", lock.oldest_python, "--output-file", str(output)]
        command += ["--constraints", str(constraints), "--excludes", str(excluded)]
        if lock.versions_of:
            command += ["--constraints", str(LOCKED / f"{lock.versions_of}.txt")]
        if not lock.with_dependencies:
            command.append("--no-deps")
        subprocess.run([*command, str(source)], check=True)
        packages: list[dict[str, Any]] = tomllib.loads(output.read_text())["packages"]
    return packages


def versions_to_keep(lock: Lock) -> str:
    """Return versions that a new lock takes over from the existing one: lines such as "numpy==2.0".

    They are of packages that requirements/NAME.txt does not name, but that its packages need. Without
    --upgrade, these packages stay at their versions. Those that the file names get its versions.

    Returns:
        The lines of requirements/locked/NAME.txt without hashes; "" if there is no such file.
    """
    path = LOCKED / f"{lock.name}.txt"
    if not path.exists():
        return ""
    named = {
        normalized(re.split(r"[=;\s]", line)[0])
        for line in (FOLDER / f"{lock.name}.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    lines = [line.removesuffix(" \\") for line in path.read_text().splitlines() if "==" in line]
    kept = [line for line in lines if normalized(line.partition("==")[0]) not in named]
    return "\n".join(kept)


def normalized(name: str) -> str:
    """Return the name of a package as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement(package: dict[str, Any]) -> str:
    """Return the lines of a requirements file for one package: its version and its hashes.

    Args:
        package: Entry of pylock.toml (PEP 751) with the keys name, version, and wheels or sdist; and
            with the key marker if the package is for some Pythons only.
    """
    line = f"{package['name']}=={package['version']}"
    if "marker" in package:
        line += f" ; {package['marker']}"
    hashes = sorted({file["hashes"]["sha256"] for file in files_to_accept(package)})
    return " \\\n".join([line, *(f"    --hash=sha256:{digest}" for digest in hashes)]) + "\n"


def files_to_accept(package: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the files of a package that pip may install; a lock has the hashes of these files.

    They are the wheels for CPython on Linux. If a supported Python has no wheel, the source archive
    is among them.

    Args:
        package: Entry of pylock.toml (PEP 751).

    Returns:
        Entries of pylock.toml for one file each, with the keys url and hashes.
    """
    wheels = [wheel for wheel in package.get("wheels", []) if supported(file_name(wheel))]
    return wheels + ([package["sdist"]] if needs_source(package) else [])


def needs_source(package: dict[str, Any]) -> bool:
    """Return whether pip must build a package from source on at least one Python that needs it.

    That is so if the package has a source archive, but lacks a wheel for at least one of the supported
    Pythons and machines (x86_64, aarch64). minors_of() returns the Pythons that need the package.

    Args:
        package: Entry of pylock.toml (PEP 751).
    """
    covered: set[tuple[int, str]] = set()
    for wheel in package.get("wheels", []):
        covered |= supported(file_name(wheel))
    needed = {(minor, machine) for minor in minors_of(package) for machine in MACHINES}
    return "sdist" in package and not needed <= covered


def minors_of(package: dict[str, Any]) -> set[int]:
    """Return the minor versions of Python 3 for which a package is, by its marker; all if in doubt."""
    marker = package.get("marker", "")
    if " or " in marker:
        return set(MINORS)
    minors = set(MINORS)
    for operator, minor in re.findall(r"python_full_version (<|>=) '3\.(\d+)'", marker):
        minors &= set(range(int(minor)) if operator == "<" else range(int(minor), max(MINORS) + 1))
    return minors


def file_name(file: dict[str, Any]) -> str:
    """Return the name of a file, which pylock.toml may leave to the URL."""
    return file.get("name") or file["url"].rpartition("/")[2]


def supported(wheel: str) -> set[tuple[int, str]]:
    """Return for which (minor version of Python 3, machine) a wheel can be installed on Linux with glibc."""
    tags = WHEEL.search(wheel)
    assert tags, wheel
    minors = set()
    for tag in tags["python"].split("."):
        implementation, version = tag[:2], tag[2:]
        if not version.startswith("3") or implementation not in ("py", "cp"):
            continue
        oldest = int(version[1:] or 0)
        # A wheel for CPython's own ABI fits one version; "py310" and the stable ABI fit newer ones, too.
        newer_too = implementation == "py" or tags["abi"] in ("abi3", "none")
        minors |= {m for m in MINORS if m == oldest or newer_too and m > oldest}
    if tags["abi"].endswith("t"):  # without the GIL
        return set()
    machines = set()
    for platform in tags["platform"].split("."):
        if platform == "any":
            machines |= set(MACHINES)
        elif platform.startswith(("manylinux", "linux")):
            machines |= {machine for machine in MACHINES if platform.endswith(machine)}
    return {(minor, machine) for minor in minors for machine in machines}


if __name__ == "__main__":
    main()
