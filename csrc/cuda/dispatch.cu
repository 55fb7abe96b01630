// dispatch: rows of x to the F ranks that need them, and the plan that explains them.
//   moves    T x H elements once per (token, F rank); T x topk x 12 bytes of plan per F rank
//   launch   1 plan CTA + kCopyCtas copy CTAs of 512 threads, independent of capacity
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

struct Flight {
  Lane lane;
  int64_t sequence, ring;
  bool ok;
};

// Why nothing may be published, decided from words that only this stream changes, or that only ever get worse.
__device__ Flight open_flight(DeviceControl* c, const int32_t* port, bool first_cta) {
  __shared__ Flight flight;
  if (threadIdx.x == 0) {
    flight.lane = read_port(c, port);
    flight.ok = c->failed == 0 && flight.lane.stage >= 0;
    if (flight.lane.stage < 0) {
      flight.sequence = flight.ring = -1;
      if (first_cta) fail(c, error_at(Kind::Argument, Op::dispatch, -1, -1, -1, -1, -1));
    } else {
      const int32_t stage = flight.lane.stage;
      flight.sequence = c->next[stage];
      flight.ring = flight.sequence % c->geometry.depth;
      const ErrorRecord r =
          error_at(Kind::RingBusy, Op::dispatch, flight.lane.layer, -1, stage, flight.ring, flight.sequence);
      if (flight.ok && c->ring[stage * c->geometry.depth + flight.ring] >= 0) {
        flight.ok = false;
        if (first_cta) fail(c, r);
      }
      for (int32_t f = 0; flight.ok && f < c->peers; ++f) {
        const int32_t sticky = peer_state(c, f);
        if (sticky == kAlive || c->masked[f] != 0) continue;
        flight.ok = false;
        if (first_cta) fail(c, peer_ended(r, f, sticky));
      }
    }
  }
  __syncthreads();
  return flight;
}

__device__ void write_plan(DeviceControl* c, const Flight& flight, int64_t tokens, const DeviceIds& ids,
                           const DeviceWeights& weights) {
  extern __shared__ int32_t running[];  // [experts], then routed [ffn_size]
  const Geometry& g = c->geometry;
  const auto* map = reinterpret_cast<const int2*>(c->expert_map);
  int32_t* routed = running + g.num_experts;
  for (int64_t i = threadIdx.x; i < g.num_experts + g.ffn_size; i += blockDim.x) running[i] = 0;
  __syncthreads();
  const int64_t index = c->slot(c->role_rank, flight.lane.stage, flight.ring);
  rank_choices(
      ids, tokens, g.topk, g.num_experts, running,
      [&](int64_t i, int64_t id, int32_t rank) {
        const int2 owner = id >= 0 ? map[id] : make_int2(-1, -1);
        const float w = weights.data[i / g.topk * weights.row + i % g.topk * weights.column];
        for (int32_t f = 0; f < c->peers; ++f) {
          if (c->masked[f] != 0) continue;
          const DeviceSlot slot(c->peer[f], c->layout, index);
          const bool mine = owner.x == f;
          *reinterpret_cast<int2*>(&slot.position[i]) = mine ? make_int2(owner.y, rank) : make_int2(-1, -1);
          slot.weight[i] = w;
        }
      },
      [&](int64_t i, int64_t id) {
        ErrorRecord r = error_at(Kind::Argument, Op::dispatch, flight.lane.layer, -1, flight.lane.stage, flight.ring,
                                 flight.sequence);
        r.field = static_cast<int32_t>(Field::topk_ids);
        r.expected = g.num_experts;
        r.seen = id;
        fail(c, r);
      });
  __syncthreads();
  for (int64_t e = threadIdx.x; e < g.num_experts; e += blockDim.x) {
    const int2 owner = map[e];
    if (c->masked[owner.x] == 0) DeviceSlot(c->peer[owner.x], c->layout, index).counts[owner.y] = running[e];
    atomicAdd(&routed[owner.x], running[e]);
  }
  for (int32_t f = 0; f < c->peers; ++f)
    for (int64_t e = c->experts_per_rank[f] + threadIdx.x; e < g.local_experts; e += blockDim.x)
      if (c->masked[f] == 0) DeviceSlot(c->peer[f], c->layout, index).counts[e] = 0;
  __syncthreads();
  for (int32_t f = threadIdx.x; f < c->peers; f += blockDim.x) {
    if (c->masked[f] != 0) continue;
    *DeviceSlot(c->peer[f], c->layout, index).header = {kHeaderMagic,
                                                        kWireVersion,
                                                        c->generation,
                                                        flight.lane.layer,
                                                        static_cast<int32_t>(tokens),
                                                        0,
                                                        flight.sequence,
                                                        routed[f],
                                                        0};
    const int64_t plan = tokens * g.topk * static_cast<int64_t>(sizeof(Position) + sizeof(float));
    const int64_t header = static_cast<int64_t>(sizeof(SlotHeader)) + 4 * g.local_experts;
    atomicAdd(reinterpret_cast<unsigned long long*>(&c->bytes_sent[f]), static_cast<unsigned long long>(plan + header));
  }
}

