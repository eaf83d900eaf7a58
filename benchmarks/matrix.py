"""Runs holmes with many versions of Python, torch and the frameworks.

matrix_rows.py lists combinations of versions. Each is a row of the tables in docs/versions.md. For each row,
this program creates a Python environment with these versions (in build/matrix/NAME), runs the parts below in
it, and deletes it unless --keep is given.

    make matrix           runs the parts that have no result yet in benchmarks/results/matrix.json. If it is
                          interrupted, the next call continues where it was
    make matrix NEXT=1    installs the newest version of everything, and prints the failures
    python benchmarks/matrix.py --json FILE --cases "torch 2.6.0,..." [--parts check,tests,lab]
                          runs these parts of these rows again

The parts:

    check    counts the features of holmes that are on and off with these versions (`holmes patches --check`).
             `holmes doctor` must name each feature that is off
    tests    runs the tests of the row, which compare training with and without holmes
    lab      measures training with and without holmes on emulated clusters (matrix_lab.py)
    nccl     runs tests over NCCL on emulated GPUs, if these support the row's torch. HOLMES_NCCL_SOURCE names
             the folder of NCCL's source

If a row names a version of torch, its environment has that torch: 5 GB with CUDA's libraries, 2 GB without
them (--slim). --pip "--index-url ..." chooses another index for it, and integration_tests/torch_on_cpu.py
adds missing parts to old versions on CPUs. The environment of any other row contains only the row's
packages, and imports torch and all else from the environment that runs this program.

If FILE is benchmarks/results/matrix.json, the tables in docs/versions*.md are updated from it.
Rows that use the source of Megatron-LM or Megatron-DeepSpeed need a clone of it (tests/checkouts.py says
where). A row with another version of Python needs pythonX.Y on PATH.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matrix_table
import matrix_torch
from harness import Row as Figure
from harness import (
    checkouts_folder,
    chosen_cases,
    find_checkout,
    finish,
    kept_rows,
    machine,
    parser,
    tell,
    versions,
    why_missing,
)
from matrix_rows import NEXT, ROWS, Row

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "matrix.json"
PARTS = ("check", "tests", "lab", "nccl")
#: Packages that the tests need, beside those of the row.
TOOLS = (
    "wrapt",
    "packaging",
    "rich",
    "psutil",
    "scipy",
    "matplotlib",
    "prometheus_client",
    "numpy",
    "setuptools",
    "wheel",
    "pybind11",
    "six",
    "regex",
    "pytest",
    "pytest-timeout",
    "pytest-rerunfailures",
)
#: pip's environment variables: DeepSpeed's C++ extensions are not compiled when DeepSpeed is installed.
PIP_ENVIRONMENT = {**os.environ, "DS_BUILD_OPS": "0"}


def missing(row: Row) -> str:
    """Return a sentence about the things that this machine lacks for a row, "" if it lacks nothing.

    A row is a combination of versions of Python, torch and frameworks. It may need another version of Python,
    or a clone of Megatron-LM or Megatron-DeepSpeed.
    """
    if row.python and not shutil.which(f"python{row.python}"):
        return f"there is no python{row.python} on PATH"
    needs_megatron_lm = bool(row.source)  # a version of Megatron-LM that is no package
    if needs_megatron_lm and find_checkout("Megatron-LM") is None:
        return why_missing("Megatron-LM")
    trains_megatron_deepspeed = row.name.startswith("Megatron-DeepSpeed ")
    if trains_megatron_deepspeed and find_checkout("Megatron-DeepSpeed") is None:
        return why_missing("Megatron-DeepSpeed")
    return ""


def environment_folder(row: Row) -> Path:
    """Return the folder of the Python environment for the row (a combination of package versions)."""
    return ROOT / "build" / "matrix" / re.sub(r"\W+", "-", row.name)


def torchtitan_folder(row: Row) -> Path:
    """Return the folder for torchtitan in the Python environment of the row (a combination of versions)."""
    return environment_folder(row) / "torchtitan"


def create_environment(row: Row, pip_arguments: list[str], slim: bool) -> Path:
    """Create the Python environment of the row, unless it exists, and return its interpreter.

    Args:
        row: A combination of versions of Python, torch and frameworks.
        pip_arguments: Further arguments of pip for the installation of torch, e.g. an index.
        slim: Whether torch is installed without CUDA's libraries.

    Returns:
        The path of the environment's `python`.
    """
    folder = environment_folder(row)
    python = folder / "bin" / "python"
    complete = folder / "made"  # a file that exists once everything is installed
    if complete.exists():
        return python
    tell(f"{row.name}: installing {' '.join((row.torch, *row.packages))}")
    if row.torch:  # e.g. "torch==2.4.1"
        _create_with_own_torch(row, python, pip_arguments, slim)
    else:
        # torch is imported from the environment that runs this program.
        _create_with_packages_only(row, python)
    complete.touch()
    return python


def _create_with_own_torch(row: Row, python: Path, pip_arguments: list[str], slim: bool) -> None:
    """Create a Python environment with the row's version of torch, its packages and those of the tests.

    Args:
        row: A combination of versions of torch and frameworks.
        python: The interpreter of the new environment.
        pip_arguments: Further arguments of pip for the installation of torch, e.g. an index.
        slim: Whether torch is installed without CUDA's libraries.
    """
    folder = environment_folder(row)
    base_python = f"python{row.python}" if row.python else sys.executable
    subprocess.run([base_python, "-m", "venv", "--clear", folder], check=True)
    install = [str(python), "-m", "pip", "install", "-q"]
    if slim:
        matrix_torch.install(python, row.torch, pip_arguments)  # stubs replace CUDA's libraries
    else:
        subprocess.run([*install, row.torch, *pip_arguments], check=True)
    # torch is named again, so that no package replaces it by another version.
    subprocess.run([*install, row.torch, *row.packages, *TOOLS], check=True, env=PIP_ENVIRONMENT)
    if row.torchtitan:
        # torchtitan's folder is not in the import path: only the tests of torchtitan import from it.
        into_folder = ["--no-deps", "--target", str(torchtitan_folder(row))]
        subprocess.run([*install, *into_folder, *row.torchtitan], check=True)
    extend_import_path(row, folder)
    # Fails if torch was not installed well.
    subprocess.run([python, "-c", "import torch"], check=True)


def _create_with_packages_only(row: Row, python: Path) -> None:
    """Create a Python environment with the packages of the row, on top of the calling environment.

    Only the packages of the row are installed. torch and everything else are imported from the
    environment that runs this program.

    Args:
        row: A combination of versions. This one names no version of torch.
        python: The interpreter of the new environment.
    """
    folder = environment_folder(row)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    # This comes before pip, which needs the setuptools of the calling environment.
    extend_import_path(row, folder)
    if row.packages:
        install = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--ignore-installed",
        ]
        subprocess.run([*install, *row.packages], check=True, env=PIP_ENVIRONMENT)


def extend_import_path(row: Row, folder: Path) -> None:
    """Let the Python environment in `folder` import holmes and the modules of its tests.

    A .pth file is written. Python adds the folders in it to its import path. A row is a combination of
    versions to test. The file lists:

        always                 the folder of holmes
        with `row.source`      the source of this Megatron-LM version, extracted into `folder`
        with `row.torch`       integration_tests; its torch_on_cpu.py mends old versions of torch
        without `row.torch`    all packages of the environment that runs this program
    """
    (site_packages,) = folder.glob("lib/python*/site-packages")
    lines = [str(ROOT)]  # of the .pth file; Python adds each folder to the import path
    if row.source:
        lines.insert(0, str(_extract_megatron_lm(row.source, folder)))
    if row.torch:
        lines += [
            str(ROOT / "integration_tests"),
            "import torch_on_cpu",
        ]  # Python runs a line with "import"
    else:
        # The folder of the calling environment's packages, printed by its own interpreter.
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        printed = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        )
        packages_folder = printed.stdout.strip()
        lines.append(f"import site; site.addsitedir({packages_folder!r})")
    # Python reads .pth files in the order of their names: this one before that of holmes.
    (site_packages / "000_matrix.pth").write_text("\n".join(lines) + "\n")
    shutil.copy(ROOT / "holmes_ext.pth", site_packages)


def _extract_megatron_lm(revision: str, folder: Path) -> Path:
    """Extract the files of one Megatron-LM version into a Python environment, and return their folder.

    Args:
        revision: A tag or branch of the clone of Megatron-LM.
        folder: The folder of the environment.
    """
    clone = checkouts_folder() / "Megatron-LM"
    extracted = folder / "checkouts" / "Megatron-LM"
    extracted.mkdir(parents=True, exist_ok=True)
    if revision == "main":
        revision = "HEAD"  # the commit of main that the clone has checked out
    archive = subprocess.run(
        ["git", "-C", clone, "archive", revision], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", extracted], input=archive.stdout, check=True)
    return extracted


def run(row: Row, python: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the environment of the row, and return its status, stdout and stderr.

    Args:
        row: The combination of versions that is installed in the environment.
        python: The interpreter.
        arguments: Its arguments, e.g. "-m", "pytest".
        env: Further environment variables.
    """
    row_env = {}
    if row.source:
        # The tests look for a checkout of Megatron-LM in this folder: it is the row's version.
        row_env["HOLMES_CHECKOUTS"] = str(environment_folder(row) / "checkouts")
    if row.torchtitan:
        row_env["HOLMES_TEST_TORCHTITAN"] = str(torchtitan_folder(row))
    environ = {  # a later entry replaces an earlier one
        # Tests marked as exhaustive are skipped: each commit would select others of these.
        "HOLMES_TEST_FULL": "0",
        **os.environ,
        **row_env,
        "DS_ACCELERATOR": "cpu",  # of DeepSpeed
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        **env,
    }
    return subprocess.run(
        [str(python), *arguments], cwd=ROOT, capture_output=True, text=True, env=environ
    )


