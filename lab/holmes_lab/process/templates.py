"""Templates: Python processes that have imported a job's modules once, for all labs of this process.

A fork server (fork_server.py) is a Python that has imported the modules and forks ranks. It belongs
to one lab, because it is in the lab's PID namespace. Its imports cost seconds of a core. A template
has imported the modules outside of any lab. A lab that needs a fork server gets a fork of the
template, and the fork needs no imports:

    Templates --socket--> template --forks--> guard --forks--> fork server --> job supervisor --> ranks
    (this process)        (outside of all labs)                (in the lab's PID namespace)

    guard          The parent of the fork server. A process cannot enter a PID namespace itself,
                   only let its next child begin in it. So the template forks the guard, and the
                   guard forks the fork server. The guard then waits until the fork server has
                   ended, and reaps it. Without a guard, the machine's init would have to reap the
                   fork server, and the lab's end would wait for that.
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
    """All inputs on which the imports of a preloaded Python depend; labs with equal keys share it."""

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
    """Preloaded Python processes (templates): the labs of this process fork them, to save imports.

    The class is a context manager. The templates exist inside the `with` block, and all labs must
    end in it:

        with Templates() as Lab.templates:
            ...  # each Lab here forks its preloaded Pythons from a template
    """

    def __init__(self) -> None:
        #: Python processes that labs can fork, the least recently used process first.
        self._templates: dict[TemplateKey, _Template] = {}
        #: Templates that no lab can use any more. Their control sockets are closed, but they end
        #: only after the processes that they have forked. close() waits for them.
        self._retired: list[_Template] = []

    def __enter__(self) -> Templates:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork_server(
        self, key: TemplateKey, roots: str, lab_init: int, log: Path
    ) -> socket.socket | None:
        """Fork a fork server into a lab from a template, and return the socket that controls it.

        A fork server is a Python in a lab that has imported some modules, and forks ranks. A
        template is a Python outside of the labs that has imported the same modules, so its fork
        imports nothing. The template is started if there is none for this key. The _KEPT templates
        that were used last are kept.

        Args:
            key: The modules that the fork server must have imported, and its environment.
            roots: Folders that contain the packages holmes_lab and holmes_ext, separated by colons.
            lab_init: PID of the init of the lab's PID namespace.
            log: File for the output of the fork server.

        Returns:
            None if the lab is in another user namespace (a template cannot enter it), or if the template was
            killed. The lab must then start a fork server by itself.

        Raises:
            HolmesError: The modules cannot be imported.
        """
        if os.readlink(f"/proc/{lab_init}/ns/user") != os.readlink("/proc/self/ns/user"):
            return None
        template = self._templates.pop(key, None) or self._start(key, roots)
        self._templates[key] = template  # at the end of the dictionary, as the last that was used
        while len(self._templates) > _KEPT:
            least_recent_key = next(iter(self._templates))
            least_recent = self._templates.pop(least_recent_key)
            least_recent.control.close()  # it ends after the fork servers that it has forked
            self._retired.append(least_recent)

        def request_fork(descriptors: list[int]) -> None:
            """Let the template fork a fork server with a control socket and a log."""
            wire.send(template.control, {"init": lab_init}, descriptors)

        try:
            return fork_server.start(request_fork, log, key.modules)
        except (BrokenPipeError, ConnectionResetError):  # somebody has killed the template
            self._retired.append(self._templates.pop(key))
            return None

    def close(self) -> None:
        """End all templates, and return when their processes are gone.

        A template is a Python process outside of the labs that has imported modules. Its forks, the
        fork servers, belong to labs. A template ends only after its fork servers, and a fork server
        ends with its lab. So all labs must have ended before this call.
        """
        templates = [*self._templates.values(), *self._retired]
        self._templates.clear()
        self._retired.clear()
        for template in templates:
            template.control.close()
        for template in templates:
            template.process.wait()

    def _start(self, key: TemplateKey, roots: str) -> _Template:
        """Start a template (a Python that labs fork), and return it when it has imported the modules.

        Args:
            key: The Python, its modules, its environment and its working directory.
            roots: Folders that contain the packages holmes_lab and holmes_ext, separated by colons.

        Raises:
            HolmesError: The modules cannot be imported.
        """
        started: list[subprocess.Popen[bytes]] = []

        def start_process(descriptors: list[int]) -> None:
            """Start the template's Python process, and append it to the list `started` of _start().

            fork_server.start() calls this function with the two descriptors, and then waits until the
            process has imported its modules.

            Args:
                descriptors: The template's end of its control socket, and the file for its output.
            """
            control, output = descriptors
            # The program TEMPLATE_BOOT imports holmes_lab from `roots`, and calls serve_template().
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
            # The output of the template matters only if it cannot start, so its file is removed
            # afterwards. Otherwise it would remain if this process is killed.
            with tempfile.TemporaryDirectory(prefix="holmes-template-") as folder:
                control = fork_server.start(start_process, Path(folder, "log"), key.modules)
        except HolmesError:
            started[0].kill()  # threads of a module might keep it from ending
            started[0].wait()
            raise
        return _Template(started[0], control)
