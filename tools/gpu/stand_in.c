/* A GPU that computes nothing, for stand_in.py: one library in the place of libcuda.so.1, libcudart and
 * cuBLAS(Lt), put in with LD_PRELOAD.
 *
 * It says that it is the GPU that the environment describes, hands out address space as device memory within
 * that GPU's limit, copies small tensors between host and device for real, launches nothing, refuses what the
 * GPU would refuse, and writes down every launch, product, copy and wait, a line each with tabs between.
 * stubs.h, which stand_in.py makes, gives every other symbol that torch imports the body `return 0`.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define API __attribute__((visibility("default")))
typedef struct { unsigned x, y, z; } Dim3;

/* ---------- settings: the GPU, as cards.py has it */
static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}
#define GPU_COUNT setting("STATIC_COUNT", 1)
#define CAPABILITY setting("STATIC_CC", 90)
#define PROCESSORS setting("STATIC_SMS", 132)
#define THREADS setting("STATIC_THREADS", 2048)    /* that a multiprocessor holds at once */
#define SHARED setting("STATIC_SHARED", 232448)    /* bytes that a block can have */
#define MEMORY ((size_t)setting("STATIC_MIB", 81079) << 20)
#define CONTEXT ((size_t)600 << 20)                /* what context and libraries take of it */
#define COPIED ((size_t)4 << 20)                   /* larger copies move no data */
#define REGISTERS 65536
#define COMPUTES setting("STATIC_COMPUTES", 0)    /* emulate_gpu.py computes results in the device's memory */

/* ---------- the record */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *record;
static void (*on_wait)(const char *);

#define SAY(...) do { \
    pthread_mutex_lock(&lock); \
    if (record) fprintf(record, __VA_ARGS__); \
    pthread_mutex_unlock(&lock); \
} while (0)

/* NULL: stop */
API void static_record(const char *path) {
    pthread_mutex_lock(&lock);
    if (record) fclose(record);
    record = path ? fopen(path, "w") : NULL;
    pthread_mutex_unlock(&lock);
}
API void static_on_wait(void (*f)(const char *)) { on_wait = f; }
API void static_note(const char *line) { SAY("%s\n", line); }
static void waits(const char *what) {
    SAY("wait\t%s\n", what);
    if (record && on_wait) on_wait(what);
}

/* ---------- memory: address space that nothing touches */
#define SPANS 65536
enum { UNKNOWN, PINNED, DEVICE };    /* numbered as cudaMemoryType */
static struct { char *at; size_t size; int kind; } spans[SPANS];
static size_t used, peak;

