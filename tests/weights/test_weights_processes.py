"""Weights between processes over loopback: complete or not at all, whoever is killed and whatever breaks."""

import json
import os
import resource

import pytest
from weights_runs import Link, Process, free_port, holmes, until

MB = 10**6
SIZE = 40 * MB


class Run:
    """A coordinator, and the receivers and links of a test."""

    def __init__(self, folder):
        self.folder = folder
        self.home = folder / "state"
        self.port = free_port()
        self.processes = []
        self.links = []
        self.serve = self.start_serve()

    def start_serve(self):
        serve = self._started("join", "serve", "--host", "127.0.0.1", "--port", self.port)
        until(lambda: any("jobs meet" in line for line in serve.lines))
        return serve

    def _started(self, *arguments, **more):
        process = Process(*arguments, home=self.home, **more)
        self.processes.append(process)
        return process

    def receive(self, directory, *arguments, site="east", port=None, **more):
        return self._started(
            "weights",
            "receive",
            self.folder / directory,
            "--join",
            f"{site}@127.0.0.1:{port or self.port}",
            "--json",
            *arguments,
            **more,
        )

    def link(self, rate=0.0):
        link = Link(self.port, rate)
        self.links.append(link)
        return link

    def invite(self, site, port):
        """Let a receiver that calls another port (a Link) join."""
        file = self.folder / f"{site}-{port}.json"
        result = holmes(self.home, "join", "invite", site, "--port", self.port, "--output", file)
        assert result.returncode == 0, result.stderr
        return ("--invitation", file)

    def publish(self, version, *arguments, size=SIZE):
        """Publish a version of random bytes; return its folder."""
        folder = self.folder / f"made{version}"
        folder.mkdir()
        (folder / "model.bin").write_bytes(os.urandom(size))
        (folder / "config.json").write_text(f'{{"version": {version}}}')
        result = self.command("publish", folder, "--version", version, *arguments)
        assert result.returncode == 0, result.stderr
        return folder

    def command(self, action, *arguments):
        return holmes(self.home, "weights", action, *arguments, "--port", self.port)

    def is_same(self, directory, version):
        """Return whether a receiver has exactly the files of a version."""
        copy = self.folder / directory / str(version)
        made = self.folder / f"made{version}"
        return all((copy / f.name).read_bytes() == f.read_bytes() for f in made.iterdir())

    def current(self, directory):
        try:
            return int(os.readlink(self.folder / directory / "current"))
        except FileNotFoundError:
            return None

    def close(self):
        for process in self.processes:
            process.kill()
        for link in self.links:
            link.close()


@pytest.fixture
def run(tmp_path):
    running = Run(tmp_path)
    yield running
    running.close()


def staged_bytes(receiver):
    """Return the bytes of a receiver's version 1 that came in its last try; None: it is not complete."""
    for event in receiver.events:
        if event["event"] == "staged" and event["version"] == 1:
            return event["pulled_bytes"]
    return None


def never_half(run, directory):
    """Assert that no version is in a folder."""
    assert not [name for name in os.listdir(run.folder / directory) if not name.startswith(".")]


def test_two_sites_switch_together_and_each_pulls_once(run):
    hosts = {"e1": "east", "e2": "east", "w1": "west"}
    receivers = {name: run.receive(name, site=site) for name, site in hosts.items()}
    status = ("weights", "status", f"127.0.0.1:{run.port}")
    until(lambda: holmes(run.home, *status).stdout.count("east") == 2)
    run.publish(1, "--stage")
    until(lambda: all(staged_bytes(receiver) for receiver in receivers.values()))
    assert [run.current(name) for name in hosts] == [None] * 3  # staged, not committed
    assert run.command("commit", 1).returncode == 0
    until(lambda: all(run.current(name) == 1 for name in hosts))
    assert all(run.is_same(name, 1) for name in hosts)
    run.publish(2, "--parent", 1, size=MB)
    until(lambda: all(run.current(name) == 2 for name in hosts))
    text = holmes(run.home, *status, "--json").stdout
    sent = json.loads(text)["sent_bytes"]
    total = SIZE + MB + 2 * len('{"version": 1}')
    assert sent == {"east": total, "west": total}


def test_a_latecomer_gets_the_newest_full_version_and_its_deltas(run):
    run.publish(1, size=MB)
    run.publish(2, size=MB)
    run.publish(3, "--parent", 2, size=MB)
    run.publish(4, "--parent", 3, size=MB)
    late = run.receive("late", "--once")
    assert late.wait() == 0, late.lines
    numbers = sorted(name for name in os.listdir(run.folder / "late") if name.isdecimal())
    assert numbers == ["2", "3", "4"] and run.current("late") == 4
    assert all(run.is_same("late", version) for version in (2, 3, 4))


