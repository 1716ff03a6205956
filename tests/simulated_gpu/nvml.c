/* The part of NVML that torch needs: since 2.14 its allocator queries the links between GPUs, of
 * which there are none, before it maps pages. It is preloaded under NVML's name,
 * libnvidia-ml.so.1. `nvmlInit` is missing on purpose: without it, Python counts GPUs by the
 * runtime. */

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return SUCCESS; }

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** device) {
  static char one;
  (void)text;
  *device = &one;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* processes) {
  (void)device, (void)processes;
  *count = 0;
  return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