static int take(void **p, size_t n, int kind) {
    size_t size = (n + 511) & ~(size_t)511, unit = (size_t)2 << 20;
    int i = 0, error = 2;    /* cudaErrorMemoryAllocation */
    *p = NULL;
    pthread_mutex_lock(&lock);
    if (kind != DEVICE || used + size <= MEMORY - CONTEXT) {
        char *at = mmap(NULL, size + unit, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        while (i < SPANS && spans[i].at) i++;
        if (at != MAP_FAILED && i < SPANS) {
            *p = spans[i].at = (char *)(((uintptr_t)at + unit - 1) & ~(unit - 1));
            spans[i].size = size;
            spans[i].kind = kind;
            if (kind == DEVICE) used += size;
            if (used > peak) peak = used;
            error = 0;
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}
static int give(void *p) {
    pthread_mutex_lock(&lock);
    for (int i = 0; p && i < SPANS; i++) {
        if (spans[i].at != p) continue;
        munmap(p, spans[i].size);
        if (spans[i].kind == DEVICE) used -= spans[i].size;
        spans[i].at = NULL;
        break;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}
static int kind_of(const void *p) {
    for (int i = 0; i < SPANS; i++)
        if (spans[i].at && (char *)p >= spans[i].at && (char *)p < spans[i].at + spans[i].size)
            return spans[i].kind;
    return UNKNOWN;
}
API size_t static_used(void) { return used; }
API size_t static_peak(void) { return peak; }

API int cudaMalloc(void **p, size_t n) { return take(p, n, DEVICE); }
API int cudaFree(void *p) { if (p) waits("cudaFree"); return give(p); }
API int cudaHostAlloc(void **p, size_t n, unsigned flags) { return take(p, n, PINNED); }
API int cudaFreeHost(void *p) { return give(p); }
API int cudaMemGetInfo(size_t *free, size_t *all) {
    *all = MEMORY;
    *free = MEMORY - CONTEXT - used;
    return 0;
}
static void copy(void *to, const void *from, size_t n, const char *how) {
    int inwards = kind_of(to) == DEVICE, outwards = kind_of(from) == DEVICE;
    SAY("copy\t%s\t%s->%s\t%zu\n", how, outwards ? "device" : "host", inwards ? "device" : "host", n);
    if (inwards && outwards && !COMPUTES) return;    /* computed, so garbage */
    if (n <= COPIED || COMPUTES) memcpy(to, from, n);
    else if (!inwards) memset(to, 0, n);
}
API int cudaMemcpy(void *to, const void *from, size_t n, int kind) {
    waits("cudaMemcpy");
    copy(to, from, n, "sync");
    return 0;
}
API int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) {
    int there = kind_of(to), here = kind_of(from);
    if (there + here == DEVICE && there != here) waits("cudaMemcpyAsync of pageable memory");
    copy(to, from, n, "async");
    return 0;
}
API int cudaMemset(void *p, int value, size_t n) {
    SAY("memset\t%zu\n", n);
    if (COMPUTES) memset(p, value, n);
    return 0;
}
API int cudaMemsetAsync(void *p, int value, size_t n, void *stream) { return cudaMemset(p, value, n); }
API int cuPointerGetAttribute(void *out, int what, uint64_t p) { *(uint64_t *)out = p; return 0; }
API int cudaGetSymbolAddress(void **p, const void *symbol) {
    static char room[1 << 16];
    *p = room;
    return 0;
}

/* ---------- the device */
static __thread int device;
static int attribute(int which) {    /* numbers of cudaDeviceAttr */
    switch (which) {
    case 1: case 2: case 3: case 111: return 1024;
    case 4: return 64;
    case 5: case 11: return 2147483647;
    case 6: case 7: return 65535;
    case 8: return 49152;
    case 9: case 82: return 65536;
    case 10: case 106: return 32;
    case 12: return REGISTERS;
    case 13: return 1980000;
    case 14: return 512;
    case 16: return PROCESSORS;
    case 19: case 31: case 41: case 78: case 83: case 89: case 95: case 115: case 120: return 1;
    case 36: return 2619000;
    case 37: return 5120;
    case 38: return 52428800;
    case 39: return THREADS;
    case 40: return 3;
    case 75: return CAPABILITY / 10;
    case 76: return CAPABILITY % 10;
    case 81: return CAPABILITY == 75 ? SHARED : SHARED + 1024;
    case 97: return SHARED;
    }
    return 0;
}
API int cudaDeviceGetAttribute(int *value, int which, int d) { *value = attribute(which); return 0; }
API int cuDeviceGetAttribute(int *value, int which, int d) { *value = attribute(which); return 0; }
API int cudaGetDeviceCount(int *n) { *n = GPU_COUNT; return 0; }
API int cuDeviceGetCount(int *n) { *n = GPU_COUNT; return 0; }
API int cudaGetDevice(int *d) { *d = device; return 0; }
API int cudaSetDevice(int d) { device = d; return 0; }
API int cuDeviceGet(int *d, int n) { *d = n; return 0; }
API int cuCtxGetDevice(int *d) { *d = device; return 0; }
API int cudaDeviceGetStreamPriorityRange(int *low, int *high) {
    if (low) *low = 0;
    if (high) *high = -5;
    return 0;
}
API int cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
API int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
API int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
API int cudaDeviceCanAccessPeer(int *v, int a, int b) { *v = a != b; return 0; }
API int cudaDeviceGetPCIBusId(char *text, int n, int d) {
    snprintf(text, n, "0000:%02x:00.0", d + 1);
    return 0;
}
API const char *cudaGetErrorName(int error) {
    return error == 2 ? "cudaErrorMemoryAllocation" : error ? "cudaErrorStatic" : "cudaSuccess";
}
API const char *cudaGetErrorString(int error) {
    return error == 2 ? "out of memory" : error ? "refused by the stand-in" : "no error";
}
API int cuGetErrorString(int error, const char **text) { *text = "refused by the stand-in"; return 0; }
API int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_STATIC"; return 0; }
static int context;
API int cuCtxGetCurrent(void **c) { *c = &context; return 0; }
API int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &context; return 0; }
API int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}
static int nothing(void) { return 0; }
API int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version,
                                         unsigned long long flags, int *status) {
    void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    *f = self ? dlsym(self, name) : NULL;
    if (!*f) *f = nothing;
    if (status) *status = 0;
    return 0;
}
#if __has_include("driver_types.h")    /* absent where only this library itself is tested */
#include "driver_types.h"
API int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", getenv("STATIC_NAME") ?: "NVIDIA H100 80GB HBM3");
    p->totalGlobalMem = MEMORY;
    p->major = attribute(75);
    p->minor = attribute(76);
    p->multiProcessorCount = PROCESSORS;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = SHARED;
    p->sharedMemPerMultiprocessor = attribute(81);
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = REGISTERS;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = attribute(39);
    p->maxBlocksPerMultiProcessor = 32;
    p->maxGridSize[0] = p->memPitch = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->textureAlignment = 512;
    p->l2CacheSize = attribute(38);
    p->memoryBusWidth = attribute(37);
    p->pciBusID = 1 + d;
    p->asyncEngineCount = 3;
    p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
    p->streamPrioritiesSupported = p->managedMemory = p->cooperativeLaunch = 1;
    p->memoryPoolsSupported = p->clusterLaunch = 1;
    return 0;
}
API int cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = kind_of(p);
    a->device = a->type ? device : -1;
    a->devicePointer = a->hostPointer = (void *)p;
    return 0;
}
API int cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 64;
    /* torch has no code of its own for 8.9 and 10.3: there the one before runs, and cub asks which that is */
    a->binaryVersion = a->ptxVersion = CAPABILITY == 89 ? 86 : CAPABILITY == 103 ? 100 : CAPABILITY;
    a->maxDynamicSharedSizeBytes = SHARED;
    return 0;
}
#endif