def holmes(row: Row, python: Path, *words: str) -> dict[str, Any]:
    """Run a command of holmes with --check --json in a row's environment, and return the JSON.

    A row is a combination of versions. megatron-core needs a CUDA device when it is imported. On
    this machine, the module megatron_cpu_shim pretends that there is one. DeepSpeed and transformers are
    imported before that module, because it would mislead them.

    Args:
        row: The combination of versions.
        python: The interpreter of its environment.
        words: The command: "patches" or "doctor".
    """
    # Framework -> module that imports all functions that holmes patches.
    others = {"deepspeed": "deepspeed.runtime.pipe.engine", "transformers": "transformers.trainer"}
    first = "".join(f"import {module}; " for name, module in others.items() if name in row.features)
    shim = f"{first}import megatron_cpu_shim; " if "megatron-core" in row.features else ""
    path = "import sys; sys.path.append('examples/megatron_core/on_cpu'); "
    code = f"{path}{shim}from holmes_ext.cli.main import main; main()"
    done = run(row, python, "-c", code, *words, "--check", "--json")
    # Frameworks print text when they are imported. The JSON follows it.
    _, brace, rest = done.stdout.partition("{")
    assert brace, done.stderr
    return json.loads(brace + rest)


def check(row: Row, python: Path, record: dict[str, Any]) -> list[Figure]:
    """Count the features of holmes that are on and off with the versions of a row.

    `holmes patches` prints for each patch whether it can be applied to the installed framework. A
    feature is off if one of its patches cannot be applied. For such a feature, `holmes doctor`
    should name framework versions that support it. The third result counts the features that are
    off without such advice.

    Args:
        row: The combination of versions.
        python: The interpreter of its environment.
        record: Its key "off" is set: feature -> reason, for the features that are off.
    """
    patches = []  # those of the row's frameworks
    for patch in holmes(row, python, "patches")["patches"]:
        framework = re.split(r"[^\w-]", patch["versions"])[0]  # "versions" is such as "torch>=2.6"
        if framework in row.features:
            patches.append(patch)
    assert patches, row.name
    # "other version": the patch is for another version, and another patch has the feature here.
    off = {
        patch["feature"]: patch["reason"]
        for patch in patches
        if patch["state"] not in ("fits", "other version")
    }
    features_on = len({patch["feature"] for patch in patches}) - len(off)
    # A finding of the doctor: "what" names the problem (here the features that are off), and "mend"
    # is the remedy.
    findings = holmes(row, python, "doctor")["findings"]
    advice = " ".join(f"{finding['what']} {finding['mend']}" for finding in findings)
    record["off"] = off
    for feature, reason in off.items():
        tell(f"{row.name}: {feature} is off: {reason}")
    # The advice: "features that are off: FEATURE, ...: REASON VERSIONS have them: pip install ...".
    # A feature has got advice if its name comes before "have them: pip install".
    silent = [
        feature
        for feature in off
        if not re.search(rf"\b{feature}\b.* have them: pip install", advice)
    ]
    return [
        figure(row, "features on", features_on, "features"),
        figure(row, "features off", len(off), "features"),
        figure(row, "features off that doctor does not name", len(silent), "features", "<= 0"),
    ]


