// CUDA's runtime, and the part of its driver that torch needs, on a machine without a GPU.
//
// Device memory is host memory. A stream is a thread that works in order. A copy between host and
// device takes time, so that a missing wait finds the data missing. Kernels are not run:
// `kernels.py` makes the CPU's kernels do their work, and a launch is an error that names the
// kernel. LD_PRELOAD loads this under the name of the driver's library, libcuda.so.1.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Clock = std::chrono::steady_clock;
using Guard = std::lock_guard<std::mutex>;
using Ranges = std::map<uintptr_t, size_t>;  // start address -> bytes

double setting(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text ? atof(text) : otherwise;
}

const size_t TOTAL_BYTES = size_t(setting("SIMULATED_GPU_MIB", 8192)) << 20;
const double BYTES_PER_SECOND =
    setting("SIMULATED_GPU_BYTES_PER_SECOND", 4e9) / setting("SIMULATED_GPU_SLOWNESS", 1);
const bool COMPUTES = setting("SIMULATED_GPU_COMPUTES", 1) != 0;
// Whether there is virtual memory; some virtual GPUs have none.
const bool MAPS = setting("SIMULATED_GPU_MAPS", 1) != 0;
// The host's time to map one handle, and to unmap it later.
const double MAPPING_SECONDS = COMPUTES ? 0 : 1e-4 * setting("SIMULATED_GPU_SLOWNESS", 1);
const size_t PAGE_BYTES = size_t(2) << 20;

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t unsupported() { return fail(cudaErrorNotSupported); }

void pass(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// A point in a stream's work.
class Moment {
 public:
  void come() {
    Guard lock(mutex_);
    over_ = true;
    at_ = Clock::now();
    changed_.notify_all();
  }
  void await() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return over_; });
  }
  bool over() {
    Guard lock(mutex_);
    return over_;
  }
  Clock::time_point at() {
    Guard lock(mutex_);
    return at_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  Clock::time_point at_;
};

class Stream {
 public:
  explicit Stream(int priority) : priority(priority) {}

  const int priority;

  void add(std::function<void()> work) {
    Guard lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { serve(); }).detach();
    }
    waiting_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool idle() {
    Guard lock(mutex_);
    return waiting_.empty() && !busy_;
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return waiting_.empty() && !busy_; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      auto work = std::move(waiting_.front());
      waiting_.pop_front();
      busy_ = true;
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool busy_ = false;
  bool started_ = false;
};

class Event {
 public:
  explicit Event(bool timed) : timed(timed) {}

  const bool timed;

  std::shared_ptr<Moment> moment() {
    Guard lock(mutex_);
    return moment_;
  }
  void record(Stream* stream) {
    auto moment = std::make_shared<Moment>();
    {
      Guard lock(mutex_);
      moment_ = moment;
    }
    stream->add([moment] { moment->come(); });
  }
  bool over() {
    auto last = moment();
    return !last || last->over();
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Moment> moment_;
};

struct Device {
  std::mutex mutex;
  size_t taken_bytes = 0;
  Ranges blocks;  // of cudaMalloc
  Ranges spaces;  // reserved addresses, where pages may be mapped
  Ranges locked;  // pinned host memory, registered or allocated
  Ranges pinned;  // the part of `locked` from cudaHostAlloc
  std::set<Stream*> streams;
  Stream* default_stream = new Stream(0);
  std::unordered_map<const void*, std::string> kernels;
};

Device& device() {
  static Device* one = new Device;  // never destroyed: threads of streams outlive `main`
  return *one;
}

Stream* of(cudaStream_t stream) {
  bool named = reinterpret_cast<uintptr_t>(stream) > 2;  // 1 and 2 are default streams, as 0 is
  return named ? reinterpret_cast<Stream*>(stream) : device().default_stream;
}

Event* of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

bool within(const Ranges& ranges, const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return false;
  --next;
  return address < next->first + next->second;
}

bool on_device(const void* pointer) {
  Guard lock(device().mutex);
  return within(device().blocks, pointer) || within(device().spaces, pointer);
}

bool is_locked(const void* pointer) {
  Guard lock(device().mutex);
  return within(device().locked, pointer);
}

bool take(size_t nbytes) {
  Guard lock(device().mutex);
  if (device().taken_bytes + nbytes > TOTAL_BYTES) return false;
  device().taken_bytes += nbytes;
  return true;
}

void give_back(size_t nbytes) {
  Guard lock(device().mutex);
  device().taken_bytes -= nbytes;
}

cudaError_t copy(void* to, const void* from, size_t nbytes, cudaStream_t stream) {
  bool to_device = on_device(to), from_device = on_device(from);
  bool pageable = !(to_device || is_locked(to)) || !(from_device || is_locked(from));
  of(stream)->add([=] {
    if (to_device != from_device) pass(double(nbytes) / BYTES_PER_SECOND);
    if (COMPUTES || pageable) memmove(to, from, nbytes);
  });
  if (pageable) of(stream)->drain();
  return cudaSuccess;
}

cudaError_t refuse_launch(const void* kernel) {
  Guard lock(device().mutex);
  auto found = device().kernels.find(kernel);
  const char* name = found == device().kernels.end() ? "?" : found->second.c_str();
  fprintf(stderr, "simulated GPU: a kernel that nobody plays: %.300s\n", name);
  return unsupported();
}

}  // namespace