def test_a_killed_receiver_goes_on_where_it_was(run):
    run.publish(1)
    link = run.link(rate=3 * MB)
    invitation = run.invite("east", link.port)
    first = run.receive("e", *invitation, "--streams", "4", port=link.port)
    until(lambda: link.passed > SIZE * 0.9)
    first.kill()
    never_half(run, "e")
    fast = run.link()
    second = run.receive("e", *run.invite("east", fast.port), "--once", port=fast.port)
    assert second.wait() == 0, second.lines
    assert staged_bytes(second) < SIZE * 0.8 and run.is_same("e", 1)


def test_a_killed_sender_and_a_cut_link(run):
    run.publish(1)
    link = run.link(rate=4 * MB)
    receiver = run.receive("e", *run.invite("east", link.port), "--once", port=link.port)
    until(lambda: link.passed > SIZE * 0.3)
    link.cut()
    until(lambda: link.passed > SIZE * 0.6)
    run.serve.kill()
    never_half(run, "e")
    run.start_serve()
    assert receiver.wait(30) == 0, receiver.lines
    assert run.is_same("e", 1) and run.current("e") == 1
    assert link.passed < 2.2 * SIZE


def test_another_host_takes_over(run):
    run.publish(1)
    link = run.link(rate=4 * MB)
    invitation = run.invite("east", link.port)
    first = run.receive("e1", *invitation, port=link.port)
    until(lambda: link.passed > SIZE * 0.2)
    second = run.receive("e2", *invitation, "--once", port=link.port)
    until(lambda: link.passed > SIZE * 0.4)
    assert staged_bytes(second) is None
    first.kill()
    assert second.wait(30) == 0, second.lines
    assert run.is_same("e2", 1)


def test_a_full_disk(run):
    run.publish(1)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2))

    receiver = run.receive("e", preexec=limit)
    assert receiver.wait() == 2
    errors = [line for line in receiver.lines if "Traceback" in line or "written" in line]
    assert len(errors) == 1 and "File too large" in errors[0] and "make space" in errors[0]
    never_half(run, "e")
    again = run.receive("e", "--once")
    assert again.wait() == 0 and run.is_same("e", 1)


def test_a_published_copy_that_was_changed(run):
    run.publish(1)
    store = next(run.home.rglob("weights"))
    with open(store / "1" / "model.bin", "r+b") as file:
        file.seek(20 * MB)
        file.write(b"changed")
    receiver = run.receive("e")
    assert receiver.wait() == 2
    assert "model.bin is not what its manifest says" in receiver.lines[-1]
    never_half(run, "e")


def test_bad_input(run):
    made = run.publish(1, size=MB)
    for arguments, message in (
        (("publish", made, "--version", 1), "published already"),
        (("publish", made, "--version", 3, "--parent", 2), "delta to 2, which is not published"),
        (("publish", run.folder / "none", "--version", 2), "is no folder"),
        (("publish", made, "--version", 2, "--keep", 0), "--keep 0 is not a number"),
        (("commit", 7), "version 7 is not published; published are: 1"),
    ):
        result = run.command(*arguments)
        assert result.returncode == 2 and message in result.stderr, result
        assert len(result.stderr.splitlines()) == 1
    for arguments, message in (
        (("x", "--join", "east"), "--join: 'east' is not NAME@HOST:PORT"),
        (("x", "--join", f"east@127.0.0.1:{run.port}", "--rate", "1kb/s"), "least limit"),
        (("x", "--join", f"east@127.0.0.1:{run.port}", "--streams", "99"), "--streams 99"),
    ):
        result = holmes(run.home, "weights", "receive", *arguments)
        assert result.returncode == 2 and message in result.stderr, result


def test_a_site_without_a_certificate_or_revoked_is_refused(run, tmp_path):
    run.publish(1, size=MB)
    elsewhere = holmes(
        tmp_path / "other",
        "weights",
        "receive",
        tmp_path / "x",
        "--join",
        f"e@127.0.0.1:{run.port}",
    )
    assert elsewhere.returncode == 2 and "no certificate" in elsewhere.stderr
    receiver = run.receive("e")
    until(lambda: run.current("e") == 1)
    assert holmes(run.home, "join", "revoke", "east", "--port", run.port).returncode == 0
    assert receiver.wait() == 2, receiver.lines
    assert "was revoked" in receiver.lines[-1]