/* ---------- streams and events */
static uintptr_t next_handle = 0x1000;
static int handle(void **p) {
    *p = (void *)__sync_add_and_fetch(&next_handle, 16);
    return 0;
}
API int cudaStreamCreate(void **s) { return handle(s); }
API int cudaStreamCreateWithFlags(void **s, unsigned flags) { return handle(s); }
API int cudaStreamCreateWithPriority(void **s, unsigned flags, int priority) { return handle(s); }
API int cudaStreamGetPriority(void *s, int *priority) { *priority = 0; return 0; }
API int cudaStreamIsCapturing(void *s, int *state) { *state = 0; return 0; }
API int cudaStreamGetCaptureInfo(void *s, int *state, unsigned long long *id, void **graph, void **nodes,
                                 void **edges, size_t *n) {
    if (state) *state = 0;
    if (id) *id = 0;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (n) *n = 0;
    return 0;
}
API int cudaStreamSynchronize(void *s) { waits("cudaStreamSynchronize"); return 0; }
API int cudaDeviceSynchronize(void) { waits("cudaDeviceSynchronize"); return 0; }
API int cudaEventCreate(void **e) { return handle(e); }
API int cudaEventCreateWithFlags(void **e, unsigned flags) { return handle(e); }
API int cudaEventSynchronize(void *e) { waits("cudaEventSynchronize"); return 0; }
API int cudaEventElapsedTime(float *ms, void *a, void *b) { *ms = 1; return 0; }