// --- kernels ---

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, uint3*,
                                uint3*, dim3*, dim3*, int*) {
  Guard lock(device().mutex);
  device().kernels[kernel] = name;
}
API char __cudaInitModule(void**) { return 1; }
API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse_launch(kernel);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return refuse_launch(kernel);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void**, const void*) { return unsupported(); }
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*,
                                                                       int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

// --- the device ---

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* number) {
  *number = 0;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int number) {
  return number ? fail(cudaErrorInvalidDevice) : cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  strcpy(properties->name, "simulated GPU");
  properties->totalGlobalMem = TOTAL_BYTES;
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->l2CacheSize = 50 << 20;
  properties->pciBusID = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int) {
  snprintf(text, length, "0000:01:00.0");
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return unsupported(); }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  *least = 0;
  *most = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  std::vector<Stream*> all{device().default_stream};
  {
    Guard lock(device().mutex);
    all.insert(all.end(), device().streams.begin(), device().streams.end());
  }
  for (Stream* stream : all) stream->drain();
  return cudaSuccess;
}
API const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
API const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  return error == cudaErrorNotSupported ? "operation not supported" : "an error";
}
API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// --- memory ---

// Torch frees tensors while it holds Python's GIL, which the kernels need here.
template <typename Work>
static void without_python(Work wait) {
  static auto* holds = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  static auto* leave = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  static auto* enter = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  void* left = holds && holds() ? leave() : nullptr;
  wait();
  if (left) enter(left);
}
static void synchronize_without_python() { without_python(cudaDeviceSynchronize); }

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Guard lock(device().mutex);
  *free = TOTAL_BYTES - device().taken_bytes;
  *total = TOTAL_BYTES;
  return cudaSuccess;
}
API cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
  size_t whole = (nbytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
  if (!take(whole)) return fail(cudaErrorMemoryAllocation);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *pointer = mmap(nullptr, whole, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (*pointer == MAP_FAILED) {
    give_back(whole);
    return fail(cudaErrorMemoryAllocation);
  }
  Guard lock(device().mutex);
  device().blocks[reinterpret_cast<uintptr_t>(*pointer)] = whole;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  synchronize_without_python();
  size_t nbytes;
  {
    Guard lock(device().mutex);
    auto found = device().blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == device().blocks.end()) return fail(cudaErrorInvalidValue);
    nbytes = found->second;
    device().blocks.erase(found);
  }
  munmap(pointer, nbytes);
  give_back(nbytes);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* pointer, size_t nbytes, unsigned) {
  Guard lock(device().mutex);
  bool is_new = device().locked.emplace(reinterpret_cast<uintptr_t>(pointer), nbytes).second;
  return is_new ? cudaSuccess : fail(cudaErrorHostMemoryAlreadyRegistered);
}
API cudaError_t cudaHostUnregister(void* pointer) {
  Guard lock(device().mutex);
  bool was_there = device().locked.erase(reinterpret_cast<uintptr_t>(pointer));
  return was_there ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
API cudaError_t cudaHostAlloc(void** pointer, size_t nbytes, unsigned) {
  if (posix_memalign(pointer, 4096, nbytes ? nbytes : 1)) return fail(cudaErrorMemoryAllocation);
  {
    Guard lock(device().mutex);
    device().pinned[reinterpret_cast<uintptr_t>(*pointer)] = nbytes;
  }
  return cudaHostRegister(*pointer, nbytes, 0);
}
API cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return cudaSuccess;
  cudaHostUnregister(pointer);
  {
    Guard lock(device().mutex);
    device().pinned.erase(reinterpret_cast<uintptr_t>(pointer));
  }
  free(pointer);
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->type = on_device(pointer)   ? cudaMemoryTypeDevice
                     : is_locked(pointer) ? cudaMemoryTypeHost
                                          : cudaMemoryTypeUnregistered;
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind,
                                cudaStream_t stream) {
  return copy(to, from, nbytes, stream);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  copy(to, from, nbytes, nullptr);
  of(cudaStream_t(nullptr))->drain();
  return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes,
                                    cudaStream_t stream) {
  return copy(to, from, nbytes, stream);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind,
                                  cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) {
    copy(static_cast<char*>(to) + row * to_pitch,
         static_cast<const char*>(from) + row * from_pitch, width, stream);
  }
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t nbytes, cudaStream_t stream) {
  of(stream)->add([=] {
    if (COMPUTES) memset(pointer, value, nbytes);
  });
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* pointer, int value, size_t nbytes) {
  cudaMemsetAsync(pointer, value, nbytes, nullptr);
  of(cudaStream_t(nullptr))->drain();
  return cudaSuccess;
}

