// dispatch: rows of x to the F ranks that need them, and the plan that explains them.
//   moves    T x H elements once per (token, F rank); T x topk x 12 bytes of plan per F rank
//   casts    a row once, in registers, where the payload is narrower than x
//   launch   1 plan CTA + kCtas copy CTAs of 512 threads, independent of capacity; a warp copies a segment of a row
//   order    every writer: stores -> __syncthreads -> done++ (acq_rel.gpu) ; last one: flags (release.sys)
//   waits    never
//   fails    port never filled, no free ring, a peer that ended: error record, nothing published, ticket with
//            generation -1; an id outside [-1, E): counts as -1, error record, published
#include "float8.cuh"
#include "ids.cuh"

namespace afd {
namespace {

constexpr int kThreads = 512;

struct Flight {
  Lane lane;
  int64_t sequence, ring, slot;
  int32_t generation;
  bool ok;
};

// Why nothing may be published, decided from words that only this stream changes, or that only ever get worse (a mask()
// in mid-dispatch may reach some CTAs only, and then the rank that is masked hears of half a dispatch). By the last
// warp of every CTA, which has the least else to do; __syncthreads before `flight` and `skip` (a bit per F rank that is
// left out) are read.
__device__ void open_flight(const DeviceControl& c, const int32_t* port, Flight& flight, uint32_t* skip) {
  const Geometry& g = c.geometry;
  if (threadIdx.x / 32 != blockDim.x / 32 - 1) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  // Which stage is meant is in the port; asking for those of all lanes' stages at once saves waiting for it.
  int64_t next = lane < g.stages ? c.next[lane] : 0;
  int64_t busy = lane < g.stages * g.depth ? c.ring[lane] : -1;
  const int32_t generation = c.state->generation;
  const bool failed = has_failed(c);
  const Lane l = read_port(c, port);
  int32_t lost = 0;
  for (int32_t first = 0; first < c.peers; first += 32) {
    const int32_t p = first + lane;
    const int32_t sticky = p < c.peers ? peer_state(c, p) : kAlive;
    const bool masked = p < c.peers && c.masked[p] != 0;
    if (sticky != kAlive && !masked) lost = 1 + p;
    const uint32_t bits = __ballot_sync(kWarp, masked);
    if (lane == 0) skip[first / 32] = bits;
  }
  lost = static_cast<int32_t>(__reduce_max_sync(kWarp, static_cast<uint32_t>(lost)));
  Flight f{l, -1, -1, -1, generation, false};
  if (l.stage >= 0) {
    next = l.stage < 32 ? __shfl_sync(kWarp, next, l.stage) : c.next[l.stage];
    f.sequence = next;
    f.ring = ring_of(c.geometry, next);
    f.slot = c.slot(c.role_rank, l.stage, f.ring);
    const int64_t ring = l.stage * g.depth + f.ring;
    busy = ring < 32 ? __shfl_sync(kWarp, busy, static_cast<int>(ring)) : c.ring[ring];
    f.ok = !failed && busy < 0 && lost == 0;
    if (lane == 0 && blockIdx.x == 0 && !f.ok && !failed) {
      const ErrorRecord r = error_at(Kind::RingBusy, Op::dispatch, l.layer, -1, l.stage, f.ring, f.sequence);
      fail(c, lost > 0 ? ended(r, lost - 1, peer_state(c, lost - 1)) : r);
    }
  } else if (lane == 0 && blockIdx.x == 0 && !failed) {
    fail(c, error_at(Kind::Argument, Op::dispatch, -1, -1, -1, -1, -1));
  }
  if (lane == 0) flight = f;
}

struct PlanMemory {
  int2* map;        // [experts]
  int32_t* routed;  // [ffn_size]
  int32_t* ranks;   // of rank_choices
  __device__ PlanMemory(const Geometry& g, void* memory) {
    map = static_cast<int2*>(memory);
    routed = reinterpret_cast<int32_t*>(map + g.num_experts);
    ranks = routed + g.ffn_size;
  }
};

struct WeightedChoice {
  int64_t id;
  float weight;
};

// By the plan CTA.
__device__ void write_plan(const DeviceControl& c, const PlanMemory& m, const int32_t* port, Flight& flight,
                           uint32_t* skip, uint32_t tokens, const DeviceIds& ids, const DeviceWeights& weights) {
  const Geometry& g = c.geometry;
  const uint32_t topk = static_cast<uint32_t>(g.topk), n = tokens * topk;
  const auto choice = [&](uint32_t i) -> WeightedChoice {
    return {id_at(ids, i / topk, i % topk), weights.data[i / topk * weights.row + i % topk * weights.column]};
  };
  const Share share(n, rank_warps(g.num_experts, plan_bytes(g), kThreads / 32));
  const WeightedChoice first = share.first() < share.end ? choice(share.first()) : WeightedChoice{-1, 0.0f};
  for (int64_t e = threadIdx.x; e < g.num_experts; e += blockDim.x)
    m.map[e] = reinterpret_cast<const int2*>(c.expert_map)[e];
  for (int64_t i = threadIdx.x; i < share.rows() * g.num_experts; i += blockDim.x) m.ranks[i] = 0;
  for (int64_t f = threadIdx.x; f < g.ffn_size; f += blockDim.x) m.routed[f] = 0;
  open_flight(c, port, flight, skip);
  __syncthreads();
  if (!flight.ok) return;
  rank_choices(
      share, first, g.num_experts, m.ranks, choice,
      [&](uint32_t i, const WeightedChoice& w, int32_t rank) {
        const int2 owner = w.id >= 0 ? m.map[w.id] : make_int2(-1, -1);
        if (owner.x >= 0) atomicAdd(&m.routed[owner.x], 1);
        for (int32_t f = 0; f < c.peers; ++f) {
          if (bit(skip, f)) continue;
          const Slot slot(peer_window(c, f), c.layout, flight.slot);
          *reinterpret_cast<int2*>(&slot.position[i]) = owner.x == f ? make_int2(owner.y, rank) : make_int2(-1, -1);
          slot.weight[i] = w.weight;
        }
      },
      [&](int64_t id) {
        ErrorRecord r = error_at(Kind::Argument, Op::dispatch, flight.lane.layer, -1, flight.lane.stage, flight.ring,
                                 flight.sequence);
        name_word(r, Field::topk_ids, g.num_experts, id);
        record_error(c, r);
      });
  __syncthreads();
  const int32_t* found = m.ranks + (share.rows() - 1) * g.num_experts;
  // A rank's counts beyond the experts it owns were zeroed at construction and are never written.
  for (int64_t e = threadIdx.x; e < g.num_experts; e += blockDim.x) {
    const int2 owner = m.map[e];
    if (!bit(skip, owner.x)) Slot(peer_window(c, owner.x), c.layout, flight.slot).counts[owner.y] = found[e];
  }
  for (int32_t f = kThreads - 1 - static_cast<int32_t>(threadIdx.x); f < c.peers; f += kThreads) {
    if (bit(skip, f)) continue;
    *Slot(peer_window(c, f), c.layout, flight.slot).header = {kHeaderMagic,
                                                              kWireVersion,
                                                              flight.generation,
                                                              flight.lane.layer,
                                                              static_cast<int32_t>(tokens),
                                                              0,
                                                              flight.sequence,
                                                              m.routed[f],
                                                              0};
    count_up(&c.bytes_sent[f], n * static_cast<int64_t>(sizeof(Position) + sizeof(float)) +
                                   static_cast<int64_t>(sizeof(SlotHeader)) + 4 * g.local_experts);
  }
}

// What a warp holds of a row between reading it and storing it to each peer that needs it: vectors v0 + lane, v0 + 32 +
// lane .. of the payload.
struct Copied {
  static constexpr uint32_t kUnroll = 4, kCtas = 32;  // these fill the link
  int4 data[kUnroll];
  __device__ void load(const int4* row, uint32_t v0, uint32_t end) {
    const uint32_t v = v0 + threadIdx.x % 32;
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u)
      if (v + 32 * u < end) data[u] = row[v + 32 * u];
  }
  __device__ void cast(uint32_t, uint32_t) {}
  __device__ void store(const Slot& slot, uint32_t t, uint32_t vectors, uint32_t v0, uint32_t end) const {
    auto* to = reinterpret_cast<int4*>(slot.payload) + static_cast<int64_t>(t) * vectors;
    const uint32_t v = v0 + threadIdx.x % 32;
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u)
      if (v + 32 * u < end) to[v + 32 * u] = data[u];
  }
};