/* ---------- kernels that are compiled into torch: named when they are registered */
#define NAMES (1 << 20)
static struct { const void *f; const char *name; } names[NAMES];
static unsigned slot(const void *f) {
    unsigned i = (unsigned)(((uintptr_t)f * 0x9E3779B97F4A7C15ull) >> 44);
    while (names[i].f && names[i].f != f) i = (i + 1) & (NAMES - 1);
    return i;
}
API void **__cudaRegisterFatBinary(void *binary) { static void *held[4]; return held; }
API void __cudaRegisterFunction(void **h, const char *f, char *stub, const char *name, int limit, void *a,
                                void *b, void *c, void *d, int *e) {
    unsigned i = slot(f);
    names[i].f = f;
    names[i].name = name;
}
API int __cudaGetKernel(void **kernel, const void *f) { *kernel = (void *)f; return 0; }
static __thread struct { Dim3 grid, block; size_t shared; void *stream; } pushed;
API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}
API int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *stream = pushed.stream;
    return 0;
}
static int launched(const void *f, Dim3 grid, Dim3 block) {
    const char *name = names[slot(f)].name;
    SAY("torch\t%s\t%u,%u,%u\t%u\n", name ? name : "?", grid.x, grid.y, grid.z, block.x * block.y * block.z);
    return 0;
}
API int cudaLaunchKernel(const void *f, Dim3 grid, Dim3 block, void **args, size_t shared, void *s) {
    return launched(f, grid, block);
}
API int __cudaLaunchKernel(const void *f, Dim3 grid, Dim3 block, void **args, size_t shared, void *s) {
    return launched(f, grid, block);
}
API int cudaLaunchCooperativeKernel(const void *f, Dim3 grid, Dim3 block, void **args, size_t shared,
                                    void *s) {
    return launched(f, grid, block);
}
struct Launch { Dim3 grid, block; size_t shared; void *stream; };
API int cudaLaunchKernelExC(const struct Launch *l, const void *f, void **args) {
    return launched(f, l->grid, l->block);
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int threads, size_t shared) {
    *n = 2;
    return 0;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int threads,
                                                               size_t shared, unsigned flags) {
    *n = 2;
    return 0;
}

/* ---------- Triton's kernels: registers and stack as the cubin states them (.nv.info) */
struct Kernel { char name[512]; int registers, stack; };
static void read_cubin(struct Kernel *k, const unsigned char *image) {
    const Elf64_Ehdr *head = (const void *)image;
    if (memcmp(image, ELFMAG, 4)) return;
    const Elf64_Shdr *section = (const void *)(image + head->e_shoff);
    const char *text = (const char *)image + section[head->e_shstrndx].sh_offset;
    for (int i = 0; i < head->e_shnum; i++) {
        if (strncmp(text + section[i].sh_name, ".nv.info", 8)) continue;
        const unsigned char *p = image + section[i].sh_offset, *end = p + section[i].sh_size;
        while (p + 4 <= end) {    /* format, attribute, size or value */
            int format = p[0], what = p[1], size = p[2] | p[3] << 8;
            if (format == 4) {
                const int *value = (const void *)(p + 4);
                if (what == 0x2f && value[1] > k->registers) k->registers = value[1];
                if (what == 0x11 && value[1] > k->stack) k->stack = value[1];
                p += size;
            }
            p += 4;
        }
    }
}
API int cuModuleLoadData(void **module, const void *image) {
    struct Kernel *k = calloc(1, sizeof *k);
    read_cubin(k, image);
    *module = k;
    return 0;
}
API int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *options, void *values) {
    return cuModuleLoadData(module, image);
}
API int cuModuleLoad(void **module, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return 301;    /* CUDA_ERROR_FILE_NOT_FOUND */
    fseek(file, 0, SEEK_END);
    long n = ftell(file);
    rewind(file);
    char *image = malloc(n);
    int error = fread(image, 1, n, file) == (size_t)n ? cuModuleLoadData(module, image) : 301;
    fclose(file);
    free(image);
    return error;
}
API int cuModuleGetFunction(void **f, void *module, const char *name) {
    struct Kernel *k = module;
    snprintf(k->name, sizeof k->name, "%s", name);
    SAY("load\t%s\t%d\t%d\n", name, k->registers, k->stack);
    *f = k;
    return 0;
}
API int cuFuncGetAttribute(int *value, int what, void *f) {
    struct Kernel *k = f;
    *value = what == 4 ? k->registers : what == 3 ? k->stack : what == 0 ? 1024 : what == 8 ? SHARED : 0;
    return 0;
}
API int cuFuncSetAttribute(void *f, int what, int value) {    /* 8: dynamic shared memory */
    return what == 8 && value > SHARED;
}
static int refused(struct Kernel *k, unsigned threads, unsigned shared) {
    if (shared > SHARED)
        SAY("refused\t%s: %u bytes of shared memory, %ld are there\n", k->name, shared, SHARED);
    else if (threads > 1024 || (long)k->registers * threads > REGISTERS)
        SAY("refused\t%s: %u threads of %d registers\n", k->name, threads, k->registers);
    else
        return 0;
    return 701;    /* CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES */
}
static unsigned grid[3];    /* of the last launch of a Triton kernel */
API unsigned *static_last_grid(void) { return grid; }
static int triton(struct Kernel *k, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared) {
    grid[0] = x;
    grid[1] = y;
    grid[2] = z;
    SAY("triton\t%s\t%u,%u,%u\t%u\t%u\t%d\t%d\n", k->name, x, y, z, threads, shared, k->registers, k->stack);
    return refused(k, threads, shared);
}
struct DriverLaunch { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; };
API int cuLaunchKernelEx(const struct DriverLaunch *l, void *f, void **args, void **more) {
    return triton(f, l->gx, l->gy, l->gz, l->bx * l->by * l->bz, l->shared);
}
API int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void *s, void **args, void **more) {
    return triton(f, gx, gy, gz, bx * by * bz, shared);
}
API int cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                  unsigned bz, unsigned shared, void *s, void **args) {
    return triton(f, gx, gy, gz, bx * by * bz, shared);
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int threads, size_t shared) {
    *n = 1;
    return 0;
}
API int cuOccupancyMaxActiveClusters(int *n, void *f, void *config) { *n = 1; return 0; }

