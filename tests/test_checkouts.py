"""Tests tests/checkouts.py, which clones git repositories that other tests need, each at a pinned commit.

It must not change an existing checkout, and must report which repositories it could not clone.
"""

import subprocess
import sys
from dataclasses import replace

import checkouts
import pytest


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Make a local git repository the only one that `checkouts.main` clones, and return its `Source`.

    The repository stands for the one of Megatron-LM. Its first commit is pinned; a second one is newer.
    """
    server = tmp_path / "server"
    server.mkdir()
    subprocess.run(["git", "init", "-q", server], check=True)
    author = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    for text in ("pinned", "newer"):
        (server / "pretrain_gpt.py").write_text(text)
        subprocess.run(["git", "-C", server, "add", "."], check=True)
        subprocess.run(["git", "-C", server, *author, "commit", "-qm", text], check=True)
    command = ["git", "-C", server, "rev-parse", "HEAD~1"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    first_commit = result.stdout.strip()

    megatron_lm = checkouts.PINNED[0]  # PINNED: the repositories that checkouts.main clones
    source = replace(megatron_lm, url=f"file://{server}", commit=first_commit)
    monkeypatch.setattr(checkouts, "PINNED", (source,))
    monkeypatch.setenv(checkouts.VARIABLE, str(tmp_path / "checkouts"))  # the folder for the clones
    return source


def test_the_pinned_commit_is_cloned_once(source, capsys):
    assert checkouts.find_checkout("Megatron-LM") is None
    assert checkouts.main() == 0
    folder = checkouts.find_checkout("Megatron-LM")
    assert (folder / "pretrain_gpt.py").read_text() == "pinned"
    assert "cloned main of" in capsys.readouterr().out

    (folder / "pretrain_gpt.py").write_text("changed by its user")
    assert checkouts.main() == 0
    assert (folder / "pretrain_gpt.py").read_text() == "changed by its user"
    assert capsys.readouterr().out == f"Megatron-LM: found in {folder}\n"


def test_another_commit_is_kept_and_named(source, capsys):
    checkouts.main()
    folder = checkouts.find_checkout("Megatron-LM")
    newer_commit = "origin/HEAD"
    subprocess.run(["git", "-C", folder, "checkout", "-q", newer_commit], check=True)
    capsys.readouterr()  # drops what was printed so far
    assert checkouts.main() == 0
    assert f"(the tests were last run with {source.commit[:10]})" in capsys.readouterr().out
    assert (folder / "pretrain_gpt.py").read_text() == "newer"


@pytest.mark.parametrize("url", ["file:///nowhere", "https://nowhere.invalid/NVIDIA/Megatron-LM"])
def test_a_server_that_cannot_be_reached(source, monkeypatch, capsys, url):
    monkeypatch.setattr(checkouts, "PINNED", (replace(source, url=url),))
    assert checkouts.main() == 1
    folder = checkouts.checkouts_folder() / "Megatron-LM"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Megatron-LM: MISSING (") and line.endswith(f"into {folder}")
    assert url in line and source.commit in line
    assert not folder.exists()


def test_a_server_that_does_not_answer_is_given_up(monkeypatch, tmp_path):
    git_that_hangs = tmp_path / "git"
    git_that_hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    git_that_hangs.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert checkouts._git("ls-remote", "x", timeout_s=0.2) == "no answer within 0.2 s"


def test_a_folder_without_the_script_is_not_overwritten(source, capsys):
    folder = checkouts.checkouts_folder() / "Megatron-LM"
    folder.mkdir(parents=True)
    assert checkouts.main() == 1
    assert "exists, but contains no pretrain_gpt.py" in capsys.readouterr().out
    assert list(folder.iterdir()) == []


def test_each_nccl_is_cloned_into_the_folder_in_which_holmes_ext_looks_for_it(
    tmp_path, monkeypatch
):
    """The variable HOLMES_NCCL_SOURCE names a checkout of any version, so it moves only the first folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HOLMES_NCCL_SOURCE", raising=False)
    nccl, nccl_of_new_torch = [
        source for source in checkouts.PINNED if source.url.endswith("/nccl")
    ]
    assert nccl.folder() == tmp_path / "holmes_ext" / "nccl"
    assert nccl_of_new_torch.folder() == tmp_path / "holmes_ext" / "nccl-2.30.7"
    monkeypatch.setenv("HOLMES_NCCL_SOURCE", str(tmp_path / "mine"))
    assert nccl.folder() == tmp_path / "mine"
    assert nccl_of_new_torch.folder() == tmp_path / "holmes_ext" / "nccl-2.30.7"


def test_the_program_runs_before_anything_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(checkouts.VARIABLE, raising=False)
    monkeypatch.delenv("HOLMES_NCCL_SOURCE", raising=False)
    for source in checkouts.PINNED:  # exists already, so nothing is cloned
        expected = source.folder() / source.expected_file
        expected.parent.mkdir(parents=True)
        expected.write_text("")
    without_packages = [sys.executable, "-I", "-S", checkouts.__file__]
    result = subprocess.run(without_packages, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count(": found in ") == len(checkouts.PINNED)
