// The part of CUDA's runtime API that the emulated GPU has: own declarations of its public interface (names,
// values and layouts as in NVIDIA's "CUDA Runtime API" reference, 12 and 13), for the runtime, the operators
// and NCCL's host code.
#pragma once

#include <stddef.h>
#include <stdint.h>

// The version of the toolkit that torch was built with: 1000 x major + 10 x minor.
#ifndef CUDART_VERSION
#define CUDART_VERSION 13000
#endif
#define CUDA_VERSION CUDART_VERSION

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDART_CB

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorCudartUnloading = 4,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorStubLibrary = 34,
  cudaErrorInsufficientDriver = 35,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorDevicesUnavailable = 46,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorDeviceUninitialized = 201,
  cudaErrorPeerAccessUnsupported = 217,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorLossyQuery = 402,
  cudaErrorSymbolNotFound = 500,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorPeerAccessNotEnabled = 705,
  cudaErrorContextIsDestroyed = 709,
  cudaErrorAssert = 710,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorUnknown = 999
} cudaError_t;

// Handles. They point to objects of the runtime; the driver's names for them are the same (cuda.h).
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef struct CUfunc_st* cudaFunction_t;
typedef struct CUkern_st* cudaKernel_t;
typedef struct CUlib_st* cudaLibrary_t;
typedef struct CUgraph_st* cudaGraph_t;
typedef struct CUgraphNode_st* cudaGraphNode_t;
typedef struct CUgraphExec_st* cudaGraphExec_t;
typedef struct CUuserObject_st* cudaUserObject_t;
typedef struct CUmemPoolHandle_st* cudaMemPool_t;
typedef unsigned long long cudaGraphConditionalHandle;

#define cudaStreamLegacy ((cudaStream_t)0x1)
#define cudaStreamPerThread ((cudaStream_t)0x2)
#define cudaStreamDefault 0x00
#define cudaStreamNonBlocking 0x01

#define cudaEventDefault 0x00
#define cudaEventBlockingSync 0x01
#define cudaEventDisableTiming 0x02
#define cudaEventInterprocess 0x04
#define cudaEventRecordDefault 0x00
#define cudaEventRecordExternal 0x01
#define cudaEventWaitDefault 0x00
#define cudaEventWaitExternal 0x01

#define cudaHostAllocDefault 0x00
#define cudaHostAllocPortable 0x01
#define cudaHostAllocMapped 0x02
#define cudaHostAllocWriteCombined 0x04
#define cudaHostRegisterDefault 0x00
#define cudaHostRegisterPortable 0x01
#define cudaHostRegisterMapped 0x02
#define cudaHostRegisterIoMemory 0x04
#define cudaHostRegisterReadOnly 0x08
#define cudaMemAttachGlobal 0x01
#define cudaIpcMemLazyEnablePeerAccess 0x01
#define cudaDeviceScheduleMask 0x07
#define cudaOccupancyDefault 0x00
#define cudaEnableDefault 0x0
#define cudaEnableLegacyStream 0x1
#define cudaEnablePerThreadDefaultStream 0x2

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
};

enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3
};

struct cudaPointerAttributes {
  enum cudaMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
#if CUDART_VERSION >= 13000
  long reserved[8];
#endif
};

typedef struct CUuuid_st {
  char bytes[16];
} cudaUUID_t;

// The members that this code reads or sets, at their offsets.
#define EGPU_JOIN2(a, b) a##b
#define EGPU_JOIN(a, b) EGPU_JOIN2(a, b)
#define EGPU_AT(offset, member)                \
  struct {                                     \
    char EGPU_JOIN(before_, __LINE__)[offset]; \
    member;                                    \
  }
