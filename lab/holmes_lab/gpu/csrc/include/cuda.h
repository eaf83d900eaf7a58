// The part of CUDA's driver API that programs use on emulated GPUs: own declarations of its public
// interface (names, values and layouts as in NVIDIA's "CUDA Driver API" reference). Some functions are
// declared and not emulated, so that NCCL's host code compiles: cuda.cc does not have them, and NCCL finds
// them missing.
#pragma once

#include "cuda_runtime_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cudaError_enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_LAUNCH_FAILED = 719,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_UNKNOWN = 999
} CUresult;

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st* CUcontext;
typedef struct CUmod_st* CUmodule;
typedef struct CUlinkState_st* CUlinkState;
typedef cudaStream_t CUstream;
typedef cudaEvent_t CUevent;
typedef cudaFunction_t CUfunction;
typedef CUuuid_st CUuuid;
typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef enum cudaDeviceAttr CUdevice_attribute;

#define CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ((CUdevice_attribute)75)
#define CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ((CUdevice_attribute)76)
#define CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ((CUdevice_attribute)102)
#define CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED ((CUdevice_attribute)110)
#define CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED ((CUdevice_attribute)124)
#define CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED ((CUdevice_attribute)128)
#define CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED ((CUdevice_attribute)132)
#define CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID ((CUdevice_attribute)134)
#define CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED ((CUdevice_attribute)143)

#define CU_CTX_SCHED_SPIN 0x01
#define CU_CTX_MAP_HOST 0x08
#define CU_MEMHOSTALLOC_WRITECOMBINED 0x04
#define CU_IPC_HANDLE_SIZE 64
#define CU_STREAM_WAIT_VALUE_GEQ 0x0
#define CU_STREAM_WAIT_VALUE_EQ 0x1
#define CU_STREAM_WRITE_VALUE_DEFAULT 0x0
#define CU_LAUNCH_PARAM_END ((void*)0x00)
#define CU_LAUNCH_PARAM_BUFFER_POINTER ((void*)0x01)
#define CU_LAUNCH_PARAM_BUFFER_SIZE ((void*)0x02)
#define CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE 0x1

typedef enum CUpointer_attribute_enum {
  CU_POINTER_ATTRIBUTE_CONTEXT = 1,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
  CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
  CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14
} CUpointer_attribute;

typedef enum CUmemorytype_enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 } CUmemorytype;

typedef enum CUclusterSchedulingPolicy_enum {
  CU_CLUSTER_SCHEDULING_POLICY_SPREAD = 1
} CUclusterSchedulingPolicy;
typedef enum CUlaunchMemSyncDomain_enum { CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT = 0 } CUlaunchMemSyncDomain;
typedef enum CUlaunchAttributeID_enum {
  CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
  CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE = 5,
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
  CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN = 10,
  CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT = 12,
  CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING = 16
} CUlaunchAttributeID;
typedef union CUlaunchAttributeValue_union {
  char all[64];
  struct {
    unsigned x, y, z;
  } clusterDim;
  CUclusterSchedulingPolicy clusterSchedulingPolicyPreference;
  int programmaticStreamSerializationAllowed;
  struct {
    CUevent event;
    int flags;
  } launchCompletionEvent;
  CUlaunchMemSyncDomain memSyncDomain;
  unsigned nvlinkUtilCentricScheduling;
} CUlaunchAttributeValue;
typedef struct CUlaunchAttribute_st {
  CUlaunchAttributeID id;
  char to_8[4];
  CUlaunchAttributeValue value;
} CUlaunchAttribute;
typedef struct CUlaunchConfig_st {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
} CUlaunchConfig;

