// libnvidia-ml.so.1: the functions of the management library that NCCL and torch call. It has all GPUs of the
// node, whatever CUDA_VISIBLE_DEVICES shows. It does not start the runtime: a process that has only counted
// GPUs may fork.

#include <stdio.h>
#include <string.h>

#include "cuda_runtime_api.h"
#include "emulated_gpu.h"

namespace {

enum Return { kSuccess = 0, kInvalidArgument = 2, kNotSupported = 3, kNotFound = 6 };

// A device's handle is its number plus 1.
using Device = intptr_t;

// The start of nvmlPciInfo_t, version 3. NVIDIA's struct has 68 bytes, because its bus_id has 32. NCCL 2.30
// passes a struct of 52 bytes to nvmlDeviceGetPciInfo_v3 (src/include/nvmlwrap.h, src/graph/xml.cc), so that
// function writes no byte after the 52nd.
struct PciInfo {
  char old_bus_id[16];
  unsigned domain, bus, device, pci_device, pci_subsystem;
  char bus_id[16];
};
static_assert(sizeof(PciInfo) == 52);

int count() { return static_cast<int>(egpuSetting("COUNT", 1)); }

// A device's number in CUDA; -1 where CUDA_VISIBLE_DEVICES hides it.
int in_cuda(Device device) {
  char id[16];
  snprintf(id, sizeof id, "0000:%02X:00.0", EGPU_FIRST_BUS + static_cast<int>(device - 1));
  int found = -1;
  return cudaDeviceGetByPCIBusId(&found, id) == cudaSuccess ? found : -1;
}

}  // namespace

extern "C" {

int nvmlInit_v2() { return kSuccess; }
int nvmlInit() { return kSuccess; }
int nvmlShutdown() { return kSuccess; }
const char* nvmlErrorString(int code) {
  return code == kSuccess ? "Success" : "Not supported by the emulated GPU";
}

int nvmlDeviceGetCount_v2(unsigned* devices) {
  *devices = count();
  return kSuccess;
}
int nvmlDeviceGetCount(unsigned* devices) { return nvmlDeviceGetCount_v2(devices); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  *device = index + 1;
  return static_cast<int>(index) < count() ? kSuccess : kInvalidArgument;
}
int nvmlDeviceGetHandleByIndex(unsigned index, Device* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, Device* device) {
  unsigned domain, bus, number;
  if (sscanf(id, "%x:%x:%x", &domain, &bus, &number) != 3) return kInvalidArgument;
  if (bus < EGPU_FIRST_BUS || bus >= EGPU_FIRST_BUS + static_cast<unsigned>(count())) return kNotFound;
  *device = bus - EGPU_FIRST_BUS + 1;
  return kSuccess;
}
int nvmlDeviceGetHandleByPciBusId(const char* id, Device* device) {
  return nvmlDeviceGetHandleByPciBusId_v2(id, device);
}

int nvmlDeviceGetIndex(Device device, unsigned* index) {
  *index = static_cast<unsigned>(device - 1);
  return kSuccess;
}

int nvmlDeviceGetPciInfo_v3(Device device, PciInfo* info) {
  memset(info, 0, sizeof *info);
  info->bus = EGPU_FIRST_BUS + static_cast<unsigned>(device - 1);
  snprintf(info->old_bus_id, sizeof info->old_bus_id, "0000:%02X:00.0", info->bus);
  // NVIDIA writes the domain with 8 digits. They do not fit into 16 bytes.
  snprintf(info->bus_id, sizeof info->bus_id, "0000:%02X:00.0", info->bus);
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

int nvmlDeviceGetCudaComputeCapability(Device, int* major, int* minor) {
  *major = EGPU_MAJOR;
  *minor = EGPU_MINOR;
  return kSuccess;
}

// Memory of the device, as this process sees it.
int nvmlDeviceGetMemoryInfo(Device device, unsigned long long* total_free_used) {
  size_t free, total;
  free = total = static_cast<size_t>(egpuSetting("MEMORY_MB", EGPU_MEMORY_MB)) << 20;
  int before = 0, number = in_cuda(device);
  if (number >= 0) {
    cudaGetDevice(&before);
    cudaSetDevice(number);
    cudaMemGetInfo(&free, &total);
    cudaSetDevice(before);
  }
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

// PCIe 4.0 x16.
int nvmlDeviceGetCurrPcieLinkGeneration(Device, unsigned* generation) {
  *generation = 4;
  return kSuccess;
}
int nvmlDeviceGetCurrPcieLinkWidth(Device, unsigned* lanes) {
  *lanes = 16;
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
int nvmlDeviceGetPcieLinkMaxSpeed(Device, unsigned*) { return kNotSupported; }
int nvmlDeviceGetPciInfoExt(Device, void*) { return kNotSupported; }
int nvmlDeviceGetUtilizationRates(Device, void*) { return kNotSupported; }
int nvmlDeviceGetClockInfo(Device, int, unsigned*) { return kNotSupported; }
int nvmlDeviceGetTemperature(Device, int, unsigned*) { return kNotSupported; }
int nvmlDeviceGetPowerUsage(Device, unsigned*) { return kNotSupported; }
}
