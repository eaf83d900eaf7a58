"""Checks whether holmes's patches fit the installed frameworks, and whether other code patches them.

A patch is a change of holmes to one function of a framework (torch, DeepSpeed, Megatron, ...) while
a job runs. A feature is a group of patches that are all applied, or none: if one does not fit, the
feature is off.
"""

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
from typing import NamedTuple

from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.document import read_bytes, read_text
from holmes_ext.errors import HolmesError
from holmes_ext.patches import WITH_GIL, without_gil
from holmes_ext.patches.conflicts import conflicts
from holmes_ext.patches.engine import location
from holmes_ext.patches.engine.location import find_module, source_misfit
from holmes_ext.patches.engine.patch import Feature, Patch
from holmes_ext.patches.megatron.unused import UNUSED_BY_GPT

#: Distributions that change torch, DeepSpeed or Megatron when they are imported: name -> their effect.
PATCHING = {
    "mindspeed": "replaces functions of megatron.core when mindspeed.megatron_adaptor is imported",
    "torch_npu": "replaces parts of torch and torch.distributed",
    "ddtrace": "wraps libraries at start-up through sitecustomize",
    "intel_extension_for_deepspeed": "adds an accelerator to DeepSpeed",
}
#: Part of the reason of a Fit if the framework cannot be imported: "ImportError while importing
#: torch.distributed: ...". check_patches() recognizes such reasons by it.
_WHILE_IMPORTING = " while importing "
_MOST_SHOWN = 120  # characters of a line of code
#: Texts by which .pth files are recognized that change no framework: the import line has such a text, or the
#: name of the file begins with it.
_HARMLESS_PTH = (
    "holmes_ext",
    "_distutils_hack",
    "_virtualenv",
    "__editable__",
    "coverage",
    "a1_coverage",
    "pywin32_bootstrap",
    "zzz_",
)
#: Packages that Megatron-DeepSpeed imports and uses.
_MEGATRON_DEEPSPEED_NEEDS = ("regex", "pybind11", "six", "transformers")


@dataclass(frozen=True)
class Fit:
    """Result of comparing a patch (a change of a framework's function) with the installed framework."""

    patch: Patch
    installed: str | None  # version of the framework; None: it is not installed
    #: "fits"; "off": it does not fit; "other version": it is made for another version, and the installed
    #: version does not need it; "unknown": only an import of the framework would show it.
    state: str
    reason: str | None  # why the state is not "fits"


def fit_of(patch: Patch, check: bool) -> Fit:
    """Compare a patch (a change of a framework's function) with the framework: whether and why it fits.

    First the version of the installed framework is compared. Then the function itself is compared:
    with `check` after an import, otherwise in the source. Without an import, the version may not be
    known: then the result is "unknown", unless the source already speaks against the patch.

    Args:
        patch: The patch.
        check: Import the framework and look at the function. Otherwise its source is read.
    """
    feature = patch.feature
    version = feature.installed()  # from the metadata of the package
    # A framework may run from a checkout without metadata, or beside an installed package with
    # other metadata. Then only the imported framework can tell its version (version_of).
    needs_import_for_version = feature.version_of is not None
    if needs_import_for_version and check:
        # The version from the metadata may be wrong. _fit_of_imported() asks the imported framework
        # for its version and compares that.
        if find_module(patch.module) is None:
            return Fit(patch, version, "off", f"there is no module {patch.module}")
        return _fit_of_imported(patch, version)

    if not patch.is_for_version(version):  # the patch is needed for other versions only
        return _fit_of_other_version(patch, version)
    # A checkout (vendored copy) may have another version than the installed package.
    is_version_certain = not needs_import_for_version or (
        version is not None and not _is_vendored(patch)
    )
    if is_version_certain:
        reason = feature.version_misfit(version)  # in words; None if the version is supported
        if reason:
            return Fit(patch, version, "off", reason)
    if needs_import_for_version and find_module(patch.module) is None:
        return Fit(patch, version, "off", f"there is no module {patch.module}")
    if check:
        return _fit_of_imported(patch, version)

    # source_misfit() reads the framework's source. None: nothing speaks against the patch.
    reason = source_misfit(patch)
    if reason:
        return Fit(patch, version, "off", reason)
    if needs_import_for_version:
        return Fit(
            patch, version, "unknown", "the version is known only when it is imported: use --check"
        )
    return Fit(patch, version, "fits", None)


