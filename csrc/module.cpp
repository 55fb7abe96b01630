// The Python module afd_ops._C: constants of wire.h, and the calls by which window.py builds and ends a window.
// Nothing here is on a model's path; that is what the ops are for. Limited API, so one build serves every Python.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "control.h"
#include "cpu/wait.h"
#include "trips.h"

#ifndef AFD_SOURCE_DIGEST
#error "setup.py defines AFD_SOURCE_DIGEST"
#endif

namespace {

using namespace afd;

bool read_ints(PyObject* sequence, std::vector<int64_t>& out) {
  const Py_ssize_t n = PySequence_Size(sequence);
  if (n < 0) return false;
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    if (item == nullptr) return false;
    out.push_back(PyLong_AsLongLong(item));
    Py_DECREF(item);
    if (PyErr_Occurred()) return false;
  }
  return true;
}

bool read_geometry(PyObject* sequence, Geometry& g) {
  std::vector<int64_t> v;
  if (!read_ints(sequence, v)) return false;
  if (v.size() * sizeof(int64_t) != sizeof(Geometry)) {
    PyErr_SetString(PyExc_ValueError, "geometry has the wrong number of fields");
    return false;
  }
  std::memcpy(&g, v.data(), sizeof(Geometry));
  return true;
}

// Adds value under name to a dict; takes the reference.
void put(PyObject* dict, const char* key, PyObject* value) {
  if (value == nullptr) return;
  PyDict_SetItemString(dict, key, value);
  Py_DECREF(value);
}

void put(PyObject* dict, const char* key, int64_t value) { put(dict, key, PyLong_FromLongLong(value)); }

PyObject* to_tuple(const int64_t* values, int64_t n) {
  PyObject* tuple = PyTuple_New(n);
  for (int64_t i = 0; tuple != nullptr && i < n; ++i) PyTuple_SetItem(tuple, i, PyLong_FromLongLong(values[i]));
  return tuple;
}

Control* existing(long long window) {
  Control* c = find(window);
  if (c == nullptr) PyErr_Format(PyExc_ValueError, "window %lld does not exist in this process", window);
  return c;
}

Control* control_of(PyObject* args) {
  long long window = 0;
  return PyArg_ParseTuple(args, "L", &window) ? existing(window) : nullptr;
}

// (window, value)
Control* control_and(PyObject* args, long long& value) {
  long long window = 0;
  return PyArg_ParseTuple(args, "LL", &window, &value) ? existing(window) : nullptr;
}