typedef enum CUmemAllocationType_enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 } CUmemAllocationType;
typedef enum CUmemAllocationHandleType_enum {
  CU_MEM_HANDLE_TYPE_NONE = 0,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
  CU_MEM_HANDLE_TYPE_FABRIC = 8
} CUmemAllocationHandleType;
typedef enum CUmemLocationType_enum {
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
  CU_MEM_LOCATION_TYPE_HOST = 2,
  CU_MEM_LOCATION_TYPE_HOST_NUMA = 3
} CUmemLocationType;
typedef enum CUmemAccess_flags_enum { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 } CUmemAccess_flags;
typedef enum CUmemAllocationGranularity_flags_enum {
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1
} CUmemAllocationGranularity_flags;
typedef enum CUmemRangeHandleType_enum {
  CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1,
  CU_MEM_RANGE_HANDLE_TYPE_MAX = 0x7fffffff
} CUmemRangeHandleType;
typedef enum CUmulticastGranularity_flags_enum {
  CU_MULTICAST_GRANULARITY_MINIMUM = 0,
  CU_MULTICAST_GRANULARITY_RECOMMENDED = 1
} CUmulticastGranularity_flags;
typedef struct CUmemLocation_st {
  CUmemLocationType type;
  int id;
} CUmemLocation;
typedef struct CUmemAllocationProp_st {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType, gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} CUmemAllocationProp;
typedef struct CUmemAccessDesc_st {
  CUmemLocation location;
  CUmemAccess_flags flags;
} CUmemAccessDesc;
typedef struct CUmemFabricHandle_st {
  unsigned char data[CU_IPC_HANDLE_SIZE];
} CUmemFabricHandle;
typedef CUmemFabricHandle CUmemFabricHandle_v1;
typedef struct CUmulticastObjectProp_st {
  unsigned numDevices;
  size_t size;
  unsigned long long handleTypes, flags;
} CUmulticastObjectProp;

typedef enum CUstreamBatchMemOpType_enum {
  CU_STREAM_MEM_OP_WAIT_VALUE_32 = 1,
  CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2,
  CU_STREAM_MEM_OP_WAIT_VALUE_64 = 4,
  CU_STREAM_MEM_OP_WRITE_VALUE_64 = 5
} CUstreamBatchMemOpType;
typedef union CUstreamBatchMemOpParams_union {
  CUstreamBatchMemOpType operation;
  struct {
    CUstreamBatchMemOpType operation;
    CUdeviceptr address;
    union {
      cuuint32_t value;
      cuuint64_t value64;
    };
    unsigned flags;
    CUdeviceptr alias;
  } waitValue, writeValue;
  cuuint64_t all[6];
} CUstreamBatchMemOpParams;

CUresult cuInit(unsigned flags);
CUresult cuDriverGetVersion(int* version);
CUresult cuGetErrorString(CUresult error, const char** text);
CUresult cuGetErrorName(CUresult error, const char** name);
CUresult cuDeviceGet(CUdevice* device, int ordinal);
CUresult cuDeviceGetCount(int* count);
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device);
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active);
CUresult cuCtxGetCurrent(CUcontext* context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxGetDevice(CUdevice* device);
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address);
CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* size, CUdeviceptr address);
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream stream, void** parameters, void** extra);
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra);

// Declared only: cuda.cc has none of these.
CUresult cuCtxCreate(CUcontext* context, void* affinity, int affinity_count, unsigned flags, CUdevice device);
CUresult cuCtxDestroy(CUcontext context);
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment, CUdeviceptr at,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr address, size_t size);
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                     unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags);
CUresult cuMemUnmap(CUdeviceptr address, size_t size);
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t count);
CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option);
CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                        CUmemAllocationHandleType type);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address);
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                CUmemGenericAllocationHandle handle);
CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr address, size_t size,
                                       CUmemRangeHandleType type, unsigned long long flags);
CUresult cuMulticastCreate(CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* properties);
CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device);
CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset,
                            CUmemGenericAllocationHandle memory, size_t memory_offset, size_t size,
                            unsigned long long flags);
CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr memory,
                             size_t size, unsigned long long flags);
CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t size);
CUresult cuMulticastGetGranularity(size_t* size, const CUmulticastObjectProp* properties,
                                   CUmulticastGranularity_flags option);
CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations,
                            unsigned flags);
CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags);
CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags);
CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags);
CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags);

#ifdef __cplusplus
}
#endif
