"""Who may speak: certificates and their names, revocation, what is refused, and in what words."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from joined_jobs import credentials_of, run_at
from waiting import soon

from holmes_ext import document
from holmes_ext.errors import HolmesError
from holmes_ext.join.sockets import certificates, handshake
from holmes_ext.join.sockets.certificates import Holder, site_contexts, stranger_context
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import (
    BY_FINGERPRINT,
    BY_NAME,
    Credentials,
    NotAuthentic,
    NotHolmes,
    Refused,
    answer,
    end_tls,
    greet,
    has_name,
    printable,
)

PORT = 2  # of the run of these tests; nobody listens there
EAST = {"purpose": "test", "job": "east"}


def east():
    return credentials_of("east", PORT)


def west():
    return credentials_of("west", PORT)


def meet(caller, listener, name="west", purpose=EAST, between=None):
    """Shake hands, and return what the caller and the listener got.

    Each got a Channel, Accepted, or an error.
    """
    ours, theirs = socket.socketpair()
    if between is not None:
        ours, theirs = between(ours, theirs)
    found = {}

    def listen():
        try:
            found["listener"] = answer(theirs, listener, soon())
        except (OSError, HolmesError) as error:
            found["listener"] = error
            theirs.close()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        found["caller"] = greet(ours, "there:1", caller, name, purpose, soon())
    except (OSError, HolmesError) as error:
        found["caller"] = error
    thread.join(20)
    return found["caller"], found["listener"]


def test_both_ends_have_certificates_of_the_run():
    purpose = {"purpose": "exchange", "job": "east", "incarnation": "1f"}
    caller, (listener, told, holder) = meet(east(), west(), purpose=purpose)
    assert told == purpose and holder.names == {"east"} and len(holder.fingerprint) == 64
    caller.send({"n": 1}, soon())
    assert listener.receive(soon()) == {"n": 1}
    assert caller.socket.version() == "TLSv1.3"


def test_a_certificate_of_another_run_is_refused_in_words():
    caller, listener = meet(credentials_of("east", PORT, "another"), west())
    assert isinstance(caller, NotAuthentic) and "does not have a certificate of this run" in str(
        caller
    )
    assert isinstance(listener, NotHolmes)


def test_a_caller_speaks_for_the_job_in_its_certificate_only():
    caller, listener = meet(east(), west(), purpose={"purpose": "test", "job": "south"})
    words = "the certificate of this caller is of east, not of job 'south'"
    assert isinstance(caller, Refused) and str(caller) == words
    assert isinstance(listener, Refused) and str(listener) == words
    for purpose in ({"purpose": "test"}, {"purpose": "test", "job": ""}):
        assert isinstance(meet(east(), west(), purpose=purpose)[1], Refused)


def test_a_caller_tells_nothing_to_a_listener_of_another_name():
    """A member of the run answers in the place of another one."""
    told = []
    caller, listener = meet(east(), credentials_of("south", PORT), name="west")
    assert isinstance(
        caller, NotAuthentic
    ) and "has the certificate of south, not of 'west'" in str(caller)
    assert isinstance(listener, OSError), told
    caller, _ = meet(east(), credentials_of("south", PORT), name="holmes join serve")
    assert isinstance(caller, NotAuthentic), "nobody but the coordinator answers for it"


def test_revoked_certificates_are_refused_and_their_connections_end():
    mine, theirs = credentials_of("revoked", PORT), Credentials(west().contexts)
    caller, (listener, _, holder) = meet(
        mine, theirs, purpose={"purpose": "test", "job": "revoked"}
    )
    theirs.revoke([BY_FINGERPRINT + holder.fingerprint])
    for end in (listener, caller):
        with pytest.raises(OSError) as ended:
            end.receive(soon())
        assert not isinstance(ended.value, TimeoutError)
    again, refused = meet(mine, theirs, purpose={"purpose": "test", "job": "revoked"})
    assert isinstance(refused, Refused) and "was revoked" in str(again)
    as_listener, _ = meet(theirs, mine, name="revoked", purpose={"purpose": "test", "job": "west"})
    assert isinstance(as_listener, NotAuthentic) and "revoked" in str(as_listener)
    theirs.revoke([BY_NAME + "revoked"])
    assert isinstance(meet(mine, theirs, purpose={"purpose": "test", "job": "revoked"})[1], Refused)
    assert isinstance(meet(east(), theirs)[0], Channel), "others are not affected"


def test_a_caller_without_a_certificate_is_refused():
    ours, theirs = socket.socketpair()
    found = []

    def listen():
        try:
            answer(theirs, west(), soon())
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    with contextlib.suppress(OSError):
        stranger = stranger_context().wrap_socket(ours)
        stranger.recv(1)
    thread.join(20)
    assert isinstance(found[0], NotHolmes) and "PEER_DID_NOT_RETURN_A_CERTIFICATE" in str(found[0])


def test_an_older_tls_is_refused():
    old = run_at(PORT).credentials()
    old.contexts.client.minimum_version = ssl.TLSVersion.TLSv1_2
    old.contexts.client.maximum_version = ssl.TLSVersion.TLSv1_2
    caller, listener = meet(old, west())
    assert isinstance(caller, OSError) and isinstance(listener, NotHolmes)


@pytest.mark.parametrize("sent", [b"", b"\x15\x03\x03\x00\x02\x02\x28", b"\x16\x03"])
def test_a_connection_that_ends_in_its_first_handshake_is_no_refusal(sent):
    """Anybody on the way can end it, also with an alert. A starting job ended; it must try again."""
    ours, theirs = socket.socketpair()

    def cut():
        theirs.recv(4096)
        theirs.sendall(sent)
        theirs.close()

    threading.Thread(target=cut, daemon=True).start()
    with pytest.raises(ConnectionError) as told:
        greet(ours, "there:1", east(), "west", EAST, soon())
    assert not isinstance(told.value, HolmesError)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01 not tls",
        b"\0\0\0\2" + bytes(8) + b"{}",
        b"\0",
        b"",
    ],
)
def test_something_else_is_named(data):
    ours, theirs = socket.socketpair()
    ours.sendall(data)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises((NotHolmes, ConnectionError)):
        answer(theirs, west(), soon())


def test_slow_bytes_of_a_tls_handshake_do_not_keep_the_listener_waiting():
    """One each 50 ms of a hello that never ends: the handshake as a whole has its time."""
    ours, theirs = socket.socketpair()
    stop, found, sent = threading.Event(), {}, []
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)

    def trickle():
        with contextlib.suppress(OSError):
            for byte in hello:
                ours.send(bytes([byte]))
                sent.append(byte)
                if stop.wait(0.05):
                    return

    def listen():
        try:
            answer(theirs, west(), soon(1.0))
        except OSError as error:
            found["why"] = error

    threads = [threading.Thread(target=one) for one in (trickle, listen)]
    for one in threads:
        one.start()
    threads[1].join(20)
    assert isinstance(found["why"], TimeoutError) and len(sent) < len(hello)
    stop.set()
    ours.close()


def test_nothing_is_told_to_who_takes_tls_away():
    """Whoever stands between answers as a plain listener does: the caller's purpose stays with it."""
    ours, theirs = socket.socketpair()
    heard = bytearray()

    def between():
        with contextlib.suppress(OSError):
            heard.extend(theirs.recv(4096))
            Channel(theirs).send({"holmes": 3}, soon())
            while data := theirs.recv(4096):
                heard.extend(data)

    thread = threading.Thread(target=between)
    thread.start()
    with pytest.raises(NotAuthentic, match="does not speak TLS"):
        greet(ours, "there:1", east(), "west", {"purpose": "a secret purpose"}, soon())
    thread.join(10)
    assert heard[0] == 0x16 and b"purpose" not in heard and b"holmes" not in heard


