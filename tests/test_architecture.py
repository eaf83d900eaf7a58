"""Tests that the source code follows the rules in CONTRIBUTING.md, such as which package may import which.

The tests parse the source with `ast` and import nothing, except those that count the modules that are loaded.
Packages of the core may import those to their left:

    ground -> cluster -> plan -> runtime -> patches -> job -> entry

The packages doctor, report and cli stand beside this chain and after it. Extensions (planner, adapt, join,
and the lab, which is a distribution of its own) import the core, and the core imports none of them.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.each_landing

#: Top-level modules of holmes_ext that are no room of their own.
TOP = {
    **dict.fromkeys(
        (
            "errors",
            "words",
            "units",
            "checks",
            "files",
            "document",
            "options",
            "extensions",
            "samples",
        ),
        "ground",
    ),
    **dict.fromkeys(("job", "banner"), "job"),
    **dict.fromkeys(("__init__", "__main__", "_pth"), "entry"),
}
#: Room of the core -> the rooms that it may import, besides itself and the ground.
MAY_IMPORT = {
    "ground": (),
    "cluster": (),
    "plan": ("cluster",),
    "runtime": ("cluster", "plan"),
    "patches": ("cluster", "plan", "runtime"),
    "job": ("cluster", "plan", "runtime", "patches"),
    # how a program reaches job; public names are loaded when they are used
    "entry": ("job", "runtime", "patches"),
    # judges what a job would do from files, flags and patches: runs no job
    "doctor": ("cluster", "plan", "patches"),
    "report": ("cluster", "plan"),  # figures of what a job left: works where no framework is
    "cli": ("cluster", "plan", "runtime", "patches", "job", "entry", "doctor", "report"),
}
#: Extension -> the other extensions whose public interface (PUBLIC) it may use.
EXTENSIONS = {
    "planner": (),
    "adapt": (),
    "join": ("planner",),
    "weights": ("join",),
    "lab": ("planner", "join"),
}
#: What other extensions may import of an extension.
PUBLIC = {
    "planner": {
        "holmes_ext.planner.html.chart",
        "holmes_ext.planner.html.page",
        "holmes_ext.planner.html.pictures",
        "holmes_ext.planner.search.changed",
        "holmes_ext.planner.search.result",
        "holmes_ext.planner.search.search",
        "holmes_ext.planner.simulate.events",
    },
    "join": {
        "holmes_ext.join.pictures",  # of a joined run, for `holmes demo --joined`
        # identity, authenticated connections and services of a run
        "holmes_ext.join.address",
        "holmes_ext.join.coordinator.client",
        "holmes_ext.join.coordinator.server",
        "holmes_ext.join.identity.job_certificate",
        "holmes_ext.join.identity.run_folder",
        "holmes_ext.join.sockets.channel",
        "holmes_ext.join.sockets.handshake",
    },
}
#: Modules of plan/ that are values: what the runtime may import. All others decide something.
VALUES = {
    f"holmes_ext.plan.{name}"
    for name in (
        "across",
        "buckets",
        "engine",
        "schedule",
        "plan",
        "sizes",
        "traffic",
        "workload",
        "profile",
    )
}
#: The runtime's imports of plan/ that are not values: file -> (module, why).
NOT_VALUES = {
    "holmes_ext/runtime/measure/probe.py": (
        "holmes_ext.plan.cost.links",
        "`holmes probe` fits curves; no job",
    ),
    "holmes_ext/runtime/session.py": ("holmes_ext.plan.cost.model", "the type of a field"),
    "holmes_ext/runtime/planning.py": ("holmes_ext.plan.cost.model", "the same"),
}
FRAMEWORKS = (
    "megatron",
    "deepspeed",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "torchtitan",
    "nemo",
)
#: Own imports inside functions: file -> (how many, why).
ALLOWED_INSIDE = {
    "holmes_ext/_pth.py": (
        1,
        "the .pth line must import nothing before it is known that holmes is wanted",
    ),
    "holmes_ext/cli/doctor.py": (
        1,
        "only where nodes meet through a launcher's variables does doctor need torch",
    ),
    "holmes_ext/cli/probe.py": (1, "`holmes --help` works without torch"),
    "patches/deepspeed/reduce.py": (
        1,
        "`holmes patches` works without torch, GradientReducer does not",
    ),
    "patches/deepspeed/hierarchical.py": (
        2,
        "`holmes patches` works without torch, the hierarchical all-reduce does not",
    ),
    "patches/megatron/reduce/tied.py": (1, "the same"),
    "patches/megatron/command_line/describe.py": (
        1,
        "a job whose flags describe no model must not load what makes one",
    ),
    "holmes_ext/join/training.py": (1, "a job that is not joined must not load what joining needs"),
    "patches/torch/ddp.py": (2, "the same"),
    "lab/holmes_lab/process/fork_server.py": (
        1,
        "a rank that runs without holmes must not have it in its template",
    ),
}
#: Files that import by a name that is worked out: what for.
DYNAMIC = {
    "holmes_ext/__init__.py": "the public names, when they are used",
    "holmes_ext/cli/main.py": "the module of the command that is asked for",
    "holmes_ext/extensions.py": "load(): what extensions name, modules with patches, parts that few jobs use",
    "holmes_ext/doctor/frameworks.py": "`--check` imports the frameworks",
    "lab/holmes_lab/__init__.py": "the public names, when they are used",
    "lab/holmes_lab/process/fork_server.py": "what --preload names",
}
#: What works where torch is not installed, with all that it imports at its top.
WITHOUT_TORCH = (
    "holmes_ext.cluster",
    "holmes_ext.plan",
    "holmes_ext.doctor",
    "holmes_ext.report",
    "holmes_ext.patches",
    "holmes_ext.cli.main",
    "holmes_ext.cli.discover",
    "holmes_ext.cli.plan",
    "holmes_ext.cli.doctor",
    "holmes_ext.cli.patches",
    "holmes_ext.cli.report",
    "holmes_ext.cli.show",
    "holmes_ext.planner",
    "holmes_ext._pth",
    "holmes_ext.__main__",
)


@cache
def modules() -> dict[str, Path]:
    """Name -> file of every module of the package; patches/ is holmes_ext.patches."""
    found = {}
    packages = (
        (ROOT / "holmes_ext", "holmes_ext"),
        (ROOT / "patches", "holmes_ext.patches"),
        (ROOT / "lab" / "holmes_lab", "holmes_lab"),
    )
    for top, name in packages:
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            if top.name == "holmes_ext" and parts[0] == "patches" or "checkouts" in parts:
                continue  # the link, for type checkers
            found[".".join([name, *(part for part in parts if part != "__init__")])] = path
    return found


def place(module: str) -> str:
    return str(modules()[module].relative_to(ROOT))


def room(module: str) -> str:
    parts = module.split(".")
    if parts[0] == "holmes_lab":
        return "lab"
    own = modules()[module]
    if own.parent == ROOT / "holmes_ext":
        return TOP.get(
            own.stem, f"{own.stem}: a new top-level module; say in TOP which room it belongs to"
        )
    return parts[1]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), str(path))


@cache
def imports(path: Path) -> tuple[tuple[str, bool, bool, int], ...]:
    """Return every name that a file imports.

    Returns:
        (imported module or name in it, inside a function, only for type checkers, line) of each
    """
    found: list[tuple[str, bool, bool, int]] = []

    def walk(node: ast.AST, inside: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside, typing, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import; write the whole name"
            found.extend(
                (f"{node.module}.{alias.name}", inside, typing, node.lineno) for alias in node.names
            )
        typing = typing or isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            walk(child, inside, typing)

    walk(tree(path), False, False)
    return tuple(found)


def own(name: str) -> str | None:
    """Return the module of this package that an imported name is or is in.

    None for other packages, and for holmes_ext's version.
    """
    if name == "holmes_ext.__version__" or name.partition(".")[0] not in (
        "holmes_ext",
        "holmes_lab",
    ):
        return None
    while name not in modules():
        name = name.rpartition(".")[0]
    return name


def edges(module: str, top_only: bool = False) -> set[str]:
    """List the modules of this package that a module imports: anywhere, or when it is imported itself."""
    found = imports(modules()[module])
    names = {
        own(name) for name, inside, typing, _ in found if not (top_only and (inside or typing))
    }
    return {name for name in names if name is not None and name != module}


def test_one_direction():
    wrong = {
        (place(module), room(other))
        for module in modules()
        for other in edges(module)
        if room(module) not in EXTENSIONS
        and room(other) not in (room(module), "ground", *MAY_IMPORT[room(module)])
    }
    assert not wrong


def test_the_core_imports_no_extension():
    wrong = {
        (place(module), other)
        for module in modules()
        if room(module) not in EXTENSIONS
        for other in edges(module)
        if room(other) in EXTENSIONS
    }
    assert not wrong


def test_extensions_use_each_others_public_interface_only():
    wrong = set()
    for module in modules():
        mine = room(module)
        for other in edges(module) if mine in EXTENSIONS else ():
            theirs = room(other)
            allowed = theirs in EXTENSIONS.get(mine, ()) and other in PUBLIC[theirs]
            if theirs in EXTENSIONS and theirs != mine and not allowed:
                wrong.add((place(module), other))
    assert not wrong


def test_the_runtime_decides_nothing():
    """It reads values of plan/; the functions that make and complete plans are handed to it by job.py."""
    wrong = {
        (place(module), other)
        for module in modules()
        if room(module) == "runtime"
        for other in edges(module)
        if room(other) == "plan" and other not in VALUES | {"holmes_ext.plan"}
    }
    assert wrong == {(file, module) for file, (module, _) in NOT_VALUES.items()}


def test_every_room_is_in_the_law():
    assert {room(module) for module in modules()} == {*MAY_IMPORT, *EXTENSIONS}
    order = list(MAY_IMPORT)
    assert all(
        order.index(other) < order.index(name)
        for name, others in MAY_IMPORT.items()
        for other in others
    )


def folder(module: str) -> tuple[str, ...]:
    """Return the package that a module is in; a package is in itself."""
    parts = tuple(module.split("."))
    return parts if modules()[module].name == "__init__.py" else parts[:-1]


def test_no_two_sibling_folders_import_each_other():
    found = defaultdict(set)
    for module in modules():
        for other in edges(module):
            mine, theirs = folder(module), folder(other)
            common = 0
            while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
                common += 1
            if common < len(mine) and common < len(theirs):
                found[mine[: common + 1], theirs[: common + 1]].add(place(module))
    both = {(a[-1], b[-1]): found[a, b] for a, b in found if a < b and (b, a) in found}
    assert not both


def test_no_circles():
    """No modules import each other in a circle.

    Modules that import nothing that is left, and modules that nothing left imports, are taken away.
    The modules that remain are in circles.
    """
    left = {module: edges(module) for module in modules()}
    while free := {
        m
        for m in left
        if not left[m] & left.keys() or not any(m in others for others in left.values())
    }:
        left = {module: others for module, others in left.items() if module not in free}
    assert not left


def test_frameworks_only_in_patches():
    used = {
        (place(module), name)
        for module, path in modules().items()
        if room(module) != "patches" and "patches" not in module.split(".")
        for name, *_ in imports(path)
        if name.partition(".")[0] in FRAMEWORKS
    }
    assert not used


def test_the_lab_is_for_commands_tests_and_benchmarks():
    """Other rooms do not import the lab: the test of the directions checks that."""
    starts_a_lab = ROOT / "examples" / "weights" / "lab.py"  # a command, not a part of a job
    for path in set((ROOT / "examples").rglob("*.py")) - {starts_a_lab}:
        assert not [name for name, *_ in imports(path) if name.startswith("holmes_lab")], path


def test_own_imports_stand_at_the_top():
    lines = {
        (place(module), line)
        for module, path in modules().items()
        for name, inside, _, line in imports(path)
        if inside and name.partition(".")[0] in ("holmes_ext", "holmes_lab")
    }
    found = Counter(file for file, _ in lines)
    allowed = {file: count for file, (count, _) in ALLOWED_INSIDE.items()}
    assert found == allowed
    assert sum(allowed.values()) <= 12


def test_dynamic_imports_are_listed():
    found = {
        place(module)
        for module, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and node.args
        and getattr(node.func, "attr", getattr(node.func, "id", ""))
        in ("import_module", "__import__")
        and not (isinstance(node.args[0], ast.Constant) and own(node.args[0].value) is None)
    }
    assert found <= set(DYNAMIC)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_torch_is_not_needed(name):
    """The way by which it is, if it is."""
    todo = {
        module: module for module in modules() if module == name or module.startswith(f"{name}.")
    }
    assert todo
    seen: set[str] = set()
    while todo:
        module, way = todo.popitem()
        seen.add(module)
        found = imports(modules()[module])
        heavy = {
            name
            for name, inside, typing, _ in found
            if not (inside or typing) and name.partition(".")[0] in ("torch", "numpy", "matplotlib")
        }
        assert not heavy, f"{way} imports {heavy}"
        todo.update(
            {
                other: f"{way} -> {other}"
                for other in edges(module, top_only=True)
                if other not in seen
            }
        )


#: Modules that `ruff format` made longer than 500 lines. They are split when their text is rewritten.
LONGER_BY_FORMATTING = {
    "holmes_ext/plan/cost/model.py",
    "holmes_ext/plan/cost/price.py",
    "holmes_ext/plan/cost/reductions.py",
    "holmes_ext/plan/placement.py",
    "patches/engine/registry.py",
}


def test_sizes():
    """No module has more than 500 lines, and no folder more than 20 modules."""
    long = {
        place(module)
        for module, path in modules().items()
        if len(path.read_text().splitlines()) > 500
    }
    assert long == LONGER_BY_FORMATTING
    folders = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    assert not {str(folder): count for folder, count in folders.items() if count > 20}


def test_no_two_classes_share_a_name():
    names = Counter(
        node.name
        for path in modules().values()
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, count in names.items() if count > 1}


DDP_JOB = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    print("LOADED", *[name for name in sys.modules if name.split(".")[0] == "holmes_ext"], flush=True)
dist.destroy_process_group()
"""


def loaded(*command: str) -> list[str]:
    """Return our modules that a program has loaded when it prints them after LOADED."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in result.stdout.splitlines() if "LOADED" in line]
    assert lines, result.stdout + result.stderr
    return lines[0].partition("LOADED")[2].split()


def loaded_by_import(module: str) -> list[str]:
    return loaded(
        "-c",
        f"import sys, {module}\nprint('LOADED', *[name for name in sys.modules"
        " if name.split('.')[0] == 'holmes_ext'])",
    )


@pytest.mark.parametrize(
    "module, most",
    [("holmes_ext.job", 110), ("holmes_ext.runtime.reduce.reducer", 45)],
)
def test_modules_that_an_import_loads(module, most):
    names = loaded_by_import(module)
    assert len(names) <= most, sorted(names)


def test_modules_after_the_first_step_of_a_plain_ddp_job(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(DDP_JOB)
    names = loaded(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        str(script),
        "--holmes",
    )
    unused = [
        name
        for name in names
        if name.split(".")[1:2] in (["planner"], ["join"], ["weights"])
        and name.split(".")[2:] not in ([], ["extension"])
    ]
    assert not unused
    assert len(names) <= 130, sorted(names)
