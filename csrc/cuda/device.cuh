// device.cuh: the vocabulary of the CUDA kernels: a window as a kernel sees it, flags, errors, warps.
//
// Memory order. Every CTA that wrote passes __syncthreads; one thread of it then counts the CTA done (acquire and
// release, device scope). Who counts last stores the flags with st.release.sys. A flag is read with ld.acquire.sys by
// whoever waits; __syncthreads, __syncwarp, a kernel boundary (await_previous() is one) or an item's tag hands on what
// it made visible.
// docs/protocol.md argues why no store and no reset is lost.
//
// Speed. A load from L2 takes 0.3 us, a system fence 1 to 1.5, a kernel boundary 0.6: at a few tokens that is all there
// is. So kernels issue loads that do not depend on each other together, before the first of them is used, and each
// fences once. What only an error needs is out of the way: instructions are loads too, and for a call in a loop every
// turn of it saves registers to memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../control.h"

namespace afd {

constexpr int64_t kMaxTopk = 64;             // checked at construction: choices of a token kept by two per lane
constexpr int64_t kSharedBytes = 47 * 1024;  // of the 48 KB that a kernel gets without asking
constexpr int kNearPeers = 16;               // peers whose addresses ride in the kernel's parameters
constexpr int kMailbox = 4;                  // entries; arrive n + kMailbox is launched only after reply n

// An entry of the mailbox. Each word is stored at once, and carries the item's sequence above its value: the host has
// an item when all three say so, and arrive needs no fence across PCIe.
enum MailWord { kMailCount = 0, kMailLayer = 1, kMailRows = 2, kMailWords = 3 };
__host__ __device__ inline int64_t mail_word(int64_t sequence, int32_t value) {
  return static_cast<int64_t>(static_cast<uint64_t>(sequence) << 32 | static_cast<uint32_t>(value));
}
__host__ __device__ inline uint32_t mail_sequence(int64_t word) {
  return static_cast<uint32_t>(static_cast<uint64_t>(word) >> 32);
}

// What reset() and the kernels change, in device memory that is never freed: captured graphs hold its address.
struct DeviceState {
  int32_t generation;
  int32_t failed;  // as Control::failed
  int32_t cursor;
  int32_t ready;     // tag of the last item that was written for a server
  int64_t arrivals;  // items so far, empty ones too
  int64_t counters[kCounters];
};

// A window as a kernel sees it, passed by value: geometry, layout and addresses, none of which reset() changes. The
// pointers of the Control are device addresses here; its scalars generation, failed, cursor and counters are not used,
// `state` has them.
struct DeviceControl : Control {
  DeviceState* state;
  Control* mapped;         // the host's Control, in mapped memory: abort, failed
  int32_t* mapped_region;  // its region array: what the host knows of the peers
  int32_t* claimed;        // [peers + 1]: which error records are taken; PCIe has no compare-and-swap with the CPU
  uint32_t* done;          // [done_words]: CTAs that have finished, and how many of them are against publishing
  int32_t* verdict;        // A [stages]: 1 if the replies that await_kernel waited for may be summed
  int32_t* row;            // F [slots, tokens, topk]: where receive put a choice of a taken slot; -1: nowhere
  int64_t* refused;        // F [slots]: receive refused a choice: 1 above its expert's number; 0 otherwise
  int64_t* mailbox;        // mapped [kMailbox, kMailWords]
  int32_t* gone;           // mapped [peers]: set by the host when a peer's process ended
  char* near[kNearPeers];  // the first of `peer`
  bool begins_early;       // for the host: what was compiled has griddepcontrol, see launch_behind
};

// Counters of finished CTAs: one per op and stage, because stages run on different streams.
enum class Done { dispatch, combine, reply };  // combine counts CTAs that have seen every flag
__host__ __device__ inline int64_t done_index(const Geometry& g, Done which, int64_t stage) {
  return static_cast<int64_t>(which) * (g.stages + 1) + stage;
}
__host__ __device__ inline int64_t done_words(const Geometry& g) { return 3 * (g.stages + 1); }

// Vectors of 16 bytes in a token's row on the way to an F rank: a multiple, as construction checks.
inline __host__ __device__ int64_t payload_vectors(const Geometry& g) { return payload_row(g) / 16; }

// Shared memory of rank_choices (ids.cuh) beside `other` bytes of its kernel: 4 bytes per expert for each of its warps.
// Many experts leave it fewer warps.
inline __host__ __device__ uint32_t rank_warps(int64_t experts, int64_t other, int64_t most) {
  const int64_t fit = (kSharedBytes - other) / (4 * (experts > 0 ? experts : 1));
  return static_cast<uint32_t>(fit < most ? fit : most);
}
inline int64_t rank_bytes(int64_t experts, int64_t other, int64_t most) {
  return 4 * experts * rank_warps(experts, other, most);
}

// What dispatch keeps of its plan in shared memory beside that: 8 bytes per expert, 4 per F rank.
inline __host__ __device__ int64_t plan_bytes(const Geometry& g) { return 8 * g.num_experts + 4 * g.ffn_size; }

// Shared memory of arrive: 8 bytes per slot and per local expert, and a bit per slot, for which kSharedBytes leaves
// room.
inline int64_t arrive_bytes(const Geometry& g, int64_t slots) {
  return 8 * (slots + g.local_experts) + (slots + 31) / 32 * 4;
}

#if defined(__CUDACC__)

constexpr unsigned kWarp = 0xffffffffu;

__device__ __forceinline__ int32_t load_acquire(const int32_t* p) {
  int32_t v;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ int32_t load_acquire_gpu(const int32_t* p) {
  int32_t v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ int64_t load_acquire_gpu(const int64_t* p) {
  int64_t v;
  asm volatile("ld.acquire.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_release(int32_t* p, int32_t v) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void store_release_gpu(int32_t* p, int32_t v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ int32_t load_relaxed(const int32_t* p) {
  int32_t v;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(int32_t* p, int32_t v) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Loads that are asked for where they stand. The compiler puts an ordinary one off until behind a branch that can do
// without it, and then it is waited for alone.
__device__ __forceinline__ int32_t load_here(const int32_t* p) {
  int32_t v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ int4 load_here(const int4* p) {
  int4 v;
  asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ int64_t global_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return static_cast<int64_t>(t);
}

__device__ __forceinline__ void count_up(int64_t* counter, int64_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(n));
}

__device__ __forceinline__ char* peer_window(const DeviceControl& c, int32_t peer) {
  return peer < kNearPeers ? c.near[peer] : c.peer[peer];
}

__device__ __forceinline__ int32_t* flag_of(char* window, const Layout& l, int64_t slot) {
  return reinterpret_cast<int32_t*>(window + l.flags + slot * kWordStride);
}

__device__ __forceinline__ int32_t* sticky_of(char* window, const Layout& l, int64_t peer) {
  return reinterpret_cast<int32_t*>(window + l.sticky + peer * kWordStride);
}

__device__ __forceinline__ bool bit(const uint32_t* mask, int32_t f) { return (mask[f / 32] >> (f % 32)) & 1; }

// Errors, as control.cpp has them for the host. Out of line, where they do not lengthen the way of those that go well.

__device__ inline ErrorRecord error_at(Kind kind, Op op, int32_t layer, int32_t peer, int32_t stage, int64_t ring,
                                       int64_t sequence) {
  ErrorRecord r = where(op, layer, stage, ring, sequence);
  r.kind = static_cast<int32_t>(kind);
  r.peer = peer;
  return r;
}

__device__ inline void tell_host(int32_t* mapped, int32_t value) {
  *reinterpret_cast<volatile int32_t*>(mapped) = value;
}
__device__ inline int32_t ask_host(const int32_t* mapped) { return *reinterpret_cast<const volatile int32_t*>(mapped); }

__device__ inline bool has_failed(const DeviceControl& c) { return ask_host(&c.state->failed) != 0; }

// Body, system fence, valid word: the host may look at any moment.
static __device__ __noinline__ void record_error(const DeviceControl& c, ErrorRecord r) {
  const int32_t index = r.peer >= 0 ? r.peer : c.peers;
  if (atomicCAS(&c.claimed[index], 0, 1) != 0) return;
  r.claimed = 1;
  r.valid = 0;
  r.generation = c.state->generation;
  c.records[index] = r;
  __threadfence_system();
  tell_host(&c.records[index].valid, 1);
}

__device__ inline void poison_peer(const DeviceControl& c, int32_t peer) {
  store_relaxed(sticky_of(peer_window(c, peer), c.layout, c.role_rank), kPoisoned);
}

// Stops this window.
static __device__ __noinline__ void fail(const DeviceControl& c, const ErrorRecord& r) {
  record_error(c, r);
  const int32_t which = 1 + (r.peer >= 0 ? r.peer : c.peers);
  if (atomicCAS(&c.state->failed, 0, which) == 0) {
    __threadfence_system();
    tell_host(&c.mapped->failed, which);
  }
  for (int32_t p = 0; p < c.peers; ++p) poison_peer(c, p);
}

// F: closes one region; its owner is told, the others are served on.
static __device__ __noinline__ void close_region(const DeviceControl& c, const ErrorRecord& r) {
  record_error(c, r);
  store_relaxed(&c.region[r.peer], kPoisoned);
  tell_host(&c.mapped_region[r.peer], kPoisoned);
  poison_peer(c, r.peer);
}

__device__ inline int32_t peer_state(const DeviceControl& c, int32_t peer) {
  return load_relaxed(sticky_of(c.window, c.layout, peer));
}

struct Lane {
  int32_t layer, stage;  // stage -1: the port was never filled
};

__device__ inline Lane read_port(const DeviceControl& c, const int32_t* port) {
  const int4 w = *reinterpret_cast<const int4*>(port);
  if (w.x != kPortMagic || w.z < 0 || w.z >= c.geometry.stages || w.y < 0) return {-1, -1};
  return {w.y, w.z};
}

// Every CTA that takes part (the first `ctas` of the grid) calls this after its last access. True in warp 0 of the last
// one, and nowhere else: it then sees what all others did, and what it releases to the system covers their stores.
// `against` is uniform in a CTA; `spoiled` says whether it was true in any.
__device__ inline bool last_cta(const DeviceControl& c, Done which, int64_t stage, uint32_t ctas, bool against,
                                bool& spoiled) {
  constexpr uint32_t kAgainst = 1u << 16;
  __syncthreads();
  if (threadIdx.x >= 32) return false;
  spoiled = against;
  if (ctas == 1) return true;
  uint32_t* done = &c.done[done_index(c.geometry, which, stage)];
  const uint32_t mine = against ? kAgainst + 1 : 1;
  uint32_t count = 0;
  if (threadIdx.x == 0)
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(count) : "l"(done), "r"(mine) : "memory");
  count = __shfl_sync(kWarp, count, 0) + mine;
  __syncwarp();
  if (count % kAgainst != ctas) return false;
  if (threadIdx.x == 0) *done = 0;
  spoiled = count >= kAgainst;
  return true;
}

// Programmatic dependent launch, from compute capability 9.0 on: begin_next() lets the next kernel of the stream onto
// the device while this one still runs, if that one was launched for it (launch_behind); await_previous() holds that
// one until this one has ended, and then it sees what this one wrote and had acquired. Behind begin_next() nobody may
// wait for anything: the next kernel's CTAs are in the way by then.
__device__ __forceinline__ void begin_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Rows in work units for warps: a unit is a segment of a row, so that a short batch is cut over many warps and a long
// one reads its plan once per row. Segments are a power of two, so that a unit is taken apart by shifts, and no shorter
// than one vector of 16 bytes per lane; units go to the CTAs in turn.
struct Units {
  uint32_t vectors, shift, span, count, first, stride, ctas;
  __device__ Units(int64_t rows_, int64_t vectors_, uint32_t cta, uint32_t grid)
      : vectors(static_cast<uint32_t>(vectors_)) {
    const uint32_t rows = static_cast<uint32_t>(rows_), warps = grid * (blockDim.x / 32);
    // As many segments as there are warps for, while they are longer than 32 vectors.
    int enough = __clz(static_cast<int>(rows)) - __clz(static_cast<int>(warps));
    if (enough > 0 && rows << enough > warps) --enough;
    const int most = 32 - __clz(static_cast<int>((vectors - 1) / 32));
    shift = static_cast<uint32_t>(max(0, min(enough, most)));
    span = ((vectors >> shift) + ((vectors & ((1u << shift) - 1)) != 0) + 31) / 32 * 32;
    count = rows << shift;
    first = (threadIdx.x / 32) * grid + cta;
    stride = warps;
    ctas = count < grid ? (count > 0 ? count : 1) : grid;
  }
  __device__ uint32_t row(uint32_t unit) const { return unit >> shift; }
  __device__ uint32_t begin(uint32_t unit) const { return (unit & ((1u << shift) - 1)) * span; }
  __device__ uint32_t end(uint32_t unit) const {
    const uint32_t e = begin(unit) + span;
    return e < vectors ? e : vectors;
  }
};

// A launch right behind another kernel of ours, which may let it onto the device before it ends. The wait is for that
// one alone: of two in a row that are let in early each must wait, or the second's does not cover what stands before.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_behind(void (*kernel)(DeviceControl, Parameters...), int ctas, int threads, cudaStream_t stream,
                          const DeviceControl& c, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = c.begins_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, c, arguments...);
}

template <typename T>
struct Elements {
  static constexpr int kPerVector = 16 / sizeof(T);
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}

template <typename T>
__device__ __forceinline__ void unpack(float* out, const int4& v) {
  const T* e = reinterpret_cast<const T*>(&v);
#pragma unroll
  for (int j = 0; j < Elements<T>::kPerVector; ++j) out[j] = to_float(e[j]);
}

// N elements from or to 16-byte aligned memory.
template <int N, typename T>
__device__ __forceinline__ void load(float (&out)[N], const T* p) {
  constexpr int per = Elements<T>::kPerVector;
#pragma unroll
  for (int i = 0; i < N / per; ++i) unpack<T>(out + i * per, reinterpret_cast<const int4*>(p)[i]);
}

template <int N, typename T>
__device__ __forceinline__ void store(T* p, const float (&in)[N]) {
  constexpr int per = Elements<T>::kPerVector;
#pragma unroll
  for (int i = 0; i < N / per; ++i) {
    int4 v;
    T* e = reinterpret_cast<T*>(&v);
#pragma unroll
    for (int j = 0; j < per; ++j) e[j] = from_float<T>(in[i * per + j]);
    reinterpret_cast<int4*>(p)[i] = v;
  }
}

#endif  // __CUDACC__

}  // namespace afd
