"""Tests requirements/locked: the versions and hashes of all that pip installs, on every supported Python.

`make locks` writes these files from requirements/*.txt. Without the tests, a change of requirements/*.txt
would have no effect until somebody runs it.
"""

import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
LOCKED = FOLDER / "locked"
LOCKS = sorted(path.stem for path in LOCKED.glob("*.txt"))
PYTHONS = ("3.10.12", "3.11.7", "3.12.3", "3.13.1", "3.14.0")
#: A line of a lock with its hashes: "name==1.0 ; MARKER \\n    --hash=sha256:...".
ENTRY = re.compile(r"^(\S+==[^\n\\]+?)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def environment(python: str) -> dict[str, str]:
    """Return what markers see on Linux with a version of Python."""
    return {
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "extra": "",
    }


def requirements_in(lines: list[str], python: str) -> dict[str, str]:
    """Return the version of each package that some lines require on a version of Python."""
    versions = {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment(python)):
            name = canonicalize_name(requirement.name)
            assert name not in versions, f"{name} twice on Python {python}"
            versions[name] = str(requirement.specifier)
    return versions


def locked(name: str, python: str) -> dict[str, str]:
    """Return the version of each package in a lock."""
    lines = [line for line, _ in ENTRY.findall((LOCKED / f"{name}.txt").read_text())]
    return requirements_in(lines, python)


def source(name: str, python: str) -> dict[str, str]:
    """Return the version of each package in the file from which a lock was made."""
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    return requirements_in([line for line in lines if line and line[0] != "#"], python)


def test_every_file_of_requirements_has_a_lock():
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == LOCKS


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_a_version_and_hashes_of_each_package_and_nothing_else(name):
    text = (LOCKED / f"{name}.txt").read_text()
    header, _, packages = text.partition("\n")
    assert header.startswith("# Written by `make locks`")
    rest = ENTRY.sub("", packages)
    assert rest.strip() == ""


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_the_versions_of_its_source(name, python):
    if name == "docs" and python.startswith("3.10"):
        pytest.skip("mkdocs-material needs Python 3.11")
    versions = locked(name, python)
    missing = {
        package: version
        for package, version in source(name, python).items()
        if versions.get(package) != version
    }
    assert missing == {}, "run `make locks`"


@pytest.mark.parametrize("python", PYTHONS)
def test_locks_that_meet_in_one_environment_have_the_same_versions(python):
    for together in (("build", "dev", "no-deps", "docs"), ("build", "gpu", "torch")):
        seen = {}
        for name in together:
            for package, version in locked(name, python).items():
                assert seen.setdefault(package, version) == version, (package, name)


def test_a_lock_names_all_that_its_packages_need():
    """A lock is installed with --no-deps, so all requirements of its packages must be in it.

    Only packages that are installed here can be checked.
    """
    versions = locked("dev", "{}.{}.{}".format(*sys.version_info[:3]))
    lacking = []
    for package in versions:
        for line in installed_requirements(package):
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            name = canonicalize_name(requirement.name)
            if applies and name != "torch" and name not in versions:
                lacking.append(f"{package} needs {line}")
    assert lacking == []


def installed_requirements(package: str) -> list[str]:
    """Return what an installed package requires; [] if it is not installed."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def test_torch_is_in_no_lock_but_its_own():
    """Its hash depends on the index that a build for the CPU comes from."""
    having = [name for name in LOCKS if "torch" in locked(name, "3.11.7")]
    assert having == ["torch"]


def test_make_installs_everything_but_torch_by_hashes():
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (flags,) = re.findall(r"^LOCKED := (.*)$", text, re.MULTILINE)
    assert "--require-hashes" in flags.split()
    for line in text.splitlines():
        for file in re.findall(r"-r requirements/(\S+)", line):
            assert "$(LOCKED)" in line or file == "torch.txt", line
    # Without --no-build-isolation, pip would bring a newer setuptools for the build of holmes_ext.
    editable = [line for line in text.splitlines() if re.search(r"_?PIP\).* -e \.", line)]
    assert editable and all("--no-build-isolation" in line for line in editable)


@pytest.fixture(scope="module")
def lock():
    """Return requirements/lock.py as a module."""
    pytest.importorskip("tomllib", reason="requirements/lock.py needs Python 3.11")
    spec = importlib.util.spec_from_file_location("lock", FOLDER / "lock.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["lock"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class TestFilesThatALockAccepts:
    @pytest.mark.parametrize(
        "wheel, minors",
        [
            ("a-1-py3-none-any.whl", [10, 11, 12, 13, 14]),
            ("a-1-py2.py3-none-any.whl", [10, 11, 12, 13, 14]),
            ("a-1-py312-none-any.whl", [12, 13, 14]),
            ("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", [12]),
            ("a-1-cp312-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", [12, 13, 14]),
            ("a-1-cp39-abi3-manylinux_2_17_x86_64.whl", [10, 11, 12, 13, 14]),
            ("a-1-cp314-cp314t-manylinux_2_28_x86_64.whl", []),
            ("a-1-cp39-cp39-manylinux_2_28_x86_64.whl", []),
            ("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", []),
            ("a-1-cp312-cp312-win_amd64.whl", []),
            ("a-1-cp312-cp312-macosx_11_0_arm64.whl", []),
        ],
    )
    def test_pythons_of_a_wheel(self, lock, wheel, minors):
        found = {minor for minor, machine in lock.supported(wheel) if machine == "x86_64"}
        assert sorted(found) == minors

    def test_the_source_counts_only_where_a_python_has_no_wheel(self, lock):
        sdist = {"name": "a-1.tar.gz"}
        for_all = {"name": "a-1-py3-none-any.whl"}
        for_one = {"name": "a-1-cp312-cp312-manylinux_2_28_x86_64.whl"}
        accepted = lock.files_to_accept
        assert accepted({"wheels": [for_all], "sdist": sdist}) == [for_all]
        assert accepted({"wheels": [for_one], "sdist": sdist}) == [for_one, sdist]
        assert accepted({"sdist": sdist}) == [sdist]

    def test_a_python_that_a_package_is_not_for_needs_no_wheel(self, lock):
        wheels = [
            {"name": f"a-1-cp310-cp310-manylinux_2_17_{machine}.whl"} for machine in lock.MACHINES
        ]
        package = {"wheels": wheels, "sdist": {"name": "a-1.tar.gz"}}
        assert lock.needs_source(package)
        assert not lock.needs_source({**package, "marker": "python_full_version < '3.11'"})
        assert lock.needs_source({**package, "marker": "python_full_version >= '3.11'"})
