// checks.h: what every op asks of its arguments, whatever the device. Nothing here touches a window's memory, so an
// argument that is refused has changed nothing.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "control.h"

namespace afd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const char* dtype_name(ScalarType t) {
  switch (t) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return "another dtype";
  }
}

inline ScalarType payload_type(const Geometry& g) {
  constexpr ScalarType types[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
  return types[g.dtype];
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
    raise(Kind::Argument, op, argument, " is ", dtype_name(t.scalar_type()), ", expected ", dtype_name(expected));
}

inline bool is_float(const Tensor& t) {
  return t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::BFloat16 ||
         t.scalar_type() == ScalarType::Half;
}

// Rows of `columns` elements, dense in the last dimension; rows may be any distance apart.
inline void check_rows(Op op, const char* argument, const Tensor& t, int64_t columns) {
  check_dim(op, argument, t, 2);
  check_size(op, argument, t, 1, columns);
  if (t.size(0) > 0 && columns > 1 && t.stride(1) != 1)
    raise(Kind::Argument, op, argument, " has stride ", t.stride(1),
          " in its last dimension, expected 1; call .contiguous()");
}

inline void check_ids(Op op, const Tensor& ids, int64_t tokens, int64_t topk) {
  check_dim(op, "topk_ids", ids, 2);
  check_size(op, "topk_ids", ids, 0, tokens);
  check_size(op, "topk_ids", ids, 1, topk);
  if (ids.scalar_type() != ScalarType::Int && ids.scalar_type() != ScalarType::Long)
    raise(Kind::Argument, op, "topk_ids is ", dtype_name(ids.scalar_type()), ", expected int32 or int64");
}

// topk_ids of either width and any strides, read where they lie.
class Ids {
 public:
  explicit Ids(const Tensor& t)
      : data_(t.const_data_ptr()),
        wide_(t.scalar_type() == ScalarType::Long),
        row_(t.stride(0)),
        column_(t.stride(1)) {}
  int64_t at(int64_t token, int64_t k) const {
    const int64_t i = token * row_ + k * column_;
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }

 private:
  const void* data_;
  bool wide_;
  int64_t row_, column_;
};

inline void check_id(Op op, int64_t id, int64_t experts, int64_t token, int64_t k) {
  if (id < -1 || id >= experts)
    raise(Kind::Argument, op, "topk_ids[", token, ", ", k, "] is ", id, ", expected -1 (no expert) or 0 to ",
          experts - 1);
}

// The port's content; the op may have been handed a clone of it, so its address and later writes mean nothing.
struct Port {
  int32_t layer, stage;
};

inline void check_port(Op op, const Tensor& port) {
  check_dim(op, "port", port, 1);
  check_size(op, "port", port, 0, kPortWords);
  check_type(op, "port", port, ScalarType::Int);
}

inline Port read_port(const Control& c, Op op, const Tensor& port) {
  check_port(op, port);
  const auto* w = static_cast<const int32_t*>(port.const_data_ptr());
  if (w[kPortMagicWord] != kPortMagic)
    raise(Kind::Argument, op, "port holds ", w[kPortMagicWord], " where its magic word ", kPortMagic,
          " belongs; attach(window) fills it");
  if (w[kPortStage] < 0 || w[kPortStage] >= c.geometry.stages)
    raise(Kind::Argument, op, "port is for stage ", w[kPortStage], ", but the window has ", c.geometry.stages,
          " stages");
  return {w[kPortLayer], w[kPortStage]};
}

}  // namespace afd
