"""Builds components on all cores, into the user's cache.

CACHE/NAME-DIGEST/         what is built: made in one rename, so it is whole or not there
CACHE/NAME-DIGEST.part/    being built; a build that was killed goes on here
CACHE/NAME-DIGEST.lock     held by the process that builds it; another one waits, and then finds it
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event

from holmes_ext.errors import HolmesError
from holmes_lab.gpu.recipes import HERE, MADE, BuildStep, BuildUnit

VARIABLE = "HOLMES_GPU_CACHE"
#: Told (commands done, commands in all, what was made last).
OnProgress = Callable[[int, int, str], None]
_FORGOTTEN_S = (
    30 * 86400
)  # seconds without use after which a component of another digest is removed
_SHOWN = 300  # characters of a compiler's message


def cache_folder() -> Path:
    """HOLMES_GPU_CACHE, else the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(VARIABLE) or Path(base, "holmes_ext", "gpu")).absolute()


def build(
    components: Sequence[BuildUnit], cache: Path, on_progress: OnProgress = lambda *_: None
) -> dict[str, Path]:
    """Name of each BuildUnit -> its folder. Builds those that are not in the cache, in the given order where
    one links another. HolmesError with the compiler's first error."""
    built = {unit.name: cache / unit.folder for unit in components}
    if all(folder.is_dir() for folder in built.values()):
        for folder in built.values():
            os.utime(folder)
        return built
    cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for unit in components:
            stack.enter_context(_locked(cache / f"{unit.folder}.lock", on_progress))
        missing = [unit for unit in components if not built[unit.name].is_dir()]
        parts = {unit.name: cache / f"{unit.folder}.part" for unit in missing}
        _build_all(missing, {**built, **parts}, on_progress)
        for unit in missing:
            _publish(unit, parts[unit.name], built[unit.name])
    _forget(components, cache)
    return built


class _locked:
    """Holds a file's lock inside the with block; the kernel frees it when the process ends."""

    def __init__(self, path: Path, on_progress: OnProgress):
        self.path, self.on_progress = path, on_progress

    def __enter__(self) -> None:
        self.file = open(self.path, "w")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.on_progress(0, 0, "another process builds it: waiting")
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _build_all(
    missing: Sequence[BuildUnit], folders: dict[str, Path], on_progress: OnProgress
) -> None:
    for unit in missing:
        (folders[unit.name] / "objects").mkdir(parents=True, exist_ok=True)
        unit.prepare(folders[unit.name])
    headers = [(unit.header, folders[unit.name]) for unit in missing if unit.header]
    compiles = [
        (step, folders[unit.name]) for unit in missing for step in unit.compiles(folders[unit.name])
    ]
    headers, compiles = (
        [(step, folder) for step, folder in steps if not (folder / step.makes).exists()]
        for steps in (headers, compiles)
    )
    links = [(step, folders[unit.name]) for unit in missing for step in unit.links(folders)]
    total, done, failed = len(headers) + len(compiles) + len(links), 0, Event()

    def run(item: tuple[BuildStep, Path]) -> None:
        nonlocal done
        if failed.is_set():
            return
        try:
            _run(*item)
        except BaseException:
            failed.set()
            raise
        done += 1
        on_progress(done, total, item[0].makes.removeprefix("objects/").removesuffix(".o"))

    on_progress(0, total, "compiling")
    compiles.sort(key=lambda item: -item[0].weight)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for steps in (headers, compiles):
                for _ in pool.map(run, steps):
                    pass
        except BaseException:
            failed.set()  # Ctrl-C: the commands that run get it, too; no other is begun
            raise
    for item in links:
        run(item)


def _run(step: BuildStep, folder: Path) -> None:
    target = folder / step.makes
    draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
    argv = [word.replace(MADE, str(draft)).replace(HERE, str(folder)) for word in step.argv]
    try:
        done = subprocess.run(
            argv, cwd=step.where, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        raise HolmesError(f"the emulated GPU cannot be built: {argv[0]}: {error}") from None
    if done.returncode:
        draft.unlink(missing_ok=True)
        log = folder / "failed.log"
        log.write_text(" ".join(argv) + "\n" + done.stdout + done.stderr)
        lines = done.stderr.splitlines() or [f"status {done.returncode}"]
        said = next((line for line in lines if "error" in line or "undefined" in line), lines[-1])
        raise HolmesError(
            f"the emulated GPU cannot be built: {step.makes}: {said.strip()[:_SHOWN]} (all of it: {log})"
        )
    draft.rename(target)


def _publish(component: BuildUnit, part: Path, target: Path) -> None:
    """Keep its products only, and give it its name."""
    for path in part.iterdir():
        if path.name not in component.products:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    part.rename(target)


def _forget(components: Sequence[BuildUnit], cache: Path) -> None:
    """Remove what other versions of holmes, torch or NCCL left here and nobody used for a month."""
    names = {unit.name for unit in components}
    for path in cache.iterdir():
        old = time.time() - path.stat().st_mtime > _FORGOTTEN_S
        if old and path.is_dir() and path.name.removesuffix(".part").rpartition("-")[0] in names:
            shutil.rmtree(path, ignore_errors=True)
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