// The same with the cast in between. A row is whole blocks and v0 begins one, so a block's lanes are all in or all out.
struct Quantized {
  static constexpr uint32_t kUnroll = 4, kCtas = 64;
  static constexpr uint32_t kBlocks = 32 / kBlockLanes;
  int4 wide[kUnroll][2], data[kUnroll];
  float scale;  // of block v0 / kBlockLanes + lane, so that a warp stores them together
  __device__ void load(const int4* row, uint32_t v0, uint32_t end) {
    const uint32_t v = v0 + threadIdx.x % 32;
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u)
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) wide[u][i] = v + 32 * u < end ? row[2 * (v + 32 * u) + i] : int4{};
  }
  __device__ void cast(uint32_t v0, uint32_t end) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      if (v0 + 32 * u >= end) break;
      const Float8 q = quantize(wide[u]);
      data[u] = q.elements;
      const float mine = __shfl_sync(kWarp, q.scale, static_cast<int>(lane % kBlocks * kBlockLanes));
      if (lane / kBlocks == u) scale = mine;
    }
  }
  __device__ void store(const Slot& slot, uint32_t t, uint32_t vectors, uint32_t v0, uint32_t end) const {
    auto* to = reinterpret_cast<int4*>(slot.payload) + static_cast<int64_t>(t) * vectors;
    const uint32_t lane = threadIdx.x % 32, v = v0 + lane, block = v0 / kBlockLanes + lane;
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u)
      if (v + 32 * u < end) to[v + 32 * u] = data[u];
    if (lane < kBlocks * kUnroll && block < end / kBlockLanes)
      slot.scale[static_cast<int64_t>(t) * (vectors / kBlockLanes) + block] = scale;
  }
};

