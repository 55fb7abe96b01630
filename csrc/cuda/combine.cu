// combine: base + what the F ranks answered, summed in float32 in F-rank order and rounded once.
//   moves    one row per (token, F rank) that answers it; T x H of base in, T x H out
//   launch   T up to kFusedTokens: kFusedCtas CTAs wait and sum. More: 1 CTA waits, then a grid over the tokens sums; a
//            waiting kernel never holds more than kFusedCtas multiprocessors. A warp sums a segment of a row
//   order    flag (acquire, by every CTA that waits), header, rows; done++ ; last CTA: every flag to EMPTY, ring free.
//            The next dispatch on this ring releases the resets, so they need no fence of their own
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
  int32_t layer, stage, ring;
  int64_t sequence;
  bool ok;
};

__device__ Ticket read_ticket(const DeviceControl& c, const int32_t* w, const int32_t* port, int64_t tokens,
                              bool report) {
  __shared__ Ticket ticket;
  if (threadIdx.x == 0) {
    const Lane lane = read_port(c, port);
    const int4 a = *reinterpret_cast<const int4*>(w), b = *reinterpret_cast<const int4*>(w + 4);
    Ticket k{lane.layer, lane.stage, a.z, join(a.w, b.x), false};
    static_assert(kTicketGeneration == 0 && kTicketStage == 1 && kTicketRing == 2 && kTicketSequenceLow == 3);
    static_assert(kTicketSequenceHigh == 4 && kTicketLayer == 5 && kTicketTokens == 6);
    const bool failed = has_failed(c);
    k.ok = !failed && k.stage >= 0 && a.x == c.state->generation && a.y == k.stage && b.y == k.layer && b.z == tokens &&
           k.sequence >= 0 && k.ring >= 0 && k.ring < c.geometry.depth &&
           c.ring[k.stage * c.geometry.depth + k.ring] == k.sequence;
    if (!k.ok && report && !failed) fail(c, error_at(Kind::Stale, Op::combine, b.y, -1, a.y, k.ring, k.sequence));
    ticket = k;
  }
  __syncthreads();
  return ticket;
}

// One F rank's reply, by one thread: true once it is there and is the answer to this ticket.
__device__ bool await_reply(const DeviceControl& c, const Ticket& k, int32_t f, int64_t tokens, int64_t start) {
  const int64_t index = c.slot(f, k.stage, k.ring);
  const int32_t* flag = flag_of(c.window, c.layout, index);
  const ErrorRecord r = error_at(Kind::Timeout, Op::combine, k.layer, f, k.stage, k.ring, k.sequence);
  bool late = false;
  for (uint32_t turn = 1; load_acquire(flag) != kReady; ++turn) {
    if (turn % 16 != 0) continue;
    if (has_failed(c)) return false;
    const int32_t sticky = peer_state(c, f);
    if (sticky != kAlive) {
      fail(c, peer_ended(r, f, sticky));
      return false;
    }
    if (turn % 256 != 0) continue;  // these lie across PCIe
    if (ask_host(&c.mapped->abort) != 0) return false;
    if (ask_host(&c.gone[f]) != 0) {
      fail(c, peer_ended(r, f, kGone));
      return false;
    }
    if (late) {
      fail(c, r);
      return false;
    }
    late = global_ns() - start > c.deadline_ns;  // then a last look: it may have been this rank that was stopped
  }
  const SlotHeader h = *DeviceSlot(c.window, c.layout, index).header;
  ErrorRecord bad = r;
  bad.kind = static_cast<int32_t>(Kind::Protocol);
  const auto differs = [&bad](Field field, int64_t expected, int64_t seen) {
    if (expected == seen) return false;
    bad.field = static_cast<int32_t>(field);
    bad.expected = expected;
    bad.seen = seen;
    return true;
  };
  if (differs(Field::magic, kHeaderMagic, h.magic) || differs(Field::version, kWireVersion, h.version) ||
      differs(Field::generation, c.state->generation, h.generation) ||
      differs(Field::sequence, k.sequence, h.sequence) || differs(Field::layer, k.layer, h.layer) ||
      differs(Field::flags, 0, h.flags) || differs(Field::num_tokens, tokens, h.num_tokens)) {
    fail(c, bad);
    return false;
  }
  return true;
}

