// wire.h: what crosses between ranks, and what a rank keeps about it. Shared by CPU and CUDA code.
//
// Everything a peer can write (flags, sticky words, slots) is laid out here once; Python reads these numbers through
// the extension module (csrc/module.cpp) and repeats none of them. All offsets are 64-bit and in bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define AFD_HD __host__ __device__
#else
#define AFD_HD
#endif

namespace afd {

constexpr int32_t kWireVersion = 3;
constexpr int32_t kHeaderMagic = 0x53444641;  // "AFDS"
constexpr int32_t kPortMagic = 0x50444641;    // "AFDP"
constexpr int64_t kAlign = 256;               // every field of a slot starts on such a boundary
constexpr int64_t kWordStride = 64;           // one flag or sticky word per cache line: no false sharing between peers
constexpr int64_t kMaxRanks = 1024;           // of one role
constexpr int64_t kMaxDepth = 1024;

// A flag holds one of two constants, so that every replay of a captured wait compares with the same word.
enum Flag : int32_t { kEmpty = 0, kReady = 0x59444552 };  // "REDY"

// A sticky word says how a peer ended: it closed its window, it failed and said so, or its process is gone (set by the
// watcher of the rank that owns the word). Only reset() clears it; a larger value replaces a smaller one, but a process
// that left may go.
enum Sticky : int32_t { kAlive = 0, kLeft = 1, kPoisoned = 2, kGone = 3 };

enum Role : int32_t { kAttention = 0, kFfn = 1 };

// How errors are named on both sides of the language border: Python maps each to an exception class (errors.py).
#define AFD_KINDS(X) \
  X(Argument)        \
  X(RingBusy)        \
  X(Stale)           \
  X(Closed)          \
  X(Aborted)         \
  X(Failed)          \
  X(Timeout)         \
  X(PeerFailed)      \
  X(PeerLeft)        \
  X(Protocol)

enum class Kind : int32_t {
#define X(name) name,
  AFD_KINDS(X)
#undef X
};

#define AFD_OPS(X) X(dispatch) X(combine) X(arrive) X(receive) X(reply) X(plan) X(host)

enum class Op : int32_t {
#define X(name) name,
  AFD_OPS(X)
#undef X
};

// The agreed geometry: every rank publishes these and construction compares them one by one.
#define AFD_GEOMETRY(X)                                               \
  X(attention_size)                                                   \
  X(ffn_size)                                                         \
  X(num_experts)                                                      \
  X(local_experts) /* the most any F rank owns: the header's width */ \
  X(stages)                                                           \
  X(depth)                                                            \
  X(tokens) /* capacity of one dispatch */                            \
  X(topk)                                                             \
  X(hidden)                                                           \
  X(dtype)  /* index into AFD_DTYPES */                               \
  X(layers) /* a dispatch of another layer is a protocol error */

struct Geometry {
#define X(name) int64_t name;
  AFD_GEOMETRY(X)
#undef X
};

// Payload dtypes: bytes of an element, and the wide dtype: of x given to dispatch, of expert_out and of replies. A
// payload that is narrower than its wide dtype is quantised by dispatch.
#define AFD_DTYPES(X)      \
  X(float32, 4, float32)   \
  X(bfloat16, 2, bfloat16) \
  X(float16, 2, float16)   \
  X(float8_e4m3fn, 1, bfloat16)

enum DType : int64_t {
#define X(name, bytes, wide) k_##name,
  AFD_DTYPES(X)
#undef X
};

AFD_HD constexpr int64_t itemsize(int64_t dtype) {
  switch (dtype) {
#define X(name, bytes, wide) \
  case k_##name:             \
    return bytes;
    AFD_DTYPES(X)
#undef X
    default:
      return 0;
  }
}

AFD_HD constexpr int64_t wide_dtype(int64_t dtype) {
  switch (dtype) {
#define X(name, bytes, wide) \
  case k_##name:             \
    return k_##wide;
    AFD_DTYPES(X)
#undef X
    default:
      return dtype;
  }
}

// Quantisation: per token and block of channels, amax = max |x|, scale = amax / 448 and element = x * (448 / amax)
// rounded to nearest even, each step in float32. amax is found among the bits of |x|, where inf and NaN are largest,
// and is at least kLeastAmax: zeros stay zeros and scale is a normal number. |element| never exceeds 448 by enough to
// round up. A block with an inf or a NaN comes back as NaN, all of it.
constexpr int64_t kScaleBlock = 128;
constexpr float kFloat8Max = 448.0f;
constexpr float kLeastAmax = 448.0f * 0x1p-126f;

// Scales of a token's row; 0 unless the payload is quantised.
AFD_HD constexpr int64_t scales_per_row(const Geometry& g) {
  return wide_dtype(g.dtype) == g.dtype ? 0 : g.hidden / kScaleBlock;
}
// Bytes of a token's row on the way to an F rank, and of x, expert_out and the reply.
AFD_HD constexpr int64_t payload_row(const Geometry& g) { return g.hidden * itemsize(g.dtype); }
AFD_HD constexpr int64_t wide_row(const Geometry& g) { return g.hidden * itemsize(wide_dtype(g.dtype)); }

// Slot header; `local_experts` int32 counts follow it.
struct SlotHeader {
  int32_t magic;
  int32_t version;
  int32_t generation;
  int32_t layer;
  int32_t num_tokens;
  int32_t flags;  // reserved, 0
  int64_t sequence;
  int32_t routed;  // (token, choice) pairs meant for this receiver: the sum of the counts
  int32_t reserved;
  // int32_t counts[local_experts]
};
static_assert(offsetof(SlotHeader, magic) == 0);
static_assert(offsetof(SlotHeader, version) == 4);
static_assert(offsetof(SlotHeader, generation) == 8);
static_assert(offsetof(SlotHeader, layer) == 12);
static_assert(offsetof(SlotHeader, num_tokens) == 16);
static_assert(offsetof(SlotHeader, flags) == 20);
static_assert(offsetof(SlotHeader, sequence) == 24);
static_assert(offsetof(SlotHeader, routed) == 32);
static_assert(offsetof(SlotHeader, reserved) == 36);
static_assert(sizeof(SlotHeader) == 40);

// One entry of the position field: where a choice goes in its receiver; (-1, -1) if it is not for this receiver.
struct Position {
  int32_t expert;  // local expert
  int32_t rank;    // among the choices of that expert in this dispatch, token-major
};
static_assert(sizeof(Position) == 8);

// Offsets inside a window (flags, sticky, slots) and inside a slot (position, weight, scale, payload).
#define AFD_LAYOUT(X)                                        \
  X(flags)  /* one word per slot, kWordStride apart */       \
  X(sticky) /* one word per opposite-role peer */            \
  X(slots)                                                   \
  X(position) /* Position [tokens, topk] */                  \
  X(weight)   /* float32 [tokens, topk] */                   \
  X(scale)    /* float32 [tokens, scales_per_row] */         \
  X(payload)  /* [tokens, hidden] of dtype; a reply: wide */ \
  X(slot_bytes)                                              \
  X(slots_per_region) /* stages x depth */

struct Layout {
#define X(name) int64_t name;
  AFD_LAYOUT(X)
#undef X
};

AFD_HD constexpr int64_t align_up(int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

AFD_HD constexpr Layout layout_of(const Geometry& g) {
  // Both roles use the same offsets, so the control part has room for the larger one.
  const int64_t regions = g.attention_size > g.ffn_size ? g.attention_size : g.ffn_size;
  Layout l{};
  l.slots_per_region = g.stages * g.depth;
  l.flags = 0;
  l.sticky = align_up(regions * l.slots_per_region * kWordStride);
  l.slots = l.sticky + align_up(regions * kWordStride);
  l.position = align_up(static_cast<int64_t>(sizeof(SlotHeader)) + g.local_experts * 4);
  l.weight = l.position + align_up(g.tokens * g.topk * static_cast<int64_t>(sizeof(Position)));
  l.scale = l.weight + align_up(g.tokens * g.topk * 4);
  l.payload = l.scale + align_up(g.tokens * scales_per_row(g) * 4);
  l.slot_bytes = l.payload + align_up(g.tokens * wide_row(g));
  return l;
}

// Bytes of a window that receives from `regions` peers: the one formula.
AFD_HD constexpr int64_t window_bytes(const Layout& l, int64_t regions) {
  return l.slots + regions * l.slots_per_region * l.slot_bytes;
}

// Content of the port tensor, int32.
enum PortWord : int32_t { kPortMagicWord = 0, kPortLayer = 1, kPortStage = 2, kPortWords = 4 };

// Ticket, int32 [T + 1, ticket_width]: row 0 below, then per token a bit mask of the F ranks that answer it.
enum TicketWord : int32_t {
  kTicketGeneration = 0,
  kTicketStage = 1,
  kTicketRing = 2,
  kTicketSequenceLow = 3,
  kTicketSequenceHigh = 4,
  kTicketLayer = 5,
  kTicketTokens = 6,
  kTicketWords = 8
};

AFD_HD constexpr int64_t ticket_width(int64_t ffn_size) {
  const int64_t masks = (ffn_size + 31) / 32;
  return masks > kTicketWords ? masks : kTicketWords;
}

// Item, int32 [1 + slots, kItemWords]: row 0 is the item, row 1 + i its i-th slot. An empty item has count 0.
enum ItemWord : int32_t { kItemGeneration = 0, kItemCount = 1, kItemLayer = 2, kItemRows = 3, kItemWords = 8 };
enum ItemSlotWord : int32_t {
  kItemRegion = 0,
  kItemStage = 1,
  kItemRing = 2,
  kItemSequenceLow = 3,
  kItemSequenceHigh = 4,
  kItemTokens = 5,
  kItemRouted = 6
};

AFD_HD constexpr int32_t low(int64_t v) { return static_cast<int32_t>(v & 0xffffffff); }
AFD_HD constexpr int32_t high(int64_t v) { return static_cast<int32_t>(v >> 32); }
AFD_HD constexpr int64_t join(int32_t lo, int32_t hi) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(hi)) << 32 | static_cast<uint32_t>(lo));
}

// Why a protocol error: which word of a slot was not what the protocol allows.
#define AFD_FIELDS(X) \
  X(none)             \
  X(magic)            \
  X(version)          \
  X(generation)       \
  X(sequence)         \
  X(ring)             \
  X(layer)            \
  X(num_tokens)       \
  X(counts)           \
  X(position)         \
  X(topk_ids)         \
  X(rows)             \
  X(port)             \
  X(flags)

enum class Field : int32_t {
#define X(name) name,
  AFD_FIELDS(X)
#undef X
};

// One per opposite-role peer and one for the rank itself; the first error wins `claimed` by compare-and-swap and
// `valid` is stored last.
struct ErrorRecord {
  int32_t claimed;
  int32_t valid;
  int32_t kind;
  int32_t op;
  int32_t layer;
  int32_t peer;  // role rank, -1 for the rank itself
  int32_t stage;
  int32_t ring;
  int32_t generation;
  int32_t field;
  int64_t sequence;
  int64_t expected;
  int64_t seen;
};
static_assert(sizeof(ErrorRecord) == 64);

}  // namespace afd