struct cudaDeviceProp {
  union {
#if CUDART_VERSION >= 13000
    char all[1008];
#else
    char all[1032];
#endif
    char name[256];
    EGPU_AT(256, cudaUUID_t uuid);
    EGPU_AT(288, size_t totalGlobalMem);
    EGPU_AT(296, size_t sharedMemPerBlock);
    EGPU_AT(304, int regsPerBlock);
    EGPU_AT(308, int warpSize);
    EGPU_AT(312, size_t memPitch);
    EGPU_AT(320, int maxThreadsPerBlock);
    EGPU_AT(324, int maxThreadsDim[3]);
    EGPU_AT(336, int maxGridSize[3]);
    EGPU_AT(352, size_t totalConstMem);
    EGPU_AT(360, int major);
    EGPU_AT(364, int minor);
    EGPU_AT(368, size_t textureAlignment);
#if CUDART_VERSION >= 13000
    EGPU_AT(384, int multiProcessorCount);
    EGPU_AT(388, int integrated);
    EGPU_AT(392, int canMapHostMemory);
    EGPU_AT(560, int concurrentKernels);
    EGPU_AT(568, int pciBusID);
    EGPU_AT(572, int pciDeviceID);
    EGPU_AT(576, int pciDomainID);
    EGPU_AT(584, int asyncEngineCount);
    EGPU_AT(588, int unifiedAddressing);
    EGPU_AT(592, int memoryBusWidth);
    EGPU_AT(596, int l2CacheSize);
    EGPU_AT(604, int maxThreadsPerMultiProcessor);
    EGPU_AT(608, int streamPrioritiesSupported);
    EGPU_AT(624, size_t sharedMemPerMultiprocessor);
    EGPU_AT(632, int regsPerMultiprocessor);
    EGPU_AT(668, int cooperativeLaunch);
    EGPU_AT(672, size_t sharedMemPerBlockOptin);
    EGPU_AT(688, int maxBlocksPerMultiProcessor);
#else
    EGPU_AT(348, int clockRate);
    EGPU_AT(384, int deviceOverlap);
    EGPU_AT(388, int multiProcessorCount);
    EGPU_AT(396, int integrated);
    EGPU_AT(400, int canMapHostMemory);
    EGPU_AT(576, int concurrentKernels);
    EGPU_AT(584, int pciBusID);
    EGPU_AT(588, int pciDeviceID);
    EGPU_AT(592, int pciDomainID);
    EGPU_AT(600, int asyncEngineCount);
    EGPU_AT(604, int unifiedAddressing);
    EGPU_AT(608, int memoryClockRate);
    EGPU_AT(612, int memoryBusWidth);
    EGPU_AT(616, int l2CacheSize);
    EGPU_AT(624, int maxThreadsPerMultiProcessor);
    EGPU_AT(628, int streamPrioritiesSupported);
    EGPU_AT(640, size_t sharedMemPerMultiprocessor);
    EGPU_AT(648, int regsPerMultiprocessor);
    EGPU_AT(692, int cooperativeLaunch);
    EGPU_AT(704, size_t sharedMemPerBlockOptin);
    EGPU_AT(720, int maxBlocksPerMultiProcessor);
#endif
  };
};
#undef EGPU_AT

// Attributes that this code queries; the values are also the driver's (CUdevice_attribute).
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxGridDimX = 5,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMaxRegistersPerBlock = 12,
  cudaDevAttrClockRate = 13,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrIntegrated = 18,
  cudaDevAttrCanMapHostMemory = 19,
  cudaDevAttrComputeMode = 20,
  cudaDevAttrConcurrentKernels = 31,
  cudaDevAttrPciBusId = 33,
  cudaDevAttrPciDeviceId = 34,
  cudaDevAttrMemoryClockRate = 36,
  cudaDevAttrGlobalMemoryBusWidth = 37,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrAsyncEngineCount = 40,
  cudaDevAttrUnifiedAddressing = 41,
  cudaDevAttrPciDomainId = 50,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrStreamPrioritiesSupported = 78,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxRegistersPerMultiprocessor = 82,
  cudaDevAttrHostNativeAtomicSupported = 86,
  cudaDevAttrCooperativeLaunch = 95,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrHostRegisterSupported = 99,
  cudaDevAttrMaxBlocksPerMultiprocessor = 106,
  cudaDevAttrMemoryPoolsSupported = 115,
  cudaDevAttrGPUDirectRDMASupported = 116
};

enum cudaLimit { cudaLimitStackSize = 0, cudaLimitPrintfFifoSize = 1, cudaLimitMallocHeapSize = 2 };

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

struct cudaFuncAttributes {
  size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA;
  int maxDynamicSharedSizeBytes, preferredShmemCarveout;
  int rest[22];
};

enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2
};

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2
};

enum cudaStreamUpdateCaptureDependenciesFlags {
  cudaStreamAddCaptureDependencies = 0,
  cudaStreamSetCaptureDependencies = 1
};

enum cudaUserObjectFlags { cudaUserObjectNoDestructorSync = 1 };
enum cudaUserObjectRetainFlags { cudaGraphUserObjectMove = 1 };

typedef struct cudaGraphEdgeData_st {
  unsigned char from_port, to_port, type, reserved[5];
} cudaGraphEdgeData;

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2
};