def tests(
    row: Row, python: Path, files: tuple[str, ...], on: str = "", **more: str
) -> list[Figure]:
    """Run the tests of a row (a combination of versions), and return the numbers that pass and fail.

    If no test passes, this counts as a failure.

    Args:
        row: The combination of versions.
        python: The interpreter of its environment.
        files: Files and options of pytest.
        on: Text for the name of the metric, such as " on NCCL".
        more: Further environment variables.
    """
    done = run(
        row,
        python,
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "--timeout",
        "900",
        "-p",
        "no:cacheprovider",
        *files,
        **more,
    )
    with tempfile.NamedTemporaryFile(
        mode="w", prefix="matrix-", suffix=".log", delete=False
    ) as log:
        log.write(done.stdout + done.stderr)
    last = (done.stdout.strip().splitlines() or [done.stderr[-500:]])[-1]
    tell(f"{row.name}: {last}{on} ({log.name})")
    count = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", last)}
    # `count`: numbers of the tests that passed, failed and ended with an error, from pytest's last line.
    bad = count.get("failed", 0) + count.get("error", 0)
    for line in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE):
        tell(f"{row.name}: {line}")
    return [
        figure(row, f"tests passed{on}", count.get("passed", 0), "tests"),
        figure(row, f"tests failed{on}", bad or int(not count.get("passed")), "tests", "<= 0"),
    ]


