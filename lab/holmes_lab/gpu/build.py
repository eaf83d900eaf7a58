"""Builds the components of the emulated GPU in parallel, and keeps them in the user's cache.

    CACHE/NAME-DIGEST/         a finished component; it appears by one rename, so it is never incomplete
    CACHE/NAME-DIGEST.part/    a component that is being built; an interrupted build continues here
    CACHE/NAME-DIGEST.lock     lock file that the building process holds

Processes that need the same component wait for its lock, and then find the component finished. The kernel
releases the locks of a process that ends, so no process waits for a build that was killed. All processes lock
components in the same order, so they cannot deadlock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from holmes_ext.errors import HolmesError
from holmes_lab.gpu.cache import make_cache, require_own_cache
from holmes_lab.gpu.recipes import BUILD_FOLDER, OUTPUT, BuildStep, BuildUnit

#: Function that shows progress. Arguments: finished commands, all commands, name of the last output.
OnProgress = Callable[[int, int, str], None]
#: Seconds without use after which an outdated component is removed: 30 days.
_UNUSED_S = 30 * 86400
#: Characters of a compiler's error that are shown.
_MAX_ERROR_LENGTH = 300


def ignore_progress(finished: int, total: int, output: str) -> None:
    """Show no progress (the default of `on_progress`)."""


@dataclass(frozen=True)
class _Command:
    """A build step with the folder of its component."""

    step: BuildStep
    folder: Path

    @property
    def is_built(self) -> bool:
        return (self.folder / self.step.output).exists()


def build(
    components: Sequence[BuildUnit], cache: Path, on_progress: OnProgress = ignore_progress
) -> dict[str, Path]:
    """Build the components of the emulated GPU that are not in the cache yet.

    Args:
        components: The components, each after those that it links.
        cache: Folder of the cache.
        on_progress: Shows the progress of the build.

    Returns:
        The folder of each component, by its name.

    Raises:
        HolmesError: A command failed, and the message has the compiler's first error. Or the cache
            cannot be written, or another user can change it.
    """
    require_own_cache(cache)
    # Component -> its folder in the cache, if the component is built.
    built = {unit.name: cache / unit.folder for unit in components}
    if all(folder.is_dir() for folder in built.values()):
        for folder in built.values():
            os.utime(folder)  # _remove_outdated() goes by this time
        return built
    make_cache(cache)
    with ExitStack() as locks:
        for unit in components:
            locks.enter_context(_lock(cache / f"{unit.folder}.lock", on_progress))
        # Another process may have built some components before it released the locks.
        missing = [unit for unit in components if not built[unit.name].is_dir()]
        parts = {unit.name: cache / f"{unit.folder}.part" for unit in missing}
        _build_missing(missing, {**built, **parts}, on_progress)
        for unit in missing:
            _publish(unit, parts[unit.name], target=built[unit.name])
    _remove_outdated(components, cache)
    return built


@contextmanager
def _lock(path: Path, on_progress: OnProgress) -> Iterator[None]:
    """Hold an exclusive lock on a file. The kernel also releases it when the process ends.

    Args:
        path: The lock file of a component.
        on_progress: Shows the user that this process waits, if another one holds the lock.
    """
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress(0, 0, "another process builds it: waiting")  # 0 of 0 commands
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_missing(
    missing: Sequence[BuildUnit], folders: dict[str, Path], on_progress: OnProgress
) -> None:
    """Run all commands that build the missing components: compilations in parallel, then links in order.

    Args:
        missing: The components to build.
        folders: The folder of each component, also of those that the missing ones link.
        on_progress: Shows the progress of the build. Called as on_progress(finished commands, all
            commands, name of the last output).
    """
    headers: list[_Command] = []
    compilations: list[_Command] = []
    links: list[_Command] = []
    for unit in missing:
        folder = folders[unit.name]
        (folder / "objects").mkdir(parents=True, exist_ok=True)
        unit.prepare(folder)
        if unit.header:
            headers.append(_Command(unit.header, folder))
        compilations.extend(_Command(step, folder) for step in unit.compilations(folder))
    for unit in missing:
        links.extend(_Command(step, folders[unit.name]) for step in unit.links(folders))
    # Outputs of an interrupted build need not be built again.
    headers = [command for command in headers if not command.is_built]
    compilations = [command for command in compilations if not command.is_built]
    compilations.sort(key=lambda command: command.step.source_bytes, reverse=True)

    total = len(headers) + len(compilations) + len(links)
    finished = 0
    failed = Event()  # whether a command has failed, so that no further one is to start

    def run(command: _Command) -> None:
        """Run a command in a thread of the pool, and show the progress.

        Nothing is run once another command has failed.
        """
        nonlocal finished
        if failed.is_set():
            return
        try:
            _run(command.step, command.folder)
        except BaseException:
            failed.set()
            raise
        # Without a lock: if two threads end at the same time, at worst the shown number is too
        # small.
        finished += 1
        # The file of an object is objects/NAME.o.
        name = command.step.output.removeprefix("objects/").removesuffix(".o")
        on_progress(finished, total, name)

    on_progress(0, total, "compiling")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for commands in (headers, compilations):  # compilations read the precompiled headers
                for _ in pool.map(run, commands):  # the loop raises the error of a command
                    pass
        except BaseException:
            failed.set()  # after Ctrl-C no further command starts; running ones receive the signal, too
            raise
    for command in links:
        run(command)


def _run(step: BuildStep, folder: Path) -> None:
    """Run the command of a build step. Its output file appears only if the command succeeds.

    Raises:
        HolmesError: The command is missing or failed.
    """
    target = folder / step.output
    draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
    argv = []
    for word in step.argv:
        argv.append(word.replace(OUTPUT, str(draft)).replace(BUILD_FOLDER, str(folder)))
    try:
        completed = subprocess.run(
            argv,
            cwd=step.working_directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise HolmesError(f"the emulated GPU cannot be built: {argv[0]}: {error}") from None
    if completed.returncode:
        draft.unlink(missing_ok=True)
        log = folder / "failed.log"
        log.write_text(" ".join(argv) + "\n" + completed.stdout + completed.stderr)
        lines = completed.stderr.splitlines() or [f"status {completed.returncode}"]
        errors = [line for line in lines if "error" in line or "undefined" in line]
        message = errors[0] if errors else lines[-1]
        raise HolmesError(
            f"the emulated GPU cannot be built: {step.output}: {message.strip()[:_MAX_ERROR_LENGTH]}"
            f" (all of it: {log})"
        )
    draft.rename(target)


def _publish(component: BuildUnit, part: Path, target: Path) -> None:
    """Delete all files of a finished build except its products, and move its folder into place.

    Args:
        component: The component that was built.
        part: The folder of the build.
        target: Its place in the cache.
    """
    for path in part.iterdir():
        if path.name in component.products:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    part.rename(target)


def _remove_outdated(components: Sequence[BuildUnit], cache: Path) -> None:
    """Remove builds of the same components that were not used for 30 days.

    Such builds belong to other versions of holmes, torch or NCCL.
    """
    names = {unit.name for unit in components}
    for path in cache.iterdir():
        # The name is NAME-DIGEST or NAME-DIGEST.part.
        component_name = path.name.removesuffix(".part").rpartition("-")[0]
        unused_s = time.time() - path.stat().st_mtime
        if unused_s > _UNUSED_S and path.is_dir() and component_name in names:
            shutil.rmtree(path, ignore_errors=True)
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