/* ---------- products: name, transposes, m, n, k, batch, types of A and of the result */
static void product(const char *name, int ta, int tb, long m, long n, long k, long batch, int type, int out) {
    SAY("gemm\t%s\t%c%c\t%ld\t%ld\t%ld\t%ld\t%d\t%d\n", name, "NTC"[ta], "NTC"[tb], m, n, k, batch, type, out);
}
API int cublasCreate_v2(void **h) { return handle(h); }
API int cublasGetMathMode(void *h, int *v) { *v = 0; return 0; }
API int cublasGetPointerMode_v2(void *h, int *v) { *v = 0; return 0; }
API size_t cublasLtGetVersion(void) { return 130100; }
API int cublasGemmEx(void *h, int ta, int tb, int m, int n, int k, void *alpha, void *a, int atype, int lda,
                     void *b, int btype, int ldb, void *beta, void *c, int ctype, int ldc, int compute,
                     int algorithm) {
    product("cublasGemmEx", ta, tb, m, n, k, 1, atype, ctype);
    return 0;
}
API int cublasGemmStridedBatchedEx(void *h, int ta, int tb, int m, int n, int k, void *alpha, void *a,
                                   int atype, int lda, long long sa, void *b, int btype, int ldb,
                                   long long sb, void *beta, void *c, int ctype, int ldc, long long sc,
                                   int batch, int compute, int algorithm) {
    product("cublasGemmStridedBatchedEx", ta, tb, m, n, k, batch, atype, ctype);
    return 0;
}
API int cublasSgemm_v2(void *h, int ta, int tb, int m, int n, int k, void *alpha, void *a, int lda, void *b,
                       int ldb, void *beta, void *c, int ldc) {
    product("cublasSgemm", ta, tb, m, n, k, 1, 0, 0);
    return 0;
}
API int cublasSgemmStridedBatched(void *h, int ta, int tb, int m, int n, int k, void *alpha, void *a, int lda,
                                  long long sa, void *b, int ldb, long long sb, void *beta, void *c, int ldc,
                                  long long sc, int batch) {
    product("cublasSgemmStridedBatched", ta, tb, m, n, k, batch, 0, 0);
    return 0;
}
struct Layout { int type; uint64_t rows, columns; int64_t ld; int batch; };
struct Matmul { int ta, tb; void *scale_a, *scale_b; };
API int cublasLtMatrixLayoutCreate(struct Layout **l, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    struct Layout made = {type, rows, columns, ld, 1};
    *l = malloc(sizeof made);
    **l = made;
    return 0;
}
API int cublasLtMatrixLayoutDestroy(struct Layout *l) { free(l); return 0; }
API int cublasLtMatrixLayoutSetAttribute(struct Layout *l, int what, const void *value, size_t n) {
    if (what == 5) l->batch = *(int *)value;
    return 0;
}
API int cublasLtMatmulDescCreate(struct Matmul **d, int compute, int scale) {
    *d = calloc(1, sizeof **d);
    return 0;
}
API int cublasLtMatmulDescDestroy(struct Matmul *d) { free(d); return 0; }
API int cublasLtMatmulDescSetAttribute(struct Matmul *d, int what, const void *value, size_t n) {
    if (what == 3) d->ta = *(int *)value;
    if (what == 4) d->tb = *(int *)value;
    if (what == 17) d->scale_a = *(void **)value;
    if (what == 18) d->scale_b = *(void **)value;
    return 0;
}
API int cublasLtMatmulPreferenceCreate(void **p) { return handle(p); }
enum { E4M3 = 28, E5M2 = 29 };    /* of cudaDataType */
static int unaligned(const void *p) { return (uintptr_t)p % 16 != 0; }
/* What cublasLt asks of fp8, or NULL: TN, sides and leading dimensions multiples of 16, not both e5m2, each
 * scale at a multiple of 16 bytes (an H100 refused one at 4, with the algorithm that the heuristic gave). */