def lab(row: Row, python: Path, repetitions: int, cases: str) -> list[Figure]:
    """Measure the training jobs of a row on emulated clusters, with and without holmes.

    Returns the results: the ratio of the step times, and the largest difference of the losses.

    Args:
        row: The combination of versions.
        python: The interpreter of its environment.
        repetitions: Runs with holmes, and as many without it.
        cases: Names of jobs, separated by commas; "": all jobs of the row.
    """
    figures = []
    for case in (name for name in row.lab if not cases or name in cases.split(",")):
        done = run(row, python, "benchmarks/matrix_lab.py", case, "--repetitions", str(repetitions))
        if done.returncode:
            tell(f"{row.name}: {case}: {done.stderr[-3000:]}")
            figures.append(
                figure(row, f"{case}: ended with status", done.returncode, "status", "<= 0")
            )
            continue
        seconds = json.loads(done.stdout.strip().splitlines()[-1])
        ratios = [stock / ours for stock, ours in zip(seconds["stock"], seconds["holmes"])]
        ratio = sum(seconds["stock"]) / sum(seconds["holmes"])
        spread, target = (min(ratios), max(ratios)), ">= 2" if case == "FSDP2" else ">= 1.6"
        figures.append(
            Figure.of(
                row.name,
                f"{case}, holmes : stock",
                ratio,
                unit="x",
                spread=spread,
                emulated=True,
                target=target,
                busy=seconds["busy"],
            )
        )
        # holmes uses gradient buckets of another size than Megatron-DeepSpeed. So a ring of four
        # ranks adds the gradients in another order, with other rounding errors. The seven digits of the log
        # show them.
        limit = "<= 1e-5" if case == "Megatron-DeepSpeed" else "<= 1e-6"
        figures.append(
            figure(row, f"{case}, largest loss difference", seconds["difference"], "nats", limit)
        )
        tell(f"{row.name}: {case}: {ratio:.2f} x, losses differ by {seconds['difference']:.2g}")
    return figures


def figure(row: Row, metric: str, value: float, unit: str, target: str = "") -> Figure:
    """Return one result of a combination of versions, for the results file.

    Args:
        row: The combination of versions.
        metric: Name of the result, such as "tests passed".
        value: The value.
        unit: Unit of the value.
        target: A bound such as ">= 1"; "" if there is none.
    """
    return Figure.of(
        row.name, metric, value, unit=unit, spread=(value, value), emulated=False, target=target
    )


