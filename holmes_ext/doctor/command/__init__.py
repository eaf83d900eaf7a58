"""Checks of a training command: its words, its launcher, the nodes and variables that they give a job."""
