// combine: base + what the F ranks answered, summed in float32 in F-rank order and rounded once.
//   moves    one row per (token, F rank) that answers it; T x H of base in, T x H out
//   launch   T up to kFusedTokens: kFusedCtas CTAs wait and sum. More: 1 CTA waits, then a grid over the tokens sums,
//            let in early: replies are never waited for on more than kFusedCtas multiprocessors. A warp sums a segment
//            of a row
//   order    flag (acquire, by every CTA that waits); the last CTA to have seen all: every flag to EMPTY, ring free;
//            header, rows. F writes into these slots again only after the next dispatch on this ring, a later kernel of
//            this stream, which also releases the resets: neither rows nor resets need a fence here. Behind a CTA that
//            waited, the grid touches no memory before that one has ended
//   waits    for the reply of every F rank that is not masked, until poison, abort or the deadline
//   fails    stale ticket, a peer's fault, a stop: error record, window stopped, out filled with NaN
#include <cmath>

#include "device.cuh"
#include "kernels.h"

namespace afd {
namespace {

constexpr int kThreads = 512;
constexpr int kFusedTokens = 64;
constexpr int kFusedCtas = 16;
constexpr int kSumCtas = 264;

struct Ticket {
  int32_t layer, stage, ring, generation;
  int64_t sequence;
  bool ok;
};

__device__ Ticket read_ticket(const DeviceControl& c, const int32_t* w, const int32_t* port, int64_t tokens,
                              bool report) {
  __shared__ Ticket ticket;
  if (threadIdx.x == 0) {
    const int32_t generation = c.state->generation;
    const bool failed = has_failed(c);
    const int4 a = *reinterpret_cast<const int4*>(w), b = *reinterpret_cast<const int4*>(w + 4);
    const Lane lane = read_port(c, port);
    Ticket k{lane.layer, lane.stage, a.z, generation, join(a.w, b.x), false};
    static_assert(kTicketGeneration == 0 && kTicketStage == 1 && kTicketRing == 2 && kTicketSequenceLow == 3);
    static_assert(kTicketSequenceHigh == 4 && kTicketLayer == 5 && kTicketTokens == 6);
    k.ok = !failed && k.stage >= 0 && a.x == generation && a.y == k.stage && b.y == k.layer && b.z == tokens &&
           k.sequence >= 0 && k.ring >= 0 && k.ring < c.geometry.depth &&
           c.ring[k.stage * c.geometry.depth + k.ring] == k.sequence;
    if (!k.ok && report && !failed) fail(c, error_at(Kind::Stale, Op::combine, b.y, -1, a.y, k.ring, k.sequence));
    ticket = k;
  }
  __syncthreads();
  return ticket;
}

// A bit per F rank that is left out, as this CTA sees it; __syncthreads before it is read. A mask() in mid-step may
// reach some CTAs only: the tokens it concerns are those of Window.affected().
__device__ void read_masked(const DeviceControl& c, uint32_t* skip) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  for (int32_t first = static_cast<int32_t>(threadIdx.x / 32) * 32; first < c.peers;
       first += static_cast<int32_t>(blockDim.x)) {
    const uint32_t bits = __ballot_sync(kWarp, first + lane < c.peers && c.masked[first + lane] != 0);
    if (lane == 0) skip[first / 32] = bits;
  }
}

// Why a reply will not come: a flag that nobody may write, a peer that ended, or the deadline.
__device__ __noinline__ void give_up(const DeviceControl& c, Ticket k, int32_t f, int32_t seen, int32_t sticky) {
  const ErrorRecord late = error_at(Kind::Timeout, Op::combine, k.layer, f, k.stage, k.ring, k.sequence);
  fail(c, seen != kEmpty ? bad_flag(late, f, seen) : sticky != kAlive ? ended(late, f, sticky) : late);
}

// One F rank's reply flag, by one thread: true once it is there, or the rank was masked meanwhile.
__device__ bool await_flag(const DeviceControl& c, const Ticket& k, int32_t f, int64_t start, uint32_t* skip) {
  const int32_t* flag = flag_of(c.window, c.layout, c.slot(f, k.stage, k.ring));
  bool late = false;
  int32_t seen, sticky = kAlive;
  for (uint32_t turn = 1; (seen = load_acquire(flag)) != kReady; ++turn) {
    if (turn % 16 != 0) continue;
    if (has_failed(c)) return false;
    if (load_relaxed(&c.masked[f]) != 0) {
      atomicOr(&skip[f / 32], 1u << (f % 32));
      return true;
    }
    sticky = peer_state(c, f);
    if (seen != kEmpty || sticky != kAlive) break;
    if (turn % 256 != 0) continue;  // these lie across PCIe
    if (ask_host(&c.mapped->abort) != 0) return false;
    if (ask_host(&c.gone[f]) != 0) sticky = kGone;
    if (late || sticky != kAlive) break;
    late = global_ns() - start > c.deadline_ns;  // then a last look: it may have been this rank that was stopped
  }
  if (seen == kReady) return true;
  give_up(c, k, f, seen, sticky);
  return false;
}

// Every thread gets the same answer; the threads of the F ranks have acquired their flags, or left them out.
__device__ bool await_flags(const DeviceControl& c, const Ticket& k, uint32_t* skip) {
  const int64_t start = global_ns();
  bool ok = k.ok;
  for (int32_t f = threadIdx.x; ok && f < c.peers; f += blockDim.x)
    ok = bit(skip, f) || await_flag(c, k, f, start, skip);
  return __syncthreads_and(ok);
}

__device__ __noinline__ void refuse_reply(const DeviceControl& c, Ticket k, int32_t f, int64_t tokens,
                                          const SlotHeader& h) {
  ErrorRecord r = error_at(Kind::Protocol, Op::combine, k.layer, f, k.stage, k.ring, k.sequence);
  reply_header_fails(k, tokens, h, [&r](bool bad, Field field, int64_t expected, int64_t seen) {
    if (!bad) return false;
    name_word(r, field, expected, seen);
    return true;
  });
  fail(c, r);
}

// Whether a reply is the answer to this ticket.
__device__ bool check_header(const DeviceControl& c, const Ticket& k, int32_t f, int64_t tokens, const SlotHeader& h) {
  if (!reply_header_fails(k, tokens, h, [](bool bad, Field, int64_t, int64_t) { return bad; })) return true;
  refuse_reply(c, k, f, tokens, h);
  return false;
}

// The headers of this thread's F ranks: asked for by the constructor, judged by check().
struct Headers {
  SlotHeader first;
  __device__ Headers(const DeviceControl& c, const Ticket& k, bool ok) {
    if (ok && static_cast<int32_t>(threadIdx.x) < c.peers) first = header_of(c, k, threadIdx.x);
  }
  __device__ bool check(const DeviceControl& c, const Ticket& k, bool ok, int64_t tokens, const uint32_t* skip) const {
    for (int32_t f = threadIdx.x; ok && f < c.peers; f += blockDim.x)
      ok = bit(skip, f) ||
           check_header(c, k, f, tokens, f == static_cast<int32_t>(threadIdx.x) ? first : header_of(c, k, f));
    return ok;
  }

