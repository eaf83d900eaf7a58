"""Which versions of the frameworks holmes was run with: for each, what fits, the engine's tests, and a run in the lab.

    make matrix                                      everything: an hour or more on 2 cores
    python benchmarks/matrix.py --json FILE [--scenes "deepspeed 0.16.9,..."] [--parts check,tests,lab]

Each version has an environment of its own under build/matrix (its package over the packages of this environment):

    check    `holmes patches --check`: no feature of the framework may be off
    tests    the framework's integration tests, its losses against stock's, overlap and checkpoints among them
    lab      stock against holmes on emulated clusters (2 + 2 nodes; Megatron-DeepSpeed: 4 + 4), compute emulated

Rows of other scenes and parts stay in FILE, so the matrix can be made piece by piece. The tables in README.md and
docs/versions.md are written from FILE. Megatron-DeepSpeed needs MEGATRON_DEEPSPEED_DIR, a checkout.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import Row, chosen, finish, kept, machine, parser, tell, versions

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "versions.md")
PARTS = ("check", "tests", "lab")
#: Part "few": what .ci/run has of an old version of a framework.
FEW = {"deepspeed": ("integration_tests/deepspeed/test_overlap.py", "integration_tests/deepspeed/test_resume.py"),
       "megatron-core": ("integration_tests/megatron/test_core.py", "-k",
                         "every_split or leave_ethernet or built_once")}
CHECKOUT = "MEGATRON_DEEPSPEED_DIR"
#: Micro-batches of 2 + 2 in the lab: of 8 even a network that is fast everywhere makes a step 1.59 x as fast.
BATCH = "4"


@dataclass(frozen=True)
class Pair:
    """A framework's version. packages: what pip installs for it; tests: files and options of pytest."""

    framework: str
    version: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.framework} {self.version}"

    @property
    def distribution(self) -> str:
        """Whose features must be on."""
        return "megatron-core" if self.framework == "megatron-core" else "deepspeed"


DEEPSPEED_TESTS = tuple(f"integration_tests/deepspeed/test_{name}.py"
                        for name in ("overlap", "zero", "partition", "resume", "two_clusters", "joined"))
MEGATRON_TESTS = ("integration_tests/megatron/test_core.py",)
PRETRAIN_TESTS = ("integration_tests/megatron_deepspeed", "-k", "same_losses or overlapped or pass_between")
DEEPSPEED = ("0.14.5", "0.15.4", "0.16.0", "0.16.9", "0.17.0", "0.17.6", "0.18.0", "0.18.9", "0.19.0", "0.19.8")
PAIRS = {pair.name: pair for pair in (
    *(Pair("deepspeed", version, (f"deepspeed=={version}",), DEEPSPEED_TESTS)
      for version in DEEPSPEED),
    *(Pair("megatron-core", version, (f"megatron-core=={version}",), MEGATRON_TESTS)
      for version in ("0.11.0", "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1")),
    # with its dependency torchvision (any will do: a GPT does not use it), and without, which holmes serves
    Pair("Megatron-DeepSpeed with deepspeed", "0.18.9", ("deepspeed==0.18.9", "torchvision==0.16.0"), PRETRAIN_TESTS),
    Pair("Megatron-DeepSpeed with deepspeed", "0.19.8", ("deepspeed==0.19.8",), PRETRAIN_TESTS),
)}


