"""Connections between ranks of different joined jobs: how they are made, and what is sent over them."""
