#include "hcas.h"

#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

namespace rdma {

namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<std::string> entries(const std::string& path) {
  std::vector<std::string> names;
  if (DIR* directory = opendir(path.c_str())) {
    while (dirent* entry = readdir(directory)) {
      if (entry->d_name[0] != '.') names.push_back(entry->d_name);
    }
    closedir(directory);
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool address_of(const std::string& device, sockaddr_in* address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return false;
  bool found = false;
  for (ifaddrs* one = all; one && !found; one = one->ifa_next) {
    if (one->ifa_addr && one->ifa_addr->sa_family == AF_INET && device == one->ifa_name) {
      std::memcpy(address, one->ifa_addr, sizeof *address);
      found = true;
    }
  }
  freeifaddrs(all);
  return found;
}

// NCCL_IB_HCA: [^][=]NAME[:PORT],...  ^: all but these; =: whole names, else beginnings (NCCL's
// documentation).
bool selected(const std::string& name) {
  const char* variable = std::getenv("NCCL_IB_HCA");
  if (!variable || !*variable) return true;
  bool excludes = *variable == '^';
  std::string list = variable + excludes;
  bool exact = !list.empty() && list[0] == '=';
  std::stringstream items(list.substr(exact));
  for (std::string item; std::getline(items, item, ',');) {
    std::string wanted = item.substr(0, item.find(':'));
    bool port_1 = item.find(':') == std::string::npos || item.substr(item.find(':') + 1) == "1";
    bool same = exact ? name == wanted : name.compare(0, wanted.size(), wanted) == 0;
    if (same && port_1) return !excludes;
  }
  return excludes;
}

}  // namespace

std::vector<Hca> find_hcas() {
  std::vector<Hca> found;
  const char* disabled = std::getenv("NCCL_IB_DISABLE");
  const char* root = std::getenv("HOLMES_SYSFS");
  if (!root || (disabled && std::atoi(disabled))) return found;
  std::string base = std::string(root) + "/class/infiniband/";
  for (const std::string& name : entries(base)) {
    std::string port = base + name + "/ports/1/";
    auto devices = entries(base + name + "/device/net");
    Hca hca{name, devices.empty() ? "" : devices[0], 0, {}};
    hca.speed =
        static_cast<int>(std::atof(first_line(port + "rate").c_str()) * 1000);  // "200 Gb/sec (4X HDR)"
    bool active = first_line(port + "state").find("ACTIVE") != std::string::npos;
    if (active && selected(name) && address_of(hca.device, &hca.address)) found.push_back(hca);
  }
  return found;
}

}  // namespace rdma