 private:
  __device__ static SlotHeader header_of(const DeviceControl& c, const Ticket& k, int32_t f) {
    return *Slot(c.window, c.layout, c.slot(f, k.stage, k.ring)).header;
  }
};

// By one warp of every CTA that has seen all flags: true in the last of them. Relaxed: what a CTA has
// loaded decides whether it counts, and it hands nothing over.
__device__ bool last_to_see(const DeviceControl& c, int64_t stage, uint32_t ctas) {
  uint32_t* done = &c.done[done_index(c.geometry, Done::combine, stage)];
  uint32_t count = ctas - 1;
  if (ctas > 1 && threadIdx.x % 32 == 0) count = atomicAdd(done, 1u);
  if (__shfl_sync(kWarp, count, 0) != ctas - 1) return false;
  if (ctas > 1 && threadIdx.x % 32 == 0) *done = 0;
  return true;
}

// The replies are here: nothing else will look at their flags.
__device__ void take_replies(const DeviceControl& c, const Ticket& k, const uint32_t* skip) {
  for (int32_t f = static_cast<int32_t>(threadIdx.x % 32); f < c.peers; f += 32)
    if (!bit(skip, f)) store_relaxed(flag_of(c.window, c.layout, c.slot(f, k.stage, k.ring)), kEmpty);
  if (threadIdx.x % 32 == 0) {
    c.ring[k.stage * c.geometry.depth + k.ring] = -1;
    count_up(&c.state->counters[k_combines], 1);
  }
}

__global__ void __launch_bounds__(32)
    await_kernel(const __grid_constant__ DeviceControl c, const int32_t* words, const int32_t* port, int64_t tokens) {
  __shared__ uint32_t skip[kMaxRanks / 32];
  read_masked(c, skip);
  const Ticket k = read_ticket(c, words, port, tokens, true);
  const bool there = await_flags(c, k, skip);
  begin_next();  // nothing is waited for from here on
  const bool ok = __all_sync(kWarp, Headers(c, k, there).check(c, k, there, tokens, skip));
  const int32_t stage = words[kTicketStage];  // also if the port disagrees: it is where combine_kernel looks
  if (threadIdx.x == 0 && stage >= 0 && stage < c.geometry.stages) c.verdict[stage] = ok ? 1 : 0;
  if (ok) take_replies(c, k, skip);
}

template <typename Payload, typename Base, bool kFused>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ DeviceControl c, const int32_t* words, DeviceRows base, Base* out,
                   const int32_t* port) {
  constexpr int N = Elements<Payload>::kPerVector > Elements<Base>::kPerVector ? Elements<Payload>::kPerVector
                                                                               : Elements<Base>::kPerVector;
  __shared__ uint32_t skip[kMaxRanks / 32];
  const Geometry& g = c.geometry;
  const int64_t tokens = base.count, width = ticket_width(g.ffn_size);
  const Units units(tokens, g.hidden / N, blockIdx.x, gridDim.x);
  if (blockIdx.x >= units.ctas) return;
  const uint32_t lane = threadIdx.x % 32;
  float acc[N];
  // Everything that does not come from an F rank: a short batch asks for it while the replies are on their way.
  uint32_t bits = 0;
  const auto begin_sum = [&](uint32_t t, uint32_t v, uint32_t end) {
    bits = static_cast<uint32_t>(words[(t + 1) * width]);
    if (v < end) load<N>(acc, static_cast<const Base*>(base.data) + t * base.stride + v * N);
  };
  const auto finish_sum = [&](const Ticket& k, uint32_t t, uint32_t v, uint32_t end) {
    if (v >= end) return;
    for (int32_t word = 0;; bits = static_cast<uint32_t>(words[(t + 1) * width + word])) {
      for (uint32_t rest = bits & ~skip[word]; rest != 0; rest &= rest - 1) {
        const int32_t f = word * 32 + __ffs(static_cast<int>(rest)) - 1;
        float part[N];
        load<N>(part, reinterpret_cast<const Payload*>(Slot(c.window, c.layout, c.slot(f, k.stage, k.ring)).payload) +
                          t * g.hidden + v * N);
#pragma unroll
        for (int j = 0; j < N; ++j) acc[j] += part[j];
      }
      if (++word * 32 >= c.peers) break;
    }
  };
  const auto write = [&](bool ok, uint32_t t, uint32_t v, uint32_t end) {
    if (v >= end) return;
    if (!ok)
#pragma unroll
      for (int j = 0; j < N; ++j) acc[j] = NAN;
    store<N>(out + t * g.hidden + v * N, acc);
  };

  const bool any = units.first < units.count;
  const uint32_t t0 = any ? units.row(units.first) : 0;
  const uint32_t v0 = any ? units.begin(units.first) + lane : 0, end0 = any ? units.end(units.first) : 0;
  if constexpr (!kFused) await_previous();
  if (any) begin_sum(t0, v0, end0);
  Ticket k;
  // One answer per CTA: a row is summed or NaN, never half of each.
  bool ok;
  if constexpr (kFused) {
    read_masked(c, skip);
    k = read_ticket(c, words, port, tokens, blockIdx.x == 0);
    const bool there = await_flags(c, k, skip);
    const Headers headers(c, k, there);
    if (there && threadIdx.x / 32 == kThreads / 32 - 1 && last_to_see(c, k.stage, units.ctas)) take_replies(c, k, skip);
    if (there && any) finish_sum(k, t0, v0, end0);
    ok = __syncthreads_and(headers.check(c, k, there, tokens, skip));
  } else {
    const int32_t verdict = lane < g.stages ? c.verdict[lane] : 0;  // all stages' at once: which is meant takes a load
    read_masked(c, skip);
    k.stage = words[kTicketStage];
    k.ring = words[kTicketRing];
    const bool known = k.stage >= 0 && k.stage < g.stages;
    ok = known && (k.stage < 32 ? __shfl_sync(kWarp, verdict, k.stage) : c.verdict[k.stage]) != 0;
    __syncthreads();  // skip
    if (ok && any) finish_sum(k, t0, v0, end0);
  }
  if (any) write(ok, t0, v0, end0);
  for (uint32_t unit = units.first; unit < units.count; unit += units.stride) {
    const uint32_t t = units.row(unit), end = units.end(unit);
    for (uint32_t v = units.begin(unit) + lane; v < end; v += 32) {
      if (t == t0 && v == v0) continue;
      begin_sum(t, v, end);
      if (ok) finish_sum(k, t, v, end);
      write(ok, t, v, end);
    }
  }
}

