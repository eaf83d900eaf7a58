"""The emulated GPU: CUDA and NCCL for an unmodified training command, on a machine without a GPU.

    libraries.py   what a job is started with: builds it (build.py, recipes.py) or finds it in the user's cache
    compiler.py, torch_build.py, nccl_source.py   what it is built with, and for
    job.py         the environment of the ranks
    networks.py    which network NCCL chose for each group, which NIC carried how many bytes
    csrc/          the libraries' sources
"""
