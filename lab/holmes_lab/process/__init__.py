"""Processes of a lab.

keeper            owns all other processes of the lab, so that they end with it
job supervisor    forks the ranks of one job, and reports their ends
fork server       Python that has imported the modules of a job once, and forks its ranks
template          Python outside of all labs that forks the fork servers of several labs
"""
