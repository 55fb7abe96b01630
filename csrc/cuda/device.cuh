// device.cuh: the vocabulary of the CUDA kernels: a window's control block in device memory, flags, waits, errors.
//
// Memory order. A flag is stored with st.release.sys by one thread after every CTA that wrote has passed
// __syncthreads, __threadfence_system and an atomic count; it is read with ld.acquire.sys by a thread of every CTA that
// reads, before a __syncthreads. Between the two lie only relaxed stores and loads of the same flag.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../control.h"

namespace afd {

// A Control whose pointers are device addresses, and what only kernels need. reset() changes what stands in here, never
// where it stands, so a captured graph stays valid.
struct DeviceControl : Control {
  Control* mapped;         // the host's Control, in mapped memory: abort, failed; `records` of this one lies there too
  int32_t* mapped_region;  // its region array: what the host knows of the peers
  int32_t* claimed;        // [peers + 1]: which error records are taken; PCIe has no compare-and-swap with the CPU
  uint32_t* done;          // [done_words]: CTAs that have finished
  uint32_t* spoiled;       // [done_words]: some CTA found a reason not to publish
  int64_t* mailbox;        // mapped [kMailbox, kMailWords]
  int32_t* gone;           // mapped [peers]: set by the host when a peer's process ended
  int64_t arrivals;        // items so far, empty ones too
};

constexpr int64_t kMaxTopk = 64;  // checked at construction: choices of a token kept in shared memory
constexpr int kMailbox = 4;
constexpr int kMailWords = 8;  // sequence (last written), count, layer, rows
enum MailWord { kMailSequence = 0, kMailCount = 1, kMailLayer = 2, kMailRows = 3 };

// Counters of finished CTAs: one per op and stage, because stages run on different streams.
enum class Done { dispatch, combine, reply };
__host__ __device__ inline int64_t done_index(const Geometry& g, Done which, int64_t stage) {
  return static_cast<int64_t>(which) * (g.stages + 1) + stage;
}
__host__ __device__ inline int64_t done_words(const Geometry& g) { return 3 * (g.stages + 1); }

#if defined(__CUDACC__)

__device__ __forceinline__ int32_t load_acquire(const int32_t* p) {
  int32_t v;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_release(int32_t* p, int32_t v) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ int32_t load_relaxed(const int32_t* p) {
  int32_t v;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(int32_t* p, int32_t v) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ int64_t global_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return static_cast<int64_t>(t);
}

__device__ __forceinline__ int32_t* flag_of(char* window, const Layout& l, int64_t slot) {
  return reinterpret_cast<int32_t*>(window + l.flags + slot * kWordStride);
}

__device__ __forceinline__ int32_t* sticky_of(char* window, const Layout& l, int64_t peer) {
  return reinterpret_cast<int32_t*>(window + l.sticky + peer * kWordStride);
}

struct DeviceSlot {
  SlotHeader* header;
  int32_t* counts;
  Position* position;
  float* weight;
  char* payload;
  __device__ DeviceSlot(char* window, const Layout& l, int64_t index) {
    char* base = window + l.slots + index * l.slot_bytes;
    header = reinterpret_cast<SlotHeader*>(base);
    counts = reinterpret_cast<int32_t*>(base + sizeof(SlotHeader));
    position = reinterpret_cast<Position*>(base + l.position);
    weight = reinterpret_cast<float*>(base + l.weight);
    payload = base + l.payload;
  }
};

__device__ __forceinline__ bool bit(const int32_t* mask, int64_t f) {
  return (static_cast<uint32_t>(mask[f / 32]) >> (f % 32)) & 1;
}

__device__ inline ErrorRecord error_at(Kind kind, Op op, int32_t layer, int32_t peer, int32_t stage, int64_t ring,
                                       int64_t sequence) {
  ErrorRecord r{};
  r.kind = static_cast<int32_t>(kind);
  r.op = static_cast<int32_t>(op);
  r.layer = layer;
  r.peer = peer;
  r.stage = stage;
  r.ring = static_cast<int32_t>(ring);
  r.sequence = sequence;
  return r;
}

// Body, system fence, valid word: the host may look at any moment.
__device__ inline void record_error(DeviceControl* c, ErrorRecord r) {
  const int32_t index = r.peer >= 0 ? r.peer : c->peers;
  if (atomicCAS(&c->claimed[index], 0, 1) != 0) return;
  r.claimed = 1;
  r.valid = 0;
  r.generation = c->generation;
  c->records[index] = r;
  __threadfence_system();
  *reinterpret_cast<volatile int32_t*>(&c->records[index].valid) = 1;
}

__device__ inline void poison_peer(DeviceControl* c, int32_t peer) {
  store_relaxed(sticky_of(c->peer[peer], c->layout, c->role_rank), kPoisoned);
}

// Stops this window, as control.cpp's fail() does on the host.
__device__ inline void fail(DeviceControl* c, const ErrorRecord& r) {
  record_error(c, r);
  const int32_t which = 1 + (r.peer >= 0 ? r.peer : c->peers);
  if (atomicCAS(&c->failed, 0, which) == 0) {
    __threadfence_system();
    *reinterpret_cast<volatile int32_t*>(&c->mapped->failed) = which;
  }
  for (int32_t p = 0; p < c->peers; ++p) poison_peer(c, p);
}

// F: closes one region; its owner is told, the others are served on.
__device__ inline void close_region(DeviceControl* c, const ErrorRecord& r) {
  record_error(c, r);
  c->region[r.peer] = kPoisoned;
  *reinterpret_cast<volatile int32_t*>(&c->mapped_region[r.peer]) = kPoisoned;
  poison_peer(c, r.peer);
}

// The sticky word of a peer.
__device__ __forceinline__ int32_t peer_state(DeviceControl* c, int32_t peer) {
  return load_relaxed(sticky_of(c->window, c->layout, peer));
}

__device__ inline ErrorRecord peer_ended(ErrorRecord r, int32_t peer, int32_t sticky) {
  r.kind = static_cast<int32_t>(sticky == kLeft ? Kind::PeerLeft : Kind::PeerFailed);
  r.peer = peer;
  r.seen = sticky;
  return r;
}

struct Lane {
  int32_t layer, stage;  // stage -1: the port was never filled
};

__device__ inline Lane read_port(const DeviceControl* c, const int32_t* port) {
  if (port[kPortMagicWord] != kPortMagic || port[kPortStage] < 0 || port[kPortStage] >= c->geometry.stages)
    return {-1, -1};
  return {port[kPortLayer], port[kPortStage]};
}

// Every CTA of a kernel calls this after its last access; true in the last one, which sees what all others did.
__device__ inline bool last_cta(DeviceControl* c, Done which, int64_t stage, bool spoil, bool& any_spoiled) {
  __shared__ int32_t last, bad;
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t i = done_index(c->geometry, which, stage);
    if (spoil) atomicOr(&c->spoiled[i], 1u);
    __threadfence_system();
    last = atomicAdd(&c->done[i], 1u) == gridDim.x - 1;
    if (last) {
      __threadfence_system();
      bad = atomicExch(&c->spoiled[i], 0u) != 0;
      c->done[i] = 0;
    }
  }
  __syncthreads();
  any_spoiled = last && bad;
  return last;
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

// N elements from or to 16-byte aligned memory.
template <int N, typename T>
__device__ __forceinline__ void load(float (&out)[N], const T* p) {
  constexpr int per = Elements<T>::kPerVector;
#pragma unroll
  for (int i = 0; i < N / per; ++i) {
    const int4 v = reinterpret_cast<const int4*>(p)[i];
    const T* e = reinterpret_cast<const T*>(&v);
#pragma unroll
    for (int j = 0; j < per; ++j) out[i * per + j] = to_float(e[j]);
  }
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
