// The Python module afd_ops._C_cuda: building and ending the device half of a window. The host half, and the meaning of
// each call, is csrc/module.cpp's; the two halves share one Control.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "../cpu/wait.h"
#include "host.h"

namespace afd {
namespace {

// Module state for the same reason as in control.cpp, under the same ids.
constexpr int64_t kMaxWindows = 1 << 16;
std::array<std::atomic<DeviceWindow*>, kMaxWindows> g_device_windows{};

}  // namespace

DeviceWindow& device_window(int64_t window) {
  DeviceWindow* w = window > 0 && window < kMaxWindows ? g_device_windows[window].load() : nullptr;
  if (w == nullptr)
    throw std::runtime_error("Argument in afd::host: the window is on the CPU, but a tensor is on a GPU");
  return *w;
}

namespace {

#define CUDA_OR_RETURN(call)                                                        \
  do {                                                                              \
    const cudaError_t error = (call);                                               \
    if (error != cudaSuccess) {                                                     \
      cudaGetLastError(); /* else the next op's launch is blamed for it */          \
      PyErr_Format(PyExc_RuntimeError, "%s: %s", #call, cudaGetErrorString(error)); \
      return nullptr;                                                               \
    }                                                                               \
  } while (0)

class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

DeviceWindow* window_at(long long id) {
  DeviceWindow* w = id > 0 && id < kMaxWindows ? g_device_windows[id].load() : nullptr;
  if (w == nullptr) PyErr_Format(PyExc_ValueError, "window %lld has no device half", id);
  return w;
}

DeviceWindow* window_of(PyObject* args) {
  long long id = 0;
  return PyArg_ParseTuple(args, "L", &id) ? window_at(id) : nullptr;
}

// A device half while it is built: gives back what it has got unless `finished`.
class Adoption {
 public:
  explicit Adoption(Control* host) : host_(host), window_(new DeviceWindow) {}
  ~Adoption() {
    if (window_ == nullptr) return;
    for (void* p : arrays_) cudaFree(p);
    if (window_->control.mailbox != nullptr) cudaFreeHost(window_->control.mailbox);
    if (window_->rehearsal != nullptr) cudaGraphExecDestroy(window_->rehearsal);
    if (window_->stream != nullptr) cudaStreamDestroy(window_->stream);
    if (registered_) cudaHostUnregister(host_);
    cudaGetLastError();
    delete window_;
  }
  Adoption(const Adoption&) = delete;
  Adoption& operator=(const Adoption&) = delete;

  DeviceWindow& window() const { return *window_; }
  cudaError_t map_host() {
    const cudaError_t e =
        cudaHostRegister(host_, host_->arena_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    registered_ = e == cudaSuccess;
    return e;
  }
  // n zeros.
  template <typename T>
  cudaError_t array(T** out, int64_t n) {
    const size_t bytes = (n > 0 ? n : 1) * sizeof(T);
    const cudaError_t e = cudaMalloc(reinterpret_cast<void**>(out), bytes);
    if (e != cudaSuccess) return e;
    arrays_.push_back(*out);
    return cudaMemsetAsync(*out, 0, bytes, window_->stream);
  }
  // The n values that *out points to on the host.
  template <typename T>
  cudaError_t upload(T** out, int64_t n) {
    const T* from = *out;
    const cudaError_t e = array(out, n);
    if (e != cudaSuccess || n == 0) return e;
    return cudaMemcpyAsync(*out, from, n * sizeof(T), cudaMemcpyHostToDevice, window_->stream);
  }
  cudaError_t rehearsal() {
    cudaGraph_t graph = nullptr;
    cudaError_t e = cudaGraphCreate(&graph, 0);
    if (e != cudaSuccess) return e;
    e = add_rehearsal(graph, window_->rehearsed);
    if (e == cudaSuccess) e = cudaGraphInstantiate(&window_->rehearsal, graph, 0);
    cudaGraphDestroy(graph);
    return e;
  }
  DeviceWindow* finished() { return std::exchange(window_, nullptr); }

 private:
  Control* host_;
  DeviceWindow* window_;
  std::vector<void*> arrays_;
  bool registered_ = false;
};

// The words that reset() puts back: rings free, nothing taken.
cudaError_t clear_state(DeviceWindow& w) {
  const DeviceControl& c = w.control;
  const Geometry& g = c.geometry;
  cudaError_t e = cudaSuccess;
  const auto fill = [&](void* p, int value, int64_t bytes) {
    if (e == cudaSuccess && bytes > 0) e = cudaMemsetAsync(p, value, bytes, w.stream);
  };
  fill(c.next, 0, g.stages * 8);
  fill(c.ring, 0xff, g.stages * g.depth * 8);
  fill(c.taken, 0xff, c.slots() * static_cast<int64_t>(sizeof(Taken)));
  fill(c.region, 0, c.peers * 4);
  fill(c.masked, 0, c.peers * 4);
  fill(c.claimed, 0, (c.peers + 1) * 4);
  fill(c.done, 0, done_words(g) * 4);
  std::memset(c.gone, 0, c.peers * 4);
  return e;
}

// Every byte a peer may have written that means something: flags, sticky words, headers.
cudaError_t clear_window(DeviceWindow& w) {
  const DeviceControl& c = w.control;
  cudaError_t e = cudaMemsetAsync(c.window, 0, c.layout.slots, w.stream);
  if (e == cudaSuccess)
    e = cudaMemset2DAsync(c.window + c.layout.slots, c.layout.slot_bytes, 0, c.layout.position, c.slots(), w.stream);
  return e;
}

PyObject* adopt(PyObject*, PyObject* args) {
  long long id = 0, address = 0;
  int device = 0;
  if (!PyArg_ParseTuple(args, "LLi", &id, &address, &device)) return nullptr;
  auto* host = reinterpret_cast<Control*>(address);
  const Geometry& g = host->geometry;
  if (g.topk > kMaxTopk || (g.num_experts + g.ffn_size) * 12 > kSharedBytes ||
      8 * (host->slots() + g.local_experts) > kSharedBytes) {
    PyErr_Format(PyExc_ValueError,
                 "topk is %lld, num_experts + ffn_size is %lld, slots + experts of one rank are %lld; on CUDA expected "
                 "at most %lld, %lld, %lld",
                 static_cast<long long>(g.topk), static_cast<long long>(g.num_experts + g.ffn_size),
                 static_cast<long long>(host->slots() + g.local_experts), static_cast<long long>(kMaxTopk),
                 static_cast<long long>(kSharedBytes / 12), static_cast<long long>(kSharedBytes / 8));
    return nullptr;
  }
  const OnDevice on(device);
  int same_address = 0;
  CUDA_OR_RETURN(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device));
  if (same_address == 0) {
    PyErr_SetString(PyExc_RuntimeError, "this device cannot use host addresses of registered memory");
    return nullptr;
  }
  CUDA_OR_RETURN(preload());
  Adoption made(host);
  DeviceWindow& w = made.window();
  DeviceControl& c = w.control;
  w.device = device;
  CUDA_OR_RETURN(made.map_host());
  // Of the highest priority, so that it shares no hardware queue with a caller's stream whose head waits.
  int least = 0, greatest = 0;
  CUDA_OR_RETURN(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CUDA_OR_RETURN(cudaStreamCreateWithPriority(&w.stream, cudaStreamNonBlocking, greatest));
  static_cast<Control&>(c) = *host;
  CUDA_OR_RETURN(receive_begins_early(&c.begins_early));
  c.mapped = host;
  c.mapped_region = host->region;
  CUDA_OR_RETURN(made.upload(&c.peer, c.peers));
  CUDA_OR_RETURN(made.upload(&c.expert_map, 2 * g.num_experts));
  CUDA_OR_RETURN(made.upload(&c.experts_per_rank, g.ffn_size));
  CUDA_OR_RETURN(made.array(&c.next, g.stages));
  CUDA_OR_RETURN(made.array(&c.ring, g.stages * g.depth));
  // Slot number `slots`, of region number `peers`, is there for arrive to rehearse with.
  CUDA_OR_RETURN(made.array(&c.taken, c.slots() + 1));
  CUDA_OR_RETURN(made.array(&c.counts, (c.slots() + 1) * g.local_experts));
  CUDA_OR_RETURN(made.array(&c.first, (c.slots() + 1) * g.local_experts));
  CUDA_OR_RETURN(made.array(&c.region, c.peers));
  CUDA_OR_RETURN(made.array(&c.masked, c.peers));
  CUDA_OR_RETURN(made.array(&c.bytes_sent, c.peers));
  CUDA_OR_RETURN(made.array(&c.slots_taken, c.peers + 1));
  CUDA_OR_RETURN(made.array(&c.rows_taken, c.peers + 1));
  CUDA_OR_RETURN(made.array(&c.claimed, c.peers + 1));
  CUDA_OR_RETURN(made.array(&c.done, done_words(g)));
  CUDA_OR_RETURN(made.array(&c.verdict, g.stages));
  CUDA_OR_RETURN(made.array(&c.row, host->role == kFfn ? c.slots() * g.tokens * g.topk : 0));
  CUDA_OR_RETURN(made.array(&c.refused, host->role == kFfn ? c.slots() : 0));
  const size_t mapped_bytes = (kMailbox * kMailWords + 1) * sizeof(int64_t) + c.peers * sizeof(int32_t);
  CUDA_OR_RETURN(
      cudaHostAlloc(reinterpret_cast<void**>(&c.mailbox), mapped_bytes, cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(c.mailbox, 0, mapped_bytes);
  w.rehearsed = c.mailbox + kMailbox * kMailWords;
  c.gone = reinterpret_cast<int32_t*>(w.rehearsed + 1);
  for (int32_t p = 0; p < c.peers && p < kNearPeers; ++p) c.near[p] = host->peer[p];
  CUDA_OR_RETURN(made.array(&c.state, 1));
  CUDA_OR_RETURN(made.rehearsal());
  CUDA_OR_RETURN(clear_state(w));
  CUDA_OR_RETURN(clear_window(w));
  CUDA_OR_RETURN(cudaStreamSynchronize(w.stream));
  host->on_device = 1;
  g_device_windows[id].store(made.finished());  // never freed, like the Control
  publish_as(id, host);
  Py_RETURN_NONE;
}

PyObject* sticky(DeviceWindow* w, int32_t value) {
  const OnDevice on(w->device);
  launch_sticky(w->control, value, w->stream);
  CUDA_OR_RETURN(cudaGetLastError());
  cudaError_t e;
  Py_BEGIN_ALLOW_THREADS;
  e = cudaStreamSynchronize(w->stream);
  Py_END_ALLOW_THREADS;
  CUDA_OR_RETURN(e);
  Py_RETURN_NONE;
}

// As csrc/module.cpp's: not into another generation, and a reset that begins now waits until this ends.
PyObject* poison(PyObject*, PyObject* args) {
  long long id = 0, generation = 0;
  if (!PyArg_ParseTuple(args, "LL", &id, &generation)) return nullptr;
  DeviceWindow* w = window_at(id);
  if (w == nullptr) return nullptr;
  Control& host = *w->control.mapped;
  atomic(host.active).fetch_add(1);
  const bool late = atomic(host.closed).load() != 0 || atomic(host.abort).load() != 0 ||
                    host.generation != generation || atomic(host.failed).load() != 0;
  PyObject* done = late ? Py_NewRef(Py_None) : sticky(w, kPoisoned);
  atomic(host.active).fetch_sub(1);
  return done;
}

PyObject* leave(PyObject*, PyObject* args) {
  DeviceWindow* w = window_of(args);
  return w != nullptr ? sticky(w, kLeft) : nullptr;
}

PyObject* synchronize(PyObject*, PyObject* args) {
  DeviceWindow* w = window_of(args);
  if (w == nullptr) return nullptr;
  const OnDevice on(w->device);
  cudaError_t e;
  Py_BEGIN_ALLOW_THREADS;
  e = cudaDeviceSynchronize();
  Py_END_ALLOW_THREADS;
  CUDA_OR_RETURN(e);
  Py_RETURN_NONE;
}

PyObject* rewind(PyObject*, PyObject* args) {
  DeviceWindow* w = window_of(args);
  if (w == nullptr) return nullptr;
  const OnDevice on(w->device);
  CUDA_OR_RETURN(clear_window(*w));
  CUDA_OR_RETURN(clear_state(*w));
  const int32_t zero = 0, generation = w->control.mapped->generation + 1;  // resume() gives the host half the same
  CUDA_OR_RETURN(cudaMemcpyAsync(&w->control.state->failed, &zero, 4, cudaMemcpyHostToDevice, w->stream));
  CUDA_OR_RETURN(cudaMemcpyAsync(&w->control.state->cursor, &zero, 4, cudaMemcpyHostToDevice, w->stream));
  CUDA_OR_RETURN(cudaMemcpyAsync(&w->control.state->generation, &generation, 4, cudaMemcpyHostToDevice, w->stream));
  // Mail that nobody has read belongs to the generation that ends.
  CUDA_OR_RETURN(cudaMemcpyAsync(&w->expected, &w->control.state->arrivals, 8, cudaMemcpyDeviceToHost, w->stream));
  CUDA_OR_RETURN(cudaStreamSynchronize(w->stream));
  Py_RETURN_NONE;
}

PyObject* peer_gone(PyObject*, PyObject* args) {
  long long id = 0;
  int peer = 0;
  if (!PyArg_ParseTuple(args, "Li", &id, &peer)) return nullptr;
  DeviceWindow& w = *g_device_windows[id].load();
  atomic(w.control.gone[peer]).store(1);
  Py_RETURN_NONE;
}

PyObject* mask(PyObject*, PyObject* args) {
  long long id = 0;
  int peer = 0;
  if (!PyArg_ParseTuple(args, "Li", &id, &peer)) return nullptr;
  DeviceWindow& w = *g_device_windows[id].load();
  const OnDevice on(w.device);
  const int32_t one = 1;
  CUDA_OR_RETURN(cudaMemcpyAsync(&w.control.masked[peer], &one, 4, cudaMemcpyHostToDevice, w.stream));
  CUDA_OR_RETURN(cudaStreamSynchronize(w.stream));
  Py_RETURN_NONE;
}

// What a server does in place of the two ops: refused, in arrive's name, once the window is closed, stopped or being
// reset.
PyObject* arrive_and_receive(PyObject*, PyObject* args) {
  long long id = 0, item = 0, rows = 0, scales = 0, capacity = 0, offsets = 0, address = 0;
  if (!PyArg_ParseTuple(args, "LLLLLLL", &id, &item, &rows, &scales, &capacity, &offsets, &address)) return nullptr;
  const auto stream = reinterpret_cast<cudaStream_t>(address);
  cudaError_t launched;
  try {
    const Entry entry(id, kFfn, Op::arrive);
    DeviceWindow& w = device_window(id);
    const OnDevice on(w.device);
    cudaStreamCaptureStatus capturing;
    CUDA_OR_RETURN(cudaStreamIsCapturing(stream, &capturing));
    if (capturing != cudaStreamCaptureStatusNone)  // and every replay would have the same tag
      raise(Kind::Argument, Op::arrive, "a server's step cannot be captured in a graph; capture the ops");
    if (w.control.begins_early && ++w.tag == 0) w.tag = 1;
    const auto tag = static_cast<int32_t>(w.tag);
    Py_BEGIN_ALLOW_THREADS;
    auto* const to = reinterpret_cast<int32_t*>(item);
    launched = launch_arrive(w.control, to, tag, stream);
    if (launched == cudaSuccess)  // a receive whose arrive was not launched would wait for ever
      launched = launch_receive(w.control, to, reinterpret_cast<char*>(rows), reinterpret_cast<float*>(scales),
                                capacity, reinterpret_cast<int32_t*>(offsets), tag, stream);
    Py_END_ALLOW_THREADS;
  } catch (const std::runtime_error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
  if (launched != cudaSuccess) {
    cudaGetLastError();  // else the next op's launch is blamed for it
    return PyErr_Format(PyExc_RuntimeError, "arrive and receive could not be launched: %s",
                        cudaGetErrorString(launched));
  }
  Py_RETURN_NONE;
}

// A row of CapturedExperts.graph_table; they stand by layer, then by bucket.
struct ExpertGraph {
  int64_t layer, bucket;
  cudaGraphExec_t exec;
};
static_assert(sizeof(ExpertGraph) % sizeof(int64_t) == 0);

// The smallest bucket of the layer that holds the rows, or `end`.
const ExpertGraph* find_graph(const ExpertGraph* begin, const ExpertGraph* end, int64_t layer, int64_t rows) {
  const ExpertGraph* at = std::lower_bound(begin, end, std::pair{layer, rows}, [](const ExpertGraph& g, const auto& k) {
    return std::pair{g.layer, g.bucket} < k;
  });
  return at != end && at->layer == layer ? at : end;
}

// The next item's count, layer and rows, as arrive left them in the mailbox; None after the timeout. The graph of its
// experts, if the table has one, is launched from here: the GPU waits for nothing else, and Python's lock may be taken.
PyObject* next_item(PyObject*, PyObject* args) {
  long long id = 0, timeout_ns = 0, table = 0, table_words = 0, stream = 0;
  if (!PyArg_ParseTuple(args, "LLLLL", &id, &timeout_ns, &table, &table_words, &stream)) return nullptr;
  DeviceWindow& w = *g_device_windows[id].load();
  const auto* graphs = reinterpret_cast<const ExpertGraph*>(table);
  const ExpertGraph *const end = graphs + table_words * sizeof(int64_t) / sizeof(ExpertGraph), *graph = end;
  const size_t table_size = end - graphs;
  // So that the driver has at hand what it will launch. Not of the graph that was launched last: an upload waits for
  // the run before it, and on this stream goes what must not wait.
  const auto practise = [&w, graphs, next = w.succession.next(table_size)] {
    if (next >= 0 && cudaGraphUpload(graphs[next].exec, w.stream) != cudaSuccess) cudaGetLastError();
  };
  int64_t* mail = w.control.mailbox + w.expected % kMailbox * kMailWords;
  const auto wanted = static_cast<uint32_t>(w.expected + 1);
  std::array<int64_t, kMailWords> words{};
  const auto there = [&] {
    bool all = true;
    for (int i = 0; i < kMailWords; ++i) {
      words[i] = atomic(mail[i]).load(std::memory_order_acquire);
      all = all && mail_sequence(words[i]) == wanted;
    }
    return all;
  };
  const auto value = [&words](MailWord word) { return static_cast<int32_t>(words[word]); };
  bool found = false;
  cudaError_t launched = cudaSuccess;
  const OnDevice on(w.device);
  Py_BEGIN_ALLOW_THREADS;
  // A nap is longer than an item's way here: within a second of the last one this only spins, and lets others run now
  // and then.
  Backoff backoff;
  const int64_t start = now_ns(), busy_until = w.last_item + kBusyNs;
  int64_t waited = 0, last_rehearsal = start;
  for (uint32_t turn = 1; !(found = there()) && waited < timeout_ns; ++turn) {
    const int64_t now = now_ns();
    if (now >= busy_until) {
      waited = backoff.pause();
      continue;
    }
    waited = now - start;
    if (turn == 1) practise();
    if (graphs != end && now - last_rehearsal >= kRehearseNs && atomic(*w.rehearsed).load() == w.rehearsals) {
      last_rehearsal = now;
      if (cudaGraphLaunch(w.rehearsal, w.stream) == cudaSuccess)
        ++w.rehearsals;
      else
        cudaGetLastError();  // the next launch will fail for itself
    }
    if (turn % kSpinsPerYield == 0)
      sched_yield();
    else
      spin();
  }
  if (found && value(kMailRows) > 0) graph = find_graph(graphs, end, value(kMailLayer), value(kMailRows));
  if (graph != end) {
    launched = cudaGraphLaunch(graph->exec, reinterpret_cast<cudaStream_t>(stream));
    w.succession.add(static_cast<int32_t>(graph - graphs), table_size);
  }
  Py_END_ALLOW_THREADS;
  if (!found && static_cast<int32_t>(mail_sequence(words[0]) - wanted) > 0) {
    PyErr_SetString(PyExc_RuntimeError,
                    "the mailbox ran over: a captured arrive took items that the host did not read");
    return nullptr;
  }
  // Under the lock, as rewind() is. A reset that came first has dropped the item: its graph computes on the server's
  // own buffers, and reply answers nothing.
  if (!found || static_cast<uint32_t>(w.expected + 1) != wanted) Py_RETURN_NONE;
  ++w.expected;
  if (launched != cudaSuccess) {
    cudaGetLastError();  // else the next op's launch is blamed for it
    return PyErr_Format(PyExc_RuntimeError, "the graph of layer %lld, bucket %lld could not be launched: %s",
                        static_cast<long long>(graph->layer), static_cast<long long>(graph->bucket),
                        cudaGetErrorString(launched));
  }
  if (value(kMailCount) > 0) w.last_item = now_ns();
  return Py_BuildValue("(iiii)", value(kMailCount), value(kMailLayer), value(kMailRows),
                       graph == end ? -1 : static_cast<int>(graph - graphs));
}

// Counters live on the device; this copies them into the host half, whose stats() then reads them.
PyObject* fetch_stats(PyObject*, PyObject* args) {
  DeviceWindow* w = window_of(args);
  if (w == nullptr) return nullptr;
  const OnDevice on(w->device);
  Control& host = *w->control.mapped;
  CUDA_OR_RETURN(cudaMemcpyAsync(host.counters, w->control.state->counters, sizeof(host.counters),
                                 cudaMemcpyDeviceToHost, w->stream));
  const DeviceControl& c = w->control;
  for (const auto& [to, from] : {std::pair{host.bytes_sent, c.bytes_sent}, std::pair{host.slots_taken, c.slots_taken},
                                 std::pair{host.rows_taken, c.rows_taken}})
    CUDA_OR_RETURN(cudaMemcpyAsync(to, from, host.peers * 8, cudaMemcpyDeviceToHost, w->stream));
  CUDA_OR_RETURN(cudaStreamSynchronize(w->stream));
  Py_RETURN_NONE;
}

// For tests and debuggers: the device's counterparts of what `_C.addresses` names.
PyObject* addresses(PyObject*, PyObject* args) {
  DeviceWindow* w = window_of(args);
  if (w == nullptr) return nullptr;
  const DeviceControl& c = w->control;
  const auto at = [](const void* p) { return static_cast<long long>(reinterpret_cast<uintptr_t>(p)); };
  return Py_BuildValue("{s:L,s:L,s:L,s:L}", "next", at(c.next), "ring", at(c.ring), "taken", at(c.taken), "cursor",
                       at(&c.state->cursor));
}

// Lets kernels on one device store to another's memory; a peer address is then an ordinary one.
PyObject* enable_peer_access(PyObject*, PyObject* args) {
  int from = 0, to = 0;
  if (!PyArg_ParseTuple(args, "ii", &from, &to)) return nullptr;
  int can = 0;
  CUDA_OR_RETURN(cudaDeviceCanAccessPeer(&can, from, to));
  if (can != 0 && from != to)
    CUDA_OR_RETURN(cudaDeviceGetP2PAttribute(&can, cudaDevP2PAttrNativeAtomicSupported, from, to));
  if (can == 0) {
    PyErr_Format(PyExc_RuntimeError, "cuda:%d cannot reach the memory of cuda:%d, or not with atomics", from, to);
    return nullptr;
  }
  const OnDevice on(from);
  const cudaError_t e = cudaDeviceEnablePeerAccess(to, 0);
  if (e == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    CUDA_OR_RETURN(e);
  }
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"adopt", adopt, METH_VARARGS, "adopt(window, control address, device): build the device half"},
    {"poison", poison, METH_VARARGS, "poison(window, generation)"},
    {"leave", leave, METH_VARARGS, "leave(window)"},
    {"synchronize", synchronize, METH_VARARGS, "synchronize(window): all work of its device has ended"},
    {"rewind", rewind, METH_VARARGS, "rewind(window)"},
    {"peer_gone", peer_gone, METH_VARARGS, "peer_gone(window, peer)"},
    {"mask", mask, METH_VARARGS, "mask(window, peer)"},
    {"arrive_and_receive", arrive_and_receive, METH_VARARGS,
     "arrive_and_receive(window, item, rows, scales, capacity, offsets, stream): into these addresses"},
    {"next_item", next_item, METH_VARARGS,
     "next_item(window, timeout_ns, table, table words, stream) -> (count, layer, rows, graph) or None"},
    {"fetch_stats", fetch_stats, METH_VARARGS, "fetch_stats(window): into the host half"},
    {"addresses", addresses, METH_VARARGS, "addresses(window) -> dict, for tests and debuggers"},
    {"enable_peer_access", enable_peer_access, METH_VARARGS, "enable_peer_access(device, peer device)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace afd

PyMODINIT_FUNC PyInit__C_cuda() {
  PyObject* m = PyModule_Create(&afd::kModule);
  if (m == nullptr) return nullptr;
  PyModule_AddStringConstant(m, "SOURCE_DIGEST", AFD_SOURCE_DIGEST);
  PyModule_AddStringConstant(m, "ARCHITECTURES", AFD_ARCHITECTURES);
  return m;
}
