"""Coordinator of joined jobs: its rules (pure), its server process, and the client that jobs use."""
