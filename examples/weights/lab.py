"""Runs the example in the lab: a trainer, and two sites of two hosts, 100 Mb/s and 40 ms away.

The lab (holmes_lab) emulates hosts and networks on this machine: each host is a network namespace.

The receivers of site west are killed while version 4 arrives, and started again. At the end, all hosts must
have the last version, bit for bit, and the generators must generate the trainer's tokens.
"""

import argparse
import filecmp
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from holmes_lab import Lab
from holmes_lab.process.ranks import Program

from holmes_ext.cluster.spec import load_spec

HERE = Path(__file__).resolve().parent
HOLMES = (sys.executable, "-m", "holmes_ext.cli.main")
PORT = 29600
HOSTS = {"east0": "east", "east1": "east", "west0": "west", "west1": "west"}  # host -> its site
GENERATORS = ("east0", "west0")
KILLED_AT = 4  # version during which the receivers of west are killed
LIMIT_S = 300.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=8, help=f"at least {KILLED_AT}")
    parser.add_argument("--folder", help="for all files (default: a temporary one)")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as temporary,
        Lab(load_spec(HERE / "lab.toml")) as lab,
        running(lab, Path(options.folder or temporary).absolute()) as example,
    ):
        problems = example.run(options.versions)
    for problem in problems:
        print(f"example: {problem}")
    if not problems:
        print(f"example: all hosts have version {options.versions}, bit for bit; same tokens")
    return 1 if problems else 0


@contextmanager
def running(lab, folder):
    """Context manager that yields an Example, and ends all of its processes when the block ends.

    No process runs before Example.run().

    Args:
        lab: The running lab.
        folder: Absolute path of the folder for all files.
    """
    example = Example(lab, folder)
    try:
        yield example
    finally:
        example.close()


