"""The transport of every process group."""
