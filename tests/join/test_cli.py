"""`holmes join`: status as a table and JSON, its exit status, and one line for what cannot be."""

import json
import resource
import subprocess
import sys

import pytest
import torch
from joined_jobs import TOKEN, coordinator, joined_of

from holmes_ext.cli.main import main
from holmes_ext.join.settings import parse_outer


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("HOLMES_JOIN_TOKEN", TOKEN)


def test_status(token, capsys):
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
        (["status", "127.0.0.1:1"], "127.0.0.1:1"),
        (["serve", "--port", "70000"], "--port 70000 is not a port from 0 to 65535"),
    ],
)
def test_one_line(arguments, why, token, capsys):
    assert main(["join", *arguments]) == 2
    err = capsys.readouterr().err
    assert why in err and err.count("\n") == 1


def test_a_wrong_token_and_a_port_that_is_taken(token, monkeypatch, capsys):
    with coordinator() as server:
        assert main(["join", "serve", "--host", "127.0.0.1", "--port", str(server.port)]) == 2
        assert str(server.port) in capsys.readouterr().err
        monkeypatch.setenv("HOLMES_JOIN_TOKEN", "a token that is wrong")
        assert main(["join", "status", f"127.0.0.1:{server.port}"]) == 2
        assert "token" in capsys.readouterr().err
    monkeypatch.delenv("HOLMES_JOIN_TOKEN")
    assert main(["join", "status", "127.0.0.1:1"]) == 2
    assert "HOLMES_JOIN_TOKEN" in capsys.readouterr().err


def test_serve_takes_all_descriptors_that_it_may_have_and_names_an_open_token(tmp_path):
    """1024 are what many systems give at first: connections of 500 ranks behind NAT."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o644)
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256)); "
        "from holmes_ext.cli.main import main; "
        "main(['join', 'serve', '--host', '127.0.0.1', '--port', '0'])"
    )
    serve = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={"HOLMES_JOIN_TOKEN_FILE": str(path), "PYTHONPATH": ":".join(sys.path)},
    )
    try:
        lines = [serve.stdout.readline() for _ in range(2)]
        assert "jobs meet at port" in lines[0] and f"chmod 600 {path}" in lines[1]
        assert resource.prlimit(serve.pid, resource.RLIMIT_NOFILE) == (256, 256)
    finally:
        serve.kill()
        serve.wait()
        serve.stdout.close()
