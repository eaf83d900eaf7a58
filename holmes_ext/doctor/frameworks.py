"""What may keep the patches from working: versions outside their ranges, targets that changed, others that patch the same frameworks."""

from __future__ import annotations

import ast
import importlib.metadata
import site
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.patches.engine.patch import Patch

#: Distributions that change torch, DeepSpeed or Megatron when they are imported: name -> what they do.
PATCHING = {
    "mindspeed": "replaces functions of megatron.core when mindspeed.megatron_adaptor is imported",
    "torch_npu": "replaces parts of torch and torch.distributed",
    "ddtrace": "wraps libraries at start-up through sitecustomize",
    "intel_extension_for_deepspeed": "adds an accelerator to DeepSpeed",
}
#: Import lines of .pth files that touch no framework.
_HARMLESS = ("holmes_ext", "_distutils_hack", "_virtualenv", "__editable__", "coverage", "a1_coverage", "pywin32_bootstrap", "zzz_")


def check_patches(judge: Callable[[Patch], dict]) -> list[Finding]:
    """Findings on features whose framework is installed and that would stay off. judge(patch) -> {"state", "reason", "installed"}."""
    from holmes_ext.patches import all_patches

    reasons: dict[str, str] = {}
    for patch in all_patches():
        if patch.feature.version_of and _is_vendored(patch):  # another copy of the framework than the installed one: its patches stay off, quietly
            continue
        row = judge(patch)
        if row["state"] == "off" and row["installed"]:
            reasons.setdefault(patch.feature.name, f"{patch.target}: {row['reason']}")
    mend = "install a version in the range (`holmes patches`), or train without the feature: it is left off as a whole"
    return [
        problem(f"feature {feature}", reason, "holmes leaves the feature off; `--holmes-require` would stop the job", mend)
        for feature, reason in reasons.items()
    ]


def _is_vendored(patch: Patch) -> bool:
    """Whether the module would come from a checkout (PYTHONPATH, the script's folder) and not from an installed distribution."""
    from holmes_ext.patches.engine.source import find_module

    spec = find_module(".".join(patch.module.split(".")[:2]))  # megatron.core, whether or not this copy has the module
    return bool(spec and spec.origin and not {"site-packages", "dist-packages"} & set(Path(spec.origin).parts))


def check_others(folders: Iterable[str] | None = None) -> list[Finding]:
    """Findings on libraries that patch the same frameworks, and on .pth files and sitecustomize that run code before holmes."""
    findings = []
    for name, what in PATCHING.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        mend = "import it before the frameworks are used, and look at `holmes patches --check` in the same environment"
        findings.append(
            note(f"{name} {version}", f"is installed; it {what}", "what it replaced first does not fit holmes's patches, which then stay off", mend)
        )
    for path, line in _start_up_code(site.getsitepackages() if folders is None else folders):
        findings.append(
            note(
                path,
                f"runs code at every start of Python: {line[:120]}",
                "it may import or patch a framework before holmes does",
                "look what it does; remove it if the job does not need it",
            )
        )
    return findings


def _start_up_code(folders: Iterable[str]) -> list[tuple[str, str]]:
    found = []
    for folder in map(Path, dict.fromkeys(folders)):
        for file in sorted(folder.glob("*.pth")):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            found += [
                (str(file), line.strip())
                for line in lines
                if line.startswith(("import ", "import\t")) and not any(word in line or file.name.startswith(word) for word in _HARMLESS)
            ]
        found += [(str(folder / name), "the module is imported") for name in ("sitecustomize.py", "usercustomize.py") if (folder / name).exists()]
    return found


def check_replaced(patches: Iterable[Patch]) -> list[Finding]:
    """Findings on targets that are imported in this process and hold something that is not the framework's own."""
    import operator

    found: dict[str, str] = {}
    for patch in patches:
        module = sys.modules.get(patch.module)
        try:
            value = operator.attrgetter(patch.qualname)(module)
        except AttributeError:
            continue
        owner = getattr(value, "__module__", None) or ""
        top = patch.module.partition(".")[0]
        if owner and owner.partition(".")[0] not in (top, "holmes_ext", "builtins", "torch") and not hasattr(value, "__wrapped__"):
            found[patch.target] = owner
    why = "holmes's patch would go on top of it, or not fit: it was written for the framework's own"
    return [
        problem(target, f"was replaced by {owner}", why, f"start without {owner.partition('.')[0]}, or switch the feature off with HOLMES_DISABLE")
        for target, owner in found.items()
    ]


def check_script(path: Path) -> list[Finding]:
    """Findings on what a training script imports, from its text: libraries in PATCHING."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return [problem(str(path), f"cannot be read as Python: {error}", "the job would end at once", "give the training script's path")]
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    tops = {name.partition(".")[0] for name in names}
    return [
        note(str(path), f"imports {name}", f"it {PATCHING[name]}", "look at holmes's start line for features that are off")
        for name in sorted(tops & set(PATCHING))
    ]


def check_megatron_deepspeed(folder: Path) -> list[Finding]:
    """What a Megatron-DeepSpeed checkout itself needs to start with the installed packages."""
    from holmes_ext.patches.engine.source import find_module

    if not (folder / "megatron" / "arguments.py").exists() or not (folder / "megatron" / "model" / "gpt_model.py").exists():
        return []
    findings = []
    for module, need in (("deepspeed.compression.compress", "deepspeed 0.19.7 and newer no longer have it: pip install 'deepspeed<0.19.7', or serve an empty module"),
                         ("regex", "pip install regex"), ("pybind11", "pip install pybind11")):  # fmt: skip
        top = module.partition(".")[0]
        if find_module(top) is None or find_module(module) is None:
            findings.append(
                problem(
                    str(folder),
                    f"Megatron-DeepSpeed imports {module}, which is not installed",
                    "it ends with ModuleNotFoundError, with or without holmes",
                    need,
                )
            )
    return findings