def test_another_version_is_refused_in_words(monkeypatch):
    ours, theirs = socket.socketpair()

    def newer():
        wrapped = west().contexts.server.wrap_socket(theirs, server_side=True)
        Channel(wrapped).send({"holmes": 4}, soon())

    threading.Thread(target=newer, daemon=True).start()
    with pytest.raises(Refused, match="speaks version 4 of this protocol, not 3; install the same"):
        greet(ours, "there:1", east(), "west", EAST, soon())
    monkeypatch.setattr(handshake, "VERSION", 4)
    wrapped = meet(east(), west())
    assert isinstance(wrapped[0], Channel)


def test_without_cryptography_the_line_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(HolmesError, match=r"pip install 'holmes_ext\[join\]'"):
        certificates.make_key()


def test_tls_can_be_taken_off_by_both_ends_and_put_on_again():
    """As the relay does."""
    caller, (listener, _, _) = meet(east(), west())
    naked = {}
    thread = threading.Thread(target=lambda: naked.update(two=end_tls(listener.socket, soon())))
    thread.start()
    one = end_tls(caller.socket, soon())
    thread.join(10)
    one.sendall(b"as it is")
    assert naked["two"].recv(100) == b"as it is"
    again = meet(east(), west(), between=lambda *_: (one, naked["two"]))
    assert isinstance(again[0].socket, ssl.SSLSocket) and again[1].purpose == EAST


def test_names_of_hosts_match_in_any_form():
    holder = Holder("", frozenset({"Gate.example.org", "FD00:0:0:0:0:0:0:1", "10.0.0.1", "east"}))
    for name in ("gate.example.org", "fd00::1", "10.0.0.1", "::ffff:10.0.0.1", "east"):
        assert has_name(holder, name), name
    for name in ("example.org", "10.0.0.2", "fd00::2", "", "eas"):
        assert not has_name(holder, name), name


