"""Who may speak: the token, TLS bound to it, what is refused, and in what words."""

import contextlib
import json
import os
import select
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from waiting import soon

from holmes_ext import document
from holmes_ext.errors import HolmesError
from holmes_ext.join.sockets import handshake
from holmes_ext.join.sockets.certificates import site_contexts
from holmes_ext.join.sockets.channel import BrokenFrame, Channel
from holmes_ext.join.sockets.handshake import (
    Credentials,
    NotHolmes,
    Refused,
    answer,
    end_tls,
    greet,
    printable,
)

TOKEN, OTHER = "the token of these tests", "the token of another run"


def meet(
    caller, listener, purpose=None, encrypt=True, plain_too=False, secrets=(b"", b""), between=None
):
    """(what the caller got, what the listener got): a Channel, (Channel, purpose), or the error of each."""
    ours, theirs = socket.socketpair()
    if between is not None:
        ours, theirs = between(ours, theirs)
    found = {}

    def listen():
        try:
            found["listener"] = answer(
                theirs, listener, soon(), lambda purpose: secrets[1], plain_too
            )
        except (OSError, HolmesError) as error:
            found["listener"] = error
            theirs.close()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        told = purpose or {"purpose": "test"}
        found["caller"] = greet(ours, "there:1", caller, told, soon(), secrets[0], encrypt)
    except (OSError, HolmesError) as error:
        found["caller"] = error
    thread.join(20)
    return found["caller"], found["listener"]


@pytest.mark.parametrize("encrypt", [True, False])
def test_both_ends_have_the_token(encrypt):
    purpose = {"purpose": "exchange", "job": "east", "incarnation": "1f"}
    caller, (listener, told) = meet(
        Credentials(TOKEN), Credentials(TOKEN), purpose, encrypt, plain_too=not encrypt
    )
    assert told == purpose and isinstance(caller.socket, ssl.SSLSocket) is encrypt
    caller.send({"n": 1}, soon())
    assert listener.receive(soon()) == {"n": 1}
    if encrypt:
        assert caller.socket.version() == "TLSv1.3"


@pytest.mark.parametrize(
    "encrypt, words",
    [(True, "do not trust each other's certificates"), (False, "is not this run's")],
)
def test_another_token_is_refused_in_words(encrypt, words):
    caller, listener = meet(Credentials(OTHER), Credentials(TOKEN), encrypt=encrypt, plain_too=True)
    assert isinstance(caller, Refused) and words in str(caller) and "token" in str(caller)
    assert isinstance(listener, (Refused, NotHolmes))


def test_a_listener_without_the_token_is_not_believed():
    """It answers the challenge, but with what it knows itself."""
    ours, theirs = socket.socketpair()

    def impostor():
        channel = Channel(theirs)
        channel.receive(soon())
        channel.send({"holmes": handshake.VERSION, "challenge": "00"}, soon())
        channel.receive(soon())
        channel.send({"proof": 64 * "0"}, soon())

    threading.Thread(target=impostor, daemon=True).start()
    with pytest.raises(Refused, match="does not know the token of this run"):
        greet(ours, "there:1", Credentials(TOKEN), {}, soon(), encrypt=False)


def test_the_callers_own_proof_sent_back_is_none():
    """Nobody who only mirrors what comes is believed."""
    ours, theirs = socket.socketpair()

    def mirror():
        channel = Channel(theirs)
        channel.send(channel.receive(soon()), soon())
        channel.send({"proof": channel.receive(soon())["proof"]}, soon())

    threading.Thread(target=mirror, daemon=True).start()
    with pytest.raises(Refused, match="does not know the token of this run"):
        greet(ours, "there:1", Credentials(TOKEN), {}, soon(), encrypt=False)


def test_a_frame_sent_back_to_its_sender_is_noticed():
    """Each direction has a key of its own."""
    caller, (listener, _) = meet(
        Credentials(TOKEN), Credentials(TOKEN), encrypt=False, plain_too=True
    )
    caller.send({"n": 1}, soon())
    listener.socket.sendall(listener.socket.recv(4096))
    with pytest.raises(BrokenFrame, match="MAC"):
        caller.receive(soon())


def test_an_older_tls_is_refused():
    older = Credentials(TOKEN)
    older.contexts().client.minimum_version = ssl.TLSVersion.TLSv1_2
    older.contexts().client.maximum_version = ssl.TLSVersion.TLSv1_2
    caller, listener = meet(older, Credentials(TOKEN))
    assert isinstance(caller, Refused) and isinstance(listener, NotHolmes)


def test_a_secret_besides_the_token_is_needed_where_there_is_one():
    both = Credentials(TOKEN), Credentials(TOKEN)
    assert isinstance(
        meet(*both, encrypt=False, plain_too=True, secrets=(b"a ticket", b"a ticket"))[0], Channel
    )
    for secrets in ((b"a ticket", b"another"), (b"", b"a ticket")):
        caller, listener = meet(*both, encrypt=False, plain_too=True, secrets=secrets)
        assert isinstance(caller, Refused) and isinstance(listener, Refused)


