"""Preloaded Pythons that several labs share.

A zygote (zygote.py) belongs to one lab, because it is in the lab's PID namespace. Each costs seconds of a
core for its imports. A template is a Python that has imported the modules outside of any lab. A lab that
needs a zygote gets a fork of the template:

    Templates --socket--> template --forks--> guard --setns, forks--> zygote --forks--> launcher --> ranks
    (this process)        (outside of all labs)                       (in the lab's PID namespace)

The kernel kills the zygote with its lab, as any process of the lab's PID namespace. The guard waits for that
end and then ends, too. Without a guard, the end of the namespace would wait for the outer init to reap the
zygote. The template ends when this process ends or closes the socket, after all guards.

The labs must not be in user namespaces: `Templates` then returns None, and the lab starts its own zygote.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_lab.process import wire, zygote

#: Templates that are kept. Each takes up to 0.5 GB of memory.
_KEPT = 4


@dataclass(frozen=True)
class TemplateKey:
    """Everything on which the imports of a template depend."""

    interpreter: str
    modules: tuple[str, ...]  # imported by the template
    env: tuple[tuple[str, str], ...]  # sorted pairs (name, value)
    directory: str  # working directory


@dataclass(frozen=True)
class _Template:
    """Running template, and the socket by which zygotes are requested of it."""

    process: subprocess.Popen[bytes]
    control: socket.socket


class Templates:
    """A context manager: the templates exist inside the `with` block, in which all labs must end.

    Lab.templates = Templates() makes all labs of this process share them.
    """

    def __init__(self) -> None:
        self._templates: dict[TemplateKey, _Template] = {}  # the least recently used one first
        self._retired: list[_Template] = []

    def __enter__(self) -> Templates:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def zygote(
        self, key: TemplateKey, roots: str, lab_init: int, log: Path
    ) -> socket.socket | None:
        """Return the control socket of a new zygote in a lab.

        Args:
            key: What the zygote has imported, and in which environment.
            roots: Folders of holmes_lab and holmes_ext, as in a path variable.
            lab_init: pid of the init of the lab's PID namespace.
            log: File for the output of the zygote.

        Returns:
            None if the lab is in another user namespace, which a template does not enter, or if the template
            was killed. The lab then starts a zygote of its own.

        Raises:
            HolmesError: The modules cannot be imported.
        """
        if os.readlink(f"/proc/{lab_init}/ns/user") != os.readlink("/proc/self/ns/user"):
            return None
        template = self._templates.pop(key, None) or self._start(key, roots)
        self._templates[key] = template
        while len(self._templates) > _KEPT:
            oldest = self._templates.pop(next(iter(self._templates)))
            oldest.control.close()  # it ends after the zygotes that it has forked
            self._retired.append(oldest)

        def fork(descriptors: list[int]) -> None:
            """Let the template fork a zygote into the lab, with its control socket and its log."""
            wire.send(template.control, {"init": lab_init}, descriptors)

        try:
            return zygote.start(fork, log, key.modules)
        except (BrokenPipeError, ConnectionResetError):  # somebody has killed the template
            self._retired.append(self._templates.pop(key))
            return None

    def close(self) -> None:
        """End all templates; returns when they are gone."""
        templates = [*self._templates.values(), *self._retired]
        self._templates.clear()
        self._retired.clear()
        for template in templates:
            template.control.close()
        for template in templates:
            template.process.wait()

    def _start(self, key: TemplateKey, roots: str) -> _Template:
        """Start a template, and return it when it has imported the modules.

        Raises:
            HolmesError: The modules cannot be imported.
        """
        started: list[subprocess.Popen[bytes]] = []

        def spawn(descriptors: list[int]) -> None:
            """Start the process with a control socket and a log, and append it to `started`."""
            control, output = descriptors
            argv = [
                key.interpreter,
                "-c",
                zygote.TEMPLATE_BOOT,
                roots,
                ",".join(key.modules),
                str(control),
            ]
            process = subprocess.Popen(
                argv,
                pass_fds=(control,),
                env=dict(key.env),
                cwd=key.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for this process, which then ends its labs
            )
            started.append(process)

        try:
            # Its output matters only if it cannot start. No file is left if this process is killed later.
            with tempfile.TemporaryDirectory(prefix="holmes-template-") as folder:
                control = zygote.start(spawn, Path(folder, "log"), key.modules)
        except HolmesError:
            started[0].kill()  # threads of a module might keep it from ending
            started[0].wait()
            raise
        return _Template(started[0], control)
