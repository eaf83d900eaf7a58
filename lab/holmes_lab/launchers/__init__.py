"""Real job launchers on an emulated cluster (a lab): torchrun, Slurm, mpirun and deepspeed.

Every emulated node is a host with its name and its network interfaces:

    host login       slurmctld, munged, sshd       jobs are submitted here
    node a0, b0, ... slurmd, munged, sshd          the processes of jobs run here

The programs are those that Debian installs; this machine's own Slurm and sshd are neither used nor changed.
Their configuration files lie in the lab's directory, and their output in a tmpfs on each node's /run. Both
are removed when the lab closes.
"""
