"""Tests requirements/beside_torch.py, which installs packages and keeps the torch that is installed.

The packages are tiny wheels that the tests write, and pip uses no network.
"""

import subprocess
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
import venvs

SCRIPT = Path(__file__).resolve().parents[1] / "requirements" / "beside_torch.py"


def write_wheel(folder: Path, name: str, version: str, *requirements: str) -> Path:
    """Write a wheel without any code, and return its path."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requirements)
    with zipfile.ZipFile(wheel, "w") as file:
        info = f"{name}-{version}.dist-info"
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return wheel


class Environment:
    """A new environment with pip, in which torch 2.15.0 is installed, and a folder of wheels for pip."""

    def __init__(self, folder: Path):
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        for version in ("2.14.1", "2.15.0"):
            write_wheel(self.wheels, "torch", version)
        self.python = venvs.make(folder / "environment")
        (site_packages,) = (folder / "environment").glob("lib/*/site-packages")
        # A link, because installing pip takes seconds. pip is neither imported nor searched for: setuptools
        # could not be imported afterwards, in any test of this process (_distutils_hack).
        pip_folder = Path(distribution("pip").locate_file("pip"))
        (site_packages / "pip").symlink_to(pip_folder)
        self.environ = {
            **venvs.clean_environ(),
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        }
        self.run("-m", "pip", "install", "-q", "torch==2.15.0")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *arguments]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True)

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the script that is tested."""
        return self.run(str(SCRIPT), *arguments)

    def installed(self, name: str) -> str:
        code = f"from importlib import metadata; print(metadata.version({name!r}))"
        return self.run("-c", code).stdout.strip()


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path)


def test_packages_that_fit_are_installed(environment):
    write_wheel(environment.wheels, "framework", "1.0", "torch>=2.0")
    result = environment.install("framework")
    assert result.returncode == 0, result.stderr
    assert environment.installed("framework") == "1.0"
    assert environment.installed("torch") == "2.15.0"


def test_a_constraint_of_pip_s_configuration_does_not_replace_torch(environment, tmp_path):
    """With a constraint for an older torch in pip's configuration, pip alone would replace torch silently."""
    constraint = tmp_path / "constraints.txt"
    constraint.write_text("torch<=2.14.1\n")
    environment.environ["PIP_CONSTRAINT"] = str(constraint)
    write_wheel(environment.wheels, "framework", "1.0", "torch>=2.0")
    result = environment.install("framework")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("make: pip cannot install framework and keep torch 2.15.0: ")
    assert "torch<=2.14.1" in line
    assert environment.installed("torch") == "2.15.0"


def test_a_package_that_needs_another_torch_is_named(environment):
    write_wheel(environment.wheels, "framework", "1.0", "torch<2.15")
    result = environment.install("framework")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "framework 1.0 depends on torch<2.15" in line
    assert environment.installed("torch") == "2.15.0"


def test_a_package_that_does_not_exist_is_named(environment):
    result = environment.install("no-such-package")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "no-such-package" in line and "torch 2.15.0" in line


def test_an_environment_without_torch(environment):
    environment.run("-m", "pip", "uninstall", "-q", "-y", "torch")
    result = environment.install("framework")
    assert result.returncode == 1
    assert "has no torch" in result.stderr