static const char *fp8_problem(struct Matmul *d, struct Layout *a, struct Layout *b) {
    if (a->type != E4M3 && a->type != E5M2 && b->type != E4M3 && b->type != E5M2) return NULL;
    if (CAPABILITY < 89) return "compute capability below 8.9";
    if (d->ta != 1 || d->tb != 0) return "the layout is not TN";
    if (a->type == E5M2 && b->type == E5M2) return "both are e5m2";
    if (a->ld % 16 || b->ld % 16 || a->rows % 16 || a->columns % 16 || b->columns % 16)
        return "sides are no multiples of 16";
    if (!d->scale_a || !d->scale_b) return "a scale is missing";
    if (unaligned(d->scale_a) || unaligned(d->scale_b)) return "a scale's address is no multiple of 16 bytes";
    return NULL;
}
static int fp8_refused(struct Matmul *d, struct Layout *a, struct Layout *b) {
    const char *problem = fp8_problem(d, a, b);
    if (problem) SAY("refused\tcublasLt fp8: %s\n", problem);
    return problem ? 15 : 0;    /* CUBLAS_STATUS_NOT_SUPPORTED */
}
typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;
API int cublasLtMatmulAlgoGetHeuristic(void *h, struct Matmul *d, struct Layout *a, struct Layout *b,
                                       struct Layout *c, struct Layout *out, void *preference, int asked,
                                       Heuristic *found, int *n) {
    int error = fp8_refused(d, a, b);
    memset(found, 0, sizeof *found);
    *n = !error;
    return error;
}
API int cublasLtMatmul(void *h, struct Matmul *d, void *alpha, void *pa, struct Layout *a, void *pb,
                       struct Layout *b, void *beta, void *pc, struct Layout *c, void *pd, struct Layout *out,
                       void *algorithm, void *workspace, size_t size, void *s) {
    int error = fp8_refused(d, a, b);
    if (!error)
        product("cublasLtMatmul", d->ta, d->tb, out->rows, out->columns, d->ta ? a->rows : a->columns, a->batch,
                a->type, out->type);
    return error;
}
API int cudnnCreate(void **h) { return handle(h); }
#include "stubs.h"