def environment(pair: Pair) -> Path:
    """The pair's Python, made where it is not there: its packages first, then those of this environment."""
    folder = ROOT / "build" / "matrix" / re.sub(r"\W+", "-", pair.name)
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        tell(f"{pair.name}: installing {' '.join(pair.packages)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        here = subprocess.run([sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                              check=True, capture_output=True, text=True).stdout.strip()
        (site / "parent.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps",
                        "--no-build-isolation", "--ignore-installed", *pair.packages],
                       check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
        (folder / "made").touch()
    return python


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{python.parent}:{os.environ['PATH']}"
    return subprocess.run([str(python), *arguments], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu"})


def check(pair: Pair, python: Path) -> list[Row]:
    """Features of the framework that are off."""
    shim = "import megatron_cpu_shim\n" if pair.distribution == "megatron-core" else ""
    code = f"import sys; sys.path.insert(0, 'integration_tests')\n{shim}from holmes_ext.cli.main import main; main()"
    done = run(python, "-c", code, "patches", "--check", "--json")
    fits = [fit for fit in json.loads(done.stdout)["patches"] if re.match(rf"{pair.distribution}\W", fit["versions"])]
    assert fits and {fit["installed"] for fit in fits} == {pair.version}, (pair.name, fits[:1])
    off = {fit["feature"]: fit["reason"] for fit in fits if fit["state"] not in ("fits", "other version")}
    for feature, reason in off.items():
        tell(f"{pair.name}: {feature} is off: {reason}")
    return [row(pair, "features on", len({fit["feature"] for fit in fits}) - len(off), "features"),
            row(pair, "features off", len(off), "features", "<= 0")]


def tests(pair: Pair, python: Path, files: tuple[str, ...] = ()) -> list[Row]:
    with tempfile.NamedTemporaryFile(mode="w", prefix=f"matrix-{pair.version}-", suffix=".log", delete=False) as log:
        done = run(python, "-m", "pytest", "-q", "--timeout", "900", *(files or pair.tests))
        log.write(done.stdout + done.stderr)
    last = done.stdout.strip().splitlines()[-1]
    tell(f"{pair.name}: {last} ({log.name})")
    count = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", last)}
    bad = count.get("failed", 0) + count.get("error", 0)
    if bad or not count.get("passed"):
        tell(done.stdout[-6000:])
    return [row(pair, "tests passed", count.get("passed", 0), "tests"), row(pair, "tests failed", bad, "tests", "<= 0")]


def lab(pair: Pair, python: Path, repetitions: int) -> list[Row]:
    """In the pair's environment: measure() below."""
    done = run(python, __file__, "--measure", pair.framework, "--repetitions", str(repetitions))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    ratios = [stock / holmes for stock, holmes in zip(found["stock"], found["holmes"])]
    where = "4+4" if "Megatron-DeepSpeed" in pair.framework else "2+2"
    ratio = sum(found["stock"]) / sum(found["holmes"])
    # Buckets of another size let a ring of four add in another order, and the log has seven digits.
    target = "<= 1e-5" if where == "4+4" else "<= 1e-6"
    return [Row.of(pair.name, f"{where}, holmes : stock", ratio, "x", (min(ratios), max(ratios)), True, ">= 1.6"),
            row(pair, f"{where}, largest loss difference", found["difference"], "nats", target)]


def measure(framework: str, repetitions: int, steps: int = 12) -> dict[str, Any]:
    """Medians of each run's steps in seconds, stock's and holmes's, and the greatest difference of their losses."""
    import megatron_deepspeed
    import megatron_two_clusters
    import two_clusters

    from holmes_ext.cluster.spec import load_spec
    from holmes_ext.lab import Lab, interleave
    from holmes_ext.lab.compare import Series, Variant, compare, max_loss_difference
    from holmes_ext.lab.samples import examples

    four = "Megatron-DeepSpeed" in framework
    file = examples() / "clusters" / ("two_clusters_8.toml" if four else "two_clusters_4.toml")
    spec = load_spec(file)
    sizes = () if four else ("--holmes-sizes", "pipeline=2")
    variants = [Variant("stock", spec, interleave(spec)),
                Variant("holmes", spec, interleave(spec), ("--holmes", "--holmes-cluster", str(file), *sizes))]
    common = {"repetitions": repetitions, "steps": steps, "skip": 3}
    if four:
        with tempfile.TemporaryDirectory() as folder, Lab(spec, realtime=True) as emulated:
            series = {variant.name: Series(variant.name) for variant in variants}
            checkout = megatron_deepspeed.prepared(Path(os.environ[CHECKOUT]), Path(folder))
            command = megatron_deepspeed.command_of(checkout, 4, len(variants[0].order), steps)
            for _ in range(repetitions):
                for variant in variants:
                    megatron_deepspeed.measure(emulated, variant, checkout, command, 2.3e9, steps, series[variant.name])
    elif framework == "megatron-core":
        shim = str(ROOT / "integration_tests")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [shim, os.environ.get("PYTHONPATH", "")]))
        train = str(examples() / "megatron_core" / "train.py")
        script = [train, *megatron_two_clusters.MODEL, "--micro-batches", BATCH]
        series = compare(variants, script, preload=megatron_two_clusters.PRELOAD, **common,
                         accelerator={"flops": 5e9, "classes": ["TransformerLayer"], "layout": "sbh"})
    else:
        scene = replace(two_clusters.SCENES[0], micro_batches=int(BATCH))
        series = compare(variants, two_clusters.script(scene), **common,
                         accelerator={"flops": scene.flops, "classes": ["Block"]})
    stock, holmes = series["stock"], series["holmes"]
    return {"stock": stock.medians, "holmes": holmes.medians, "difference": max_loss_difference(stock, holmes)}


