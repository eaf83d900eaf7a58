"""Files are written whole or not at all.

Links of other users are not followed, and nothing waits for anybody without end.
"""

import os
import stat
from pathlib import Path

import pytest

from holmes_ext import files
from holmes_ext.errors import HolmesError
from holmes_ext.files import require_own, save, write_whole

OTHER_USER = 65534


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path, link = tmp_path / "plan.json", tmp_path / "link"
    link.symlink_to(path)
    write_whole(path, "one")
    path.chmod(0o640)
    write_whole(link, "two")
    assert (path.read_text(), path.stat().st_mode & 0o777, link.is_symlink()) == (
        "two",
        0o640,
        True,
    )

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        HolmesError, match=f"^{path}: the plan cannot be written .No space left on device."
    ):
        save(path, "three", "the plan")
    assert path.read_text() == "two" and sorted(tmp_path.iterdir()) == [link, path], (
        "it leaves a file"
    )


def test_what_is_no_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path, monkeypatch):
    """`--output PIPE` hung."""
    monkeypatch.setattr(files, "_PIPE_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HolmesError, match="pipe: the plan cannot be written .nobody reads it"):
        save(tmp_path / "pipe", "text", "the plan")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(HolmesError, match="nobody reads it"):  # more than the pipe holds
        save(tmp_path / "pipe", "x" * 2**21, "the plan")
    os.close(reader)


@pytest.mark.parametrize("folder", ["/proc/self/fd", "/dev/fd"])
def test_what_is_a_link_of_the_kernel_is_written_to(tmp_path, folder):
    """`--output /dev/stdout`, where standard output is a pipe or a file; `--output >(...)`."""
    reading, writing = os.pipe()
    write_whole(f"{folder}/{writing}", "text")
    assert os.read(reading, 9) == b"text"
    os.close(reading), os.close(writing)
    with open(tmp_path / "file", "w") as file:
        write_whole(f"{folder}/{file.fileno()}", "text")
    assert (tmp_path / "file").read_text() == "text"


@pytest.fixture
def as_root():
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")


@pytest.mark.usefixtures("as_root")
def test_a_link_of_another_user_is_not_followed(tmp_path):
    """In a folder such as /tmp, it led root's file to a place that the other user chose."""
    victim, link, second = tmp_path / "victim", tmp_path / "plan.json", tmp_path / "second"
    victim.write_text("mine")
    link.symlink_to(victim)
    os.lchown(link, OTHER_USER, OTHER_USER)
    second.symlink_to("plan.json")  # a link of this user that leads to the other one's
    for path in (link, second):
        with pytest.raises(
            HolmesError, match=f"cannot be written .it is a link of user {OTHER_USER}"
        ):
            save(path, "theirs", "the plan")
    assert victim.read_text() == "mine" and link.is_symlink()


def test_links_that_lead_in_a_circle_end_in_one_line(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(HolmesError, match="a: the plan cannot be written .Too many levels"):
        save(tmp_path / "a", "x", "the plan")
    (tmp_path / "c").symlink_to("new")
    write_whole(tmp_path / "c", "x")
    assert (tmp_path / "new").read_text() == "x"


def test_the_name_of_a_temporary_file_cannot_be_prepared(tmp_path, monkeypatch):
    """The name had only the number of the process: a link that had this name led the text elsewhere."""
    victim, path = tmp_path / "victim", tmp_path / "plan.json"
    victim.write_text("mine")
    (tmp_path / f".plan.json.{os.getpid()}").symlink_to(victim)
    write_whole(path, "text")
    assert victim.read_text() == "mine"
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "0")
    (tmp_path / ".holmes-0").symlink_to(victim)
    with pytest.raises(OSError):
        write_whole(path, "more")
    assert victim.read_text() == "mine" and path.read_text() == "text"


def test_bytes_are_written_too(tmp_path):
    write_whole(tmp_path / "picture.png", b"\x89PNG")
    assert (tmp_path / "picture.png").read_bytes() == b"\x89PNG"


def test_a_new_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "usual").write_text("x")
    write_whole(tmp_path / "new", "x")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "new")]
    assert modes[0] == modes[1]


def test_who_may_change_a_file_is_checked(tmp_path):
    folder = tmp_path / "cache"
    require_own(folder, "the cache", "name another one")  # it does not exist
    folder.mkdir()
    require_own(folder, "the cache", "name another one")
    folder.chmod(0o777)
    with pytest.raises(
        HolmesError, match="cache: the cache can be changed by every user .mode 777.; name"
    ):
        require_own(folder, "the cache", "name another one")


@pytest.mark.usefixtures("as_root")
def test_files_of_other_users_are_not_trusted(tmp_path):
    path = Path(tmp_path, "cache")
    path.mkdir()
    os.chown(path, OTHER_USER, OTHER_USER)
    with pytest.raises(HolmesError, match=f"cache: the cache belongs to user {OTHER_USER}; name"):
        require_own(path, "the cache", "name another one")
