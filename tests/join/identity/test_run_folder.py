"""The state folder of `holmes join serve`: its CA, invitations, revocations, and what is refused there."""

import errno
import os
import stat

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.join.identity import private_files
from holmes_ext.join.identity.invitation import Invitation, read_invitation
from holmes_ext.join.identity.private_files import make_private_folder, read_private, write_private
from holmes_ext.join.identity.run_folder import RunFolder
from holmes_ext.join.sockets.certificates import fingerprint_of, make_key, make_request


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.make()
    return folder


def redeemed(run, job):
    """Return the certificate of a newly invited job."""
    invitation = run.invite(job, "gate:29600")
    return run.redeem(job, invitation.secret, make_request(make_key())).certificate


def test_a_restart_finds_the_ca(run):
    authority = run.authority
    run.make()
    assert run.authority == authority
    assert RunFolder(run.path).credentials().contexts is not None
    for path in (run.path, *run.path.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_ca_of_each_run_has_another_key(run, tmp_path):
    """It followed from the token, which could be guessed from a certificate offline."""
    other = RunFolder(tmp_path / "other")
    other.make()
    assert run.authority != other.authority


def test_an_invitation_is_for_one_key(run):
    invitation = run.invite("east", "gate:29600")
    assert invitation.job == "east" and len(invitation.secret) == 24  # 144 bits in base 64
    request = make_request(make_key())
    first = run.redeem("east", invitation.secret, request)
    assert run.redeem("east", invitation.secret, request) == first, "a reply may be lost"
    with pytest.raises(HolmesError, match="the invitation of job 'east' was used already"):
        run.redeem("east", invitation.secret, make_request(make_key()))


def test_the_secret_is_not_in_the_folder(run):
    secret = run.invite("east", "gate:29600").secret
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert files and not any(secret in path.read_text() or secret in path.name for path in files)


def test_a_secret_that_serve_did_not_draw_is_refused(run):
    invitation = run.invite("east", "gate:29600")
    for job, secret in (("east", "a weak token"), ("west", invitation.secret), ("east", "")):
        with pytest.raises(HolmesError, match=f"there is no such invitation for job '{job}'"):
            run.redeem(job, secret, make_request(make_key()))


@pytest.mark.parametrize(
    "request_text", ["", "nonsense", "-----BEGIN CERTIFICATE REQUEST-----\nAA==\n"]
)
def test_a_malformed_request_is_refused_and_uses_nothing_up(run, request_text):
    invitation = run.invite("east", "gate:29600")
    with pytest.raises(HolmesError, match="the certificate request of job 'east'"):
        run.redeem("east", invitation.secret, request_text)
    assert run.redeem("east", invitation.secret, make_request(make_key())).certificate


def test_revoke(run):
    certificate, other = redeemed(run, "east"), redeemed(run, "west")
    open_invitation = run.invite("east", "gate:29600")
    assert run.revocations() == frozenset()
    before = run.changed_at()
    assert run.revoke("east") == (1, 1)
    assert run.changed_at() != before
    assert run.revocations() == {"sha256:" + fingerprint_of(certificate)}
    assert fingerprint_of(other) not in str(run.revocations())
    with pytest.raises(HolmesError, match="the invitation of job 'east' was revoked"):
        run.redeem("east", open_invitation.secret, make_request(make_key()))
    assert run.was_revoked("east") and not run.was_revoked("west") and not run.was_revoked("new")
    redeemed(run, "east")  # invited again
    assert not run.was_revoked("east")
    with pytest.raises(HolmesError, match="no job 'south' is invited; invited are: east, west"):
        run.revoke("south")


def test_names_are_revoked_where_a_site_has_the_ca(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.make(with_authority=False)
    run.revoke("east")
    assert run.revocations() == {"name:east"}
    with pytest.raises(HolmesError, match="there is no run with a CA"):
        run.invite("west", "gate:29600")


def test_two_coordinators_of_one_folder_are_noticed(run):
    """They went unnoticed, and each had a run of its own."""
    with (
        run.serving(),
        pytest.raises(HolmesError, match="another coordinator serves the run"),
        RunFolder(run.path).serving(),
    ):
        pass
    with run.serving():
        pass


# Files


@pytest.fixture
def full_disk(monkeypatch):
    """Files can be made, but nothing can be written to them."""

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(private_files.os, "fsync", fsync)


def test_a_full_disk_leaves_no_file(tmp_path, full_disk):
    """It left an empty token file, which was refused at each later start."""
    with pytest.raises(HolmesError, match="No space left on device.; make space"):
        RunFolder(tmp_path / "run").make()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_full_disk_leaves_the_old_file(tmp_path, full_disk):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError):
        write_private(path, "new", replaces=True)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_links_are_not_followed(tmp_path):
    (tmp_path / "target").write_text("text")
    (tmp_path / "target").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(HolmesError, match="cannot be read"):
        read_private(tmp_path / "link")
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "link", "new")
    write_private(tmp_path / "link", "new", replaces=True)
    assert (tmp_path / "target").read_text() == "text" and not (tmp_path / "link").is_symlink()
    (tmp_path / "folder").symlink_to(tmp_path)
    with pytest.raises(HolmesError, match="is no folder, or a link"):
        make_private_folder(tmp_path / "folder")


def test_files_of_other_users_are_refused(tmp_path, monkeypatch):
    """Root accepted those of all users. is_given: root may have put a file there (a pod's secret)."""
    path = tmp_path / "file"
    write_private(path, "text")
    owner = path.stat().st_uid
    monkeypatch.setattr(private_files.os, "geteuid", lambda: owner + 1)
    for is_given in (False, True):
        if is_given and owner == 0:
            assert read_private(path, is_given=True) == "text"
            continue
        with pytest.raises(HolmesError, match=f"belongs to user {owner}, not to {owner + 1}"):
            read_private(path, is_given=is_given)
    with pytest.raises(HolmesError, match=f"belongs to user {owner}"):
        make_private_folder(tmp_path)
    monkeypatch.setattr(private_files, "_ROOT", -1)
    with pytest.raises(HolmesError, match="chown"):
        read_private(path, is_given=True)


@pytest.mark.parametrize("mode, refused", [(0o600, False), (0o640, True), (0o604, True)])
def test_files_that_others_can_read_are_refused(tmp_path, mode, refused):
    path = tmp_path / "file"
    write_private(path, "text")
    path.chmod(mode)
    if refused:
        with pytest.raises(HolmesError, match=f"chmod 600 {path}"):
            read_private(path)
    else:
        assert read_private(path) == "text"
    assert read_private(path, is_given=True) == "text"
    path.chmod(0o620)
    with pytest.raises(HolmesError, match="chmod 600"):
        read_private(path, is_given=True)
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(HolmesError, match="chmod 700"):
        make_private_folder(tmp_path / "open")


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(HolmesError, match="is no regular file|cannot be read"):
            read_private(path)


def test_invitation_files(tmp_path):
    invitation = Invitation.drawn("east", "gate:29600", "00" * 32)
    path = tmp_path / "invitation"
    write_private(path, invitation.text())
    assert read_invitation(path) == invitation
    with pytest.raises(
        HolmesError, match="there is no file .*; write one with `holmes join invite"
    ):
        read_invitation(tmp_path / "none")
    for text in ("", "{}", "null", invitation.text().replace("east", "a b")):
        write_private(path, text, replaces=True)
        with pytest.raises(HolmesError, match=f"^{path}: "):
            read_invitation(path)
