// A CUDA runtime, NCCL and cuBLAS that compute nothing and keep time. LD_PRELOAD puts them before the real ones, so that
// PyTorch's CUDA build runs its own events, streams, graphs, watchdogs and process groups without a GPU.
//
// Streams run in order. A kernel takes 5 us, torch.cuda._sleep what it asks for, a product of matrices 50 us, and a
// collective 10 us and its bytes over 100 GB/s. A capture is invalidated by the calls that CUDA forbids meanwhile, and a
// forked child of a process that has started the driver gets errors.
//
// Environment: FAKE_DEVICES, FAKE_NAME, FAKE_PPM (drift of the device's clock), FAKE_KERNEL_NS, FAKE_COUNT (print the
// number of calls at the end). fake_count(name), fake_counts_reset() and fake_contexts() are for ctypes.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/mman.h>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>
#include <algorithm>

static int64_t host_ns() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec; }
static double drift() { static double d = getenv("FAKE_PPM") ? 1 + atof(getenv("FAKE_PPM")) * 1e-6 : 1; return d; }
static int64_t device_of_host(int64_t ns) { return int64_t(ns * drift()); }
static void sleep_until(int64_t ns) { timespec t{ns / 1000000000, ns % 1000000000}; while (host_ns() < ns) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr); }

static std::recursive_mutex mu;
#define LOCK std::lock_guard<std::recursive_mutex> lock_(mu)
static std::map<std::string, long> counts;
static void count(const char* name) { LOCK; ++counts[name]; }
#define C count(__func__)
extern "C" void fake_counts_reset() { LOCK; counts.clear(); }
extern "C" long fake_count(const char* name) { LOCK; auto f = counts.find(name); return f == counts.end() ? 0 : f->second; }
extern "C" void fake_counts_print() { LOCK; for (auto& [k, v] : counts) fprintf(stderr, "FAKE %-40s %ld\n", k.c_str(), v); }
__attribute__((destructor)) static void at_end() { if (getenv("FAKE_COUNT")) fake_counts_print(); }

static int devices() { static int n = getenv("FAKE_DEVICES") ? atoi(getenv("FAKE_DEVICES")) : 1; return n; }
static pid_t started_by = 0;  // of the driver: a child of that process cannot use it
static std::set<int> contexts;
static bool forked() { return started_by && started_by != getpid(); }
static void start_driver() { if (!started_by) started_by = getpid(); }
static thread_local int current = 0;
static thread_local cudaError_t last = cudaSuccess;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static cudaError_t err(cudaError_t e) { if (e != cudaSuccess) last = e; return e; }
static void touch(int device) { LOCK; contexts.insert(device); }
extern "C" int fake_contexts() { LOCK; int m = 0; for (int d : contexts) m |= 1 << d; return m; }

struct Stream {
  int device = 0; int64_t busy = 0; std::deque<int64_t> queue; int priority = 0;
  bool capturing = false, invalid = false; cudaStreamCaptureMode mode{}; pthread_t owner{}; unsigned long long id = 0;
  std::set<Stream*> joined; Stream* origin = nullptr; int nodes = 0;
};
struct Event { int64_t at = -1; bool timing = true, captured = false, recorded = false; int device = -1; Stream* in = nullptr; };
struct Graph { int64_t ns; int nodes; };
static std::set<Stream*> streams;
static std::map<int, Stream*> defaults;
static unsigned long long capture_ids = 0;

