// The ops on CUDA tensors: arguments checked, memory allocated, kernels launched on the current stream. What only the
// device can see (ids, ticket, an attention rank's port) is checked there. Schemas: ops.cpp.
#include <nvtx3/nvToolsExt.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "../checks.h"
#include "../trips.h"
#include "host.h"

namespace afd {
namespace {

// What a profiler of the whole machine shows of an op's call on the host. A load and a branch when none is attached; a
// graph that is replayed makes no call.
class NvtxRange {
 public:
  explicit NvtxRange(Op op) {
    constexpr const char* names[] = {
#define X(name) "afd::" #name,
        AFD_OPS(X)
#undef X
    };
    nvtxRangePushA(names[static_cast<int32_t>(op)]);
  }
  ~NvtxRange() { nvtxRangePop(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

int32_t* ints(Tensor& t) { return static_cast<int32_t*>(t.mutable_data_ptr()); }
const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.const_data_ptr()); }
DeviceIds ids_of(const Tensor& t) {
  return {t.const_data_ptr(), t.scalar_type() == ScalarType::Long, t.stride(0), t.stride(1)};
}

DeviceRows rows_of(Op op, const char* argument, const Tensor& t) {
  const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  const int64_t pitch = t.stride(0) * static_cast<int64_t>(t.element_size());
  if (t.size(0) > 0 && (address % 16 != 0 || (t.size(0) > 1 && pitch % 16 != 0)))
    raise(Kind::Argument, op, argument, " starts at ", address % 16, " and has rows ", pitch,
          " bytes apart, expected multiples of 16; call .contiguous()");
  return {t.const_data_ptr(), t.size(0), t.stride(0)};
}

// Kernels read a port, an item and a ticket's first row as vectors.
void check_aligned(Op op, const char* argument, const Tensor& t) {
  const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  if (address % 16 != 0)
    raise(Kind::Argument, op, argument, " starts at ", address % 16, ", expected a multiple of 16 bytes");
}

cudaStream_t stream_of(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// An op's stay inside a window of this device.
class DeviceEntry {
 public:
  DeviceEntry(int64_t window, Role role, Op op, const Tensor& port)
      : range_(op), entry_(window, role, op), window_(device_window(window)), guard_(window_.device) {
    check_port(op, port);
    check_device(op, "port", port);
    check_aligned(op, "port", port);
  }
  void check_device(Op op, const char* argument, const Tensor& t) const {
    if (!t.is_cuda() || t.get_device_index() != window_.device)
      raise(Kind::Argument, op, argument, " is on ", t.is_cuda() ? "another GPU" : "the CPU",
            ", but the window is on cuda:", window_.device);
  }
  Control& host() const { return entry_.control(); }
  const Geometry& geometry() const { return entry_.control().geometry; }
  const DeviceControl& device() const { return window_.control; }
  void launched() const { STD_CUDA_KERNEL_LAUNCH_CHECK(); }

 private:
  const NvtxRange range_;
  const Entry entry_;
  const DeviceWindow& window_;
  torch::stable::accelerator::DeviceGuard guard_;
};

std::tuple<Tensor, Tensor, Tensor> plan_cuda(const Tensor& topk_ids, const Tensor& expert_map, int64_t ffn_size,
                                             int64_t local_experts) {
  constexpr Op op = Op::plan;
  const NvtxRange range(op);
  check_dim(op, "topk_ids", topk_ids, 2);
  const int64_t tokens = topk_ids.size(0), topk = topk_ids.size(1), experts = expert_map.size(0);
  check_topk_ids(op, topk_ids, tokens, topk);
  if (!topk_ids.is_cuda() || !expert_map.is_cuda() || topk_ids.get_device_index() != expert_map.get_device_index())
    raise(Kind::Argument, op, "topk_ids and expert_map are on different devices");
  check_plan(op, expert_map, ffn_size, local_experts);
  if (tokens * topk >= int64_t{1} << 31)
    raise(Kind::Argument, op, "topk_ids has ", tokens * topk, " entries, expected less than ", int64_t{1} << 31);
  if (4 * experts > kSharedBytes)
    raise(Kind::Argument, op, "expert_map has ", experts, " experts, expected at most ", kSharedBytes / 4, " on CUDA");
  torch::stable::accelerator::DeviceGuard guard(topk_ids.get_device_index());
  Tensor position = new_empty(topk_ids, {ffn_size, tokens, topk, 2}, ScalarType::Int);
  Tensor counts = new_empty(topk_ids, {ffn_size, local_experts}, ScalarType::Int);
  Tensor masks = new_empty(topk_ids, {tokens, (ffn_size + 31) / 32}, ScalarType::Int);
  launch_plan(ids_of(topk_ids), tokens, topk, ints(expert_map), experts, ffn_size, local_experts,
              static_cast<Position*>(position.mutable_data_ptr()), ints(counts), ints(masks), stream_of(topk_ids));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {position, counts, masks};
}

Tensor dispatch_cuda(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& port, Tensor,
                     int64_t window) {
  const DeviceEntry entry(window, kAttention, Op::dispatch, port);
  const Geometry& g = entry.geometry();
  entry.check_device(Op::dispatch, "x", x);
  entry.check_device(Op::dispatch, "topk_ids", topk_ids);
  entry.check_device(Op::dispatch, "topk_weights", topk_weights);
  check_dispatch(g, x, topk_ids, topk_weights);
  const DeviceRows rows = rows_of(Op::dispatch, "x", x);
  Tensor ticket = new_empty(x, {x.size(0) + 1, ticket_width(g.ffn_size)}, ScalarType::Int);
  const DeviceWeights weights{static_cast<const float*>(topk_weights.const_data_ptr()), topk_weights.stride(0),
                              topk_weights.stride(1)};
  launch_dispatch(entry.device(), rows, ids_of(topk_ids), weights, ints(port), ints(ticket), stream_of(x));
  entry.launched();
  entry.host().trips->dispatched(port.const_data_ptr());
  return ticket;
}

Tensor arrive_cuda(Tensor port, int64_t window) {
  const DeviceEntry entry(window, kFfn, Op::arrive, port);
  Tensor item = new_empty(port, {1 + entry.host().slots(), kItemWords}, ScalarType::Int);
  launch_arrive(entry.device(), ints(item), 0, stream_of(port));
  entry.launched();
  return item;
}

std::tuple<Tensor, Tensor, Tensor> receive_cuda(const Tensor& item, Tensor port, int64_t window, int64_t rows) {
  const DeviceEntry entry(window, kFfn, Op::receive, port);
  const Geometry& g = entry.geometry();
  entry.check_device(Op::receive, "item", item);
  check_item(entry.host(), Op::receive, item);
  check_aligned(Op::receive, "item", item);
  if (rows < 0) raise(Kind::Argument, Op::receive, "rows is ", rows, ", expected at least 0");
  Tensor out = new_empty(item, {rows, g.hidden}, scalar_type(g.dtype));
  Tensor scales = new_scales(item, g, rows);
  Tensor offsets = new_empty(item, {entry.host().local_experts()}, ScalarType::Int);
  launch_receive(entry.device(), ints(item), static_cast<char*>(out.mutable_data_ptr()),
                 static_cast<float*>(scales.mutable_data_ptr()), rows, ints(offsets), 0, stream_of(item));
  entry.launched();
  return {out, scales, offsets};
}

void receive_into_cuda(const Tensor& item, Tensor rows, Tensor scales, Tensor offsets, Tensor port, int64_t window) {
  const DeviceEntry entry(window, kFfn, Op::receive, port);
  entry.check_device(Op::receive, "item", item);
  entry.check_device(Op::receive, "rows", rows);
  entry.check_device(Op::receive, "scales", scales);
  entry.check_device(Op::receive, "offsets", offsets);
  check_item(entry.host(), Op::receive, item);
  check_buffers(entry.host(), rows, scales, offsets);
  check_aligned(Op::receive, "item", item);
  check_aligned(Op::receive, "rows", rows);
  launch_receive(entry.device(), ints(item), static_cast<char*>(rows.mutable_data_ptr()),
                 static_cast<float*>(scales.mutable_data_ptr()), rows.size(0), ints(offsets), 0, stream_of(item));
  entry.launched();
}

void reply_cuda(const Tensor& expert_out, const Tensor& item, Tensor port, int64_t window) {
  const DeviceEntry entry(window, kFfn, Op::reply, port);
  const Geometry& g = entry.geometry();
  entry.check_device(Op::reply, "item", item);
  entry.check_device(Op::reply, "expert_out", expert_out);
  check_item(entry.host(), Op::reply, item);
  check_aligned(Op::reply, "item", item);
  check_expert_out(g, expert_out);
  launch_reply(entry.device(), rows_of(Op::reply, "expert_out", expert_out), ints(item), stream_of(item));
  entry.launched();
}

Tensor combine_cuda(const Tensor& ticket, const Tensor& base, const Tensor& port, Tensor, int64_t window) {
  const DeviceEntry entry(window, kAttention, Op::combine, port);
  const Geometry& g = entry.geometry();
  entry.check_device(Op::combine, "ticket", ticket);
  entry.check_device(Op::combine, "base", base);
  check_combine(g, ticket, base);
  check_aligned(Op::combine, "ticket", ticket);
  const DeviceRows rows = rows_of(Op::combine, "base", base);
  if (g.hidden * static_cast<int64_t>(base.element_size()) % 16 != 0)
    raise(Kind::Argument, Op::combine, "base has rows of ", g.hidden * static_cast<int64_t>(base.element_size()),
          " bytes, expected a multiple of 16");
  Tensor out = new_empty(base, {base.size(0), g.hidden}, base.scalar_type());
  launch_combine(entry.device(), ints(ticket), rows, dtype_of(base), out.mutable_data_ptr(), ints(port),
                 stream_of(base));
  entry.launched();
  entry.host().trips->combined(port.const_data_ptr());
  return out;
}

}  // namespace
}  // namespace afd

STABLE_TORCH_LIBRARY_IMPL(afd, CUDA, m) {
  m.impl("plan", TORCH_BOX(&afd::plan_cuda));
  m.impl("dispatch", TORCH_BOX(&afd::dispatch_cuda));
  m.impl("arrive", TORCH_BOX(&afd::arrive_cuda));
  m.impl("receive", TORCH_BOX(&afd::receive_cuda));
  m.impl("receive_into", TORCH_BOX(&afd::receive_into_cuda));
  m.impl("reply", TORCH_BOX(&afd::reply_cuda));
  m.impl("combine", TORCH_BOX(&afd::combine_cuda));
}
