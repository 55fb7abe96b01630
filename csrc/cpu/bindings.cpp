// The ops on CPU tensors: arguments checked, memory allocated, kernels called. Schemas: ops.cpp.
#include <sys/mman.h>
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

#include "../checks.h"
#include "../trips.h"
#include "kernels.h"

namespace afd {
namespace {

int32_t* ints(Tensor& t) { return static_cast<int32_t*>(t.mutable_data_ptr()); }
const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.const_data_ptr()); }
Ids ids_of(const Tensor& t) {
  return {t.const_data_ptr(), t.scalar_type() == ScalarType::Long, t.stride(0), t.stride(1)};
}
Rows rows_of(const Tensor& t) { return {t.const_data_ptr(), t.size(0), t.stride(0)}; }

template <size_t N>
Tensor new_zeros(const Tensor& like, const int64_t (&sizes)[N], ScalarType type) {
  Tensor t = new_empty(like, sizes, type);
  std::memset(t.mutable_data_ptr(), 0, t.numel() * t.element_size());
  return t;
}

// malloc gives blocks of 32 MB and more back to the system at once, so every item would pay a page fault per 4 KB of
// rows, several times what copying them costs. Advice only: where it is refused, nothing changes.
void use_large_pages(void* data, int64_t bytes) {
  constexpr uintptr_t kPage = 2 << 20;
  if (bytes < 32 << 20) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

Port read_port(const Control& c, Op op, const Tensor& port) {
  check_port(op, port);
  const int32_t* w = ints(port);
  if (w[kPortMagicWord] != kPortMagic)
    raise(Kind::Argument, op, "port holds ", w[kPortMagicWord], " where its magic word ", kPortMagic,
          " belongs; attach(window) fills it");
  if (w[kPortStage] < 0 || w[kPortStage] >= c.geometry.stages)
    raise(Kind::Argument, op, "port is for stage ", w[kPortStage], ", but the window has ", c.geometry.stages,
          " stages");
  return {w[kPortLayer], w[kPortStage]};
}

std::tuple<Tensor, Tensor, Tensor> plan_cpu(const Tensor& topk_ids, const Tensor& expert_map, int64_t ffn_size,
                                            int64_t local_experts) {
  constexpr Op op = Op::plan;
  check_dim(op, "topk_ids", topk_ids, 2);
  const int64_t tokens = topk_ids.size(0), topk = topk_ids.size(1);
  check_topk_ids(op, topk_ids, tokens, topk);
  check_plan(op, expert_map, ffn_size, local_experts);
  const int32_t* map = ints(expert_map);
  for (int64_t e = 0; e < expert_map.size(0); ++e)
    if (map[2 * e] < 0 || map[2 * e] >= ffn_size || map[2 * e + 1] < 0 || map[2 * e + 1] >= local_experts)
      raise(Kind::Argument, op, "expert_map[", e, "] is (", map[2 * e], ", ", map[2 * e + 1], "), expected below (",
            ffn_size, ", ", local_experts, ")");
  check_ids(op, ids_of(topk_ids), tokens, topk, expert_map.size(0));

  const int64_t words = (ffn_size + 31) / 32;
  Tensor position = new_empty(topk_ids, {ffn_size, tokens, topk, 2}, ScalarType::Int);
  Tensor counts = new_zeros(topk_ids, {ffn_size, local_experts}, ScalarType::Int);
  Tensor masks = new_zeros(topk_ids, {tokens, words}, ScalarType::Int);
  std::vector<Position*> positions;
  std::vector<int32_t*> count;
  for (int64_t f = 0; f < ffn_size; ++f) {
    positions.push_back(static_cast<Position*>(position.mutable_data_ptr()) + f * tokens * topk);
    count.push_back(ints(counts) + f * local_experts);
  }
  plan(ids_of(topk_ids), tokens, topk, map, ffn_size, positions.data(), count.data(), ints(masks), words);
  return {position, counts, masks};
}

Tensor dispatch_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& port, Tensor,
                    int64_t window) {
  Entry entry(window, kAttention, Op::dispatch);
  Control& c = entry.control();
  const Port p = read_port(c, Op::dispatch, port);
  if (p.layer < 0 || p.layer >= c.geometry.layers)
    raise(Kind::Argument, Op::dispatch, "port is for layer ", p.layer, ", expected 0 to ", c.geometry.layers - 1);
  check_dispatch(c.geometry, x, topk_ids, topk_weights);
  Tensor ticket = new_zeros(x, {x.size(0) + 1, ticket_width(c.geometry.ffn_size)}, ScalarType::Int);
  const Weights weights{static_cast<const float*>(topk_weights.const_data_ptr()), topk_weights.stride(0),
                        topk_weights.stride(1)};
  dispatch(c, p, rows_of(x), ids_of(topk_ids), weights, ints(ticket));
  c.trips->dispatched(port.const_data_ptr());
  return ticket;
}

