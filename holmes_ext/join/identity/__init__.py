"""Identity of joined jobs: the CA of a run, invitations, and the certificates that jobs keep."""
