// libnvidia-ml.so.1: what NCCL and torch ask the management library; the same GPUs as cudaGetDeviceCount's.

#include <stdio.h>
#include <string.h>

#include "cuda_runtime_api.h"

namespace {

enum Return { kSuccess = 0, kInvalidArgument = 2, kNotSupported = 3, kNotFound = 6 };

// A device's handle is its number plus 1.
using Device = intptr_t;

struct PciInfo {  // nvmlPciInfo_t, version 3
  char old_bus_id[16];
  unsigned domain, bus, device, pci_device, pci_subsystem;
  char bus_id[32];
};

int count() {
  int devices = 0;
  cudaGetDeviceCount(&devices);
  cudaGetLastError();
  return devices;
}

}  // namespace

extern "C" {

int nvmlInit_v2() { return kSuccess; }
int nvmlInit() { return kSuccess; }
int nvmlShutdown() { return kSuccess; }
const char* nvmlErrorString(int code) { return code == kSuccess ? "Success" : "Not supported by the emulated GPU"; }

int nvmlDeviceGetCount_v2(unsigned* devices) {
  *devices = count();
  return kSuccess;
}
int nvmlDeviceGetCount(unsigned* devices) { return nvmlDeviceGetCount_v2(devices); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  *device = index + 1;
  return static_cast<int>(index) < count() ? kSuccess : kInvalidArgument;
}
int nvmlDeviceGetHandleByIndex(unsigned index, Device* device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, Device* device) {
  unsigned domain, bus, number, own_bus;
  if (sscanf(id, "%x:%x:%x", &domain, &bus, &number) != 3) return kInvalidArgument;
  for (int index = 0; index < count(); ++index) {
    char own[32];
    cudaDeviceGetPCIBusId(own, sizeof own, index);
    sscanf(own, "%*x:%x", &own_bus);
    if (own_bus == bus) {
      *device = index + 1;
      return kSuccess;
    }
  }
  return kNotFound;
}
int nvmlDeviceGetHandleByPciBusId(const char* id, Device* device) { return nvmlDeviceGetHandleByPciBusId_v2(id, device); }

int nvmlDeviceGetIndex(Device device, unsigned* index) {
  *index = static_cast<unsigned>(device - 1);
  return kSuccess;
}

int nvmlDeviceGetPciInfo_v3(Device device, PciInfo* info) {
  memset(info, 0, sizeof *info);
  cudaDeviceGetPCIBusId(info->old_bus_id, sizeof info->old_bus_id, static_cast<int>(device - 1));
  sscanf(info->old_bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device);
  snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", info->domain, info->bus, info->device);
  return kSuccess;
}

int nvmlDeviceGetName(Device, char* name, unsigned length) {
  snprintf(name, length, "holmes emulated GPU");
  return kSuccess;
}

int nvmlDeviceGetUUID(Device device, char* uuid, unsigned length) {
  snprintf(uuid, length, "GPU-holmes-emulated-%d", static_cast<int>(device - 1));
  return kSuccess;
}

int nvmlDeviceGetCudaComputeCapability(Device device, int* major, int* minor) {
  cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, static_cast<int>(device - 1));
  cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, static_cast<int>(device - 1));
  return kSuccess;
}

int nvmlDeviceGetMemoryInfo(Device device, unsigned long long* total_free_used) {
  size_t free = 0, total = 0;
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(static_cast<int>(device - 1));
  cudaMemGetInfo(&free, &total);
  cudaSetDevice(before);
  total_free_used[0] = total;
  total_free_used[1] = free;
  total_free_used[2] = total - free;
  return kSuccess;
}

int nvmlDeviceGetComputeRunningProcesses(Device, unsigned* processes, void*) {
  *processes = 0;
  return kSuccess;
}

int nvmlDeviceGetP2PStatus(Device, Device, int, int* status) {
  *status = 1;  // the chipset does not support it, as cudaDeviceCanAccessPeer says
  return kSuccess;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  cudaDriverGetVersion(version);
  return kSuccess;
}

int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  snprintf(version, length, "580.0 (emulated)");
  return kSuccess;
}

// No NVLink, no fabric manager, no confidential computing.
int nvmlDeviceGetNvLinkState(Device, unsigned, int*) { return kNotSupported; }
int nvmlDeviceGetNvLinkCapability(Device, unsigned, int, unsigned*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo(Device, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemoteDeviceType(Device, unsigned, int*) { return kNotSupported; }
int nvmlDeviceGetFieldValues(Device, int, void*) { return kNotSupported; }
int nvmlDeviceGetGpuFabricInfoV(Device, void*) { return kNotSupported; }
int nvmlDeviceGetPlatformInfo(Device, void*) { return kNotSupported; }
int nvmlSystemGetConfComputeState(void*) { return kNotSupported; }
int nvmlSystemGetConfComputeSettings(void*) { return kNotSupported; }
int nvmlDeviceGetUtilizationRates(Device, void*) { return kNotSupported; }
int nvmlDeviceGetClockInfo(Device, int, unsigned*) { return kNotSupported; }
int nvmlDeviceGetTemperature(Device, int, unsigned*) { return kNotSupported; }
int nvmlDeviceGetPowerUsage(Device, unsigned*) { return kNotSupported; }
}