// By the copy CTAs. The first unit's ids and data are asked for before it is known whether anything may be sent.
template <typename Copy>
__device__ void copy_rows(const DeviceControl& c, const Units& units, const int32_t* port, Flight& flight,
                          uint32_t* skip, const DeviceRows& x, const DeviceIds& ids, int32_t* ticket) {
  const Geometry& g = c.geometry;
  const auto* map = reinterpret_cast<const int2*>(c.expert_map);
  const int64_t size = itemsize(wide_dtype(g.dtype)), width = ticket_width(g.ffn_size);
  const int words = static_cast<int>((g.ffn_size + 31) / 32);
  const uint32_t lane = threadIdx.x % 32;
  const auto row_of = [&](uint32_t t) {
    return reinterpret_cast<const int4*>(static_cast<const char*>(x.data) + t * x.stride * size);
  };
  Copy copy;
  uint32_t bits = 0;
  bool fetched = units.first < units.count;
  if (fetched) {
    const uint32_t t = units.row(units.first);
    copy.load(row_of(t), units.begin(units.first), units.end(units.first));
    bits = mask_word(ids, t, g.topk, g.num_experts, map, 0);
  }
  open_flight(c, port, flight, skip);
  if (fetched) copy.cast(units.begin(units.first), units.end(units.first));
  __syncthreads();
  for (uint32_t unit = units.first; unit < units.count; unit += units.stride) {
    const uint32_t t = units.row(unit), begin = units.begin(unit), end = units.end(unit);
    const int4* row = row_of(t);
    if (begin == 0)
      for (int64_t w = words + lane; w < width; w += 32) ticket[(t + 1) * width + w] = 0;
    for (int word = 0; word < words; ++word) {
      if (!fetched) bits = mask_word(ids, t, g.topk, g.num_experts, map, word);
      if (begin == 0 && lane == 0) ticket[(t + 1) * width + word] = static_cast<int32_t>(bits);
      bits &= ~skip[word];
      if (bits != 0 && flight.ok) {
        for (uint32_t v0 = begin; v0 < end; v0 += 32 * Copy::kUnroll) {
          if (!fetched || v0 != begin) {
            copy.load(row, v0, end);
            copy.cast(v0, end);
          }
          for (uint32_t rest = bits; rest != 0; rest &= rest - 1) {
            const int32_t f = word * 32 + __ffs(static_cast<int>(rest)) - 1;
            copy.store(Slot(peer_window(c, f), c.layout, flight.slot), t, units.vectors, v0, end);
          }
        }
        if (begin == 0 && ((bits >> lane) & 1))
          count_up(&c.bytes_sent[word * 32 + lane], payload_row(g) + 4 * scales_per_row(g));
      }
      fetched = false;
    }
  }
}

