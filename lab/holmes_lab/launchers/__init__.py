"""The real launchers inside a lab: Slurm with munge, sshd for mpirun, pdsh and deepspeed.

    host login       slurmctld, munged, sshd       where jobs are submitted
    node a0, b0, ... slurmd, munged, sshd          as in a cluster: a host name and a /run of its own each

Debian's programs are used as they are installed; nothing of this machine's own Slurm or sshd is touched or
read. What they are told lies in the lab's directory, what they write in each node's /run (a tmpfs); both end
with the lab.
"""
