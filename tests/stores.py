"""A store for threads that stand for processes."""

from datetime import timedelta


class Client:
    """One rank's client of a HashStore that threads share.

    It has a timeout of its own, as a TCPStore's client has.
    """

    def __init__(self, inner):
        self.inner, self.timeout = inner, timedelta(seconds=60)

    def set_timeout(self, timeout):
        self.timeout = timeout

    def get(self, key):
        self.inner.wait([key], self.timeout)
        return self.inner.get(key)

    def __getattr__(self, name):
        return getattr(self.inner, name)