Tensor arrive_cpu(Tensor port, int64_t window) {
  Entry entry(window, kFfn, Op::arrive);
  Control& c = entry.control();
  read_port(c, Op::arrive, port);
  Tensor item = new_zeros(port, {1 + c.slots(), kItemWords}, ScalarType::Int);
  arrive(c, ints(item));
  return item;
}

Item item_to_receive(Control& c, const Tensor& item, const Tensor& port, int64_t rows) {
  read_port(c, Op::receive, port);
  check_item(c, Op::receive, item);
  Item it = read_item(c, Op::receive, ints(item));
  if (rows < it.rows) raise(Kind::Argument, Op::receive, "rows is ", rows, ", but the item has ", it.rows, " rows");
  return it;
}

std::tuple<Tensor, Tensor, Tensor> receive_cpu(const Tensor& item, Tensor port, int64_t window, int64_t rows) {
  Entry entry(window, kFfn, Op::receive);
  Control& c = entry.control();
  Item it = item_to_receive(c, item, port, rows);
  Tensor out = new_empty(item, {rows, c.geometry.hidden}, scalar_type(c.geometry.dtype));
  Tensor scales = new_scales(item, c.geometry, rows);
  Tensor offsets = new_empty(item, {c.local_experts()}, ScalarType::Int);
  use_large_pages(out.mutable_data_ptr(), rows * payload_row(c.geometry));
  item_offsets(c, it, ints(offsets));
  receive(c, it, static_cast<char*>(out.mutable_data_ptr()), static_cast<float*>(scales.mutable_data_ptr()));
  return {out, scales, offsets};
}

void receive_into_cpu(const Tensor& item, Tensor rows, Tensor scales, Tensor offsets, Tensor port, int64_t window) {
  Entry entry(window, kFfn, Op::receive);
  Control& c = entry.control();
  check_buffers(c, rows, scales, offsets);
  Item it = item_to_receive(c, item, port, rows.size(0));
  item_offsets(c, it, ints(offsets));
  receive(c, it, static_cast<char*>(rows.mutable_data_ptr()), static_cast<float*>(scales.mutable_data_ptr()));
}

void reply_cpu(const Tensor& expert_out, const Tensor& item, Tensor port, int64_t window) {
  Entry entry(window, kFfn, Op::reply);
  Control& c = entry.control();
  read_port(c, Op::reply, port);
  check_item(c, Op::reply, item);
  Item it = read_item(c, Op::reply, ints(item));
  check_expert_out(c.geometry, expert_out);
  if (expert_out.size(0) < it.rows)
    raise(Kind::Argument, Op::reply, "expert_out has ", expert_out.size(0), " rows, but the item has ", it.rows);
  reply(c, it, rows_of(expert_out));
}

Tensor combine_cpu(const Tensor& ticket, const Tensor& base, const Tensor& port, Tensor, int64_t window) {
  Entry entry(window, kAttention, Op::combine);
  Control& c = entry.control();
  const Port p = read_port(c, Op::combine, port);
  check_combine(c.geometry, ticket, base);
  const int64_t tokens = base.size(0);
  const Ticket k = read_ticket(c, p, ints(ticket), tokens);
  Tensor out = new_empty(base, {tokens, c.geometry.hidden}, base.scalar_type());
  combine(c, k, ints(ticket) + ticket.size(1), tokens, rows_of(base), dtype_of(base), out.mutable_data_ptr());
  c.trips->combined(port.const_data_ptr());
  return out;
}

}  // namespace
}  // namespace afd

STABLE_TORCH_LIBRARY_IMPL(afd, CPU, m) {
  m.impl("plan", TORCH_BOX(&afd::plan_cpu));
  m.impl("dispatch", TORCH_BOX(&afd::dispatch_cpu));
  m.impl("arrive", TORCH_BOX(&afd::arrive_cpu));
  m.impl("receive", TORCH_BOX(&afd::receive_cpu));
  m.impl("receive_into", TORCH_BOX(&afd::receive_into_cpu));
  m.impl("reply", TORCH_BOX(&afd::reply_cpu));
  m.impl("combine", TORCH_BOX(&afd::combine_cpu));
}