__device__ bool await_all(const DeviceControl& c, const Ticket& k, int64_t tokens) {
  const int64_t start = global_ns();
  bool ok = k.ok;
  for (int32_t f = threadIdx.x; ok && f < c.peers; f += blockDim.x)
    ok = c.masked[f] != 0 || await_reply(c, k, f, tokens, start);
  return __syncthreads_and(ok);
}

__global__ void __launch_bounds__(32)
    await_kernel(const __grid_constant__ DeviceControl c, const int32_t* words, const int32_t* port, int64_t tokens) {
  const Ticket k = read_ticket(c, words, port, tokens, true);
  const bool ok = await_all(c, k, tokens);
  if (threadIdx.x == 0 && k.stage >= 0) c.spoiled[done_index(c.geometry, Done::combine, k.stage)] = ok ? 0 : 1;
}

template <typename Payload, typename Base, bool kFused>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ DeviceControl c, const int32_t* words, DeviceRows base, Base* out,
                   const int32_t* port) {
  constexpr int N = Elements<Payload>::kPerVector > Elements<Base>::kPerVector ? Elements<Payload>::kPerVector
                                                                               : Elements<Base>::kPerVector;
  const Geometry& g = c.geometry;
  const int64_t tokens = base.count, width = ticket_width(g.ffn_size);
  const Units units(tokens, g.hidden / N, 1, blockIdx.x, gridDim.x);
  if (blockIdx.x >= units.ctas) return;
  const Ticket k = read_ticket(c, words, port, tokens, kFused && blockIdx.x == 0);
  // One answer per CTA: a row is summed or NaN, never half of each.
  const bool ok = kFused ? await_all(c, k, tokens)
                         : __syncthreads_and(k.ok && c.spoiled[done_index(g, Done::combine, k.stage)] == 0) != 0;
  for (int64_t unit = units.first; unit < units.count; unit += units.stride) {
    const int64_t t = units.row(unit), end = units.end(unit);
    const Base* from = static_cast<const Base*>(base.data) + t * base.stride;
    const int32_t* mask = words + (t + 1) * width;
    for (int64_t v = units.begin(unit) + threadIdx.x % 32; v < end; v += 32) {
      float acc[N];
      if (ok) {
        load<N>(acc, from + v * N);
        for (int32_t f = 0; f < c.peers; ++f) {
          if (!bit(mask, f) || c.masked[f] != 0) continue;
          float part[N];
          load<N>(part,
                  reinterpret_cast<const Payload*>(DeviceSlot(c.window, c.layout, c.slot(f, k.stage, k.ring)).payload) +
                      t * g.hidden + v * N);
#pragma unroll
          for (int j = 0; j < N; ++j) acc[j] += part[j];
        }
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j) acc[j] = NAN;
      }
      store<N>(out + t * g.hidden + v * N, acc);
    }
  }

  bool spoiled;
  if (!last_cta<false>(c, Done::combine, k.stage < 0 ? g.stages : k.stage, units.ctas, !ok, spoiled) || spoiled) return;
  for (int32_t f = threadIdx.x; f < c.peers; f += blockDim.x)
    if (c.masked[f] == 0) store_relaxed(flag_of(c.window, c.layout, c.slot(f, k.stage, k.ring)), kEmpty);
  if (threadIdx.x == 0) {
    c.ring[k.stage * g.depth + k.ring] = -1;
    count_up(&c.state->counters[k_combines], 1);
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
  visit(c.geometry.dtype, [&](auto payload) {
    visit(base_type, [&](auto b) {
      using Payload = decltype(payload);
      using Base = decltype(b);
      auto* to = static_cast<Base*>(out);
      if (fused) {
        combine_kernel<Payload, Base, true><<<kFusedCtas, kThreads, 0, stream>>>(c, ticket, base, to, port);
      } else {
        combine_kernel<Payload, Base, false><<<kSumCtas, kThreads, 0, stream>>>(c, ticket, base, to, port);
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
