// The CPU kernels, free of torch: raw pointers and a Control in, so that they can be driven by a fuzzer or a sanitizer
// build as well as by cpu/bindings.cpp. Each is described at the head of its own file.
#pragma once

#include <vector>

#include "../control.h"

namespace afd {

// topk_ids of either width and any strides, read where they lie.
struct Ids {
  const void* data;
  bool wide;  // int64, else int32
  int64_t row, column;
  int64_t at(int64_t token, int64_t k) const {
    const int64_t i = token * row + k * column;
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// topk_weights of any strides.
struct Weights {
  const float* data;
  int64_t row, column;
  float at(int64_t token, int64_t k) const { return data[token * row + k * column]; }
};

// Rows dense in the last dimension, `stride` elements apart.
struct Rows {
  const void* data;
  int64_t count, stride;
};

// The port's content; the op may have been handed a clone of it, so its address and later writes mean nothing.
struct Port {
  int32_t layer, stage;
};

// Raises on the first id outside [-1, experts).
void check_ids(Op op, const Ids& ids, int64_t tokens, int64_t topk, int64_t experts);

// For every F rank f with position[f] != nullptr: position[f][t, k], and counts[f][local expert] (zeroed by the
// caller). For every token the mask of F ranks that own one of its experts, masks[t * mask_stride + f / 32] (zeroed by
// the caller).
void plan(const Ids& ids, int64_t tokens, int64_t topk, const int32_t* expert_map, int64_t ffn_size,
          Position* const* position, int32_t* const* counts, int32_t* masks, int64_t mask_stride);

inline bool in_mask(const int32_t* mask, int64_t f) { return (static_cast<uint32_t>(mask[f / 32]) >> (f % 32)) & 1; }

// ticket: int32 [x.count + 1, ticket_width], zeroed by the caller.
void dispatch(Control& c, Port port, Rows x, const Ids& ids, const Weights& weights, int32_t* ticket);

struct Ticket {
  int32_t generation, stage, ring, layer;
  int64_t sequence;
};

// Raises unless the ticket is of `port`'s lane, of so many tokens, and in flight.
Ticket read_ticket(const Control& c, Port port, const int32_t* words, int64_t tokens);

// masks: the ticket's rows 1 .. ; base and out: [tokens, hidden] of base_type.
void combine(Control& c, const Ticket& ticket, const int32_t* masks, int64_t tokens, Rows base, DType base_type,
             void* out);

// item: int32 [1 + slots, kItemWords], zeroed by the caller; left empty if nothing comes within the poll interval.
void arrive(Control& c, int32_t* item);

struct ItemSlot {
  int32_t region, stage, ring;
  int64_t slot, sequence;
  bool live;  // false: its region was closed after arrive; nobody waits for the answer
};

// An item read back and checked against what was taken.
struct Item {
  int32_t layer;
  int64_t rows;
  std::vector<ItemSlot> slots;
};

Item read_item(const Control& c, Op op, const int32_t* words);

// Cumulative end of every local expert's rows: offsets [owned experts].
void item_offsets(const Control& c, const Item& item, int32_t* offsets);

// The position of one choice, checked: an index from the wire is never used before.
inline bool position_ok(const Control& c, const ItemSlot& s, const Position& p) {
  return p.expert == -1 || (p.expert >= 0 && p.expert < c.local_experts() && p.rank >= 0 &&
                            p.rank < c.counts[s.slot * c.geometry.local_experts + p.expert]);
}

// The slot broke the protocol: its region is closed.
void bad_position(Control& c, Op op, ItemSlot& s, int32_t layer, const Position& p);

// rows: [item.rows, hidden] of the payload's dtype; scales: [item.rows, scales_per_row].
void receive(Control& c, Item& item, char* rows, float* scales);

// expert_out: of the wide dtype.
void reply(Control& c, Item& item, Rows expert_out);

}  // namespace afd