// --- streams and events ---

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  auto* made = new Stream(priority);
  Guard lock(device().mutex);
  device().streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = of(stream)->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return of(stream)->idle() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  without_python([&] { of(stream)->drain(); });
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  auto moment = of(event)->moment();
  if (moment) of(stream)->add([moment] { moment->await(); });
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data,
                                      unsigned) {
  of(stream)->add([=] { call(stream, cudaSuccess, data); });
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  of(stream)->add([=] { call(data); });
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(new Event(!(flags & cudaEventDisableTiming)));
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete of(event);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  of(event)->record(of(stream));
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  return of(event)->over() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (auto moment = of(event)->moment()) moment->await();
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  auto from = of(start)->moment(), to = of(stop)->moment();
  if (!from || !to || !of(start)->timed || !of(stop)->timed) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  if (!from->over() || !to->over()) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(to->at() - from->at()).count();
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                         unsigned long long*, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                         size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// --- the driver: addresses and pages are separate, for expandable segments ---

namespace {
struct Pages {
  int file;
  size_t nbytes;
};
const int NOTHING_THERE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
}  // namespace

API CUresult cuMemAddressReserve(CUdeviceptr* address, size_t nbytes, size_t, CUdeviceptr,
                                 unsigned long long) {
  void* space = mmap(nullptr, nbytes + PAGE_BYTES, PROT_NONE, NOTHING_THERE, -1, 0);
  if (space == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  auto start = reinterpret_cast<uintptr_t>(space);
  *address = (start + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
  Guard lock(device().mutex);
  device().spaces[*address] = nbytes;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
  Guard lock(device().mutex);
  device().spaces.erase(address);
  munmap(reinterpret_cast<void*>(address), nbytes);
  return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t nbytes,
                         const CUmemAllocationProp*, unsigned long long) {
  if (!MAPS) return CUDA_ERROR_NOT_SUPPORTED;
  if (!take(nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  int file = memfd_create("simulated-gpu", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, nbytes)) {
    if (file >= 0) close(file);
    give_back(nbytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = reinterpret_cast<uintptr_t>(new Pages{file, nbytes});
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto* pages = reinterpret_cast<Pages*>(handle);
  close(pages->file);
  give_back(pages->nbytes);
  delete pages;
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset,
                      CUmemGenericAllocationHandle handle, unsigned long long) {
  if (MAPPING_SECONDS > 0) pass(MAPPING_SECONDS);
  int file = reinterpret_cast<Pages*>(handle)->file;
  void* at = mmap(reinterpret_cast<void*>(address), nbytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_FIXED, file, offset);
  return at == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
  mmap(reinterpret_cast<void*>(address), nbytes, PROT_NONE, NOTHING_THERE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAllocationGranularity(size_t* nbytes, const CUmemAllocationProp*,
                                           CUmemAllocationGranularity_flags) {
  *nbytes = PAGE_BYTES;
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error";
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* number, int) {
  *number = 0;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(&device());
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
static CUresult not_played() { return CUDA_ERROR_NOT_SUPPORTED; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  void* found = dlsym(RTLD_DEFAULT, name);
  *function = found ? found : reinterpret_cast<void*>(not_played);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- for kernels.py ---

API int simulated_gpu_is_pinned(const void* pointer) {
  Guard lock(device().mutex);
  return within(device().pinned, pointer);
}

API void simulated_gpu_sleep(cudaStream_t stream, double seconds) {
  of(stream)->add([seconds] { pass(seconds); });
}
