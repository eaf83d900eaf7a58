"""Weights between processes over loopback: complete or not at all, whoever is killed and whatever breaks."""

import json
import os
import resource

import pytest
from weights_runs import Link, Process, free_port, holmes, until

MB = 10**6
SIZE = 4 * MB  # 16 chunks
#: Bytes that go into the chunks of both files of a version: config.json has them, too.
CONFIG = len('{"version": 1}')


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


def numbers(run, directory):
    """Return the versions in the folder of a receiver."""
    return sorted(int(name) for name in os.listdir(run.folder / directory) if name.isdecimal())


def status(run):
    where = f"127.0.0.1:{run.port}"
    return json.loads(holmes(run.home, "weights", "status", where, "--json").stdout)


def test_two_sites_of_three_hosts_switch_together_and_each_pulls_once(run):
    hosts = {f"{site}{number}": site for site in ("east", "west") for number in range(3)}
    receivers = {name: run.receive(name, site=site) for name, site in hosts.items()}
    until(lambda: len(status(run)["hosts"]) == len(hosts))
    run.publish(1, "--stage")
    until(lambda: all(staged_bytes(receiver) for receiver in receivers.values()))
    assert [run.current(name) for name in hosts] == [None] * 6  # staged, not committed
    assert run.command("commit", 1).returncode == 0
    until(lambda: all(run.current(name) == 1 for name in hosts))
    run.publish(2, "--parent", 1, size=MB)
    until(lambda: all(run.current(name) == 2 for name in hosts))
    assert all(run.is_same(name, version) for name in hosts for version in (1, 2))
    total = SIZE + MB + 2 * CONFIG
    assert status(run)["sent_bytes"] == {"east": total, "west": total}


def test_a_latecomer_gets_the_newest_full_version_and_its_deltas(run):
    run.publish(1, size=MB)
    run.publish(2, size=MB)
    run.publish(3, "--parent", 2, size=MB)
    run.publish(4, "--parent", 3, size=MB)
    late = run.receive("late", "--once")
    assert late.wait() == 0, late.lines
    assert numbers(run, "late") == [2, 3, 4] and run.current("late") == 4
    assert all(run.is_same("late", version) for version in (2, 3, 4))


def test_fifty_versions_and_hosts_that_are_behind(run):
    """A host that follows has all 50; hosts 1, 5 and 20 behind get the missing ones, and nothing twice."""
    size = 300_000
    follower = run.receive("follower", site="west")
    behind = {f"behind{count}": count for count in (20, 5, 1)}
    run.publish(1, size=size)
    for version in range(2, 51):
        for name, count in behind.items():
            if version == 51 - count:
                assert run.receive(name, "--once").wait() == 0
        run.publish(version, "--parent", version - 1, size=size)
    until(lambda: run.current("follower") == 50)
    before = status(run)["sent_bytes"]["east"]
    for name, count in behind.items():
        receiver = run.receive(name, "--once")
        assert receiver.wait() == 0, receiver.lines
        staged = [each["version"] for each in receiver.events if each["event"] == "staged"]
        assert staged == list(range(51 - count, 51)) and run.current(name) == 50
    made = [
        each.stat().st_size for n in range(31, 51) for each in (run.folder / f"made{n}").iterdir()
    ]
    one_of = sum(made) / 20
    assert status(run)["sent_bytes"]["east"] - before == one_of * (20 + 5 + 1)
    for name in ("follower", *behind):
        assert numbers(run, name) == list(range(1, 51))
        assert all(run.is_same(name, version) for version in range(1, 51))
    follower.kill()


def test_a_killed_receiver_goes_on_where_it_was(run):
    run.publish(1)
    link = run.link(rate=4 * MB)
    invitation = run.invite("east", link.port)
    first = run.receive("e", *invitation, port=link.port)
    until(lambda: link.passed > SIZE * 0.7)
    first.kill()
    never_half(run, "e")
    second = run.receive("e", *run.invite("east", run.port), "--once")
    assert second.wait() == 0, second.lines
    assert staged_bytes(second) < SIZE * 0.7 and run.is_same("e", 1)


def test_a_killed_sender_and_a_cut_link(run):
    run.publish(1)
    link = run.link(rate=2 * MB)
    receiver = run.receive("e", *run.invite("east", link.port), "--once", port=link.port)
    until(lambda: link.passed > SIZE * 0.3)
    link.cut()
    until(lambda: link.passed > SIZE * 0.6)
    run.serve.kill()
    never_half(run, "e")
    run.start_serve()
    assert receiver.wait() == 0, receiver.lines
    assert run.is_same("e", 1) and run.current("e") == 1
    assert link.passed < 2.2 * SIZE


def test_another_host_takes_over(run):
    run.publish(1)
    link = run.link(rate=2 * MB)
    invitation = run.invite("east", link.port)
    first = run.receive("e1", *invitation, port=link.port)
    until(lambda: link.passed > SIZE * 0.2)
    second = run.receive("e2", *invitation, "--once", port=link.port)
    until(lambda: link.passed > SIZE * 0.5)
    assert staged_bytes(second) is None
    first.kill()
    assert second.wait() == 0, second.lines
    assert run.is_same("e2", 1)
    assert staged_bytes(second) == SIZE + CONFIG
    assert link.passed < 1.9 * SIZE  # what came through the first host is not pulled again


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
        file.seek(2 * MB)
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
        (("--join", "east"), "--join: 'east' is not NAME@HOST:PORT"),
        (("--join", f"east@127.0.0.1:{run.port}", "--rate", "1kb/s"), "least limit"),
        (("--join", f"east@127.0.0.1:{run.port}", "--streams", "99"), "--streams 99"),
    ):
        result = holmes(run.home, "weights", "receive", run.folder / "site", *arguments)
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


def test_a_receiver_without_a_service_ends_with_one_line(run, tmp_path, monkeypatch):
    invitation = run.invite("east", run.port)
    run.serve.kill()
    monkeypatch.setattr("holmes_ext.weights.cli._CERTIFICATE_S", 0.1)
    address = f"127.0.0.1:{run.port}"
    command = ("weights", "receive", tmp_path / "x", "--join", f"east@{address}", *invitation)
    result = holmes(tmp_path / "other", *command)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert f"no coordinator answers at {address}" in line and "`holmes join serve` running" in line
