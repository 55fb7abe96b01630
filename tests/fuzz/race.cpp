// race: attention and FFN ranks as threads over local windows, for TSan.
//
// Every A rank has one thread per stage (stages share nothing but their window), every F rank one. Payloads, headers
// and plans are plain memory, so TSan is silent only as long as each access to them is ordered by a flag.
//
//   race TRIPS        round trips per A thread, up to `depth` in flight, every result compared
//   race fail TIMES   several lanes of a window fail at once
#include <atomic>
#include <cstdio>
#include <deque>
#include <string>
#include <thread>

#include "cluster.h"

namespace afd::fuzz {
namespace {

constexpr Geometry kGeometry{.attention_size = 2,
                             .ffn_size = 2,
                             .num_experts = 5,
                             .local_experts = 0,
                             .stages = 2,
                             .depth = 2,
                             .tokens = 3,
                             .topk = 2,
                             .hidden = 8,
                             .dtype = k_bfloat16,
                             .layers = 2};

std::atomic<bool> failed{false}, done{false};

void wrong(const char* who, int32_t rank, const std::string& why) {
  std::fprintf(stderr, "race: %s %d: %s\n", who, rank, why.c_str());
  failed = true;
}

void attend(Control& c, int32_t stage, int64_t trips) {
  Random random(static_cast<uint64_t>(1 + c.role_rank * c.geometry.stages + stage));
  std::deque<Step> flying;
  try {
    for (int64_t trip = 0; !failed && (trip < trips || !flying.empty());) {
      const auto depth = static_cast<size_t>(random.within(1, static_cast<int32_t>(c.geometry.depth)));
      while (trip < trips && flying.size() < depth) {
        flying.emplace_back(c.geometry, random, stage);
        flying.back().dispatch(c);
        ++trip;
      }
      flying.front().combine(c);
      if (!flying.front().exact(c.geometry)) wrong("attention", c.role_rank, "a wrong sum");
      flying.pop_front();
    }
  } catch (const std::exception& e) {
    wrong("attention", c.role_rank, e.what());
  }
}

void serve(Control& c) {
  std::vector<int32_t> words((1 + c.slots()) * kItemWords);
  std::vector<char> in, out;
  try {
    while (!done && !failed) {
      std::fill(words.begin(), words.end(), 0);
      arrive(c, words.data());
      if (words[kItemCount] == 0) continue;
      Item item = read_item(c, Op::receive, words.data());
      in.resize(item.rows * c.geometry.hidden * itemsize(c.geometry.dtype));
      out.resize(in.size());
      receive(c, item, in.data(), nullptr);
      run_experts(c, item, in.data(), nullptr, out.data());
      item = read_item(c, Op::reply, words.data());
      reply(c, item, {out.data(), item.rows, c.geometry.hidden});
    }
  } catch (const std::exception& e) {
    wrong("ffn", c.role_rank, e.what());
  }
}

void exchange(int64_t trips) {
  Cluster cluster(kGeometry);
  std::vector<std::thread> attention, ffn;
  for (auto& f : cluster.f) {
    f->c.poll_ns = 1'000'000;
    ffn.emplace_back([&f] { serve(f->c); });
  }
  for (auto& a : cluster.a)
    for (int32_t stage = 0; stage < cluster.g.stages; ++stage)
      attention.emplace_back([&a, stage, trips] { attend(a->c, stage, trips); });
  for (std::thread& t : attention) t.join();
  done = true;
  for (std::thread& t : ffn) t.join();
  int64_t combines = 0, items = 0;
  for (auto& a : cluster.a) combines += a->c.counters[k_combines];
  for (auto& f : cluster.f) items += f->c.counters[k_items];
  std::printf("%lld round trips, %lld items\n", static_cast<long long>(combines), static_cast<long long>(items));
}

// What the lanes of a window do whose deadlines end together, without the wait: one record wins, everyone raises it.
void give_up_together() {
  constexpr int32_t lanes = 3;
  Cluster cluster(kGeometry);
  Control& c = cluster.a[0]->c;
  std::atomic<int32_t> ready{0}, raised{0};
  std::vector<std::thread> threads;
  for (int32_t lane = 0; lane < lanes; ++lane)
    threads.emplace_back([&, lane] {
      ErrorRecord r = where(Op::combine, 0, lane, 0, 0);
      r.kind = static_cast<int32_t>(Kind::Timeout);
      r.peer = 0;
      for (++ready; ready < lanes;) {
      }
      try {
        stop(c, r);
      } catch (const std::runtime_error&) {
        ++raised;
      }
    });
  for (std::thread& t : threads) t.join();
  if (raised != lanes || c.failed != 1 || c.records[0].valid != 1) wrong("attention", 0, "a lane did not raise");
}

}  // namespace
}  // namespace afd::fuzz

int main(int argc, char** argv) {
  using namespace afd::fuzz;
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 1) {
    exchange(std::stoll(args[0]));
  } else if (args.size() == 2 && args[0] == "fail") {
    for (int64_t i = std::stoll(args[1]); i > 0 && !failed; --i) give_up_together();
  } else {
    return 2;
  }
  return failed ? 1 : 0;
}