def row(pair: Pair, metric: str, value: float, unit: str, target: str = "") -> Row:
    return Row.of(pair.name, metric, value, unit, (value, value), False, target)


def table(rows: list[Row], dates: dict[str, str]) -> str:
    """Markdown, a line for each pair."""
    found: dict[str, dict[str, Row]] = {}
    for one in rows:
        found.setdefault(one.scene, {})[one.metric.partition(", ")[2] or one.metric] = one

    def cell(name: str, metric: str, text: str = "{:g}") -> str:
        return text.format(found[name][metric].value) if metric in found[name] else "-"

    lines = ["| | features on | off | tests passed | failed | in the lab, holmes : stock | loss difference | date |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for name in PAIRS:
        if name in found:
            metrics = [("features on", "{:g}"), ("features off", "{:g}"), ("tests passed", "{:g}"),
                       ("tests failed", "{:g}"), ("holmes : stock", "{:.2f} x"), ("largest loss difference", "{:.1g}")]
            lines.append(f"| {name} | {' | '.join(cell(name, *each) for each in metrics)} | {dates[name]} |")
    return "\n".join(lines)


def write_pages(text: str) -> None:
    """Between each page's markers."""
    for path in PAGES:
        page, begin, end = path.read_text(), "<!-- matrix -->\n", "<!-- /matrix -->"
        assert begin in page and end in page, path
        path.write_text(page[:page.index(begin)] + begin + text + "\n" + page[page.index(end):])


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--parts", default=",".join(PARTS), metavar="NAME,...", help="check, tests, lab, or few")
    arguments.add_argument("--repetitions", type=int, default=3, help="runs of each variant in the lab")
    arguments.add_argument("--measure", help="in a pair's environment: its framework; prints JSON")
    args = arguments.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.repetitions)))
        return 0
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"dates": {}}
    rows = kept(args.json)
    dates = before["dates"]
    makers = {"check": check, "tests": tests, "lab": lambda pair, python: lab(pair, python, args.repetitions),
              "few": lambda pair, python: tests(pair, python, FEW[pair.distribution])}
    parts = args.parts.split(",")
    if unknown := [part for part in parts if part not in makers]:
        tell(f"matrix.py: no part {unknown[0]!r}; there are {', '.join(makers)}")
        return 2
    for name in chosen(args.scenes, PAIRS):
        pair = PAIRS[name]
        if "Megatron-DeepSpeed" in name and not os.environ.get(CHECKOUT):
            tell(f"{name}: skipped; set {CHECKOUT} to a checkout")
            continue
        python = environment(pair)
        for part in parts:
            begin = time.monotonic()
            made = makers[part](pair, python)
            tell(f"{name}: {part} took {time.monotonic() - begin:.0f} s")
            again = {(one.scene, one.metric) for one in made}
            rows = [one for one in rows if (one.scene, one.metric) not in again] + made
        dates[name] = datetime.date.today().isoformat()
        if args.json:  # after each: a matrix takes long, and may be ended
            rows.sort(key=lambda one: list(PAIRS).index(one.scene))
            document = {"machine": machine(), "versions": versions(), "dates": dates,
                        "rows": [one.to_dict() for one in rows]}
            args.json.write_text(json.dumps(document, indent=1) + "\n")
            write_pages(table(rows, dates))
    return finish(rows, None, "Versions")


if __name__ == "__main__":
    sys.exit(main())