def changed(ours, theirs, change):
    """A middle between both ends that hands frames on, the caller's documents changed."""
    to_listener, middle_listener = socket.socketpair()
    middle_caller = theirs

    def carry(source, target, change):
        one, two = Channel(source), Channel(target)
        try:
            while True:
                two.send(change(one.receive(soon())), soon())
        except OSError:
            source.close(), target.close()

    for arguments in (
        (middle_caller, middle_listener, change),
        (middle_listener, middle_caller, lambda told: told),
    ):
        threading.Thread(target=carry, args=arguments, daemon=True).start()
    return ours, to_listener


@pytest.mark.parametrize(
    "change",
    [
        lambda told: (
            {**told, "purpose": json.dumps({"purpose": "test", "job": "west"})}
            if "purpose" in told
            else told
        ),
        lambda told: {**told, "challenge": 32 * "0"} if "challenge" in told else told,
    ],
)
def test_what_the_caller_wants_cannot_be_changed_on_the_way(change):
    _, listener = meet(
        Credentials(TOKEN),
        Credentials(TOKEN),
        {"purpose": "test", "job": "east"},
        encrypt=False,
        plain_too=True,
        between=lambda ours, theirs: changed(ours, theirs, change),
    )
    assert isinstance(listener, Refused)


def test_answers_cannot_be_used_again():
    """Challenges of both ends are in each proof, and new each time."""
    seen = []
    for _ in range(2):
        meet(
            Credentials(TOKEN),
            Credentials(TOKEN),
            encrypt=False,
            plain_too=True,
            between=lambda ours, theirs: changed(
                ours, theirs, lambda told: seen.append(told) or told
            ),
        )
    challenges, proofs = seen[0::2], seen[1::2]
    assert (
        challenges[0]["challenge"] != challenges[1]["challenge"]
        and proofs[0]["proof"] != proofs[1]["proof"]
    )
    assert TOKEN not in json.dumps(seen)

    def replay(told):
        return proofs[0] if "proof" in told else challenges[0]

    _, listener = meet(
        Credentials(TOKEN),
        Credentials(TOKEN),
        encrypt=False,
        plain_too=True,
        between=lambda ours, theirs: changed(ours, theirs, replay),
    )
    assert isinstance(listener, Refused)


def test_whoever_ends_tls_in_between_is_found_out():
    """Even with certificates that both trust (a site's CA, say): the proof is of others."""
    caller, listener, thief = Credentials(TOKEN), Credentials(TOKEN), Credentials(TOKEN)

    def between(ours, theirs):
        to_listener, middle_listener = socket.socketpair()

        def carry():  # both ways in one thread: OpenSSL's connections are not made for two at once
            one = thief.contexts().server.wrap_socket(theirs, server_side=True)
            two = thief.contexts().client.wrap_socket(middle_listener)
            for end in (one, two):
                end.setblocking(False)
            with contextlib.suppress(OSError), one, two:
                while True:
                    for source in select.select([one, two], [], [])[0]:
                        with contextlib.suppress(ssl.SSLWantReadError):  # a record of TLS's own
                            if not (data := source.recv(65536)):
                                return
                            (two if source is one else one).sendall(data)

        threading.Thread(target=carry, daemon=True).start()
        return ours, to_listener

    found = meet(caller, listener, between=between)
    assert isinstance(found[1], Refused) and "token" in str(found[1])
    assert isinstance(found[0], (Refused, OSError)) and not isinstance(found[0], Channel)


def test_plain_and_encrypting_ends_tell_each_other():
    caller, listener = meet(Credentials(TOKEN, plain=True), Credentials(TOKEN), encrypt=False)
    assert isinstance(caller, Refused) and "leave --holmes-join-plain away" in str(caller)
    assert isinstance(listener, Refused) and "does not encrypt" in str(listener)

    def says_no_tls(ours, theirs):
        to_listener, far = socket.socketpair()
        threading.Thread(
            target=lambda: (theirs.recv(4096), theirs.sendall(b"\0\0\0\2" + bytes(8) + b"{}")),
            daemon=True,
        ).start()
        far.close()
        return ours, to_listener

    caller, _ = meet(Credentials(TOKEN), Credentials(TOKEN), between=says_no_tls)
    assert isinstance(caller, Refused) and "is --holmes-join-plain given there" in str(caller)


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
        answer(theirs, Credentials(TOKEN), soon(), plain_too=True)


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
            answer(theirs, Credentials(TOKEN), soon(1.0), plain_too=False)
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
            Channel(theirs).send({"holmes": 2, "challenge": "0" * 32}, soon())
            while data := theirs.recv(4096):
                heard.extend(data)

    thread = threading.Thread(target=between)
    thread.start()
    with pytest.raises(Refused, match="does not speak TLS"):
        greet(ours, "there:1", Credentials(TOKEN), {"purpose": "a secret purpose"}, soon())
    thread.join(10)
    assert heard[0] == 0x16 and b"purpose" not in heard and b"challenge" not in heard