static Stream* of(cudaStream_t s) {
  LOCK;
  if (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) {
    auto& d = defaults[current];
    if (!d) { d = new Stream; d->device = current; streams.insert(d); }
    return d;
  }
  return reinterpret_cast<Stream*>(s);
}
static const size_t QUEUE = 1024;
// What runs next on a stream, and how long.
static void push(cudaStream_t handle, int64_t ns) {
  int64_t wait = 0;
  {
    LOCK;
    Stream* s = of(handle);
    if (s->capturing) { Stream* o = s->origin ? s->origin : s; o->nodes++; return; }
    int64_t now = host_ns();
    s->busy = std::max(s->busy, now + 2000) + ns;
    while (!s->queue.empty() && s->queue.front() <= now) s->queue.pop_front();
    s->queue.push_back(s->busy);
    if (s->queue.size() > QUEUE) wait = s->queue[s->queue.size() - QUEUE];
  }
  if (wait) { count("launch queue full"); sleep_until(wait); }
}
// CUDA's rule: whether a call that is "potentially unsafe" may be made by this thread; else it ends captures.
static cudaError_t unsafe() {
  LOCK;
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool refused = false;
  for (Stream* s : streams) {
    if (!s->capturing || s->origin) continue;
    bool mine = pthread_equal(s->owner, pthread_self());
    bool hit = (s->mode == cudaStreamCaptureModeGlobal && (mine || thread_mode == cudaStreamCaptureModeGlobal)) ||
               (s->mode == cudaStreamCaptureModeThreadLocal && mine);
    if (hit) { s->invalid = true; refused = true; }
  }
  if (refused) ++counts["UNSAFE CALL DURING CAPTURE"];
  return refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
#define FORK_CHECK if (forked()) return err(cudaErrorInitializationError)

extern "C" {
cudaError_t cudaGetDeviceCount(int* n) { C; if (forked()) { *n = 0; return err(cudaErrorInitializationError); } start_driver(); *n = devices(); return cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { *d = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { C; FORK_CHECK; start_driver(); current = d; touch(d); return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaGetLastError() { cudaError_t e = last; last = cudaSuccess; return e; }
const char* cudaGetErrorString(cudaError_t e) { return e == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing" : e == cudaErrorStreamCaptureInvalidated ? "operation failed due to a previous error during capture" : e == cudaErrorCapturedEvent ? "operation not permitted on an event last recorded in a capturing stream" : "fake error"; }
const char* cudaGetErrorName(cudaError_t e) { return "cudaErrorFake"; }
cudaError_t cudaPeekAtLastError() { return last; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p); strcpy(p->name, getenv("FAKE_NAME") ? getenv("FAKE_NAME") : "NVIDIA H100 80GB HBM3"); p->major = 9; p->minor = 0; p->multiProcessorCount = 132;
  p->totalGlobalMem = 80ull << 30; p->warpSize = 32; p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 48 << 10; p->sharedMemPerBlockOptin = 227 << 10; p->sharedMemPerMultiprocessor = 228 << 10; p->regsPerBlock = 65536; p->regsPerMultiprocessor = 65536;
  for (int i = 0; i < 3; ++i) { p->maxThreadsDim[i] = 1024; p->maxGridSize[i] = 65535; } p->maxGridSize[0] = 2147483647;
  p->l2CacheSize = 50 << 20; p->concurrentKernels = 1; p->unifiedAddressing = 1; p->canMapHostMemory = 1; p->memoryBusWidth = 5120; p->maxBlocksPerMultiProcessor = 32;
  return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) { switch (int(a)) { case 75: *v = 9; break; case 76: *v = 0; break; case 16: *v = 132; break; case 10: *v = 32; break; case 1: *v = 1024; break; case 97: *v = 227 << 10; break; case 13: *v = 1755000; break; default: *v = 1; } return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* v, int, int) { *v = 0; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* lo, int* hi) { *lo = 0; *hi = -5; return cudaSuccess; }
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
cudaError_t cudaDeviceGetLimit(size_t* v, cudaLimit) { *v = 1 << 20; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d + 1); return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { C; FORK_CHECK; if (auto e = unsafe()) return err(e); int64_t t = 0; { LOCK; for (Stream* s : streams) if (s->device == current) t = std::max(t, s->busy); } sleep_until(t); return cudaSuccess; }
static cudaError_t make_stream(cudaStream_t* s, int priority) { FORK_CHECK; LOCK; touch(current); auto* n = new Stream; n->device = current; n->priority = priority; streams.insert(n); *s = reinterpret_cast<cudaStream_t>(n); return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* s) { C; return make_stream(s, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { C; return make_stream(s, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int p) { C; return make_stream(s, p); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { C; LOCK; return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) { *p = of(s)->priority; return cudaSuccess; }
cudaError_t cudaStreamGetFlags(cudaStream_t, unsigned* f) { *f = 1; return cudaSuccess; }
cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long* id) { *id = (unsigned long long)s; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { C; FORK_CHECK; if (auto e = unsafe()) return err(e); return host_ns() >= of(s)->busy ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { C; FORK_CHECK; if (auto e = unsafe()) return err(e); sleep_until(of(s)->busy); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t h, cudaEvent_t e, unsigned) {
  C; FORK_CHECK; LOCK; Stream* s = of(h); Event* ev = reinterpret_cast<Event*>(e);
  if (ev->captured && ev->in && ev->in->capturing) {  // the stream joins the capture
    Stream* o = ev->in->origin ? ev->in->origin : ev->in;
    if (s != o && !s->capturing) { s->capturing = true; s->origin = o; s->mode = o->mode; s->owner = o->owner; s->id = o->id; o->joined.insert(s); }
    return cudaSuccess;
  }
  if (s->capturing) return cudaSuccess;
  if (ev->recorded) s->busy = std::max(s->busy, ev->at);
  return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t h, cudaStreamCaptureStatus* st) { C; LOCK; Stream* s = of(h);
  if ((h == nullptr)) for (Stream* o : streams) if (o->capturing && !o->origin && o->mode == cudaStreamCaptureModeGlobal && pthread_equal(o->owner, pthread_self()) && thread_mode != cudaStreamCaptureModeRelaxed) { o->invalid = true; return err(cudaErrorStreamCaptureImplicit); }
  *st = s->capturing ? ((s->origin ? s->origin : s)->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive) : cudaStreamCaptureStatusNone; return cudaSuccess; }
static cudaError_t info(cudaStream_t h, cudaStreamCaptureStatus* st, unsigned long long* id, cudaGraph_t* g) { LOCK; Stream* s = of(h); *st = s->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; if (id) *id = s->id; if (g) *g = nullptr; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t h, cudaStreamCaptureStatus* st, unsigned long long* id, cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** ed, size_t* n) { C; if (d) *d = nullptr; if (n) *n = 0; return info(h, st, id, g); }
cudaError_t cudaStreamBeginCapture(cudaStream_t h, cudaStreamCaptureMode m) { C; LOCK; Stream* s = of(h); if (h == nullptr) return err(cudaErrorStreamCaptureUnsupported); s->capturing = true; s->invalid = false; s->mode = m; s->owner = pthread_self(); s->id = ++capture_ids; s->nodes = 0; s->joined.clear(); s->origin = nullptr; return cudaSuccess; }
cudaError_t cudaStreamEndCapture(cudaStream_t h, cudaGraph_t* g) { C; LOCK; Stream* s = of(h); bool bad = s->invalid; s->capturing = false; for (Stream* j : s->joined) { j->capturing = false; j->origin = nullptr; } s->joined.clear(); if (bad) { *g = nullptr; return err(cudaErrorStreamCaptureInvalidated); } *g = reinterpret_cast<cudaGraph_t>(new Graph{5000 * int64_t(s->nodes), s->nodes}); return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) { std::swap(*m, thread_mode); return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t*, size_t* n) { *n = reinterpret_cast<Graph*>(g)->nodes; return cudaSuccess; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long) { *x = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(g))); return cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long f) { return cudaGraphInstantiate(x, g, f); }
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) { C; push(s, reinterpret_cast<Graph*>(x)->ns); return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaUserObjectCreate(cudaUserObject_t* o, void*, cudaHostFn_t, unsigned, unsigned) { *o = reinterpret_cast<cudaUserObject_t>(8); return cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }

static cudaError_t make_event(cudaEvent_t* e, unsigned flags) { FORK_CHECK; touch(current); auto* n = new Event; n->timing = !(flags & cudaEventDisableTiming); n->device = current; *e = reinterpret_cast<cudaEvent_t>(n); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* e) { C; return make_event(e, 0); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) { C; return make_event(e, f); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { C; FORK_CHECK; return cudaSuccess; }
static cudaError_t record(cudaEvent_t e, cudaStream_t h) {
  FORK_CHECK; LOCK; Stream* s = of(h); Event* ev = reinterpret_cast<Event*>(e);
  if (ev->device != s->device) return err(cudaErrorInvalidResourceHandle);
  ev->recorded = true; ev->in = s; ev->captured = s->capturing;
  if (!s->capturing) ev->at = std::max(host_ns() + 1500, s->busy);
  return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { C; return record(e, s); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { C; return record(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) { C; FORK_CHECK; Event* ev = reinterpret_cast<Event*>(e); if (ev->captured) return err(cudaErrorCapturedEvent); if (auto x = unsafe()) return err(x); return !ev->recorded || host_ns() >= ev->at ? cudaSuccess : err(cudaErrorNotReady); }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { C; FORK_CHECK; Event* ev = reinterpret_cast<Event*>(e); if (ev->captured) return err(cudaErrorCapturedEvent); if (auto x = unsafe()) return err(x); sleep_until(ev->at); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  C; FORK_CHECK; Event *x = reinterpret_cast<Event*>(a), *y = reinterpret_cast<Event*>(b);
  if (!x->timing || !y->timing || !x->recorded || !y->recorded || x->captured || y->captured || x->device != y->device) return err(cudaErrorInvalidResourceHandle);
  if (host_ns() < std::max(x->at, y->at)) return err(cudaErrorNotReady);
  *ms = float(double((device_of_host(y->at) / 500 - device_of_host(x->at) / 500) * 500) / 1e6); return cudaSuccess; }
cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t a, cudaEvent_t b) { return cudaEventElapsedTime(ms, a, b); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return cudaErrorNotSupported; }

static std::map<void*, size_t> blocks; static size_t used = 0;
cudaError_t cudaMalloc(void** p, size_t n) { C; FORK_CHECK; if (auto e = unsafe()) { if (thread_mode != cudaStreamCaptureModeRelaxed) return err(e); } touch(current);
  LOCK; if (used + n > (78ull << 30)) return err(cudaErrorMemoryAllocation); *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); blocks[*p] = n; used += n; return cudaSuccess; }
cudaError_t cudaFree(void* p) { C; LOCK; auto f = blocks.find(p); if (f != blocks.end()) { munmap(p, f->second); used -= f->second; blocks.erase(f); } return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) { *t = 80ull << 30; *f = *t - used; return cudaSuccess; }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { C; *p = aligned_alloc(4096, (n + 4095) & ~size_t(4095)); return cudaSuccess; }
cudaError_t cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
cudaError_t cudaFreeHost(void* p) { free(p); return cudaSuccess; }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** d, void* h, unsigned) { *d = h; return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) { memset(a, 0, sizeof *a); LOCK; auto f = blocks.upper_bound(const_cast<void*>(p)); bool dev = f != blocks.begin() && (--f, (char*)p < (char*)f->first + f->second); a->type = dev ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered; a->devicePointer = const_cast<void*>(p); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t st) { C; FORK_CHECK; if (n <= (1 << 20) || k != cudaMemcpyDeviceToDevice) memcpy(d, s, n); push(st, 3000 + int64_t(n / (k == cudaMemcpyDeviceToDevice ? 1500. : 25.))); return cudaSuccess; }
cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) { C; FORK_CHECK; if (auto e = unsafe()) return err(e); memcpy(d, s, n); return cudaSuccess; }
cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) { C; memcpy(d, s, std::min(n, size_t(1 << 20))); push(st, 3000 + n / 25); return cudaSuccess; }
cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind, cudaStream_t st) { push(st, 3000); return cudaSuccess; }
cudaError_t cudaMemset(void* d, int v, size_t n) { memset(d, v, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st) { C; if (n <= (1 << 20)) memset(d, v, n); push(st, 3000); return cudaSuccess; }

static std::unordered_map<const void*, std::string>& kernels() { static auto* k = new std::unordered_map<const void*, std::string>; return *k; }
void __cudaRegisterFunction(void** h, const char* host, char* dev, const char* name, int limit, void* tid, void* bid, void* bd, void* gd, int* w) {
  { LOCK; if (strstr(name, "spin")) kernels()[host] = name; }
}
void** __cudaRegisterFatBinary(void*) { static void* h; return &h; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
static int64_t cost_of(const void* f, void** args) { auto k = kernels().find(f); if (k == kernels().end()) return getenv("FAKE_KERNEL_NS") ? atoll(getenv("FAKE_KERNEL_NS")) : 5000; return int64_t(*reinterpret_cast<int64_t*>(args[0]) / 1.755); }
cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void** args, size_t, cudaStream_t s) { C; FORK_CHECK; touch(current); push(s, cost_of(f, args)); return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** args) { C; FORK_CHECK; push(c->stream, cost_of(f, args)); return cudaSuccess; }
int __cudaGetKernel(void** k, const void* f) { *k = const_cast<void*>(f); return 0; }
int __cudaLaunchKernel(void* f, dim3, dim3, void** args, size_t, cudaStream_t s) { count("cudaLaunchKernel"); if (forked()) return err(cudaErrorInitializationError); touch(current); push(s, cost_of(f, args)); return 0; }
static thread_local struct { dim3 g, b; size_t m; void* s; } config;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, void* s) { config = {g, b, m, s}; return 0; }
int __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* m, void* s) { *g = config.g; *b = config.b; *m = config.m; *(void**)s = config.s; return 0; }
cudaError_t cudaGetSymbolAddress(void** p, const void*) { static char a[1 << 16]; *p = a; return cudaSuccess; }
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* d) { f(d); return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) { memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->binaryVersion = 90; a->ptxVersion = 90; a->numRegs = 32; return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { *n = 8; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { *n = 8; return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// The driver, as PyTorch asks for it.
static int drv_ok() { return 0; }
static int drv_ctx_state(int d, unsigned* flags, int* active) { *flags = 0; LOCK; *active = contexts.count(d); return 0; }
static int drv_ctx_get(void** c) { *c = (void*)8; return 0; }
static int drv_name(int, const char** s) { *s = "fake"; return 0; }
static void* driver(const char* n) { if (!strcmp(n, "cuDevicePrimaryCtxGetState")) return (void*)drv_ctx_state; if (!strcmp(n, "cuCtxGetCurrent")) return (void*)drv_ctx_get; if (!strcmp(n, "cuGetErrorString")) return (void*)drv_name; return (void*)drv_ok; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* n, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) { *f = driver(n); if (r) *r = cudaDriverEntryPointSuccess; return cudaSuccess; }
cudaError_t cudaGetDriverEntryPoint(const char* n, void** f, unsigned long long, cudaDriverEntryPointQueryResult* r) { *f = driver(n); if (r) *r = cudaDriverEntryPointSuccess; return cudaSuccess; }

// cuBLAS: 50 us each, on the stream that was set.
static thread_local cudaStream_t blas_stream = nullptr;
int cublasCreate_v2(void** h) { *h = (void*)8; return 0; }
int cublasDestroy_v2(void*) { return 0; }
int cublasSetStream_v2(void*, cudaStream_t s) { blas_stream = s; return 0; }
int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
int cublasSetMathMode(void*, int) { return 0; }
int cublasGetMathMode(void*, int* m) { *m = 0; return 0; }
int cublasSetPointerMode_v2(void*, int) { return 0; }
int cublasGetPointerMode_v2(void*, int* m) { *m = 0; return 0; }
static int gemm() { count("gemm"); push(blas_stream, 50000); return 0; }
int cublasSgemm_v2() { return gemm(); }
int cublasDgemm_v2() { return gemm(); }
int cublasGemmEx() { return gemm(); }
int cublasSgemmEx() { return gemm(); }
int cublasGemmStridedBatchedEx() { return gemm(); }
int cublasSgemmStridedBatched() { return gemm(); }
int cublasSgemv_v2() { return gemm(); }
int cublasLtCreate(void** h) { *h = (void*)8; return 0; }
int cublasLtDestroy(void*) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result, int* n) { memset(result, 0, 64); *n = 1; return 0; }
int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*, const void*, void*, size_t, cudaStream_t s) { count("gemm"); push(s, 50000); return 0; }

// NCCL: no data moves.
struct Comm { int rank, size; };
static thread_local int group = 0;
// What a group launches at its end, as one kernel: bytes that are sent, received, and moved by collectives.
enum Way { SENT, RECEIVED, BOTH };
struct Bytes { double of[3] = {}; };
static thread_local std::map<cudaStream_t, Bytes> grouped;
static int64_t transfer_ns(const Bytes& bytes) { return 10000 + int64_t((std::max(bytes.of[SENT], bytes.of[RECEIVED]) + bytes.of[BOTH]) / 100.); }
static const int type_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static int coll(const char* what, size_t n, int type, cudaStream_t s, Way way = BOTH) { count(what); Bytes bytes, &to = group ? grouped[s] : bytes; to.of[way] += double(n) * type_bytes[type]; if (!group) push(s, transfer_ns(bytes)); return 0; }
struct Id { char b[128]; };
int ncclGetVersion(int* v) { *v = 22809; return 0; }
int ncclGetUniqueId(Id* id) { memset(id, 7, sizeof *id); return 0; }
int ncclCommInitRank(void** c, int n, Id, int r) { start_driver(); *c = new Comm{r, n}; return 0; }
int ncclCommInitRankConfig(void** c, int n, Id, int r, void*) { start_driver(); *c = new Comm{r, n}; return 0; }
int ncclCommInitRankScalable(void** c, int n, int r, int, Id*, void*) { *c = new Comm{r, n}; return 0; }
int ncclAlltoAll(const void*, void*, size_t n, int t, void* c, cudaStream_t s) { return coll("ncclAlltoAll", n * ((Comm*)c)->size, t, s); }
int ncclCommSplit(void* o, int, int key, void** c, void*) { *c = new Comm{key, ((Comm*)o)->size}; return 0; }
int ncclCommDestroy(void*) { return 0; }
int ncclCommFinalize(void*) { return 0; }
int ncclCommAbort(void*) { return 0; }
int ncclCommGetAsyncError(void*, int* e) { *e = 0; return 0; }
int ncclCommCount(void* c, int* n) { *n = ((Comm*)c)->size; return 0; }
int ncclCommCuDevice(void*, int* d) { *d = 0; return 0; }
int ncclCommUserRank(void* c, int* r) { *r = ((Comm*)c)->rank; return 0; }
const char* ncclGetErrorString(int) { return "fake"; }
const char* ncclGetLastError(void*) { return ""; }
int ncclCommRegister(void*, void*, size_t, void** h) { *h = (void*)8; return 0; }
int ncclCommDeregister(void*, void*) { return 0; }
int ncclCommDump() { return 0; }
int ncclMemAlloc(void** p, size_t n) { return cudaMalloc(p, n); }
int ncclMemFree(void* p) { return cudaFree(p); }
int ncclGroupStart() { ++group; return 0; }
int ncclGroupEnd() { if (--group == 0) { auto all = std::move(grouped); grouped.clear(); for (auto& [s, bytes] : all) push(s, transfer_ns(bytes)); } return 0; }
// Small messages move as if every rank had sent the same.
static void move(const void* from, void* to, size_t n, int times) { if (n * times <= (1 << 20)) for (int i = 0; i < times; ++i) if ((char*)to + i * n != from) memmove((char*)to + i * n, from, n); }
int ncclAllReduce(const void* a, void* b, size_t n, int t, int, void* c, cudaStream_t s) { move(a, b, n * type_bytes[t], 1); return coll("ncclAllReduce", n, t, s); }
int ncclBroadcast(const void* a, void* b, size_t n, int t, int, void* c, cudaStream_t s) { move(a, b, n * type_bytes[t], 1); return coll("ncclBroadcast", n, t, s); }
int ncclBcast(void*, size_t n, int t, int, void* c, cudaStream_t s) { return coll("ncclBcast", n, t, s); }
int ncclReduce(const void*, void*, size_t n, int t, int, int, void* c, cudaStream_t s) { return coll("ncclReduce", n, t, s); }
int ncclAllGather(const void* a, void* b, size_t n, int t, void* c, cudaStream_t s) { move(a, b, n * type_bytes[t], ((Comm*)c)->size); return coll("ncclAllGather", n * ((Comm*)c)->size, t, s); }
int ncclReduceScatter(const void*, void*, size_t n, int t, int, void* c, cudaStream_t s) { return coll("ncclReduceScatter", n * ((Comm*)c)->size, t, s); }
int ncclSend(const void*, size_t n, int t, int, void* c, cudaStream_t s) { return coll("ncclSend", n, t, s, SENT); }
int ncclRecv(void*, size_t n, int t, int, void* c, cudaStream_t s) { return coll("ncclRecv", n, t, s, RECEIVED); }
}
