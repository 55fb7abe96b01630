// dispatch: rows of x to the F ranks that need them, and the plan that explains them.
//   moves    T x H elements once per (token, F rank); T x topk x 12 bytes of plan per F rank
//   launch   1 plan CTA + kCopyCtas copy CTAs of 512 threads, independent of capacity; a warp copies a segment of a row
//   order    every writer: stores -> __syncthreads -> fence.sys -> done++ ; last one: flags (release.sys)
//   waits    never
//   fails    port never filled, no free ring, a peer that ended: error record, nothing published, ticket of generation
//   -1;
//            an id outside [-1, E): counts as -1, error record, published
#include "ids.cuh"

namespace afd {
namespace {

constexpr int kThreads = 512;
constexpr int kCopyCtas = 24;
constexpr int kUnroll = 4;

struct Flight {
  Lane lane;
  int64_t sequence, ring, slot;
  int32_t generation;
  bool ok;
};

// Why nothing may be published, decided from words that only this stream changes, or that only ever get worse. By warp
// 0: the lanes read the rings while one reads the sequence, so that the loads do not wait for each other.
__device__ Flight open_flight(const DeviceControl& c, const int32_t* port) {
  __shared__ Flight flight;
  const Geometry& g = c.geometry;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    const Lane l = read_port(c, port);
    Flight f{l, -1, -1, -1, c.state->generation, false};
    if (l.stage >= 0) {
      const int64_t sequence = c.next[l.stage];
      int64_t busy = lane < g.depth ? c.ring[l.stage * g.depth + lane] : -1;
      int32_t ended = 0;
      for (int32_t p = lane; p < c.peers; p += 32)
        if (peer_state(c, p) != kAlive && c.masked[p] == 0) ended = 1 + p;
      ended = __reduce_max_sync(kWarp, ended);
      f.sequence = sequence;
      f.ring = sequence % g.depth;
      f.slot = c.slot(c.role_rank, l.stage, f.ring);
      busy = f.ring < 32 ? __shfl_sync(kWarp, busy, static_cast<int>(f.ring)) : c.ring[l.stage * g.depth + f.ring];
      f.ok = !has_failed(c) && busy < 0 && ended == 0;
      if (lane == 0 && blockIdx.x == 0 && !f.ok && !has_failed(c)) {
        const ErrorRecord r = error_at(Kind::RingBusy, Op::dispatch, l.layer, -1, l.stage, f.ring, f.sequence);
        fail(c, ended > 0 ? peer_ended(r, ended - 1, peer_state(c, ended - 1)) : r);
      }
    } else if (lane == 0 && blockIdx.x == 0) {
      fail(c, error_at(Kind::Argument, Op::dispatch, -1, -1, -1, -1, -1));
    }
    if (lane == 0) flight = f;
  }
  __syncthreads();
  return flight;
}

// What the plan needs and the flight does not decide: loaded while open_flight waits for its words.
struct PlanMemory {
  int2* map;         // [experts]
  int32_t* running;  // [experts]
  int32_t* routed;   // [ffn_size]
  int32_t* skip;     // [ffn_size] masked
  __device__ PlanMemory(const Geometry& g, void* memory) {
    map = static_cast<int2*>(memory);
    running = reinterpret_cast<int32_t*>(map + g.num_experts);
    routed = running + g.num_experts;
    skip = routed + g.ffn_size;
  }
};

size_t plan_bytes(const Geometry& g) { return g.num_experts * 12 + g.ffn_size * 8; }

__device__ void load_plan(const DeviceControl& c, const PlanMemory& m) {
  for (int64_t e = threadIdx.x; e < c.geometry.num_experts; e += blockDim.x) {
    m.map[e] = reinterpret_cast<const int2*>(c.expert_map)[e];
    m.running[e] = 0;
  }
  for (int64_t f = threadIdx.x; f < c.geometry.ffn_size; f += blockDim.x) {
    m.routed[f] = 0;
    m.skip[f] = c.masked[f];
  }
}

__device__ void write_plan(const DeviceControl& c, const PlanMemory& m, const Flight& flight, int64_t tokens,
                           const DeviceIds& ids, const DeviceWeights& weights) {
  const Geometry& g = c.geometry;
  rank_choices(
      ids, tokens, g.topk, g.num_experts, m.running,
      [&](int64_t i, int64_t id, int32_t rank) {
        const int2 owner = id >= 0 ? m.map[id] : make_int2(-1, -1);
        const float w = weights.data[i / g.topk * weights.row + i % g.topk * weights.column];
        for (int32_t f = 0; f < c.peers; ++f) {
          if (m.skip[f] != 0) continue;
          const DeviceSlot slot(peer_window(c, f), c.layout, flight.slot);
          *reinterpret_cast<int2*>(&slot.position[i]) = owner.x == f ? make_int2(owner.y, rank) : make_int2(-1, -1);
          slot.weight[i] = w;
        }
      },
      [&](int64_t, int64_t id) {
        ErrorRecord r = error_at(Kind::Argument, Op::dispatch, flight.lane.layer, -1, flight.lane.stage, flight.ring,
                                 flight.sequence);
        r.field = static_cast<int32_t>(Field::topk_ids);
        r.expected = g.num_experts;
        r.seen = id;
        record_error(c, r);
      });
  __syncthreads();
  // A rank's counts beyond the experts it owns were zeroed at construction and are never written.
  for (int64_t e = threadIdx.x; e < g.num_experts; e += blockDim.x) {
    const int2 owner = m.map[e];
    if (m.skip[owner.x] == 0) DeviceSlot(peer_window(c, owner.x), c.layout, flight.slot).counts[owner.y] = m.running[e];
    if (m.running[e] != 0) atomicAdd(&m.routed[owner.x], m.running[e]);
  }
  __syncthreads();
  for (int32_t f = threadIdx.x; f < c.peers; f += blockDim.x) {
    if (m.skip[f] != 0) continue;
    *DeviceSlot(peer_window(c, f), c.layout, flight.slot).header = {kHeaderMagic,
                                                                    kWireVersion,
                                                                    flight.generation,
                                                                    flight.lane.layer,
                                                                    static_cast<int32_t>(tokens),
                                                                    0,
                                                                    flight.sequence,
                                                                    m.routed[f],
                                                                    0};
    count_up(&c.bytes_sent[f], tokens * g.topk * static_cast<int64_t>(sizeof(Position) + sizeof(float)) +
                                   static_cast<int64_t>(sizeof(SlotHeader)) + 4 * g.local_experts);
  }
}

__device__ void copy_rows(const DeviceControl& c, const Units& units, const Flight& flight, const DeviceRows& x,
                          const DeviceIds& ids, int32_t* ticket) {
  const Geometry& g = c.geometry;
  const auto* map = reinterpret_cast<const int2*>(c.expert_map);
  const int64_t size = itemsize(g.dtype), vectors = g.hidden * size / 16, width = ticket_width(g.ffn_size);
  const int words = static_cast<int>((g.ffn_size + 31) / 32), lane = threadIdx.x % 32;
  for (int64_t unit = units.first; unit < units.count; unit += units.stride) {
    const int64_t t = units.row(unit), begin = units.begin(unit), end = units.end(unit);
    const auto* row = reinterpret_cast<const int4*>(static_cast<const char*>(x.data) + t * x.stride * size);
    if (begin == 0)
      for (int64_t w = words + lane; w < width; w += 32) ticket[(t + 1) * width + w] = 0;
    for (int word = 0; word < words; ++word) {
      uint32_t bits = mask_word(ids, t, g.topk, g.num_experts, map, word);
      if (begin == 0 && lane == 0) ticket[(t + 1) * width + word] = static_cast<int32_t>(bits);
      const int32_t mine = word * 32 + lane;
      bits &= ~__ballot_sync(kWarp, mine < c.peers && c.masked[mine < c.peers ? mine : 0] != 0);
      if (bits == 0 || !flight.ok) continue;
      for (int64_t v = begin + lane; v < end; v += 32 * kUnroll) {
        int4 data[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (v + 32 * u < end) data[u] = row[v + 32 * u];
        for (uint32_t rest = bits; rest != 0; rest &= rest - 1) {
          const int32_t f = word * 32 + __ffs(static_cast<int>(rest)) - 1;
          auto* to =
              reinterpret_cast<int4*>(DeviceSlot(peer_window(c, f), c.layout, flight.slot).payload) + t * vectors;
#pragma unroll
          for (int u = 0; u < kUnroll; ++u)
            if (v + 32 * u < end) to[v + 32 * u] = data[u];
        }
      }
      if (begin == 0 && ((bits >> lane) & 1)) count_up(&c.bytes_sent[mine], vectors * 16);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const __grid_constant__ DeviceControl c, DeviceRows x, DeviceIds ids, DeviceWeights weights,
                    const int32_t* port, int32_t* ticket) {
  extern __shared__ int4 memory[];
  const Units units(x.count, c.geometry.hidden * itemsize(c.geometry.dtype) / 16, kUnroll,
                    static_cast<int64_t>(blockIdx.x) - 1, kCopyCtas);
  if (blockIdx.x > units.ctas) return;  // the plan CTA and the first units.ctas take part
  const PlanMemory plan(c.geometry, memory);
  if (blockIdx.x == 0) load_plan(c, plan);
  const Flight flight = open_flight(c, port);
  if (blockIdx.x > 0) {
    copy_rows(c, units, flight, x, ids, ticket);
  } else if (flight.ok) {
    write_plan(c, plan, flight, x.count, ids, weights);
  }
  bool spoiled;
  const int64_t stage = flight.lane.stage < 0 ? c.geometry.stages : flight.lane.stage;
  if (!last_cta<true>(c, Done::dispatch, stage, 1 + units.ctas, !flight.ok, spoiled)) return;
  if (!spoiled) {
    for (int32_t f = threadIdx.x; f < c.peers; f += blockDim.x)
      if (c.masked[f] == 0) store_release(flag_of(peer_window(c, f), c.layout, flight.slot), kReady);
  }
  if (threadIdx.x == 0) {
    const int32_t head[kTicketWords] = {spoiled ? -1 : flight.generation,
                                        flight.lane.stage,
                                        static_cast<int32_t>(flight.ring),
                                        low(flight.sequence),
                                        high(flight.sequence),
                                        flight.lane.layer,
                                        static_cast<int32_t>(x.count)};
    for (int64_t w = 0; w < ticket_width(c.geometry.ffn_size); ++w) ticket[w] = w < kTicketWords ? head[w] : 0;
    if (!spoiled) {
      c.ring[stage * c.geometry.depth + flight.ring] = flight.sequence;
      c.next[stage] = flight.sequence + 1;
      count_up(&c.state->counters[k_dispatches], 1);
      count_up(&c.state->counters[k_tokens], x.count);
    }
    // A CTA that looked later than the first may be the only one that saw a peer end.
    for (int32_t f = 0; spoiled && !has_failed(c) && f < c.peers; ++f)
      if (peer_state(c, f) != kAlive && c.masked[f] == 0)
        fail(c, peer_ended(error_at(Kind::PeerFailed, Op::dispatch, flight.lane.layer, f, flight.lane.stage,
                                    flight.ring, flight.sequence),
                           f, peer_state(c, f)));
  }
}

}  // namespace

void launch_dispatch(const DeviceControl& c, DeviceRows x, DeviceIds ids, DeviceWeights weights, const int32_t* port,
                     int32_t* ticket, cudaStream_t stream) {
  dispatch_kernel<<<1 + kCopyCtas, kThreads, plan_bytes(c.geometry), stream>>>(c, x, ids, weights, port, ticket);
}

cudaError_t preload_dispatch() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, dispatch_kernel);
}

}  // namespace afd
