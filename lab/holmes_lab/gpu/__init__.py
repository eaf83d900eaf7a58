"""CUDA and NCCL without a GPU: what `holmes lab run --gpu` puts under a user's own command.

    torch (unmodified)   libcudart, libcuda, NVML   csrc/runtime, csrc/driver  streams, events, memory
      its operators      boxed host kernels         csrc/operators             the CPU's numbers
      ProcessGroupNCCL   NCCL's own host code       csrc/nccl                  its device side on host threads
                         net plugin "IB"            csrc/net                   RDMA over the lab's fast NICs

Nothing here is a model of speed, unless an emulated clock is asked for: numbers, order, networks, bytes and
waits are those of the real programs.
"""
