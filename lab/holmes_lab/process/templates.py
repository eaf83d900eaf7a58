"""Templates: Python processes that have imported a job's modules once, for all labs of this process.

A fork server (fork_server.py) is a Python that has imported the modules and forks ranks. It belongs
to one lab, because it is in the lab's PID namespace, and its imports cost seconds of a core. A
template has imported the modules outside of any lab. A lab that needs a fork server gets a fork of
the template:

    Templates --socket--> template --forks--> guard --forks--> fork server --> job supervisor --> ranks
    (this process)        (outside of all labs)                (in the lab's PID namespace)

    guard          enters the lab's PID namespace for its children, and forks the fork server. As its
                   parent, it waits for its end, and then ends, too. If it ended earlier, the init of
                   the machine would be the parent, and the end of the PID namespace would wait for
                   that init to reap the fork server.
    fork server    The kernel kills it with its lab, as any process of the lab's PID namespace.
    template       It ends when this process ends or closes the socket, after all guards have ended.

A template cannot enter a lab that is in a user namespace of its own. `Templates.fork_server` then
returns None, and the lab starts a fork server without a template.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_lab.process import fork_server, wire

#: Templates that are kept. Each takes up to 0.5 GB of memory.
_KEPT = 4


@dataclass(frozen=True)
class TemplateKey:
    """Everything on which the imports of a preloaded Python depend. Labs with the same key can share them."""

    interpreter: str  # path of the Python
    modules: tuple[str, ...]  # imported by the template
    env: tuple[tuple[str, str], ...]  # sorted pairs (name, value)
    directory: str  # working directory


@dataclass(frozen=True)
class _Template:
    """Running template: a Python that has imported modules, and that labs fork instead of importing them.

    The forks are requested over its control socket.
    """

    process: subprocess.Popen[bytes]
    control: socket.socket


class Templates:
    """Preloaded Python processes (templates) from which the labs of this process fork, to save their imports.

    The class is a context manager. The templates exist inside the `with` block, and all labs must
    end in it:

        with Templates() as Lab.templates:
            ...  # each Lab here forks its preloaded Pythons from a template
    """

    def __init__(self) -> None:
        self._templates: dict[TemplateKey, _Template] = {}  # the least recently used one first
        #: Templates that fork no longer, but end only after the processes that they have forked.
        self._retired: list[_Template] = []

    def __enter__(self) -> Templates:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork_server(
        self, key: TemplateKey, roots: str, lab_init: int, log: Path
    ) -> socket.socket | None:
        """Fork a new fork server (a Python that forks ranks) into a lab, and return its control socket.

        It is a fork of the template with the same key, a Python that has imported the modules
        outside of any lab. The template is started if there is none yet. At most _KEPT templates
        are kept.

        Args:
            key: What the fork server must have imported, and in which environment.
            roots: Folders of holmes_lab and holmes_ext, as in a path variable.
            lab_init: PID of the init of the lab's PID namespace.
            log: File for the output of the fork server.

        Returns:
            None if the lab is in another user namespace, which a template cannot enter, or if the template
            was killed. The lab must then start a fork server by itself.

        Raises:
            HolmesError: The modules cannot be imported.
        """
        if os.readlink(f"/proc/{lab_init}/ns/user") != os.readlink("/proc/self/ns/user"):
            return None
        template = self._templates.pop(key, None) or self._start(key, roots)
        self._templates[key] = template
        while len(self._templates) > _KEPT:
            oldest = self._templates.pop(next(iter(self._templates)))
            oldest.control.close()  # it ends after the fork servers that it has forked
            self._retired.append(oldest)

        def fork(descriptors: list[int]) -> None:
            """Let the template fork a fork server into the lab, with its control socket and its log."""
            wire.send(template.control, {"init": lab_init}, descriptors)

        try:
            return fork_server.start(fork, log, key.modules)
        except (BrokenPipeError, ConnectionResetError):  # somebody has killed the template
            self._retired.append(self._templates.pop(key))
            return None

    def close(self) -> None:
        """End all templates, and return when they are gone."""
        templates = [*self._templates.values(), *self._retired]
        self._templates.clear()
        self._retired.clear()
        for template in templates:
            template.control.close()
        for template in templates:
            template.process.wait()

    def _start(self, key: TemplateKey, roots: str) -> _Template:
        """Start a template (a Python that labs fork), and return it when it has imported the modules.

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
                fork_server.TEMPLATE_BOOT,
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
                control = fork_server.start(spawn, Path(folder, "log"), key.modules)
        except HolmesError:
            started[0].kill()  # threads of a module might keep it from ending
            started[0].wait()
            raise
        return _Template(started[0], control)
