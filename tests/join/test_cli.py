"""`holmes join`: status as a table and JSON, its exit status, and one line for what cannot be."""

import json
import os
import resource
import stat
import subprocess
import sys

import pytest
import torch
from joined_jobs import coordinator, joined_of, run_at

from holmes_ext.cli.main import main
from holmes_ext.errors import HolmesError
from holmes_ext.join.settings import parse_outer


def test_status(capsys):
    with coordinator() as server:
        where = f"127.0.0.1:{server.port}"
        job = joined_of(
            torch.nn.Linear(3, 4), "east", server.port, parse_outer("every=2,fragments=1,delay=0")
        )
        job.begin()
        for _ in range(2):
            job.after_step()
        assert main(["join", "status", where]) == 0
        out = capsys.readouterr().out
        assert "round 1" in out and "east" in out and "commit (east 1.00)" in out
        assert main(["join", "status", where, "--json"]) == 0
        (one,) = json.loads(capsys.readouterr().out)["jobs"]
        assert (one["job"], one["state"], one["rounds"]) == ("east", "in", 1)
        job.end()
        assert main(["join", "status", where]) == 1  # it is gone
        assert "gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["status", "nowhere"], "'nowhere' is not HOST:PORT"),
        (["status", "127.0.0.1:1"], "no certificate for 127.0.0.1:1"),
        (["status", "--plain"], "--plain was removed; all traffic of joined jobs is encrypted"),
        (["serve", "--outer", "every=x"], "join serve: --outer: every='x' is not steps"),
        (["serve", "--outer", "part=0/2"], "--outer part=0/2 belongs to a job"),
        (["invite", "east", "--port", "9"], "there is no run with a CA; start `holmes join serve`"),
        (["invite", "a b", "--port", "9"], "'a b' is no name of a job"),
        (["invite", "east", "--address", "a b"], "--address: 'a b:29600' has no host name"),
        (["revoke", "east", "--port", "9"], "there is no run with a CA; start `holmes join serve`"),
        (["serve", "--port", "70000"], "--port 70000 is not a port from 0 to 65535"),
    ],
)
def test_one_line(arguments, why, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # where nobody has certificates
    assert main(["join", *arguments]) == 2
    err = capsys.readouterr().err
    assert why in err and err.count("\n") == 1


def test_a_port_that_is_taken(capsys):
    with coordinator() as server:
        assert main(["join", "serve", "--host", "127.0.0.1", "--port", str(server.port)]) == 2
        assert str(server.port) in capsys.readouterr().err


def test_a_variable_of_the_token_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("HOLMES_JOIN_TOKEN", "x")
    assert main(["join", "status", "127.0.0.1:1"]) == 2
    assert "HOLMES_JOIN_TOKEN was removed; run `holmes join invite" in capsys.readouterr().err


@pytest.mark.parametrize(
    "full_name, named", [("gate.example.org", "gate.example.org"), ("localhost", "gate")]
)
def test_an_invitation_names_this_host_as_others_do(
    full_name, named, tmp_path, capsys, monkeypatch
):
    """Not localhost, which is what getfqdn() returns if /etc/hosts has "127.0.0.1 localhost gate"."""
    monkeypatch.setattr("socket.getfqdn", lambda: full_name)
    monkeypatch.setattr("socket.gethostname", lambda: "gate")
    run_at(29600)
    assert main(["join", "invite", "east", "--output", str(tmp_path / "east.json")]) == 0
    assert f"--holmes-join east@{named}:29600 " in capsys.readouterr().out


def test_invite_and_revoke(tmp_path, capsys):
    port = 3  # nobody listens there; the commands need the state folder only
    run_at(port)
    file = tmp_path / "east.json"
    invite = [
        "join",
        "invite",
        "east",
        "--port",
        str(port),
        "--address",
        "gate",
        "--output",
        str(file),
    ]
    assert main(invite) == 0
    assert f"--holmes-join east@gate:3 --holmes-join-invitation {file}" in capsys.readouterr().out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert main(invite) == 2  # an existing file is not replaced
    assert "exists already; name a new file" in capsys.readouterr().err
    assert main(["join", "invite", "east", "--port", str(port)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["job"] == "east" and len(printed["secret"]) == 24
    assert printed["fingerprint"] == json.loads(file.read_text())["fingerprint"]
    assert main(["join", "revoke", "east", "--port", str(port)]) == 0
    assert "0 certificates, 2 open invitations" in capsys.readouterr().out
    assert main(["join", "revoke", "east", "--port", str(port)]) == 2
    assert "no job 'east' is invited; invited are: none" in capsys.readouterr().err


def test_serve_takes_all_descriptors_that_it_may_have_and_says_its_settings():
    """1024 are what many systems give at first: connections of 500 ranks behind NAT."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256)); "
        "from holmes_ext.cli.main import main; "
        "main(['join', 'serve', '--host', '127.0.0.1', '--port', '0', '--outer', 'every=16'])"
    )
    serve = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    try:
        lines = [serve.stdout.readline() for _ in range(3)]
        assert "jobs meet at port" in lines[0] and "settings of the run: every=16" in lines[1]
        assert "`holmes join invite NAME --port" in lines[2]
        assert resource.prlimit(serve.pid, resource.RLIMIT_NOFILE) == (256, 256)
        port = lines[0].split("port ")[1].split()[0]
        with (
            pytest.raises(HolmesError, match="another coordinator serves the run"),
            run_at(int(port)).serving(),
        ):
            pass
    finally:
        serve.kill()
        serve.wait()
        serve.stdout.close()