# A site's own CA


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Of two CAs: certificates of job east and of a coordinator on a host, made as a site would."""
    where = tmp_path_factory.mktemp("site")
    for ca in ("one", "two"):
        script = f"""
        new="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
        openssl req -x509 $new -days 30 -subj /CN={ca} -keyout {ca}.key -out {ca}.pem
        openssl req $new -subj /CN=east -keyout {ca}-job.key -out {ca}-job.csr
        openssl x509 -req -in {ca}-job.csr -CA {ca}.pem -CAkey {ca}.key -CAcreateserial -days 30 \\
            -out {ca}-job.crt
        cat {ca}-job.crt {ca}-job.key > {ca}-job.pem
        openssl req $new -subj /CN=coordinator -keyout {ca}-serve.key -out {ca}-serve.csr
        printf 'subjectAltName=DNS:gate.example.org,DNS:west,IP:127.0.0.1' > names
        openssl x509 -req -in {ca}-serve.csr -CA {ca}.pem -CAkey {ca}.key -CAcreateserial -days 30 \\
            -extfile names -out {ca}-serve.crt
        cat {ca}-serve.crt {ca}-serve.key > {ca}-serve.pem
        """
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=where, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no openssl: {done.stderr[-200:]}")
    return where


def of_site(site, ca, holder="job"):
    return Credentials.of_site(str(site / f"{ca}-{holder}.pem"), str(site / f"{ca}.pem"))


def test_a_sites_own_certificates(site):
    """Common names and alternative names are names of jobs and hosts."""
    caller, accepted = meet(of_site(site, "one"), of_site(site, "one", "serve"))
    assert isinstance(caller, Channel) and accepted.holder.names == {"east"}
    for host in ("gate.example.org", "127.0.0.1"):
        assert of_site(site, "one").coordinator_name(host) == host
        caller, _ = meet(of_site(site, "one"), of_site(site, "one", "serve"), name=host)
        assert isinstance(caller, Channel)
    caller, _ = meet(of_site(site, "one"), of_site(site, "one"), name="gate.example.org")
    assert isinstance(caller, NotAuthentic), "another job's certificate is none of the coordinator"
    caller, _ = meet(of_site(site, "one"), of_site(site, "two", "serve"))
    assert isinstance(caller, NotAuthentic) and "certificate of this run" in str(caller)
    caller, listener = meet(
        of_site(site, "one"),
        of_site(site, "one", "serve"),
        purpose={"purpose": "test", "job": "west"},
    )
    assert isinstance(listener, Refused) and "is of east, not of job 'west'" in str(caller)


def test_a_certificate_that_is_over_is_refused_and_said(site):
    script = """
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=west -keyout over.key \\
        -out over.csr
    openssl x509 -req -in over.csr -CA one.pem -CAkey one.key -CAcreateserial -days -1 -out over.crt
    cat over.crt over.key > over.pem
    """
    subprocess.run(["bash", "-e", "-c", script], cwd=site, capture_output=True, check=True)
    over = Credentials.of_site(str(site / "over.pem"), str(site / "one.pem"))
    caller, listener = meet(of_site(site, "one"), over)
    assert isinstance(caller, NotAuthentic) and "certificate has expired" in str(caller)
    caller, listener = meet(over, of_site(site, "one", "serve"))
    assert isinstance(listener, NotHolmes) and "certificate has expired" in str(listener)
    assert isinstance(caller, Refused) and "EXPIRED" in str(caller)


def test_a_certificate_that_signed_itself_is_refused(site):
    """With the name of a good one: not signed by the site's CA."""
    script = """
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=one -keyout self.key \\
        -out self.crt
    cat self.crt self.key > self.pem
    """
    subprocess.run(["bash", "-e", "-c", script], cwd=site, capture_output=True, check=True)
    one = Credentials.of_site(str(site / "self.pem"), str(site / "one.pem"))
    caller, listener = meet(one, of_site(site, "one", "serve"))
    assert isinstance(listener, NotHolmes) and isinstance(caller, (OSError, HolmesError))


def test_files_that_cannot_be_used_are_named(site, tmp_path):
    bad, good, none = tmp_path / "bad.pem", site / "one-job.pem", tmp_path / "none.pem"
    bad.write_text("nothing")
    pairs = ((bad, site / "one.pem"), (good, bad), (none, site / "one.pem"), (good, none))
    for certificate, authority in pairs:
        with pytest.raises(HolmesError) as told:
            site_contexts(str(certificate), str(authority))
        assert str(tmp_path) in str(told.value)


def test_certificates_out_of_a_pipe(site, tmp_path, monkeypatch):
    """As <(vault read ...) gives them; of one from which nothing comes the process hung."""
    monkeypatch.setattr(document, "_PIPE_S", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HolmesError, match="pipe: cannot be read .nothing comes"):
        site_contexts(str(tmp_path / "pipe"), str(site / "one.pem"))
    reading, writing = os.pipe()
    os.write(writing, (site / "one-job.pem").read_bytes())
    os.close(writing)
    assert site_contexts(f"/proc/self/fd/{reading}", str(site / "one.pem")).client
    os.close(reading)


def test_what_a_terminal_would_obey_is_not_shown():
    assert printable("a\x1b[31mb\nc\ud800d\x07é") == "a?[31mb?c?d?é"
