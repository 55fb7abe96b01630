// checks.h: what every op asks of its arguments on the host, whatever the device. Nothing here touches a window's
// memory, so an argument that is refused has changed nothing.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>

#include "control.h"

namespace afd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const char* type_name(ScalarType t) {
  switch (t) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return "another dtype";
  }
}

inline ScalarType scalar_type(int64_t dtype) {
  constexpr ScalarType types[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Float8_e4m3fn};
  return types[dtype];
}

inline int32_t shim_dtype(ScalarType t) {
  switch (t) {
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    case ScalarType::Float8_e4m3fn:
      return aoti_torch_dtype_float8_e4m3fn();
    default:
      return aoti_torch_dtype_int32();
  }
}

// A fresh contiguous tensor, uninitialised, of one of the dtypes above, on the device of `like`.
// torch::stable::new_empty asks the dispatcher for an op by its name, every time.
template <size_t N>
Tensor new_empty(const Tensor& like, const int64_t (&sizes)[N], ScalarType type) {
  int64_t strides[N];
  int64_t next = 1;
  for (size_t i = N; i-- > 0;) {
    strides[i] = next;
    next *= std::max<int64_t>(sizes[i], 1);
  }
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(N, sizes, strides, shim_dtype(type), device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

// Of what receive returns beside `rows` rows: [rows, scales_per_row], or [0] if the payload is not quantised.
inline Tensor new_scales(const Tensor& like, const Geometry& g, int64_t rows) {
  return scales_per_row(g) > 0 ? new_empty(like, {rows, scales_per_row(g)}, ScalarType::Float)
                               : new_empty(like, {0}, ScalarType::Float);
}

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return k_float32;
    case ScalarType::BFloat16:
      return k_bfloat16;
    default:
      return k_float16;
  }
}

inline void check_dim(Op op, const char* argument, const Tensor& t, int64_t dims) {
  if (t.dim() != dims) raise(Kind::Argument, op, argument, " has ", t.dim(), " dimensions, expected ", dims);
}

inline void check_size(Op op, const char* argument, const Tensor& t, int64_t dim, int64_t expected) {
  if (t.size(dim) != expected)
    raise(Kind::Argument, op, argument, " has size ", t.size(dim), " in dimension ", dim, ", expected ", expected);
}

inline void check_type(Op op, const char* argument, const Tensor& t, ScalarType expected) {
  if (t.scalar_type() != expected)
    raise(Kind::Argument, op, argument, " is ", type_name(t.scalar_type()), ", expected ", type_name(expected));
}

inline void check_contiguous(Op op, const char* argument, const Tensor& t) {
  if (!t.is_contiguous()) raise(Kind::Argument, op, argument, " is not contiguous");
}

// Rows of `columns` elements, dense in the last dimension; rows may be any distance apart.
inline void check_rows(Op op, const char* argument, const Tensor& t, int64_t columns) {
  check_dim(op, argument, t, 2);
  check_size(op, argument, t, 1, columns);
  if (t.size(0) > 0 && columns > 1 && t.stride(1) != 1)
    raise(Kind::Argument, op, argument, " has stride ", t.stride(1),
          " in its last dimension, expected 1; call .contiguous()");
}

inline void check_topk_ids(Op op, const Tensor& ids, int64_t tokens, int64_t topk) {
  check_dim(op, "topk_ids", ids, 2);
  check_size(op, "topk_ids", ids, 0, tokens);
  check_size(op, "topk_ids", ids, 1, topk);
  if (ids.scalar_type() != ScalarType::Int && ids.scalar_type() != ScalarType::Long)
    raise(Kind::Argument, op, "topk_ids is ", type_name(ids.scalar_type()), ", expected int32 or int64");
}

