"""Errors for users: one line that names the file, key, rank, node or NIC, and a way out."""


class HolmesError(Exception):
    """Error that only the user can resolve, such as bad input.

    The message becomes one printable line: control characters, which may come from files, become "?".
    Commands print the message without a traceback and exit with status 2.
    """

    def __init__(self, message: str):
        line = " ".join(message.split())
        super().__init__("".join(c if c.isprintable() else "?" for c in line))


class RemoteError(HolmesError):
    """Error whose message another rank has printed already; this rank ends without printing it."""