def _fit_of_other_version(patch: Patch, version: str | None) -> Fit:
    """Explain that a patch does not fit, because it is made for another version than `version`.

    Args:
        patch: The patch, whose field `only` limits it to some versions.
        version: Installed version of the framework; None if it is not installed.
    """
    return Fit(
        patch, version, "other version", f"for {patch.feature.requirement.name} {patch.only}"
    )


def _fit_of_imported(patch: Patch, version: str | None) -> Fit:
    """Import the framework that a patch changes, and return whether and why the patch fits it.

    The state of the result is "fits", "off" or "other version". "off": the patch does not fit, or
    the import fails. "other version": the patch is for other versions, and the installed version needs none.

    Args:
        patch: The patch.
        version: The framework's version according to the metadata of its package.
    """
    feature = patch.feature
    reason: str | None = None
    try:
        importlib.import_module(patch.module)
        # The metadata may belong to another copy of the framework. The imported one knows its version.
        if feature.version_of:
            version = feature.version_of()
            if not patch.is_for_version(version):
                return _fit_of_other_version(patch, version)
        reason = feature.version_misfit(version)  # in words; None if the version is supported
        if not reason:
            # Location finds the function in the imported module. check() looks at its parameters.
            # Both raise Misfit if the patch does not fit. The function is not changed.
            function = location.Location(patch)
            function.check(patch)
    except location.Misfit as misfit:
        reason = str(misfit)
    except Exception as error:  # whatever a framework raises while it is imported
        message = " ".join(str(error).split())  # on one line: transformers' messages have several
        reason = f"{type(error).__name__}{_WHILE_IMPORTING}{patch.module}: {message}"
    return Fit(patch, version, "off" if reason else "fits", reason)


class _Cause(NamedTuple):
    """Reason why features of holmes are off."""

    framework: str  # name and version
    reason: str
    is_import_error: bool  # whether the framework could not be imported


def check_patches(fits: Iterable[Fit]) -> Iterator[Finding]:
    """Yield findings about features of holmes that are off although their framework is installed.

    A feature is a group of patches (changes of a framework's functions) that are applied together.
    Features with the same framework and reason get one finding. A framework that cannot be imported gets a
    finding of its own. A framework that a training script brings along (a checkout, as megatron.core in
    Megatron-LM) gets none: it is not an installed package.

    Args:
        fits: For each patch, whether it fits the installed framework.
    """
    off: dict[_Cause, dict[str, Feature]] = {}  # cause -> name of a feature -> feature
    for fit in fits:
        feature = fit.patch.feature
        reason = fit.reason or ""
        if fit.state != "off" or not fit.installed or _is_vendored(fit.patch):
            continue
        framework = f"{feature.requirement.name} {fit.installed}"
        if _WHILE_IMPORTING in reason:  # the framework cannot be imported
            # One finding for each framework: all its patches fail at the same import.
            if not any(cause.is_import_error and cause.framework == framework for cause in off):
                off[_Cause(framework, reason, is_import_error=True)] = {}
        elif not any(feature.name in features for features in off.values()):
            cause = _Cause(framework, reason, is_import_error=False)
            off.setdefault(cause, {})[feature.name] = feature
    for cause, features in off.items():
        if cause.is_import_error:
            yield problem(
                cause.framework,
                what=cause.reason,
                why="the script ends with it too, with or without holmes",
                mend="install versions that work together, and try `python -c 'import ...'`",
            )
        else:
            yield _finding_on_features(cause, features)


