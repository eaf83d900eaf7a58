"""What a wheel and an editable install put into an environment, and what the bare install asks for."""

import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PathDistribution

import pytest
import venvs
from jobs import full
from packaging.requirements import Requirement

from holmes_ext import __version__

CLUSTER = str(venvs.ROOT / "examples" / "clusters" / "two_clusters_4.toml")


@pytest.fixture(scope="module")
def built():
    return venvs.built()


@pytest.fixture(scope="module")
def metadata(built):
    return PathDistribution(zipfile.Path(built.wheel, f"holmes_ext-{__version__}.dist-info/"))


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, built, tmp_path_factory):
    """Make an environment with both distributions."""
    wheels = (built.wheel, built.lab_wheel)
    if request.param == "editable":
        wheels = (built.editable, built.lab_editable)
    return venvs.make(tmp_path_factory.mktemp(request.param) / "venv", *wheels, dependencies=True)


def files_of(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info/" not in name}


def files_in(folder, base):
    return {str(path.relative_to(base)) for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_holds_every_source_file_and_the_pth(built):
    sources = built.sources
    expected = files_in(sources / "holmes_ext", sources)
    for room in ("patches", "examples"):
        expected |= {f"holmes_ext/{name}" for name in files_in(sources / room, sources)}
    names = files_of(built.wheel)
    assert names == expected | {"holmes_ext.pth"}
    assert built.wheel.name.endswith("-py3-none-any.whl")
    # The emulated CUDA runtime is not placed next to a production torch.
    assert not {name for name in names if name.endswith((".cc", ".cpp", ".cu", ".h", ".hpp"))}


def test_the_wheel_of_the_lab_holds_every_source_file(built):
    lab = built.sources / "lab"
    names = files_of(built.lab_wheel)
    assert names == files_in(lab / "holmes_lab", lab)
    assert any(name.endswith(".cc") for name in names)
    assert built.lab_wheel.name.endswith("-py3-none-any.whl")


def test_the_pth_is_one_line(built):
    for wheel in (built.wheel, built.editable):
        text = zipfile.ZipFile(wheel).read("holmes_ext.pth").decode()
        assert text.startswith("import ") and text.count("\n") == 1 and text.endswith("\n")


def test_what_is_released_can_be_built_and_uploaded(built, tmp_path):
    """Both release files can be built and pass `twine check`.

    `python -m build` makes an sdist, and the wheel from it; `twine check` reads the metadata as
    PyPI does.
    """
    sources = venvs.copy_sources(tmp_path / "src")
    options = {"cwd": tmp_path, "env": venvs.clean_environ(), "capture_output": True, "text": True}
    made = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", sources], **options
    )
    assert made.returncode == 0, made.stdout + made.stderr
    files = sorted((tmp_path / "dist").iterdir())
    assert [file.name for file in files] == [
        f"holmes_ext-{__version__}-py3-none-any.whl",
        f"holmes_ext-{__version__}.tar.gz",
    ]
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], **options
    )
    assert checked.returncode == 0 and checked.stdout.count("PASSED") == 2, (
        checked.stdout + checked.stderr
    )
    assert zipfile.ZipFile(files[0]).namelist() == zipfile.ZipFile(built.wheel).namelist()
    with tarfile.open(files[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    more = {name for name in names if not (sources / name).exists() and ".egg-info" not in name}
    assert more == {"PKG-INFO", "setup.cfg"}, "what setuptools writes"
    assert {"holmes_ext", "patches", "examples", "holmes_ext.pth", "LICENSE"} <= {
        name.split("/")[0] for name in names
    }


def test_metadata(metadata):
    about = metadata.metadata
    assert (about["License-Expression"], about["License-File"]) == ("Apache-2.0", "LICENSE")
    assert about["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in about.get_all("Classifier") and about.get_all("Project-URL")
    assert (
        about["Description-Content-Type"] == "text/markdown"
        and "holmes" in metadata.metadata.get_payload()
    )


def test_installed(python, built, tmp_path):
    rooms = (
        "cli.main",
        "_pth",
        "cluster",
        "plan",
        "runtime",
        "planner",
        "adapt",
        "join",
        "weights",
        "patches",
    )
    imported = ", ".join(["holmes_lab", *(f"holmes_ext.{name}" for name in rooms)])
    result = venvs.run(
        python, "-c", f"import {imported}; print(holmes_ext.patches.__file__)", cwd=tmp_path
    )
    assert result.returncode == 0 and result.stdout.strip().endswith("patches/__init__.py"), (
        result.stderr
    )
    site_packages = next(python.parent.parent.glob("lib/*/site-packages"))
    assert (site_packages / "holmes_ext.pth").read_text() == (
        built.sources / "holmes_ext.pth"
    ).read_text()
    result = venvs.run(python.parent / "holmes", "--version", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"holmes_ext {__version__}\n")
    result = venvs.run(python.parent / "holmes", "examples", cwd=tmp_path)
    assert result.returncode == 0 and "deepspeed_pipeline" in result.stdout, result.stderr
    cluster = "examples/clusters/two_clusters_4.toml"
    result = venvs.run(
        python.parent / "holmes", "plan", "--cluster", cluster, "--pipeline", "2", cwd=tmp_path
    )
    assert result.returncode == 0 and "predicted step" in result.stdout, result.stderr


def test_without_the_flag_nothing_of_holmes_is_imported(python, tmp_path):
    def imported(*arguments, **environ):
        result = venvs.run(
            python, "-X", "importtime", "-c", "pass", *arguments, cwd=tmp_path, **environ
        )
        return re.findall(r"\| +((?:holmes_ext|torch)[\w.]*)$", result.stderr, re.MULTILINE)

    assert imported() == imported("--unrelated") == imported(HOLMES="0") == []
    assert (
        imported(HOLMES="1")
        == imported("--holmes", HOLMES="0")
        == ["holmes_ext", "holmes_ext._pth"]
    )


def test_the_bare_install_asks_for_small_libraries_only(metadata):
    bare = [Requirement(line) for line in metadata.requires if "extra ==" not in line]
    assert {requirement.name for requirement in bare} == {"wrapt", "packaging", "rich", "tomli"}
    (marker,) = [str(requirement.marker) for requirement in bare if requirement.name == "tomli"]
    assert marker == 'python_version < "3.11"'
    assert not any(
        "==" in str(requirement.specifier) or "<" in str(requirement.specifier)
        for requirement in bare
    )


def test_extras(metadata):
    extras = {"deepspeed", "megatron", "plot", "metrics", "experts", "join", "docs", "test"}
    assert set(metadata.metadata.get_all("Provides-Extra")) == extras
    requirements = {str(Requirement(line)) for line in metadata.requires}
    assert {
        'deepspeed>=0.14.4; extra == "deepspeed"',
        'megatron-core>=0.11; extra == "megatron"',
    } <= requirements
    assert not any(Requirement(line).name == "torch" for line in metadata.requires)


#: Extra -> what it brings, as it is imported.
EXTRAS = {
    "deepspeed": "deepspeed",
    "megatron": "megatron.core",
    "plot": "matplotlib",
    "metrics": "prometheus_client",
    "experts": "scipy",
    "join": "cryptography",
    "docs": "mkdocs, material",
    "test": "pytest, scipy",
}


@full
@pytest.mark.parametrize("extra", ["", *EXTRAS])
@pytest.mark.parametrize("release", ["wheel", "sdist"])
def test_a_release_installs_in_a_clean_environment(built, release, extra, tmp_path):
    """Users install from an index: pip install FILE[extra], and the commands work.

    The sdist is installed once, without extras.
    """
    if release == "sdist" and extra:
        pytest.skip("what differs is the build, not the extras")
    file = built.wheel
    if release == "sdist":
        made = [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--sdist",
            "--outdir",
            str(tmp_path),
            str(built.sources),
        ]
        subprocess.run(made, check=True, capture_output=True, env=venvs.clean_environ())
        (file,) = tmp_path.glob("*.tar.gz")
    python = venvs.make(tmp_path / "venv")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-input"]
    # or pip would take the CUDA build
    torch = ["torch==2.13.0"] if extra in ("deepspeed", "megatron") else []
    subprocess.run(
        [*pip, f"{file}[{extra}]" if extra else str(file), *torch],
        check=True,
        env=venvs.clean_environ(),
    )
    imported = venvs.run(python, "-c", f"import {EXTRAS.get(extra, 'holmes_ext')}", cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    for words in (
        ["--version"],
        ["discover"],
        ["patches"],
        ["plan", "--cluster", CLUSTER, "--pipeline", "2"],
    ):
        done = venvs.run(python.parent / "holmes", *words, cwd=tmp_path)
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, (words, done.stderr)


def test_the_version_stands_in_one_place():
    """And CHANGELOG.md says what is in it."""
    said = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])")
    folders = (
        *venvs.ROOT.glob("*.toml"),
        *venvs.ROOT.glob("*.py"),
        *(venvs.ROOT / "holmes_ext").rglob("*.py"),
    )
    assert [path.name for path in folders if said.search(path.read_text())] == ["__init__.py"]
    newest = re.search(r"^## (\S+)", (venvs.ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == __version__


def test_every_requirement_has_one_pin():
    pins = {}
    for file in sorted((venvs.ROOT / "requirements").glob("*.txt")):
        for line in file.read_text().splitlines():
            if line and not line.startswith(("#", "-")):
                requirement = Requirement(line)
                assert re.fullmatch(r"==[\w.+]+", str(requirement.specifier)), (
                    f"{file.name}: {line}"
                )
                pins.setdefault((requirement.name, str(requirement.marker)), set()).add(
                    str(requirement.specifier)
                )
    assert pins and all(len(versions) == 1 for versions in pins.values())
