/* A small libnvidia-ml.so.1 for tests: two GPUs, the second of which supports next to nothing. The real package
   nvidia-ml-py loads it. FAKE_NVML_CPUS is the first word of the set of CPUs that are near the first GPU. */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
typedef struct { int index; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;

static Device devices[2] = {{0}, {1}};
static int num_looks = 0;

int nvmlInitWithFlags(unsigned int flags) { return getenv("FAKE_NVML_FAILS") ? 9 : SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "an error of the fake"; }

int nvmlSystemGetDriverVersion(char *text, unsigned int size) {
    strncpy(text, "570.12.01", size);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = 2;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) {
    if (index > 1) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    if (strcmp(uuid, "GPU-aaaa") && strcmp(uuid, "GPU-bbbb")) return NOT_FOUND;
    *device = &devices[strcmp(uuid, "GPU-bbbb") == 0];
    return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned int size) {
    strncpy(text, device->index ? "NVIDIA GeForce GT 1030" : "NVIDIA H100 80GB HBM3", size);
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned int size) {
    strncpy(text, device->index ? "GPU-bbbb" : "GPU-aaaa", size);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    memory->total = 85ull << 30;
    memory->used = (unsigned long long)(10 + num_looks) << 30;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    if (device->index) return NOT_SUPPORTED;
    rates->gpu = num_looks++ ? 100 : 50;
    rates->memory = 7;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned int *milliwatts) {
    *milliwatts = 650000;
    return device->index ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned int *milliwatts) {
    *milliwatts = 700000;
    return device->index ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned int *degrees) {
    *degrees = 60 + (unsigned int)num_looks;
    return device->index ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    *reasons = 0x1 | 0x4 | 0x40; /* idle, power cap, hardware thermal slowdown */
    return device->index ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetEccMode(Device *device, int *now, int *then) {
    *now = *then = 1;
    return device->index ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *count) {
    if (type != 1 || counter != 0) return INVALID_ARGUMENT; /* uncorrected, since the driver was loaded */
    *count = 3;
    return device->index ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetNvLinkState(Device *device, unsigned int link, unsigned int *is_active) {
    if (device->index || link >= 18) return NOT_SUPPORTED;
    *is_active = link != 5; /* one of them is down */
    return SUCCESS;
}

int nvmlDeviceGetCpuAffinity(Device *device, unsigned int num_words, unsigned long *words) {
    const char *cpus = getenv("FAKE_NVML_CPUS");
    if (device->index || !cpus) return NOT_SUPPORTED;
    memset(words, 0, num_words * sizeof *words);
    words[0] = strtoul(cpus, NULL, 16);
    return SUCCESS;
}