// A work unit is a segment of a row; short batches cut rows so that all CTAs have something to do.
__device__ void copy_rows(DeviceControl* c, const Flight& flight, const DeviceRows& x, const DeviceIds& ids,
                          int32_t* ticket) {
  const Geometry& g = c->geometry;
  const auto* map = reinterpret_cast<const int2*>(c->expert_map);
  const int64_t size = itemsize(g.dtype), vectors = g.hidden * size / 16, width = ticket_width(g.ffn_size);
  const int words = static_cast<int>((g.ffn_size + 31) / 32);
  const int64_t index = c->slot(c->role_rank, flight.lane.stage, flight.ring);
  const int64_t most = (vectors + kThreads - 1) / kThreads, spare = kCopyCtas / (x.count > 0 ? x.count : 1);
  const int64_t segments = spare < 1 ? 1 : (spare < most ? spare : most);
  const int64_t span = (vectors + segments - 1) / segments;
  for (int64_t unit = blockIdx.x - 1; unit < x.count * segments; unit += kCopyCtas) {
    const int64_t t = unit / segments, segment = unit % segments;
    const auto* row = reinterpret_cast<const int4*>(static_cast<const char*>(x.data) + t * x.stride * size);
    if (segment == 0)
      for (int64_t w = words + threadIdx.x; w < width; w += blockDim.x) ticket[(t + 1) * width + w] = 0;
    for (int w = 0; w < words; ++w) {
      const uint32_t bits = mask_word(ids, t, g.topk, g.num_experts, map, w);
      if (segment == 0 && threadIdx.x == 0) ticket[(t + 1) * width + w] = static_cast<int32_t>(bits);
      if (bits == 0 || !flight.ok) continue;
      const int64_t end = (segment + 1) * span < vectors ? (segment + 1) * span : vectors;
      for (int64_t v = segment * span + threadIdx.x; v < end; v += kThreads) {
        const int4 data = row[v];
        for (uint32_t rest = bits; rest != 0; rest &= rest - 1) {
          const int32_t f = w * 32 + __ffs(static_cast<int>(rest)) - 1;
          if (c->masked[f] != 0) continue;
          reinterpret_cast<int4*>(DeviceSlot(c->peer[f], c->layout, index).payload)[t * vectors + v] = data;
        }
      }
      if (segment == 0 && threadIdx.x < 32 && ((bits >> threadIdx.x) & 1))
        atomicAdd(reinterpret_cast<unsigned long long*>(&c->bytes_sent[w * 32 + threadIdx.x]),
                  static_cast<unsigned long long>(vectors * 16));
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(DeviceControl* c, DeviceRows x, DeviceIds ids, DeviceWeights weights, const int32_t* port,
                    int32_t* ticket) {
  const Flight flight = open_flight(c, port, blockIdx.x == 0);
  if (blockIdx.x > 0) {
    copy_rows(c, flight, x, ids, ticket);
  } else if (flight.ok) {
    write_plan(c, flight, x.count, ids, weights);
  }
  bool spoiled;
  if (!last_cta(c, Done::dispatch, flight.lane.stage < 0 ? c->geometry.stages : flight.lane.stage, !flight.ok, spoiled))
    return;
  const int64_t width = ticket_width(c->geometry.ffn_size);
  for (int64_t w = threadIdx.x; w < width; w += blockDim.x) {
    int32_t v = 0;
    if (w == kTicketGeneration) v = spoiled ? -1 : c->generation;
    if (w == kTicketStage) v = flight.lane.stage;
    if (w == kTicketRing) v = static_cast<int32_t>(flight.ring);
    if (w == kTicketSequenceLow) v = low(flight.sequence);
    if (w == kTicketSequenceHigh) v = high(flight.sequence);
    if (w == kTicketLayer) v = flight.lane.layer;
    if (w == kTicketTokens) v = static_cast<int32_t>(x.count);
    ticket[w] = v;
  }
  if (spoiled) {
    // A CTA that looked later than the first may be the only one that saw a peer end.
    for (int32_t f = 0; threadIdx.x == 0 && c->failed == 0 && f < c->peers; ++f)
      if (peer_state(c, f) != kAlive && c->masked[f] == 0)
        fail(c, peer_ended(error_at(Kind::PeerFailed, Op::dispatch, flight.lane.layer, f, flight.lane.stage,
                                    flight.ring, flight.sequence),
                           f, peer_state(c, f)));
    return;
  }
  if (threadIdx.x == 0) {
    c->ring[flight.lane.stage * c->geometry.depth + flight.ring] = flight.sequence;
    c->next[flight.lane.stage] = flight.sequence + 1;
    atomicAdd(reinterpret_cast<unsigned long long*>(&c->counters[k_dispatches]), 1ull);
    atomicAdd(reinterpret_cast<unsigned long long*>(&c->counters[k_tokens]), static_cast<unsigned long long>(x.count));
    __threadfence_system();
  }
  __syncthreads();
  for (int32_t f = threadIdx.x; f < c->peers; f += blockDim.x)
    if (c->masked[f] == 0)
      store_release(flag_of(c->peer[f], c->layout, c->slot(c->role_rank, flight.lane.stage, flight.ring)), kReady);
}

}  // namespace

void launch_dispatch(DeviceControl* c, const Geometry& g, DeviceRows x, DeviceIds ids, DeviceWeights weights,
                     const int32_t* port, int32_t* ticket, cudaStream_t stream) {
  dispatch_kernel<<<1 + kCopyCtas, kThreads, (g.num_experts + g.ffn_size) * sizeof(int32_t), stream>>>(
      c, x, ids, weights, port, ticket);
}

cudaError_t preload_dispatch() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, dispatch_kernel);
}

}  // namespace afd