enum cudaMemLocationType {
  cudaMemLocationTypeInvalid = 0,
  cudaMemLocationTypeDevice = 1,
  cudaMemLocationTypeHost = 2
};
struct cudaMemLocation {
  enum cudaMemLocationType type;
  int id;
};
enum cudaMemAccessFlags {
  cudaMemAccessFlagsProtNone = 0,
  cudaMemAccessFlagsProtRead = 1,
  cudaMemAccessFlagsProtReadWrite = 3
};
struct cudaMemAccessDesc {
  struct cudaMemLocation location;
  enum cudaMemAccessFlags flags;
};
enum cudaMemAllocationType { cudaMemAllocationTypeInvalid = 0, cudaMemAllocationTypePinned = 1 };
enum cudaMemAllocationHandleType { cudaMemHandleTypeNone = 0, cudaMemHandleTypePosixFileDescriptor = 1 };
struct cudaMemPoolProps {
  enum cudaMemAllocationType allocType;
  enum cudaMemAllocationHandleType handleTypes;
  struct cudaMemLocation location;
  void* win32SecurityAttributes;
  size_t maxSize;
  unsigned char reserved[56];
};
enum cudaMemPoolAttr {
  cudaMemPoolReuseFollowEventDependencies = 1,
  cudaMemPoolReuseAllowOpportunistic = 2,
  cudaMemPoolReuseAllowInternalDependencies = 3,
  cudaMemPoolAttrReleaseThreshold = 4,
  cudaMemPoolAttrReservedMemCurrent = 5,
  cudaMemPoolAttrReservedMemHigh = 6,
  cudaMemPoolAttrUsedMemCurrent = 7,
  cudaMemPoolAttrUsedMemHigh = 8
};

enum cudaGraphMemAttributeType {
  cudaGraphMemAttrUsedMemCurrent = 0,
  cudaGraphMemAttrUsedMemHigh = 1,
  cudaGraphMemAttrReservedMemCurrent = 2,
  cudaGraphMemAttrReservedMemHigh = 3
};

enum cudaMemcpyFlags { cudaMemcpyFlagDefault = 0, cudaMemcpyFlagPreferOverlapWithCompute = 1 };
enum cudaMemcpySrcAccessOrder {
  cudaMemcpySrcAccessOrderInvalid = 0,
  cudaMemcpySrcAccessOrderStream = 1,
  cudaMemcpySrcAccessOrderDuringApiCall = 2,
  cudaMemcpySrcAccessOrderAny = 3
};
struct cudaMemcpyAttributes {
  enum cudaMemcpySrcAccessOrder srcAccessOrder;
  struct cudaMemLocation srcLocHint, dstLocHint;
  unsigned flags;
};

#define CUDA_IPC_HANDLE_SIZE 64
typedef struct {
  char reserved[CUDA_IPC_HANDLE_SIZE];
} cudaIpcMemHandle_t;
typedef struct {
  char reserved[CUDA_IPC_HANDLE_SIZE];
} cudaIpcEventHandle_t;

#ifdef __cplusplus
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
#else
typedef struct {
  unsigned x, y, z;
} dim3;
#endif
typedef struct {
  unsigned x, y, z;
} uint3;

typedef struct {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
} cudaLaunchConfig_t;

enum cudaLaunchMemSyncDomain { cudaLaunchMemSyncDomainDefault = 0, cudaLaunchMemSyncDomainRemote = 1 };

typedef void (*cudaHostFn_t)(void* data);
typedef void (*cudaStreamCallback_t)(cudaStream_t stream, cudaError_t status, void* data);

// A default argument in C++.
#ifdef __cplusplus
#define EGPU_OR(value) = value
#else
#define EGPU_OR(value)
#endif

cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaSetDeviceFlags(unsigned flags);
cudaError_t cudaGetDeviceFlags(unsigned* flags);
cudaError_t cudaDeviceReset(void);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device);
#if CUDART_VERSION < 13000
#define cudaGetDeviceProperties cudaGetDeviceProperties_v2
#endif
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device);
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value);
cudaError_t cudaDeviceGetLimit(size_t* value, enum cudaLimit limit);
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceDisablePeerAccess(int peer);

cudaError_t cudaMalloc(void** address, size_t size);
cudaError_t cudaFree(void* address);
cudaError_t cudaMallocManaged(void** address, size_t size, unsigned flags EGPU_OR(cudaMemAttachGlobal));
cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t stream);
cudaError_t cudaFreeAsync(void* address, cudaStream_t stream);
cudaError_t cudaMallocFromPoolAsync(void** address, size_t size, cudaMemPool_t pool, cudaStream_t stream);
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device);
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const struct cudaMemPoolProps* properties);
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool);
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void* value);
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void* value);
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc* access, size_t count);
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t kept);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
cudaError_t cudaHostAlloc(void** address, size_t size, unsigned flags);
cudaError_t cudaMallocHost(void** address, size_t size);
cudaError_t cudaFreeHost(void* address);
cudaError_t cudaHostRegister(void* address, size_t size, unsigned flags);
cudaError_t cudaHostUnregister(void* address);
cudaError_t cudaHostGetDevicePointer(void** device_address, void* address, unsigned flags);
cudaError_t cudaHostGetFlags(unsigned* flags, void* address);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* address);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address);
cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* address);
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event);
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle);