inline void check_plan(Op op, const Tensor& expert_map, int64_t ffn_size, int64_t local_experts) {
  if (ffn_size < 1) raise(Kind::Argument, op, "ffn_size is ", ffn_size, ", expected at least 1");
  if (local_experts < 0) raise(Kind::Argument, op, "local_experts is ", local_experts, ", expected at least 0");
  check_dim(op, "expert_map", expert_map, 2);
  check_size(op, "expert_map", expert_map, 1, 2);
  check_type(op, "expert_map", expert_map, ScalarType::Int);
  check_contiguous(op, "expert_map", expert_map);
}

inline void check_port(Op op, const Tensor& port) {
  check_dim(op, "port", port, 1);
  check_size(op, "port", port, 0, kPortWords);
  check_type(op, "port", port, ScalarType::Int);
  check_contiguous(op, "port", port);
}

inline void check_dispatch(const Geometry& g, const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights) {
  constexpr Op op = Op::dispatch;
  check_rows(op, "x", x, g.hidden);
  check_type(op, "x", x, scalar_type(wide_dtype(g.dtype)));
  const int64_t tokens = x.size(0);
  if (tokens > g.tokens)
    raise(Kind::Argument, op, "x has ", tokens, " tokens, but the window's capacity is ", g.tokens,
          "; chunk longer batches");
  check_topk_ids(op, topk_ids, tokens, g.topk);
  check_dim(op, "topk_weights", topk_weights, 2);
  check_size(op, "topk_weights", topk_weights, 0, tokens);
  check_size(op, "topk_weights", topk_weights, 1, g.topk);
  check_type(op, "topk_weights", topk_weights, ScalarType::Float);
}

inline void check_combine(const Geometry& g, const Tensor& ticket, const Tensor& base) {
  constexpr Op op = Op::combine;
  check_dim(op, "ticket", ticket, 2);
  check_type(op, "ticket", ticket, ScalarType::Int);
  check_size(op, "ticket", ticket, 1, ticket_width(g.ffn_size));
  check_contiguous(op, "ticket", ticket);
  if (ticket.size(0) < 1) raise(Kind::Argument, op, "ticket has 0 rows, expected at least 1");
  check_rows(op, "base", base, g.hidden);
  check_size(op, "base", base, 0, ticket.size(0) - 1);
  const ScalarType t = base.scalar_type();
  if (t != ScalarType::Float && t != ScalarType::BFloat16 && t != ScalarType::Half)
    raise(Kind::Argument, op, "base is ", type_name(t), ", expected float32, bfloat16 or float16");
}

inline void check_item(const Control& c, Op op, const Tensor& item) {
  check_dim(op, "item", item, 2);
  check_type(op, "item", item, ScalarType::Int);
  check_size(op, "item", item, 0, 1 + c.slots());
  check_size(op, "item", item, 1, kItemWords);
  check_contiguous(op, "item", item);
}

// Where receive_into puts an item: as receive returns it.
inline void check_buffers(const Control& c, const Tensor& rows, const Tensor& scales, const Tensor& offsets) {
  constexpr Op op = Op::receive;
  check_dim(op, "rows", rows, 2);
  check_size(op, "rows", rows, 1, c.geometry.hidden);
  check_type(op, "rows", rows, scalar_type(c.geometry.dtype));
  check_contiguous(op, "rows", rows);
  const int64_t each = scales_per_row(c.geometry);
  check_dim(op, "scales", scales, each > 0 ? 2 : 1);
  check_size(op, "scales", scales, 0, each > 0 ? rows.size(0) : 0);
  if (each > 0) check_size(op, "scales", scales, 1, each);
  check_type(op, "scales", scales, ScalarType::Float);
  check_contiguous(op, "scales", scales);
  check_dim(op, "offsets", offsets, 1);
  check_size(op, "offsets", offsets, 0, c.local_experts());
  check_type(op, "offsets", offsets, ScalarType::Int);
  check_contiguous(op, "offsets", offsets);
}

inline void check_expert_out(const Geometry& g, const Tensor& expert_out) {
  check_rows(Op::reply, "expert_out", expert_out, g.hidden);
  check_type(Op::reply, "expert_out", expert_out, scalar_type(wide_dtype(g.dtype)));
}

}  // namespace afd
