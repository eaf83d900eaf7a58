// The node's emulated HCAs, as its sysfs tree (HOLMES_SYSFS) has them and NCCL_IB_HCA selects.
#pragma once

#include <netinet/in.h>

#include <string>
#include <vector>

namespace rdma {

struct Hca {
  std::string name, device;  // "mlx5_0"; the network interface below it, "ib0"
  int speed = 0;             // Mb/s
  sockaddr_in address{};     // of the interface
};

// Those whose port 1 is active, in the order of their names.
std::vector<Hca> find_hcas();

}  // namespace rdma