cudaError_t cudaMemcpy(void* target, const void* source, size_t size, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream EGPU_OR(0));
cudaError_t cudaMemcpyPeer(void* target, int target_device, const void* source, int source_device,
                           size_t size);
cudaError_t cudaMemcpyPeerAsync(void* target, int target_device, const void* source, int source_device,
                                size_t size, cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream EGPU_OR(0));
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* source, size_t size, size_t offset,
                               enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyBatchAsync(void* const* targets, const void* const* sources, const size_t* sizes,
                                 size_t count, struct cudaMemcpyAttributes* attributes, size_t* indices,
                                 size_t attribute_count, cudaStream_t stream);
cudaError_t cudaMemset(void* target, int value, size_t size);
cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream EGPU_OR(0));

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority);
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags);
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id);
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags EGPU_OR(0));
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data,
                                  unsigned flags);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream EGPU_OR(0));
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

cudaError_t cudaLaunchKernel(const void* symbol, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream);
cudaError_t cudaLaunchCooperativeKernel(const void* symbol, dim3 grid, dim3 block, void** arguments,
                                        size_t shared, cudaStream_t stream);
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* symbol, void** arguments);
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* symbol);
cudaError_t cudaFuncSetAttribute(const void* symbol, enum cudaFuncAttribute attribute, int value);
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol);
cudaError_t cudaGetSymbolAddress(void** address, const void* symbol);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* symbol, int block_size,
                                                          size_t shared);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* symbol,
                                                                   int block_size, size_t shared,
                                                                   unsigned flags);

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status);
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                     unsigned long long* id EGPU_OR(0), cudaGraph_t* graph EGPU_OR(0),
                                     const cudaGraphNode_t** dependencies EGPU_OR(0),
                                     const cudaGraphEdgeData** edges EGPU_OR(0), size_t* count EGPU_OR(0));
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* dependencies,
                                                const cudaGraphEdgeData* edges, size_t count, unsigned flags);
cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t* from,
                                     const cudaGraphNode_t* to, const cudaGraphEdgeData* edges, size_t count);
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                        unsigned long long* id EGPU_OR(0), cudaGraph_t* graph EGPU_OR(0),
                                        const cudaGraphNode_t** dependencies EGPU_OR(0),
                                        size_t* count EGPU_OR(0));
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                        unsigned long long* id EGPU_OR(0), cudaGraph_t* graph EGPU_OR(0),
                                        const cudaGraphNode_t** dependencies EGPU_OR(0),
                                        const cudaGraphEdgeData** edges EGPU_OR(0), size_t* count EGPU_OR(0));
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* dependencies,
                                                size_t count, unsigned flags);
cudaError_t cudaStreamUpdateCaptureDependencies_v2(cudaStream_t stream, cudaGraphNode_t* dependencies,
                                                   const cudaGraphEdgeData* edges, size_t count,
                                                   unsigned flags);
cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t* from,
                                     const cudaGraphNode_t* to, size_t count);
cudaError_t cudaGraphAddDependencies_v2(cudaGraph_t graph, const cudaGraphNode_t* from,
                                        const cudaGraphNode_t* to, const cudaGraphEdgeData* edges,
                                        size_t count);
#endif
cudaError_t cudaDeviceGetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute, void* value);
cudaError_t cudaDeviceSetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute, void* value);
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* pointer, cudaHostFn_t destroy,
                                 unsigned references, unsigned flags);
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count EGPU_OR(1));
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count EGPU_OR(1),
                                      unsigned flags EGPU_OR(0));
cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                        const cudaGraphNode_t* dependencies, size_t count, cudaEvent_t event);
cudaError_t cudaGraphAddEventWaitNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                      const cudaGraphNode_t* dependencies, size_t count, cudaEvent_t event);

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult* status EGPU_OR(0));
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* status EGPU_OR(0));
cudaError_t cudaProfilerStart(void);
cudaError_t cudaProfilerStop(void);

#ifdef __cplusplus
}
#endif