template <typename F>
void visit(int64_t type, F&& f) {
  switch (type) {
    case k_float32:
      return f(float{});
    case k_bfloat16:
      return f(__nv_bfloat16{});
    default:
      return f(__half{});
  }
}

}  // namespace

void launch_combine(const DeviceControl& c, const int32_t* ticket, DeviceRows base, DType base_type, void* out,
                    const int32_t* port, cudaStream_t stream) {
  const int64_t tokens = base.count;
  const bool fused = tokens <= kFusedTokens;
  if (!fused) await_kernel<<<1, 32, 0, stream>>>(c, ticket, port, tokens);
  visit(wide_dtype(c.geometry.dtype), [&](auto payload) {
    visit(base_type, [&](auto b) {
      using Payload = decltype(payload);
      using Base = decltype(b);
      auto* to = static_cast<Base*>(out);
      if (fused) {
        combine_kernel<Payload, Base, true><<<kFusedCtas, kThreads, 0, stream>>>(c, ticket, base, to, port);
      } else {
        launch_behind(combine_kernel<Payload, Base, false>, kSumCtas, kThreads, stream, c, ticket, base, to, port);
      }
    });
  });
}

cudaError_t preload_combine() {
  cudaFuncAttributes a;
  cudaError_t e = cudaFuncGetAttributes(&a, await_kernel);
  for (int64_t p = 0; p < 3; ++p)
    for (int64_t b = 0; b < 3; ++b)
      visit(p, [&](auto payload) {
        visit(b, [&](auto base) {
          using P = decltype(payload);
          using B = decltype(base);
          if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, combine_kernel<P, B, true>);
          if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, combine_kernel<P, B, false>);
        });
      });
  return e;
}

}  // namespace afd