def _finding_on_features(cause: _Cause, features: Mapping[str, Feature]) -> Finding:
    """Return one finding about the features of holmes that are off for the same reason.

    A feature is a group of patches that are applied together to a framework. The finding also
    names the versions of the framework that these patches fit.

    Args:
        cause: The framework and the reason.
        features: Name of a feature -> feature. There is at least one, and all are of one framework.
    """
    feature = next(iter(features.values()))
    names = ", ".join(features)
    name = feature.requirement.name

    # tried: versions that were run with holmes, oldest first; () if there is none.
    versions = (
        f"{name} {feature.tried[0]} to {feature.tried[-1]}"
        if feature.tried
        else "versions in the range"
    )
    return problem(
        cause.framework,
        what=f"features that are off: {names}: {cause.reason}",
        why="holmes leaves them off; `--holmes-require` would stop the job",
        mend=f"{versions} have them: pip install '{feature.versions}'; or train without"
        f" (HOLMES_TRY={names.replace(' ', '')} tries another version, at your own risk)",
    )


def _is_vendored(patch: Patch) -> bool:
    """Return whether the framework that a patch changes comes from a checkout, not from an installed package.

    Training scripts may bring a copy of a framework along ("vendored"), as Megatron-LM does with
    megatron.core. Metadata of an installed package does not tell the version of such a copy.
    """
    # version_of asks an imported framework for its version. Only features of frameworks that may
    # run from a checkout have it.
    if not patch.feature.version_of:
        return False
    # The package, e.g. megatron.core: this copy of it may not have the patch's module.
    spec = find_module(".".join(patch.module.split(".")[:2]))
    if spec is None or not spec.origin:
        return False
    folders = Path(spec.origin).parts
    return "site-packages" not in folders and "dist-packages" not in folders


def check_patching_libraries(folders: Iterable[str] | None = None) -> Iterator[Finding]:
    """Yield findings about other code that may patch torch, DeepSpeed or Megatron, too.

    Such code is in installed libraries (mindspeed, ddtrace, ...), or runs at every start of Python
    (.pth files, sitecustomize.py). If it replaces a function before holmes does, holmes's patch of
    that function does not fit and stays off.

    Args:
        folders: Folders with packages; None for those of this interpreter.
    """
    if folders is None:
        folders = site.getsitepackages()
    for name, effect in PATCHING.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield note(
            f"{name} {version}",
            what=f"is installed; it {effect}",
            why="holmes's patches do not fit functions that it replaced first, and stay off",
            mend="import it before the frameworks are used, and look at `holmes patches --check` in that "
            "environment",
        )
    for path, line in _start_up_code(folders):
        yield note(
            path,
            what=f"runs code at every start of Python: {line[:_MOST_SHOWN]}",
            why="it may import or patch a framework before holmes does",
            mend="look what it does; remove it if the job does not need it",
        )


