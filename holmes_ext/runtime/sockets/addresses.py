"""HOST:PORT as text, IPv6 included ("[::1]:29600"), and what is known of an address."""

from __future__ import annotations

import errno
import ipaddress
import socket

_PORTS = 65536
#: Bits of an IPv6 prefix within which one host may take any address (RFC 4291, 2.5.4).
_ONE_SITE = 64
#: Of TCP's keepalive: seconds of silence before the first probe, between two, and how many are not answered.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 25, 5, 5


def split_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """(host, port) of "HOST:PORT", or of "HOST" where there is a default. ValueError where it is neither."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not [IPv6]:PORT")
        port_text = rest[1:]
        ipaddress.IPv6Address(host.partition("%")[0])
    elif text.count(":") > 1:
        raise ValueError(f"{text!r} needs brackets around its IPv6 address, as in [::1]:29600")
    else:
        host, _, port_text = text.partition(":")
    if not port_text and default_port is not None and not text.endswith(":"):
        return _host(host, text), default_port
    if not (port_text.isascii() and port_text.isdecimal()) or not 0 < int(port_text) < _PORTS:
        raise ValueError(f"{text!r} has no port from 1 to {_PORTS - 1}")
    return _host(host, text), int(port_text)


def _host(host: str, text: str) -> str:
    allowed = all(c.isascii() and (c.isalnum() or c in "-._:%") for c in host)
    labels = host.removesuffix(".").split(".")
    if not allowed or len(host) > 253 or not all(0 < len(label) < 64 for label in labels):
        raise ValueError(f"{text!r} has no host name or IP address")
    return host


def address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is, as IPv4 where it is mapped into IPv6; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def peer_host(connection: socket.socket) -> str:
    """Who is at the other end: one text for an IPv4 address and the same one mapped into IPv6."""
    host = connection.getpeername()[0]
    return str(ip_of(host) or host)


def network_of(host: str) -> str:
    """What one caller can have many addresses of: the /64 of an IPv6 address; of IPv4 the address alone."""
    address = ip_of(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((address, _ONE_SITE), strict=False))
    return host


def is_loopback(host: str) -> bool:
    address = ip_of(host)
    return address is not None and address.is_loopback


def stays_on_host(connection: socket.socket) -> bool:
    """Whether both ends of a connection are loopback addresses of this host."""
    return is_loopback(connection.getpeername()[0]) and is_loopback(connection.getsockname()[0])


def prepare(connection: socket.socket) -> None:
    """Small messages go at once; a dead peer, or a forgetful NAT, is noticed within a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; host "": all addresses, IPv6 too where there is. OSError."""
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("0.0.0.0", port))