template <typename Copy>
__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const __grid_constant__ DeviceControl c, DeviceRows x, DeviceIds ids, DeviceWeights weights,
                    const int32_t* port, int32_t* ticket) {
  extern __shared__ int4 memory[];
  __shared__ Flight flight;
  __shared__ uint32_t skip[kMaxRanks / 32];
  const Units units(x.count, payload_vectors(c.geometry), blockIdx.x - 1, Copy::kCtas);
  if (blockIdx.x > units.ctas) return;  // the plan CTA and the first units.ctas take part
  if (blockIdx.x == 0) {
    write_plan(c, PlanMemory(c.geometry, memory), port, flight, skip, static_cast<uint32_t>(x.count), ids, weights);
  } else {
    copy_rows<Copy>(c, units, port, flight, skip, x, ids, ticket);
  }
  bool spoiled;
  const int64_t stage = flight.lane.stage < 0 ? c.geometry.stages : flight.lane.stage;
  if (!last_cta(c, Done::dispatch, stage, 1 + units.ctas, !flight.ok, spoiled)) return;
  if (!spoiled) {
    for (int32_t f = threadIdx.x; f < c.peers; f += 32)
      if (!bit(skip, f)) store_release(flag_of(peer_window(c, f), c.layout, flight.slot), kReady);
  }
  const int64_t width = ticket_width(c.geometry.ffn_size);
  for (int64_t w = kTicketWords + threadIdx.x; w < width; w += 32) ticket[w] = 0;
  if (threadIdx.x == 0) {
    reinterpret_cast<int4*>(ticket)[0] = make_int4(spoiled ? -1 : flight.generation, flight.lane.stage,
                                                   static_cast<int32_t>(flight.ring), low(flight.sequence));
    reinterpret_cast<int4*>(ticket)[1] =
        make_int4(high(flight.sequence), flight.lane.layer, static_cast<int32_t>(x.count), 0);
    static_assert(kTicketGeneration == 0 && kTicketStage == 1 && kTicketRing == 2 && kTicketSequenceLow == 3);
    static_assert(kTicketSequenceHigh == 4 && kTicketLayer == 5 && kTicketTokens == 6 && kTicketWords == 8);
    if (!spoiled) {
      c.ring[stage * c.geometry.depth + flight.ring] = flight.sequence;
      c.next[stage] = flight.sequence + 1;
      count_up(&c.state->counters[k_dispatches], 1);
      count_up(&c.state->counters[k_tokens], x.count);
    }
    // A CTA that looked later than the first may be the only one that saw a peer end.
    for (int32_t f = 0; spoiled && !has_failed(c) && f < c.peers; ++f)
      if (peer_state(c, f) != kAlive && c.masked[f] == 0)
        fail(c, ended(error_at(Kind::PeerFailed, Op::dispatch, flight.lane.layer, f, flight.lane.stage, flight.ring,
                               flight.sequence),
                      f, peer_state(c, f)));
  }
}

}  // namespace

void launch_dispatch(const DeviceControl& c, DeviceRows x, DeviceIds ids, DeviceWeights weights, const int32_t* port,
                     int32_t* ticket, cudaStream_t stream) {
  const Geometry& g = c.geometry;
  const int64_t shared = plan_bytes(g) + rank_bytes(g.num_experts, plan_bytes(g), kThreads / 32);
  const auto launch = [&](auto kernel, int copy_ctas) {
    kernel<<<1 + copy_ctas, kThreads, shared, stream>>>(c, x, ids, weights, port, ticket);
  };
  if (scales_per_row(c.geometry) > 0) {
    launch(dispatch_kernel<Quantized>, Quantized::kCtas);
  } else {
    launch(dispatch_kernel<Copied>, Copied::kCtas);
  }
}

cudaError_t preload_dispatch() {
  cudaFuncAttributes a;
  const cudaError_t e = cudaFuncGetAttributes(&a, dispatch_kernel<Copied>);
  return e == cudaSuccess ? cudaFuncGetAttributes(&a, dispatch_kernel<Quantized>) : e;
}

}  // namespace afd