def check_compilers(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings about lock files of C++ extensions that torch has compiled.

    torch makes such a file while it compiles an extension at run time, and removes it afterwards. If
    the process is killed, the file stays, and every later job that needs the extension waits without
    end (torch/utils/cpp_extension.py, file_baton.py).

    Args:
        environ: Environment variables. They name the folder of compiled extensions.
    """
    folder = environ.get("TORCH_EXTENSIONS_DIR")
    if folder:
        locks = Path(folder).glob("*/lock")
    else:
        cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
        locks = Path(cache).glob("torch_extensions/*/*/lock")
    for lock in sorted(locks):
        yield problem(
            str(lock),
            what="torch is compiling an extension there, or was killed while doing so",
            why=f"every job that needs {lock.parent.name} waits silently until the file is gone",
            mend="remove it unless a job is compiling now",
        )


def _start_up_code(folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (file, code) for code that Python runs at every start and that may change a framework.

    Such code are import lines in .pth files, sitecustomize.py and usercustomize.py.
    """
    for folder in map(Path, dict.fromkeys(folders)):
        for file in sorted(folder.glob("*.pth")):
            for line in _lines_of(file):
                is_harmless = any(
                    word in line or file.name.startswith(word) for word in _HARMLESS_PTH
                )
                if line.startswith(("import ", "import\t")) and not is_harmless:
                    yield str(file), line.strip()
        for name in ("sitecustomize.py", "usercustomize.py"):
            if (folder / name).exists():
                yield str(folder / name), "the module is imported"


def _lines_of(file: Path) -> list[str]:
    """Read the lines of a file; none if it cannot be read."""
    try:
        return read_text(file, advice="", errors="replace").splitlines()
    except HolmesError:
        return []


def check_replaced_functions(patches: Iterable[Patch]) -> Iterator[Finding]:
    """Yield findings about functions of imported frameworks that another library has replaced.

    Args:
        patches: Patches of holmes. Only the functions that they change are checked.
    """
    patch_of_target = {patch.target: patch for patch in patches}
    for patch in patch_of_target.values():
        try:
            value = operator.attrgetter(patch.qualname)(sys.modules.get(patch.module))
        except AttributeError:
            continue
        # Package that defines the function now.
        owner = (getattr(value, "__module__", None) or "").partition(".")[0]
        # Not a replacement: the framework's own function, a patch of holmes, a function without a
        # module (""), a function in C ("builtins"), or a function of torch that a framework offers as its
        # own.
        expected_owners = {"", patch.module.partition(".")[0], "holmes_ext", "builtins", "torch"}
        # A wrapper made with functools.wraps has __wrapped__ and still calls the framework's
        # function.
        if owner not in expected_owners and not hasattr(value, "__wrapped__"):
            yield problem(
                patch.target,
                what=f"was replaced by {value.__module__}",
                why="holmes's patch, written for the framework's own function, would wrap this one or "
                "not fit",
                mend=f"start without {owner}, or switch the feature off with HOLMES_DISABLE",
            )


def check_script(path: Path) -> Iterator[Finding]:
    """Yield findings about libraries that a training script imports and that patch frameworks (PATCHING)."""
    try:
        tree = ast.parse(read_bytes(path, "give the training script"))
    # MemoryError and RecursionError: it is nested too deep for the parser.
    except (HolmesError, SyntaxError, ValueError, MemoryError, RecursionError) as error:
        yield problem(
            str(path),
            what=f"cannot be read as Python: {error}",
            why="the job would end at once",
            mend="give the training script's path",
        )
        return
    modules: set[str] = set()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            modules.update(alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            modules.add(statement.module)
    packages = {module.partition(".")[0] for module in modules}
    for name in sorted(packages & set(PATCHING)):
        yield note(
            str(path),
            what=f"imports {name}",
            why=f"it {PATCHING[name]}",
            mend="look at holmes's start line for features that are off",
        )


def check_megatron_deepspeed(folder: Path) -> Iterator[Finding]:
    """Yield findings about packages that a checkout of Megatron-DeepSpeed needs and that are not installed.

    Args:
        folder: Folder of the training script. Nothing is checked if it is no such checkout.
    """
    # Files that show that the folder is a checkout of Megatron-DeepSpeed.
    files = [folder / "megatron/arguments.py", folder / "megatron/model/gpt_model.py"]
    if not all(file.exists() for file in files):
        return
    for module in _MEGATRON_DEEPSPEED_NEEDS:
        if find_module(module) is None:
            yield problem(
                str(folder),
                what=f"Megatron-DeepSpeed imports {module}, which is not installed",
                why="it ends with ModuleNotFoundError, with or without holmes",
                mend=f"pip install {module}",
            )
    for module, need in UNUSED_BY_GPT.items():
        if find_module(module) is None:
            yield note(
                str(folder),
                what=f"Megatron-DeepSpeed imports {module}, which is not installed",
                why="without --holmes it ends with ModuleNotFoundError; holmes provides an empty stub, "
                "which a GPT never uses",
                mend=need,
            )


def check_version_conflicts() -> Iterator[Finding]:
    """Yield findings about versions of packages that do not work together, and about a Python without GIL."""
    gil_problem = without_gil()
    if gil_problem:
        yield problem(
            f"Python {platform.python_version()}",
            what=gil_problem,
            why="holmes refuses to run a job on it",
            mend=WITH_GIL,
        )
    for packages, conflict, way_out in conflicts():
        yield problem(
            packages,
            what=conflict,
            why="the two do not work together, with or without holmes",
            mend=way_out,
        )