// A host call that touches a window's memory: refused once it is closed, and counted, so that close() waits for it.
class Inside {
 public:
  explicit Inside(PyObject* args) : Inside(control_of(args)) {}
  // Of a window and one number more.
  Inside(PyObject* args, long long& value) : Inside(control_and(args, value)) {}
  ~Inside() {
    if (control_ != nullptr) atomic(control_->active).fetch_sub(1);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  Control* control() const { return control_; }

 private:
  explicit Inside(Control* control) : control_(control) {
    if (control_ == nullptr) return;
    atomic(control_->active).fetch_add(1);
    if (atomic(control_->closed).load() == 0) return;
    PyErr_SetString(PyExc_ValueError, "the window is closed");
    atomic(control_->active).fetch_sub(1);
    control_ = nullptr;
  }

  Control* control_;
};

PyObject* layout(PyObject*, PyObject* args) {
  PyObject* sequence = nullptr;
  Geometry g{};
  if (!PyArg_ParseTuple(args, "O", &sequence) || !read_geometry(sequence, g)) return nullptr;
  const Layout l = layout_of(g);
  PyObject* out = PyDict_New();
#define X(name) put(out, #name, l.name);
  AFD_LAYOUT(X)
#undef X
  return out;
}

PyObject* py_window_bytes(PyObject*, PyObject* args) {
  PyObject* sequence = nullptr;
  long long regions = 0;
  Geometry g{};
  if (!PyArg_ParseTuple(args, "OL", &sequence, &regions) || !read_geometry(sequence, g)) return nullptr;
  return PyLong_FromLongLong(window_bytes(layout_of(g), regions));
}

PyObject* py_ticket_width(PyObject*, PyObject* args) {
  long long ffn_size = 0;
  if (!PyArg_ParseTuple(args, "L", &ffn_size)) return nullptr;
  return PyLong_FromLongLong(ticket_width(ffn_size));
}

// One zeroed allocation for a Control and its arrays, never freed (see control.h), in whole pages so that the CUDA half
// can map it. Built twice: first without memory, to learn its size.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  template <typename T>
  T* take(int64_t n) {
    char* at = base_ + used_;
    used_ += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(at);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

int64_t place_arrays(Control& c, char* base) {
  const Geometry& g = c.geometry;
  Arena arena(base);
  arena.take<Control>(1);
  c.peer = arena.take<char*>(c.peers);
  c.expert_map = arena.take<int32_t>(2 * g.num_experts);
  c.experts_per_rank = arena.take<int32_t>(g.ffn_size);
  c.next = arena.take<int64_t>(g.stages);
  c.ring = arena.take<int64_t>(g.stages * g.depth);
  c.taken = arena.take<Taken>(c.slots());
  c.counts = arena.take<int32_t>(c.slots() * g.local_experts);
  c.first = arena.take<int32_t>(c.slots() * g.local_experts);
  c.region = arena.take<int32_t>(c.peers);
  c.masked = arena.take<int32_t>(c.peers);
  c.records = arena.take<ErrorRecord>(c.peers + 1);
  c.bytes_sent = arena.take<int64_t>(c.peers);
  c.slots_taken = arena.take<int64_t>(c.peers);
  c.rows_taken = arena.take<int64_t>(c.peers);
  return arena.used();
}

// What a new window and a reset one have in common.
void clear_state(Control& c) {
  std::fill_n(c.next, c.geometry.stages, 0);
  std::fill_n(c.ring, c.geometry.stages * c.geometry.depth, -1);
  std::fill_n(c.taken, c.slots(), Taken{-1, 0, 0, 0, 0, 0});
  std::fill_n(c.region, c.peers, static_cast<int32_t>(kAlive));
  std::fill_n(c.masked, c.peers, 0);
  std::fill_n(c.records, c.peers + 1, ErrorRecord{});
  c.cursor = 0;
  c.trips->clear();
  atomic(c.failed).store(0);
}

PyObject* open(PyObject*, PyObject* args) {
  PyObject *geometry = nullptr, *peers = nullptr, *map = nullptr;
  int role = 0, role_rank = 0;
  long long deadline_ns = 0, poll_ns = 0, rows = 0, address = 0;
  Geometry g{};
  std::vector<int64_t> peer, experts;
  if (!PyArg_ParseTuple(args, "OiiLLLLOO", &geometry, &role, &role_rank, &deadline_ns, &poll_ns, &rows, &address,
                        &peers, &map) ||
      !read_geometry(geometry, g) || !read_ints(peers, peer) || !read_ints(map, experts))
    return nullptr;
  const int64_t expected_peers = role == kAttention ? g.ffn_size : g.attention_size;
  if (static_cast<int64_t>(peer.size()) != expected_peers ||
      static_cast<int64_t>(experts.size()) != 2 * g.num_experts) {
    PyErr_SetString(PyExc_ValueError, "peer addresses or expert map have the wrong length");
    return nullptr;
  }
  Control blank{};
  blank.geometry = g;
  blank.layout = layout_of(g);
  blank.role = role;
  blank.role_rank = role_rank;
  blank.owner = getpid();
  blank.peers = static_cast<int32_t>(peer.size());
  blank.deadline_ns = deadline_ns;
  blank.poll_ns = poll_ns;
  blank.rows = rows;
  blank.window = reinterpret_cast<char*>(address);
  const int64_t page = sysconf(_SC_PAGESIZE);
  blank.arena_bytes = (place_arrays(blank, nullptr) + page - 1) / page * page;
  void* memory = mmap(nullptr, blank.arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return PyErr_NoMemory();
  auto* c = static_cast<Control*>(memory);
  *c = blank;
  place_arrays(*c, static_cast<char*>(memory));
  c->trips = new Trips;
  for (int32_t p = 0; p < c->peers; ++p) c->peer[p] = reinterpret_cast<char*>(peer[p]);
  for (int64_t e = 0; e < g.num_experts; ++e) {
    c->expert_map[2 * e] = static_cast<int32_t>(experts[2 * e]);
    c->expert_map[2 * e + 1] = static_cast<int32_t>(experts[2 * e + 1]);
    ++c->experts_per_rank[experts[2 * e]];
  }
  clear_state(*c);
  try {
    return PyLong_FromLongLong(publish(c));
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
}

PyObject* facts(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  if (c == nullptr) return nullptr;
  PyObject* out = PyDict_New();
#define X(name) put(out, #name, c->geometry.name);
  AFD_GEOMETRY(X)
#undef X
  put(out, "role", c->role);
  put(out, "slots", c->slots());
  put(out, "owned_experts", c->local_experts());
  put(out, "generation", c->generation);
  put(out, "rows", c->rows);
  return out;
}

PyObject* generation(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  return c == nullptr ? nullptr : PyLong_FromLong(c->generation);
}

PyObject* set_linger(PyObject*, PyObject* args) {
  long long linger_ns = 0;
  Control* c = control_and(args, linger_ns);
  if (c == nullptr) return nullptr;
  atomic(c->linger_ns).store(linger_ns);
  Py_RETURN_NONE;
}

PyObject* set_abort(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  if (c == nullptr) return nullptr;
  atomic(c->abort).store(1);
  Py_RETURN_NONE;
}

PyObject* set_closed(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  if (c == nullptr) return nullptr;
  atomic(c->closed).store(1);
  Py_RETURN_NONE;
}

PyObject* drain(PyObject*, PyObject* args) {
  long long timeout_ns = 0;
  Control* c = control_and(args, timeout_ns);
  if (c == nullptr) return nullptr;
  bool empty = false;
  Py_BEGIN_ALLOW_THREADS;
  Backoff backoff;
  while (!(empty = atomic(c->active).load() == 0) && backoff.pause() < timeout_ns) {
  }
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(empty);
}

// The state words, flags, sticky words and headers of this rank; nobody may be inside an op or write to the window.
PyObject* rewind(PyObject*, PyObject* args) {
  const Inside inside(args);
  Control* c = inside.control();
  if (c == nullptr) return nullptr;
  if (c->on_device == 0) {
    std::memset(c->window, 0, c->layout.slots);
    for (int64_t i = 0; i < c->slots(); ++i) std::memset(Slot(c->window, c->layout, i).header, 0, c->layout.position);
  }
  clear_state(*c);
  Py_RETURN_NONE;
}

PyObject* resume(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  if (c == nullptr) return nullptr;
  ++c->generation;
  atomic(c->abort).store(0);
  Py_RETURN_NONE;
}

PyObject* to_dict(const Control& c, const ErrorRecord& r) {
  PyObject* out = PyDict_New();
  put(out, "kind", PyUnicode_FromString(name(static_cast<Kind>(r.kind))));
  put(out, "message", PyUnicode_FromString(describe(c, r).c_str()));
  put(out, "op", PyUnicode_FromString(name(static_cast<Op>(r.op))));
  put(out, "peer", r.peer);
  put(out, "layer", r.layer);
  put(out, "stage", r.stage);
  put(out, "ring", r.ring);
  put(out, "sequence", r.sequence);
  put(out, "generation", r.generation);
  return out;
}

// What stops an attention rank on the CPU: a peer that has ended and is not masked.
std::optional<ErrorRecord> ended_peer(Control& c) {
  for (int32_t p = 0; c.role == kAttention && c.on_device == 0 && p < c.peers; ++p) {
    const int32_t sticky = atomic(word(c.window, c.layout.sticky, p)).load(std::memory_order_acquire);
    if (sticky != kAlive && sticky != kLeft && atomic(c.masked[p]).load() == 0)
      return ended(where(Op::host, -1, -1, -1, -1), p, sticky);
  }
  return std::nullopt;
}

PyObject* check(PyObject*, PyObject* args) {
  const Inside inside(args);
  Control* c = inside.control();
  if (c == nullptr) return nullptr;
  if (atomic(c->failed).load() == 0) {
    if (auto r = ended_peer(*c); r && atomic(c->abort).load() == 0) {
      fail(*c, *r);
    } else if (r) {  // a reset is under way and drops it, or has failed: nothing is written
      r->generation = c->generation;
      return to_dict(*c, *r);
    }
  }
  if (atomic(c->failed).load() == 0) {
    // What a kernel could only report: a bad id, treated as none.
    ErrorRecord& own = c->records[c->peers];
    if (atomic(own.valid).load(std::memory_order_acquire) == 0) Py_RETURN_NONE;
    return to_dict(*c, own);
  }
  return to_dict(*c, first_error(*c));
}

PyObject* errors(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  if (c == nullptr) return nullptr;
  PyObject* out = PyList_New(0);
  for (int32_t i = 0; i <= c->peers; ++i) {
    if (atomic(c->records[i].valid).load(std::memory_order_acquire) == 0) continue;
    PyObject* item = to_dict(*c, c->records[i]);
    PyList_Append(out, item);
    Py_DECREF(item);
  }
  return out;
}

// Not into another generation: what a reset has dropped needs no poison. A reset that begins now waits until this ends.
PyObject* poison(PyObject*, PyObject* args) {
  long long generation = 0;
  const Inside inside(args, generation);
  Control* c = inside.control();
  if (c == nullptr) return nullptr;
  if (atomic(c->abort).load() != 0 || c->generation != generation) Py_RETURN_NONE;
  if (const auto r = ended_peer(*c)) fail(*c, *r);  // its name, not ours
  if (atomic(c->failed).load() != 0) Py_RETURN_NONE;
  ErrorRecord r = where(Op::host, -1, -1, -1, -1);
  r.kind = static_cast<int32_t>(Kind::Failed);
  fail(*c, r);
  Py_RETURN_NONE;
}

PyObject* leave(PyObject*, PyObject* args) {
  const Inside inside(args);
  Control* c = inside.control();
  if (c == nullptr) return nullptr;
  for (int32_t p = 0; p < c->peers; ++p) poison_peer(*c, p, kLeft);
  Py_RETURN_NONE;
}

Control* control_and_peer(PyObject* args, int& peer) {
  long long window = 0;
  if (!PyArg_ParseTuple(args, "Li", &window, &peer)) return nullptr;
  Control* c = find(window);
  if (c == nullptr || peer < 0 || peer >= c->peers) {
    PyErr_Format(PyExc_ValueError, "window %lld has no peer %d", window, peer);
    return nullptr;
  }
  return c;
}

// The peer's process is gone: what it would have written into our window is written for it. One that left may go. Of no
// interest any more once the window is closed.
PyObject* peer_gone(PyObject*, PyObject* args) {
  int peer = 0;
  Control* c = control_and_peer(args, peer);
  if (c == nullptr) return nullptr;
  atomic(c->active).fetch_add(1);
  int32_t expected = kAlive;
  if (atomic(c->closed).load() == 0)
    atomic(word(c->window, c->layout.sticky, peer)).compare_exchange_strong(expected, kGone);
  atomic(c->active).fetch_sub(1);
  Py_RETURN_NONE;
}

PyObject* mask(PyObject*, PyObject* args) {
  int peer = 0;
  Control* c = control_and_peer(args, peer);
  if (c == nullptr) return nullptr;
  atomic(c->masked[peer]).store(1);
  Py_RETURN_NONE;
}

PyObject* masked(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  if (c == nullptr) return nullptr;
  std::vector<int64_t> v(c->masked, c->masked + c->peers);
  return to_tuple(v.data(), c->peers);
}

PyObject* regions(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  if (c == nullptr) return nullptr;
  std::vector<int64_t> v(c->region, c->region + c->peers);
  return to_tuple(v.data(), c->peers);
}

PyObject* in_flight(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  if (c == nullptr) return nullptr;
  if (c->on_device != 0) return PyLong_FromLongLong(c->trips->open());
  int64_t n = 0;
  for (int64_t i = 0; i < c->geometry.stages * c->geometry.depth; ++i) n += c->ring[i] >= 0;
  return PyLong_FromLongLong(n);
}

PyObject* trips_clock(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  return c == nullptr ? nullptr : PyLong_FromLongLong(c->trips->clock());
}

PyObject* owes(PyObject*, PyObject* args) {
  long long since = 0;
  Control* c = control_and(args, since);
  return c == nullptr ? nullptr : PyBool_FromLong(c->trips->owed_since(since));
}

PyObject* stats(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  if (c == nullptr) return nullptr;
  PyObject* out = PyDict_New();
#define X(name) put(out, #name, c->counters[k_##name]);
  AFD_COUNTERS(X)
#undef X
  put(out, "bytes_sent", to_tuple(c->bytes_sent, c->peers));
  put(out, "slots_taken", to_tuple(c->slots_taken, c->peers));
  put(out, "rows_taken", to_tuple(c->rows_taken, c->peers));
  return out;
}

// For tests and debuggers: where the state lies.
PyObject* addresses(PyObject*, PyObject* args) {
  Control* c = control_of(args);
  if (c == nullptr) return nullptr;
  PyObject* out = PyDict_New();
  const auto at = [out](const char* key, const void* p) {
    put(out, key, static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)));
  };
  at("control", c);
  at("window", c->window);
  at("next", c->next);
  at("ring", c->ring);
  at("taken", c->taken);
  at("cursor", &c->cursor);
  return out;
}

PyMethodDef kMethods[] = {
    {"layout", layout, METH_VARARGS, "layout(geometry) -> dict of byte offsets"},
    {"window_bytes", py_window_bytes, METH_VARARGS, "window_bytes(geometry, regions) -> bytes of a window"},
    {"ticket_width", py_ticket_width, METH_VARARGS, "ticket_width(ffn_size) -> columns of a ticket"},
    {"open", open, METH_VARARGS,
     "open(geometry, role, role_rank, deadline_ns, poll_ns, rows, address, peer addresses, expert map) -> window id"},
    {"facts", facts, METH_VARARGS, "facts(window) -> dict of what the fakes need"},
    {"generation", generation, METH_VARARGS, "generation(window) -> how many times it was reset"},
    {"set_linger", set_linger, METH_VARARGS, "set_linger(window, ns): how long arrive waits for more"},
    {"set_abort", set_abort, METH_VARARGS, "set_abort(window): every wait ends, no op begins"},
    {"set_closed", set_closed, METH_VARARGS, "set_closed(window): for good"},
    {"drain", drain, METH_VARARGS, "drain(window, timeout_ns) -> whether no thread is inside an op any more"},
    {"rewind", rewind, METH_VARARGS, "rewind(window): back to the state of a new window"},
    {"resume", resume, METH_VARARGS, "resume(window): next generation, ops may begin"},
    {"check", check, METH_VARARGS, "check(window) -> None or the error that stopped it"},
    {"errors", errors, METH_VARARGS, "errors(window) -> every error record"},
    {"poison", poison, METH_VARARGS, "poison(window, generation): this rank gives up and tells its peers"},
    {"leave", leave, METH_VARARGS, "leave(window): tell the peers that this rank is done"},
    {"peer_gone", peer_gone, METH_VARARGS, "peer_gone(window, peer): its process ended"},
    {"mask", mask, METH_VARARGS, "mask(window, peer): leave this F rank out until reset()"},
    {"masked", masked, METH_VARARGS, "masked(window) -> 0 or 1 per peer"},
    {"regions", regions, METH_VARARGS, "regions(window) -> a sticky state per peer, as acted on"},
    {"in_flight", in_flight, METH_VARARGS, "in_flight(window) -> dispatches without their combine, for tests"},
    {"trips_clock", trips_clock, METH_VARARGS, "trips_clock(window) -> how many dispatches there were"},
    {"owes", owes, METH_VARARGS, "owes(window, since) -> whether this thread's dispatches since then wait for combine"},
    {"stats", stats, METH_VARARGS, "stats(window) -> dict of counters"},
    {"addresses", addresses, METH_VARARGS, "addresses(window) -> dict, for tests and debuggers"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

void add_names(PyObject* module, const char* attribute, std::initializer_list<const char*> names) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(names.size()));
  Py_ssize_t i = 0;
  for (const char* n : names) PyTuple_SetItem(tuple, i++, PyUnicode_FromString(n));
  PyModule_AddObject(module, attribute, tuple);
}

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* m = PyModule_Create(&kModule);
  if (m == nullptr) return nullptr;
  PyModule_AddStringConstant(m, "SOURCE_DIGEST", AFD_SOURCE_DIGEST);
  PyModule_AddIntConstant(m, "WIRE_VERSION", kWireVersion);
  PyModule_AddIntConstant(m, "HEADER_MAGIC", kHeaderMagic);
  PyModule_AddIntConstant(m, "HEADER_BYTES", sizeof(SlotHeader));
  PyModule_AddIntConstant(m, "PORT_MAGIC", kPortMagic);
  PyModule_AddIntConstant(m, "PORT_WORDS", kPortWords);
  PyModule_AddIntConstant(m, "ITEM_WORDS", kItemWords);
  PyModule_AddIntConstant(m, "ITEM_COUNT", kItemCount);
  PyModule_AddIntConstant(m, "ITEM_LAYER", kItemLayer);
  PyModule_AddIntConstant(m, "ITEM_ROWS", kItemRows);
  PyModule_AddIntConstant(m, "WORD_STRIDE", kWordStride);
  PyModule_AddIntConstant(m, "MAX_RANKS", kMaxRanks);
  PyModule_AddIntConstant(m, "MAX_DEPTH", kMaxDepth);
  PyModule_AddIntConstant(m, "SCALE_BLOCK", kScaleBlock);
  PyModule_AddIntConstant(m, "READY", kReady);
  PyModule_AddIntConstant(m, "ALIVE", kAlive);
  PyModule_AddIntConstant(m, "LEFT", kLeft);
  PyModule_AddIntConstant(m, "POISONED", kPoisoned);
#define X(name) #name,
#define XD(name, bytes, wide) #name,
#define XW(name, bytes, wide) #wide,
  add_names(m, "KINDS", {AFD_KINDS(X)});
  add_names(m, "GEOMETRY", {AFD_GEOMETRY(X)});
  add_names(m, "DTYPES", {AFD_DTYPES(XD)});
  add_names(m, "WIDE_DTYPES", {AFD_DTYPES(XW)});
#undef X
#undef XD
#undef XW
  return m;
}