def test_another_version_is_refused_in_words():
    ours, theirs = socket.socketpair()
    Channel(theirs).send({"holmes": 3, "challenge": "00"}, soon())
    with pytest.raises(Refused, match="speaks version 3 of this protocol, not 2; install the same"):
        greet(ours, "there:1", Credentials(TOKEN), {}, soon(), encrypt=False)


def test_without_cryptography_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat", None)
    for name in [name for name in sys.modules if name.startswith("cryptography.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(HolmesError, match=r"pip install 'holmes_ext\[join\]'"):
        Credentials(TOKEN).contexts()


def test_tls_can_be_taken_off_by_both_ends_and_put_on_again():
    """As the relay does."""
    caller, (listener, _) = meet(Credentials(TOKEN), Credentials(TOKEN))
    naked = {}
    thread = threading.Thread(target=lambda: naked.update(two=end_tls(listener.socket, soon())))
    thread.start()
    one = end_tls(caller.socket, soon())
    thread.join(10)
    one.sendall(b"as it is")
    assert naked["two"].recv(100) == b"as it is"
    again = meet(Credentials(TOKEN), Credentials(TOKEN), between=lambda *_: (one, naked["two"]))
    assert isinstance(again[0].socket, ssl.SSLSocket) and again[1][1] == {"purpose": "test"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Of two CAs: certificate with key, and the CA's own, made as a site would."""
    where = tmp_path_factory.mktemp("site")
    for ca in ("one", "two"):
        script = f"""
        new="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
        openssl req -x509 $new -days 30 -subj /CN={ca} -keyout {ca}.key -out {ca}.pem
        openssl req $new -subj /CN=job -keyout {ca}-job.key -out {ca}-job.csr
        openssl x509 -req -in {ca}-job.csr -CA {ca}.pem -CAkey {ca}.key -CAcreateserial -days 30 \\
            -out {ca}-job.crt
        cat {ca}-job.crt {ca}-job.key > {ca}-job.pem
        """
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=where, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no openssl: {done.stderr[-200:]}")
    return where


def of_site(site, ca, token=TOKEN):
    return Credentials(
        token, certificate=str(site / f"{ca}-job.pem"), authority=str(site / f"{ca}.pem")
    )


def test_a_sites_own_certificates(site):
    assert isinstance(meet(of_site(site, "one"), of_site(site, "one"))[0], Channel)
    caller, listener = meet(of_site(site, "one"), of_site(site, "two"))
    assert isinstance(caller, Refused) and "one --holmes-join-ca or none" in str(caller)
    caller, listener = meet(of_site(site, "one", OTHER), of_site(site, "one"))
    assert isinstance(caller, Refused) and isinstance(listener, Refused), (
        "a certificate is no token"
    )
    caller, _ = meet(of_site(site, "one"), Credentials(TOKEN))
    assert isinstance(caller, Refused)


def test_a_certificate_that_is_over_is_refused_and_said(site):
    script = """
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=job -keyout over.key \\
        -out over.csr
    openssl x509 -req -in over.csr -CA one.pem -CAkey one.key -CAcreateserial -days -1 -out over.crt
    cat over.crt over.key > over.pem
    """
    subprocess.run(["bash", "-e", "-c", script], cwd=site, capture_output=True, check=True)
    over = Credentials(TOKEN, certificate=str(site / "over.pem"), authority=str(site / "one.pem"))
    caller, listener = meet(of_site(site, "one"), over)
    assert isinstance(caller, Refused) and "certificate has expired" in str(caller)
    caller, listener = meet(over, of_site(site, "one"))
    assert isinstance(listener, NotHolmes) and "certificate has expired" in str(listener)
    assert isinstance(caller, (OSError, HolmesError))


def test_a_certificate_that_signed_itself_is_refused(site):
    """With the token, and the name of a good one: not signed by the site's CA."""
    script = """
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=one -keyout self.key \\
        -out self.crt
    cat self.crt self.key > self.pem
    """
    subprocess.run(["bash", "-e", "-c", script], cwd=site, capture_output=True, check=True)
    one = Credentials(TOKEN, certificate=str(site / "self.pem"), authority=str(site / "one.pem"))
    caller, listener = meet(one, of_site(site, "one"))
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
    assert site_contexts(f"/proc/self/fd/{reading}", str(site / "one.pem")).certificate
    os.close(reading)


def test_what_a_terminal_would_obey_is_not_shown():
    assert printable("a\x1b[31mb\nc\ud800d\x07é") == "a?[31mb?c?d?é"
