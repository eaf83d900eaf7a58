"""What may keep the patches from working: versions, targets that changed, others that patch."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import operator
import platform
import site
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.patches.conflicts import WITH_GIL, conflicts, without_gil
from holmes_ext.patches.engine import location
from holmes_ext.patches.engine.location import find_module, source_misfit
from holmes_ext.patches.engine.patch import Feature, Patch
from holmes_ext.patches.megatron.unused import UNUSED

#: Distributions that change torch, DeepSpeed or Megatron when they are imported: name -> what they do.
PATCHING = {
    "mindspeed": "replaces functions of megatron.core when mindspeed.megatron_adaptor is imported",
    "torch_npu": "replaces parts of torch and torch.distributed",
    "ddtrace": "wraps libraries at start-up through sitecustomize",
    "intel_extension_for_deepspeed": "adds an accelerator to DeepSpeed",
}
_IMPORTING = " while importing "
#: Import lines of .pth files that touch no framework.
_HARMLESS = (
    "holmes_ext",
    "_distutils_hack",
    "_virtualenv",
    "__editable__",
    "coverage",
    "a1_coverage",
    "pywin32_bootstrap",
    "zzz_",
)
#: What Megatron-DeepSpeed imports and uses.
_MEGATRON_DEEPSPEED_NEEDS = ("regex", "pybind11", "six", "transformers")


@dataclass(frozen=True)
class Fit:
    """Whether a patch (a change of holmes to a function of a framework) fits the installed framework."""

    patch: Patch
    installed: str | None  # version of the framework; None: it is not installed
    state: str  # "fits", "off" (it does not), "other version" (made for another one) or "unknown"
    reason: str | None  # why the state is not "fits"


def fit_of(patch: Patch, check: bool) -> Fit:
    """Return whether a patch (a change of holmes to a function of a framework) fits the installed framework.

    Args:
        check: Import the framework and look at the function. Otherwise the framework's source is read, and
            the result may be "unknown".
    """
    feature = patch.feature
    version = feature.installed()  # from the metadata of the package
    # Some frameworks have no reliable metadata: their version is known only after the import.
    is_version_known_by_import = feature.version_of is not None
    is_version_read_later = is_version_known_by_import and check  # by _fit_of_imported()
    if not is_version_read_later and not patch.is_for_version(version):
        return _fit_of_other_version(patch, version)

    if not is_version_known_by_import:
        is_version_certain = True
    elif check or version is None:
        is_version_certain = False
    else:
        is_version_certain = not _is_vendored(patch)
    if is_version_certain:
        reason = feature.version_misfit(version)
        if reason:
            return Fit(patch, version, "off", reason)
    if is_version_known_by_import and find_module(patch.module) is None:
        return Fit(patch, version, "off", f"there is no module {patch.module}")
    if check:
        return _fit_of_imported(patch, version)

    reason = source_misfit(
        patch
    )  # reads the framework's source; None if the patch fits, or may fit
    if reason:
        return Fit(patch, version, "off", reason)
    if is_version_known_by_import:
        return Fit(
            patch, version, "unknown", "the version is known only when it is imported: use --check"
        )
    return Fit(patch, version, "fits", None)


def _fit_of_other_version(patch: Patch, version: str | None) -> Fit:
    return Fit(
        patch, version, "other version", f"for {patch.feature.requirement.name} {patch.only}"
    )


def _fit_of_imported(patch: Patch, version: str | None) -> Fit:
    """Import the framework that a patch changes, and return whether the patch fits it.

    Args:
        version: The framework's version according to the metadata of its package.
    """
    feature = patch.feature
    reason: str | None = None
    try:
        importlib.import_module(patch.module)
        if feature.version_of:  # the imported framework knows its version better than the metadata
            version = feature.version_of()
            if not patch.is_for_version(version):
                return _fit_of_other_version(patch, version)
        reason = feature.version_misfit(version)
        if not reason:
            location.Location(patch).check(patch)  # raises Misfit; nothing is changed
    except location.Misfit as misfit:
        reason = str(misfit)
    except Exception as error:  # whatever a framework raises while it is imported
        message = " ".join(str(error).split())  # on one line: transformers' messages have several
        reason = f"{type(error).__name__}{_IMPORTING}{patch.module}: {message}"
    return Fit(patch, version, "off" if reason else "fits", reason)


def check_patches(fits: Iterable[Fit]) -> Iterator[Finding]:
    """On features whose framework is installed and that would stay off: why, and which versions have them."""
    off: dict[tuple[str, str], dict[str, Feature]] = {}
    for fit in fits:
        feature, reason = fit.patch.feature, fit.reason or ""
        if fit.state != "off" or not fit.installed or _is_vendored(fit.patch):
            continue
        which = f"{feature.requirement.name} {fit.installed}"
        if _IMPORTING in reason:
            off.setdefault((which, ""), {}).setdefault(reason, feature)
        elif not any(feature.name in others for others in off.values()):
            off.setdefault((which, reason), {})[feature.name] = feature
    for (which, reason), features in off.items():
        if not reason:
            yield problem(
                which,
                next(iter(features)),
                "the script ends with it too, with or without holmes",
                "install versions that work together, and try `python -c 'import ...'`",
            )
            continue
        feature, names = next(iter(features.values())), ", ".join(features)
        name, tried = feature.requirement.name, feature.tried
        have = f"{name} {tried[0]} to {tried[-1]}" if tried else "versions in the range"
        yield problem(
            which,
            f"features that are off: {names}: {reason}",
            "holmes leaves them off; `--holmes-require` would stop the job",
            f"{have} have them: pip install '{feature.versions}'; or train without"
            f" (HOLMES_TRY={names.replace(' ', '')} tries another version, at your own risk)",
        )


def _is_vendored(patch: Patch) -> bool:
    """Whether the module would come from a checkout: the patches of another copy stay off, quietly."""
    if not patch.feature.version_of:
        return False
    # megatron.core, whether or not it has the module
    spec = find_module(".".join(patch.module.split(".")[:2]))
    return bool(
        spec
        and spec.origin
        and not {"site-packages", "dist-packages"} & set(Path(spec.origin).parts)
    )


def check_others(folders: Iterable[str] | None = None) -> Iterator[Finding]:
    """Findings on libraries that patch the same frameworks, and on code that every start of Python runs."""
    for name, what in PATCHING.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield note(
            f"{name} {version}",
            f"is installed; it {what}",
            "holmes's patches do not fit functions that it replaced first, and stay off",
            "import it before the frameworks are used, and look at `holmes patches --check` in that "
            "environment",
        )
    for path, line in _start_up_code(site.getsitepackages() if folders is None else folders):
        yield note(
            path,
            f"runs code at every start of Python: {line[:120]}",
            "it may import or patch a framework before holmes does",
            "look what it does; remove it if the job does not need it",
        )


def check_compilers(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Findings on locks of torch's compiler of extensions (torch/utils/cpp_extension.py, file_baton.py)."""
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    folder = environ.get("TORCH_EXTENSIONS_DIR")
    locks = Path(folder).glob("*/lock") if folder else Path(cache).glob("torch_extensions/*/*/lock")
    for lock in sorted(locks):
        yield problem(
            str(lock),
            "torch is compiling an extension there, or was killed while doing so",
            f"every job that needs {lock.parent.name} waits silently until the file is gone",
            "remove it unless a job is compiling now",
        )


