"""Emulated GPUs: CUDA, NCCL and torch's CUDA operators run on the CPU, below an unmodified program.

    the program uses          holmes replaces                      source
    torch's CUDA operators    their kernels, by CPU computations   csrc/operators
    libcudart, libcuda, NVML  the whole libraries                  csrc/runtime, csrc/driver
    NCCL                      the device code, by host threads     csrc/nccl (NCCL's host code is unmodified)
    NCCL's network "IB"       RDMA, by the emulated fast NICs      csrc/net

`holmes lab run --gpu` builds these libraries and starts the ranks of a job with them. Results, order of work,
networks, transferred bytes and waits are those of the real programs. Times are not those of a GPU unless an
emulated clock is requested.
"""
