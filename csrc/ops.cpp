// The schemas, once, for every backend. The fakes stand in afd_ops/ops.py in the same order; what the arguments mean is
// said there.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(afd, m) {
  m.def("plan(Tensor topk_ids, Tensor expert_map, int ffn_size, int local_experts) -> (Tensor, Tensor, Tensor)");
  m.def(
      "dispatch(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor port, Tensor(a!) order, int window) -> Tensor");
  m.def("arrive(Tensor(a!) port, int window) -> Tensor");
  m.def("receive(Tensor item, Tensor(a!) port, int window, int rows) -> (Tensor, Tensor, Tensor)");
  m.def(
      "receive_into(Tensor item, Tensor(a!) rows, Tensor(b!) scales, Tensor(c!) offsets, Tensor(d!) port, int window)"
      " -> ()");
  m.def("reply(Tensor expert_out, Tensor item, Tensor(a!) port, int window) -> ()");
  m.def("combine(Tensor ticket, Tensor base, Tensor port, Tensor(a!) order, int window) -> Tensor");
}