def _start_up_code(folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    for folder in map(Path, dict.fromkeys(folders)):
        for file in sorted(folder.glob("*.pth")):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                harmless = any(word in line or file.name.startswith(word) for word in _HARMLESS)
                if line.startswith(("import ", "import\t")) and not harmless:
                    yield str(file), line.strip()
        for name in ("sitecustomize.py", "usercustomize.py"):
            if (folder / name).exists():
                yield str(folder / name), "the module is imported"


def check_replaced(patches: Iterable[Patch]) -> Iterator[Finding]:
    """On targets that are imported here and hold something that is not the framework's own."""
    for patch in {patch.target: patch for patch in patches}.values():
        try:
            value = operator.attrgetter(patch.qualname)(sys.modules.get(patch.module))
        except AttributeError:
            continue
        owner = (getattr(value, "__module__", None) or "").partition(".")[0]
        ours = {"", patch.module.partition(".")[0], "holmes_ext", "builtins", "torch"}
        if owner not in ours and not hasattr(value, "__wrapped__"):
            yield problem(
                patch.target,
                f"was replaced by {value.__module__}",
                "holmes's patch, written for the framework's own function, would wrap this one or "
                "not fit",
                f"start without {owner}, or switch the feature off with HOLMES_DISABLE",
            )


def check_script(path: Path) -> Iterator[Finding]:
    """Findings on what a training script imports, from its text: libraries in PATCHING."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        yield problem(
            str(path),
            f"cannot be read as Python: {error}",
            "the job would end at once",
            "give the training script's path",
        )
        return
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {
        n.module
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module and not n.level
    }
    for name in sorted({name.partition(".")[0] for name in names} & set(PATCHING)):
        yield note(
            str(path),
            f"imports {name}",
            f"it {PATCHING[name]}",
            "look at holmes's start line for features that are off",
        )


def check_megatron_deepspeed(folder: Path) -> Iterator[Finding]:
    """What a Megatron-DeepSpeed checkout itself needs to start with the installed packages."""
    if not all(
        (folder / "megatron" / name).exists() for name in ("arguments.py", "model/gpt_model.py")
    ):
        return
    for module in _MEGATRON_DEEPSPEED_NEEDS:
        if find_module(module) is None:
            yield problem(
                str(folder),
                f"Megatron-DeepSpeed imports {module}, which is not installed",
                "it ends with ModuleNotFoundError, with or without holmes",
                f"pip install {module}",
            )
    for module, need in UNUSED.items():
        if find_module(module) is None:
            yield note(
                str(folder),
                f"Megatron-DeepSpeed imports {module}, which is not installed",
                "without --holmes it ends with ModuleNotFoundError; holmes provides an empty stub, "
                "which a GPT never uses",
                need,
            )


def check_stock_versions() -> Iterator[Finding]:
    """Findings on versions of two packages that do not work together, and on a Python without the lock."""
    if lack := without_gil():
        yield problem(
            f"Python {platform.python_version()}",
            lack,
            "holmes refuses to run a job on it",
            WITH_GIL,
        )
    for which, what, mend in conflicts():
        yield problem(which, what, "the two do not work together, with or without holmes", mend)
