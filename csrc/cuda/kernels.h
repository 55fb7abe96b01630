// What bindings.cpp launches: one function per op, each described at the head of its file. Free of torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../control.h"

namespace afd {

struct DeviceControl;

struct DeviceIds {
  const void* data;
  bool wide;  // int64, else int32
  int64_t row, column;
};

struct DeviceWeights {
  const float* data;
  int64_t row, column;
};

// Rows dense in the last dimension, `stride` elements apart; 16-byte aligned.
struct DeviceRows {
  const void* data;
  int64_t count, stride;
};

void launch_plan(DeviceIds ids, int64_t tokens, int64_t topk, const int32_t* expert_map, int64_t num_experts,
                 int64_t ffn_size, int64_t local_experts, Position* position, int32_t* counts, int32_t* masks,
                 cudaStream_t stream);
void launch_dispatch(const DeviceControl& c, DeviceRows x, DeviceIds ids, DeviceWeights weights, const int32_t* port,
                     int32_t* ticket, cudaStream_t stream);
void launch_combine(const DeviceControl& c, const int32_t* ticket, DeviceRows base, DType base_type, void* out,
                    const int32_t* port, cudaStream_t stream);
// arrive lets the launch behind it onto the device early, where devices can do that and that launch asks for it.
// receive does, and begins when arrive has ended; or, given the tag that arrive was given (not 0, and the next one for
// each pair of a window), when arrive has released it, and then it may be let in while arrive still checks.
cudaError_t launch_arrive(const DeviceControl& c, int32_t* item, int32_t tag, cudaStream_t stream);
cudaError_t launch_receive(const DeviceControl& c, const int32_t* item, char* rows, float* scales, int64_t capacity,
                           int32_t* offsets, int32_t tag, cudaStream_t stream);
// Whether that is so; what receive was compiled for, all kernels were.
cudaError_t receive_begins_early(bool* can);
void launch_reply(const DeviceControl& c, DeviceRows expert_out, const int32_t* item, cudaStream_t stream);

// Host words into a window: what poison(), leave() and the process watch do from outside the ops' streams.
void launch_sticky(const DeviceControl& c, int32_t sticky, cudaStream_t stream);
// A node of a kernel that counts in *ran, which is mapped.
cudaError_t add_rehearsal(cudaGraph_t graph, int64_t* ran);

// Loads every kernel now: the first launch of a lazily loaded kernel behind a waiting one would deadlock.
cudaError_t preload();

}  // namespace afd
