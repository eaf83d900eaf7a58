"""Authenticated connections of joined jobs: handshake, TLS certificates, frames, and JSON documents."""
