"""The token: where it comes from, what is refused, and where `holmes join serve` keeps one."""

import os
import stat

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.join.token import exposure_of, kept_file, served_token, token_from, warning_of

TOKEN = "the token of these tests"


def test_from_the_environment_or_a_file(tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert token_from({"HOLMES_JOIN_TOKEN_FILE": str(tmp_path / "token")}) == TOKEN
    assert token_from({"HOLMES_JOIN_TOKEN": TOKEN, "HOLMES_JOIN_TOKEN_FILE": "no_such"}) == TOKEN
    with pytest.raises(HolmesError, match="no_such: cannot be read"):
        token_from({"HOLMES_JOIN_TOKEN_FILE": str(tmp_path / "no_such")})
    with pytest.raises(HolmesError, match="needs the run's token: set HOLMES_JOIN_TOKEN"):
        token_from({})


@pytest.mark.parametrize(
    "data, why",
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"short", "has 5 characters"),
        (b"\xff" * 20, "not UTF-8"),
        (b"a" * 5000, "at most 4096"),
        (b"two lines of\na token here", "one line"),
        (b"with an \x1b[1m escape", "be printed"),
    ],
)
def test_what_is_no_token(data, why, tmp_path):
    (tmp_path / "token").write_bytes(data)
    with pytest.raises(HolmesError, match=why) as told:
        token_from({"HOLMES_JOIN_TOKEN_FILE": str(tmp_path / "token")})
    assert str(tmp_path) in str(told.value)


def test_an_empty_variable_is_no_token():
    for text in ("", "short", "\udcff" * 20):
        with pytest.raises(HolmesError, match="HOLMES_JOIN_TOKEN: the token"):
            token_from({"HOLMES_JOIN_TOKEN": text})


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(HolmesError, match="is no file"):
            token_from({"HOLMES_JOIN_TOKEN_FILE": str(path)})


def test_serve_keeps_what_it_drew(tmp_path):
    environ = {"HOME": str(tmp_path)}
    token, path = served_token(environ, 29600)
    assert path == kept_file(environ, 29600) and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) >= 24 and warning_of(token) == exposure_of(path) == ""
    assert served_token(environ, 29600) == (token, path), "a restart finds it"
    assert served_token(environ, 29601)[0] != token
    assert token_from(environ, 29600) == token, "`holmes join status` on the same host"
    assert served_token({**environ, "HOLMES_JOIN_TOKEN": TOKEN}, 29600) == (TOKEN, None)
    named = {**environ, "HOLMES_JOIN_TOKEN_FILE": str(tmp_path / "run" / "token")}
    assert served_token(named, 29600)[1] == tmp_path / "run" / "token"
    assert token_from(named) == served_token(named, 5)[0]


def test_a_place_where_it_cannot_be_kept_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HolmesError, match="cannot be kept there .*HOLMES_JOIN_TOKEN_FILE"):
        served_token({"XDG_STATE_HOME": str(tmp_path / "file")}, 29600)


def test_an_empty_kept_file_is_refused(tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    kept_file(environ, 1).parent.mkdir(parents=True)
    kept_file(environ, 1).write_text("")
    with pytest.raises(HolmesError, match="is empty"):
        served_token(environ, 1)


def test_a_token_that_can_be_guessed_is_said():
    assert (
        warning_of("aaaaaaaaaaaaaaaaaaaaaaaa")
        and warning_of("123412341234")
        and warning_of("passwordpass")
    )
    assert not warning_of("dGhpcyBpcyBub3QgYSB0b2tlbg")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_can_read_is_said(mode, tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    assert f"chmod 600 {path}" in exposure_of(path)