class Example:
    """Processes of the example: service, trainer, receivers and generators, each on an emulated host.

    Args:
        lab: The running lab, which starts programs on its hosts.
        folder: Path of the folder for all files: each host has a sub-folder.
    """

    def __init__(self, lab, folder):
        self._lab = lab
        self._folder = folder
        self._address = next(node.address for node in lab.nodes if node.name == "trainer0")
        self.jobs = {}  # name, such as "receiver west0" -> running program
        self.lines = {}  # the same name -> lines that the program has printed
        self._is_closed = False

    def run(self, versions):
        """Run all processes until all hosts have the last version.

        Args:
            versions: Number of versions that the trainer publishes.

        Returns:
            Descriptions of problems, such as a file that differs; an empty list if there are none.
        """
        self._start("serve", "trainer0", [*HOLMES, "join", "serve", "--port", str(PORT)])
        until(lambda: self._has("serve", "jobs meet"))
        for host in HOSTS:
            self._invite(host)
            self._start_receiver(host)
        for host in GENERATORS:
            arguments = [self._directory(host), "--until", versions]
            self._start_script("generator.py", host, arguments)
        model = ["--hidden", 256, "--vocabulary", 8192, "--full-every", 3, "--pause", 1.5]
        self._start_script("trainer.py", "trainer0", ["--versions", versions, *model])

        until(lambda: self._staging("west0").exists())
        self._kill_and_restart("west")
        for host in ("trainer0", *GENERATORS):
            self.jobs[f"script {host}"].wait(LIMIT_S)
        until(lambda: all(self._current(host) == versions for host in HOSTS))
        self._show("status", "trainer0", [*HOLMES, "weights", "status"])
        return [*self._wrong_files(versions), *self._wrong_tokens()]

    def close(self):
        """End all processes."""
        self._is_closed = True
        for job in self.jobs.values():
            job.kill()
            job.wait()

    def _kill_and_restart(self, site):
        hosts = [host for host in HOSTS if HOSTS[host] == site]
        for host in hosts:
            self.jobs[f"receiver {host}"].kill()
            self.jobs[f"receiver {host}"].wait()
        print(f"example: the receivers of {site} are killed while version {KILLED_AT} arrives")
        until(lambda: self._has("script trainer0", f"published version {KILLED_AT}"))
        for host in hosts:
            self._start_receiver(host)
        print(f"example: the receivers of {site} are started again")

    def _wrong_files(self, versions):
        """Yield a description of each version on a host that differs from the published one."""
        for host in HOSTS:
            for published in self._store().glob("[0-9]*"):
                received = self._directory(host) / published.name
                names = [file.name for file in published.iterdir()]
                must_exist = int(published.name) == versions
                if not received.exists() and not must_exist:
                    continue  # removed because it is old, or older than the host's start
                same, *_ = filecmp.cmpfiles(published, received, names, shallow=False)
                if sorted(same) != sorted(names):
                    yield f"{host}: version {published.name} differs"

    def _wrong_tokens(self):
        """Yield a description of each generator that printed another digest or tokens than the trainer."""
        trained = self._versions("trainer0")
        for host in GENERATORS:
            generated = self._versions(host)
            if generated[-1] != trained[-1] or not set(generated) <= set(trained):
                yield f"{host}: {generated[-1]}, and the trainer: {trained[-1]}"

    def _versions(self, host):
        """Return the lines with digest and tokens of a version that the script on a host has printed."""
        return [line for line in self.lines[f"script {host}"] if line.startswith("version ")]

    def _store(self):
        return self._folder / "published"

    def _directory(self, host):
        return self._folder / host / "weights"

    def _staging(self, host):
        """Return the folder that exists while version KILLED_AT arrives at a host."""
        return self._directory(host) / ".holmes" / "staging" / str(KILLED_AT)

    def _current(self, host):
        """Return the committed version of a host; None: no version is committed yet."""
        link = self._directory(host) / "current"
        return int(os.readlink(link)) if link.is_symlink() else None

    def _invite(self, host):
        command = ["join", "invite", HOSTS[host], "--address", self._address, "--output"]
        self._start("invite", "trainer0", [*HOLMES, *command, self._invitation(host)]).wait()

    def _invitation(self, host):
        return self._folder / f"{host}.json"

    def _start_receiver(self, host):
        place = f"{HOSTS[host]}@{self._address}:{PORT}"
        command = [*HOLMES, "weights", "receive", self._directory(host), "--join", place]
        self._start(f"receiver {host}", host, [*command, "--invitation", self._invitation(host)])

    def _start_script(self, script, host, arguments):
        self._start(f"script {host}", host, [sys.executable, HERE / script, *arguments])

    def _show(self, name, host, command):
        self._start(name, host, command).wait()

    def _has(self, name, text):
        """Return whether a program has printed a line that contains a text."""
        return any(text in line for line in list(self.lines[name]))

    def _start(self, name, host, command):
        """Start a program on a host of the lab, and print its lines."""
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(self._folder / host / "state"),
            "HOLMES_WEIGHTS_STORE": str(self._store()),
            "OMP_NUM_THREADS": "1",  # the hosts of the lab share this machine's cores
            "HF_HUB_OFFLINE": "1",
        }
        lines = self.lines.setdefault(name, [])

        def on_line(rank, line, stream):
            lines.append(line)
            if stream == "stdout" and not self._is_closed:
                sys.stdout.write(f"{host}: {line}\n")  # whole lines: several threads print
                sys.stdout.flush()

        program = Program(host=host, argv=[str(part) for part in command], env=environment)
        self.jobs[name] = self._lab.start_programs([program], timeout=LIMIT_S, on_line=on_line)
        return self.jobs[name]


def until(condition):
    """Wait until a condition holds.

    Raises:
        TimeoutError: It does not hold within LIMIT_S seconds.
    """
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"the example has not ended within {LIMIT_S:g} s")
        time.sleep(0.02)


if __name__ == "__main__":
    raise SystemExit(main())