def next_versions(pip: list[str], slim: bool) -> int:
    """Test holmes with the newest releases of torch and all frameworks, and print the failures.

    The releases are installed into a new Python environment in build/matrix. A feature of holmes is
    off there if one of its patches does not fit the installed framework.

    Args:
        pip: Further arguments of pip for the installation of torch.
        slim: Whether torch is installed without CUDA's libraries.

    Returns:
        The exit status: 1 if a feature of holmes is off or a test fails, else 0.
    """
    # An earlier environment has the versions that were the newest then.
    shutil.rmtree(environment_folder(NEXT), ignore_errors=True)
    python = create_environment(NEXT, pip, slim)
    record: dict[str, Any] = {}
    listed = run(NEXT, python, "-m", "pip", "list", "--format", "freeze").stdout
    installed = [line for line in listed.split() if re.split("==", line)[0] in NEXT.features]
    tell(f"installed: {', '.join(installed)}")
    results = [*check(NEXT, python, record), *tests(NEXT, python, NEXT.tests)]
    features_off = record["off"]  # set by check()
    return 1 if features_off or any(result.met is False for result in results) else 0


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--parts", default="", metavar="NAME,...", help="check, tests, lab, nccl, or few"
    )
    arguments.add_argument(
        "--repetitions", type=int, default=3, help="runs of each variant in the lab"
    )
    arguments.add_argument("--lab", default="", metavar="SCENE,...", help="of a row's, these alone")
    arguments.add_argument(
        "--pip", default="", help="more arguments of pip, where it installs torch"
    )
    arguments.add_argument("--slim", action="store_true", help="torch without CUDA's libraries")
    arguments.add_argument(
        "--keep", action="store_true", help="leave the environments that were made"
    )
    arguments.add_argument(
        "--next", action="store_true", help="the newest of everything; nothing is written"
    )
    args = arguments.parse_args()
    if args.next:
        return next_versions(shlex.split(args.pip), args.slim)
    makers = {
        "check": check,
        "tests": lambda row, python, _: tests(row, python, row.tests),
        "nccl": lambda row, python, _: tests(
            row, python, row.nccl, " on NCCL", HOLMES_TEST_CARRIER="nccl", HOLMES_GPU_UNTRIED="1"
        ),
        "few": lambda row, python, _: tests(row, python, row.few),
        "lab": lambda row, python, _: lab(row, python, args.repetitions, args.lab),
    }
    parts = [part for part in args.parts.split(",") if part] or PARTS
    for part in parts:
        if part not in makers:
            tell(f"matrix.py: no part {part!r}; there are {', '.join(makers)}")
            return 2
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    about: dict[str, Any] = before.get("made", {})
    figures = kept_rows(args.json)
    must_repeat = bool(args.cases or args.parts)  # also parts that have a result
    for name in chosen_cases(args.cases, ROWS):
        row = ROWS[name]
        record = about.setdefault(name, {"parts": {}, "off": {}})
        parts_of_row = [part for part in parts if part == "check" or getattr(row, part)]
        open_parts = [part for part in parts_of_row if must_repeat or part not in record["parts"]]
        if not open_parts:
            tell(f"{name}: made")
            continue
        lack = missing(row)
        if lack:
            tell(f"{name}: left out: {lack}")
            continue
        existed = (environment_folder(row) / "made").exists()
        python = create_environment(row, shlex.split(args.pip), args.slim)
        for part in open_parts:
            begin = time.monotonic()
            added = makers[part](row, python, record)
            tell(f"{name}: {part} took {time.monotonic() - begin:.0f} s")
            new = {(fig.case, fig.metric) for fig in added}
            figures = [fig for fig in figures if (fig.case, fig.metric) not in new] + added
            present = {fig.metric.partition(",")[0] for fig in figures if fig.case == name}
            if part != "lab" or {*row.lab} <= present:
                record["parts"][part] = datetime.date.today().isoformat()
            if args.json:  # after each: a matrix takes long, and may be ended
                figures.sort(key=lambda fig: list(ROWS).index(fig.case))
                document = {
                    "machine": machine(),
                    "versions": versions(),
                    "made": about,
                    "rows": [fig.to_dict() for fig in figures],
                }
                args.json.write_text(json.dumps(document, indent=1) + "\n")
                if args.json.resolve() == RESULTS:
                    matrix_table.write_pages(figures, about)
        if not (existed or args.keep):
            shutil.rmtree(environment_folder(row))
    return finish(figures, None, "Versions")


if __name__ == "__main__":
    sys.exit(main())
