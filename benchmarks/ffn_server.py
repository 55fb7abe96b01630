"""The FFN server on a GPU: from the arrival of a dispatch to its answer, against a loop of stock tensor ops.

    python benchmarks/ffn_server.py [--tokens 1,32,128] [--ranks 1,2,4] [--trials 21] [--repeat 5] [--out FILE]

One process: attention ranks on the first GPU, a stream each, the FFN rank on the last. Experts as those of
DeepSeek-V4-Flash: hidden 4096, intermediate 2048, top-6 of 256, bfloat16, 12.9 GB of weights made on the GPU. The
attention side (dispatch, combine) is a graph per layer, and layers follow each other; this thread runs the server's
steps.

`arrival`: the FFN rank waits when the dispatches come. A kernel beside it watches the first one's flag and notes the
time at which it is there; the first kernel of the experts, and one behind the last reply, note theirs, all by the clock
of that GPU. Of several ranks the first dispatch makes an item by itself: this is the time of an item of one slot, while
others arrive. `ready`: all dispatches are there before the server looks, so that those that fit make one item; timed by
events around its steps. `gemm`: the two grouped GEMMs of that item alone; `experts_hit`: how many experts it needs.

Paths: `ours`: ExpertServer with captured experts. `together`: the same, lingering until all ranks' dispatches are
there, for one item; timed from the last of their flags. `eager`: without graphs. `resident`: arrive, receive, experts
and reply in one graph launched ahead of the arrival, for one attention rank, a known layer and bucket: nobody's first
kernel can be earlier. `stock`: the FFN side as the ancestors had it: the host polls a flag and a header by copies,
index_select, the same experts, index_add_.

How long the host's launch of a graph takes differs between processes by microseconds. Of the runs of --repeat, each in
a fresh process, the medians are reported, figure by figure; those of all runs stand beside them.

Results are compared with plain float32 for some tokens, before and after timing. Every wait has a deadline.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import argparse
import faulthandler
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import ffn_trace
import torch
import triton
import triton.language as tl
from common import ATTENTION, FFN
from torch import Tensor
from torch.nn import functional

import afd_ops
from afd_ops import _C
from afd_ops.buckets import fit
from afd_ops.captured import device_memory

HIDDEN, INTERMEDIATE, TOPK = 4096, 2048, 6
DELAY_CYCLES = 1_000_000  # about half a millisecond: the FFN rank waits by then
SECONDS = 20.0  # of patience
WARM = 8
LAYERS = 8  # that follow each other, as in a model: the graph of the next item is another one
ARRIVED, FIRST_KERNEL, ANSWERED = range(3)
FIRST = "arrival_to_first_kernel_us"
FIGURES = (FIRST, "arrival_to_reply_us", "drained_us", "ready_us", "gemm_us", "gemm_share")


@triton.jit
def _stamp(times, index: tl.constexpr, keep_first: tl.constexpr):  # type: ignore[no-untyped-def]
    now = tl.extra.cuda.globaltimer()
    if keep_first:
        now = tl.where(tl.load(times + index) == 0, now, tl.load(times + index))
    tl.store(times + index, now)


@triton.jit
def _watch(flags, count, stride, times, ready, index: tl.constexpr, patience):  # type: ignore[no-untyped-def]
    begin = tl.extra.cuda.globaltimer()
    now = begin
    for i in range(count):
        seen = tl.load(flags + i * stride, volatile=True)
        while (seen != ready) & (now - begin < patience):
            seen = tl.load(flags + i * stride, volatile=True)
            now = tl.extra.cuda.globaltimer()
    tl.store(times + index, tl.extra.cuda.globaltimer())


@contextmanager
def on(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def synchronize() -> None:
    for device in (ATTENTION, FFN):
        torch.cuda.synchronize(device)


class Clock:
    """Times on the FFN rank's GPU, in ns."""

    def __init__(self) -> None:
        self.times = torch.zeros(3, dtype=torch.int64, device=FFN)
        self.beside = torch.cuda.Stream(FFN)

    def clear(self) -> None:
        self.times.zero_()
        torch.cuda.synchronize(FFN)

    def stamp(self, index: int, keep_first: bool = False) -> None:
        """On the current stream."""
        _stamp[(1,)](self.times, index, keep_first, num_warps=1)

    def watch(self, flags: Tensor, ready: int) -> None:
        """Notes when the flags, one a row, are all there, on a stream of its own."""
        count, stride, patience = len(flags), flags.stride(0), int(SECONDS * 1e9)
        with on(self.beside):
            _watch[(1,)](flags, count, stride, self.times, ready, ARRIVED, patience, num_warps=1)

    def read(self) -> tuple[float, float]:
        """Microseconds from the arrival to the experts' first kernel, and to the answer."""
        synchronize()
        times = self.times.tolist()
        return tuple((times[i] - times[ARRIVED]) / 1e3 for i in (FIRST_KERNEL, ANSWERED))  # type: ignore[return-value]


class Experts:
    """GroupedSwiGLU, its first kernel a stamp. All layers have the same weights."""

    def __init__(self, count: int, clock: Clock) -> None:
        torch.manual_seed(1)
        self.gate_up = torch.empty(count, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16, device=FFN)
        self.down = torch.empty(count, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, device=FFN)
        self.gate_up.normal_(0, HIDDEN**-0.5)
        self.down.normal_(0, INTERMEDIATE**-0.5)
        self.swiglu, self.clock = afd_ops.GroupedSwiGLU([self.gate_up], [self.down], limit=10.0), clock

    def __call__(self, rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        self.clock.stamp(FIRST_KERNEL, keep_first=True)
        return self.swiglu(rows, scales, offsets, 0)  # type: ignore[no-any-return]

    def gemms(self, rows: Tensor, offsets: Tensor) -> None:
        """The two grouped GEMMs alone."""
        functional.grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=offsets)
        hidden = rows.view(-1)[: rows.shape[0] * INTERMEDIATE].view(-1, INTERMEDIATE)
        functional.grouped_mm(hidden, self.down.transpose(-2, -1), offs=offsets)

    def error(self, step: Step, out: Tensor) -> float:
        """Relative, over some tokens, against float32."""
        chosen = torch.linspace(0, out.shape[0] - 1, min(4, out.shape[0]), device=ATTENTION).long()
        x, ids, weights = (t[chosen].to(FFN) for t in (step.x, step.ids, step.weights))
        want = torch.zeros(len(chosen), HIDDEN, device=FFN)
        for t in range(len(chosen)):
            for k in range(TOPK):
                gate, up = (self.gate_up[ids[t, k]].float() @ x[t].float()).chunk(2)
                hidden = functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
                want[t] += weights[t, k] * (self.down[ids[t, k]].float() @ hidden)
        return float((out[chosen].to(FFN).float() - want).norm() / want.norm())


class Step:
    """What an attention rank sends."""

    def __init__(self, tokens: int, experts: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(tokens, HIDDEN, generator=generator).to(ATTENTION, torch.bfloat16)
        scores = torch.rand(tokens, experts, generator=generator)
        self.ids = scores.topk(TOPK).indices.int().to(ATTENTION)
        weights = torch.rand(tokens, TOPK, generator=generator)
        self.weights = (weights / weights.sum(1, keepdim=True)).to(ATTENTION)


class Attention:
    """An attention rank: dispatch and combine in a graph per layer."""

    def __init__(self, window: afd_ops.Window, stream: torch.cuda.Stream, step: Step) -> None:
        self.step, self.stream, self.base = step, stream, torch.zeros_like(step.x)
        self.modules = [afd_ops.RemoteExperts(layer).to(ATTENTION).attach(window) for layer in range(LAYERS)]
        self.graphs, self.outs, self.sent = [torch.cuda.CUDAGraph() for _ in range(LAYERS)], [], 0
        torch.cuda.synchronize(ATTENTION)
        for module, graph in zip(self.modules, self.graphs, strict=True):
            with on(stream):  # not torch.cuda.graph, which collects garbage each time
                graph.capture_begin()
                self.outs.append(module.combine(module.dispatch(step.x, step.ids, step.weights), self.base))
                graph.capture_end()

    def send(self, delay: int) -> None:
        """Of the layer after the last one."""
        with on(self.stream):
            if delay:
                torch.cuda._sleep(delay)
            self.graphs[self.sent % LAYERS].replay()
        self.sent += 1

    @property
    def answers(self) -> list[Tensor]:
        return self.outs[: self.sent]


# A path serves one item after the other on the current stream; returns how many dispatches that answered.
Serve = Callable[[], int]


def serve_all(serve: Serve, count: int) -> int:
    """How many items it took."""
    left, items, until = count, 0, time.monotonic() + SECONDS
    while left > 0:
        answered = serve()
        left, items = left - answered, items + (answered > 0)
        if time.monotonic() > until:
            raise TimeoutError(f"{left} of {count} dispatches were not answered within {SECONDS} s")
    return items


def measured(
    serve: Serve,
    send: Callable[[int], None],
    count: int,
    watch: Callable[[], None],
    clock: Clock,
    stream: torch.cuda.Stream,
    trials: int,
    ahead: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Medians of both ways of timing. `ahead` is launched before the dispatches come."""
    first, answered, ready, items = [], [], [], 0
    for _ in range(trials + WARM):
        clock.clear()
        watch()
        with on(stream):
            if ahead is not None:
                ahead()
            send(DELAY_CYCLES)
            serve_all(serve, count)
            clock.stamp(ANSWERED)
        for found, value in zip((first, answered), clock.read(), strict=True):
            found.append(value)
    for _ in range(trials + WARM):
        send(0)
        time.sleep(0.003)  # all of them are there
        with on(stream):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            if ahead is not None:
                ahead()
            items = serve_all(serve, count)
            end.record()
        synchronize()
        ready.append(begin.elapsed_time(end) * 1e3)
    return {
        FIRST: statistics.median(first[WARM:]),
        "arrival_to_reply_us": statistics.median(answered[WARM:]),
        "ready_us": statistics.median(ready[WARM:]),
        "items": items,
    }


def gemm_microseconds(experts: Experts, rows: Tensor, offsets: Tensor) -> float:
    """Of an item's two grouped GEMMs, captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(FFN)
    with torch.cuda.device(FFN):
        experts.gemms(rows, offsets)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            experts.gemms(rows, offsets)
        times = []
        for _ in range(7):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.clock = args, Clock()
        self.experts = Experts(args.experts, self.clock)
        self.streams = [torch.cuda.Stream(ATTENTION) for _ in range(max(args.ranks))]
        self.stream = torch.cuda.Stream(FFN)
        self.rows: list[dict[str, Any]] = []

    def open(self, tokens: int, ranks: int) -> list[afd_ops.Window]:
        return afd_ops.open_local(
            afd_ops.Topology(ranks, 1, self.args.experts),
            devices=[ATTENTION] * ranks + [FFN],
            hidden=HIDDEN,
            topk=TOPK,
            tokens=tokens,
            depth=1,
            layers=LAYERS,
            rows=TOPK * max(tokens, 128 * ranks),
            deadline=SECONDS,
            poll_interval=1.0,
        )

    def watcher(self, ffn: afd_ops.Window, regions: int = 1) -> Callable[[], None]:
        """Of the flags of the first regions, which have a slot each."""
        address = _C.addresses(ffn.id)["window"] + ffn.geometry.layout["flags"]
        flags = device_memory(address, regions * _C.WORD_STRIDE, FFN).view(torch.int32).view(regions, -1)
        return lambda: self.clock.watch(flags, _C.READY)

    def add(self, path: str, tokens: int, ranks: int, error: float, **figures: Any) -> None:
        row = {
            "path": path, "tokens": tokens, "hidden": HIDDEN, "dtype": "bfloat16", "topk": TOPK, "capacity": tokens,
            "period_us": None, "drained_us": figures["arrival_to_reply_us"], "error": error, "ranks": ranks,
            "experts": self.args.experts, **figures,
        }  # fmt: skip
        self.rows.append(row)
        print("  ", {name: value for name, value in row.items() if name not in ("hidden", "dtype")}, flush=True)

    def attention(self, windows: list[afd_ops.Window], tokens: int) -> list[Attention]:
        steps = [Step(tokens, self.args.experts, seed) for seed in range(len(windows))]
        return [Attention(*parts) for parts in zip(windows, self.streams, steps, strict=False)]

    def check(self, attention: list[Attention]) -> float:
        for rank in attention:
            if any(out.isnan().any() for out in rank.answers):
                raise AssertionError("an answer holds NaN")
        error = max(self.experts.error(rank.step, out) for rank in attention for out in rank.answers)
        if error > 0.02:
            raise AssertionError(f"answers differ from float32 by {error}")
        return error

    def ours(self, path: str, experts: afd_ops.Experts, tokens: int, ranks: int, linger: float = 0.0) -> None:
        *attention_windows, ffn = windows = self.open(tokens, ranks)
        attention = self.attention(attention_windows, tokens)
        server = afd_ops.ExpertServer(ffn, experts, linger=linger)
        watch = self.watcher(ffn, ranks if linger > 0 else 1)

        def send(delay: int) -> None:
            for rank in attention:
                rank.send(delay)

        send(0)
        with on(self.stream):
            serve_all(server.step, ranks)
        synchronize()
        error = self.check(attention)
        figures = measured(server.step, send, ranks, watch, self.clock, self.stream, self.args.trials)
        error = max(error, self.check(attention))
        offsets = server.inputs.offsets
        live, hit = int(offsets[-1]), int((offsets.diff(prepend=offsets.new_zeros(1)) > 0).sum())
        gemm = gemm_microseconds(self.experts, server.inputs.rows[:live], offsets)
        share = gemm * figures["items"] / figures["ready_us"]
        found = server.stats()
        if linger > 0 and found["batch_sizes"].keys() != {ranks}:
            raise AssertionError(f"items of {found['batch_sizes']} slots, expected {ranks} in each")
        self.add(
            path, tokens, ranks, error, **figures, gemm_us=gemm, gemm_share=share, coverage=found["coverage"],
            batch_sizes=found["batch_sizes"], experts_hit=hit,
        )  # fmt: skip
        for window in windows:
            window.check()
            window.close()

    def resident(self, tokens: int) -> None:
        *attention_windows, ffn = windows = self.open(tokens, 1)
        attention, port, bucket = self.attention(attention_windows, tokens), ffn.port(), TOPK * tokens
        inputs = afd_ops.ItemBuffers.create(bucket, HIDDEN, self.args.experts, torch.bfloat16, FFN)

        def loop() -> None:
            item = torch.ops.afd.arrive(port, ffn.id)
            torch.ops.afd.receive_into(item, inputs.rows, inputs.scales, inputs.offsets, port, ffn.id)
            out = self.experts(inputs.rows, inputs.scales, inputs.offsets, 0)
            torch.ops.afd.reply(out, item, port, ffn.id)

        def send(delay: int) -> None:
            for rank in attention:
                rank.send(delay)

        send(0)
        time.sleep(0.01)
        with on(self.stream):
            loop()
        synchronize()
        error = self.check(attention)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(FFN), torch.cuda.graph(graph, stream=self.stream):
            loop()
        figures = measured(
            lambda: 1, send, 1, self.watcher(ffn), self.clock, self.stream, self.args.trials, graph.replay
        )
        error = max(error, self.check(attention))
        self.add("resident", tokens, 1, error, **figures)
        for window in windows:
            window.check()
            window.close()

    def stock(self, tokens: int, ranks: int) -> None:
        """The FFN side of a transport of stock ops; whole-batch slots, a field at a time, the flag last."""
        experts, count = self.args.experts, tokens * TOPK
        ints = dict(dtype=torch.int32, device=FFN)
        steps = [Step(tokens, experts, seed) for seed in range(ranks)]
        slots, sends = [], []
        for step in steps:
            choices, order = torch.sort(step.ids.reshape(-1), stable=True)
            header = torch.zeros(7 + experts, dtype=torch.int32, device=ATTENTION)
            header[5], header[7:] = count, torch.bincount(choices, minlength=experts)
            fields = {
                "header": header,
                "index": torch.div(order, TOPK, rounding_mode="floor").int(),
                "weight": step.weights.reshape(-1)[order],
                "x": step.x,
            }
            slot = {name: torch.zeros_like(field, device=FFN) for name, field in fields.items()}
            slot["flag"] = torch.zeros(1, **ints)
            answer = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=ATTENTION)
            slots.append((slot, answer, torch.zeros(1, dtype=torch.int32, device=ATTENTION)))
            sends.append((fields, torch.zeros(1, dtype=torch.int32, device=ATTENTION)))
        flags = [torch.zeros(1, dtype=torch.int32).pin_memory() for _ in steps]
        header_here = torch.zeros(7 + experts, dtype=torch.int32).pin_memory()
        seen, one = [0] * ranks, torch.ones(1, **ints)
        polling, nothing = torch.cuda.Stream(FFN), torch.empty(0, device=FFN)

        def send(delay: int) -> None:
            for stream, (fields, sequence), (slot, _, _) in zip(self.streams, sends, slots, strict=False):
                with torch.cuda.device(ATTENTION), torch.cuda.stream(stream):
                    if delay:
                        torch.cuda._sleep(delay)
                    for name, field in fields.items():
                        slot[name].copy_(field, non_blocking=True)
                    sequence.add_(1)
                    slot["flag"].copy_(sequence, non_blocking=True)

        def serve() -> int:
            for rank, (slot, answer, marker) in enumerate(slots):
                with torch.cuda.stream(polling):
                    flags[rank].copy_(slot["flag"])
                if int(flags[rank]) == seen[rank]:
                    continue
                seen[rank] = int(flags[rank])
                with torch.cuda.stream(polling):
                    header_here.copy_(slot["header"])
                n = header_here.tolist()[5]
                index = slot["index"][:n].long()
                offsets = slot["header"][7:].cumsum(0).int()
                out = self.experts(slot["x"].index_select(0, index), nothing, offsets, 0)
                total = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=FFN)
                total.index_add_(0, index, out * slot["weight"][:n].unsqueeze(1).to(out.dtype))
                answer.copy_(total, non_blocking=True)
                marker.copy_(one, non_blocking=True)
                return 1
            return 0

        def error() -> float:
            return max(self.experts.error(step, answer) for step, (_, answer, _) in zip(steps, slots, strict=True))

        send(0)
        with on(self.stream):
            serve_all(serve, ranks)
        synchronize()
        before = error()
        # The flag holds a sequence: from what it is now, one more.
        figures = measured(
            serve,
            send,
            ranks,
            lambda: self.clock.watch(slots[0][0]["flag"], seen[0] + 1),
            self.clock,
            self.stream,
            self.args.trials,
        )
        self.add("stock", tokens, ranks, max(before, error()), **figures)

    def run(self) -> dict[str, Any]:
        trace = self.plan()
        captured = self.captured
        for tokens in self.args.tokens:
            for ranks in self.args.ranks:
                self.ours("ours", captured, tokens, ranks)
                if ranks == 1:
                    self.ours("eager", self.experts, tokens, ranks)
                    if tokens <= 128:
                        self.resident(tokens)
                elif tokens <= 128:
                    self.ours("together", captured, tokens, ranks, linger=0.1)
                self.stock(tokens, ranks)
        return trace

    def plan(self) -> dict[str, Any]:
        """The ladders of the seeded trace, and what capturing the one of a single FFN rank takes."""
        sent, fits = [*ffn_trace.DECODE] * 3 + ffn_trace.prefill_sizes(), []
        for ffn_size in (1, 2, 4):
            topology = afd_ops.Topology(ffn_trace.ATTENTION, ffn_size, ffn_trace.EXPERTS)
            for rank, share in enumerate(ffn_trace.shares(ffn_size, seed=0)):
                rows = afd_ops.expected_rows(topology, rank, topk=TOPK, tokens=sent, share=share)
                buckets = afd_ops.ladder(rows, ffn_trace.CAPACITY * TOPK)
                found = fit(buckets, ffn_trace.item_rows(ffn_size, rank, items=2000, seed=0))
                fits.append({"ffn_size": ffn_size, "rank": rank, "buckets": len(buckets), **vars(found)})
                if ffn_size == 1:
                    ladder = buckets
        self.captured = afd_ops.CapturedExperts(
            self.experts,
            rows=ffn_trace.CAPACITY * TOPK,
            hidden=HIDDEN,
            owned=self.args.experts,
            dtype=torch.bfloat16,
            device=FFN,
        )
        self.captured.capture(range(LAYERS), ladder)
        taken = self.captured.stats()
        del taken["uses"], taken["padding"]
        print(f"captured for {LAYERS} layers:", taken, flush=True)
        return {"fits": fits, "captured_layers": LAYERS, **taken}


def one_run(args: argparse.Namespace) -> dict[str, Any]:
    faulthandler.dump_traceback_later(args.limit, exit=True)
    begun = time.monotonic()
    with torch.inference_mode():
        bench = Bench(args)
        trace = bench.run()
    return {"seconds": round(time.monotonic() - begun, 1), "trace": trace, "rows": bench.rows}


def in_a_fresh_process(args: argparse.Namespace) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(one_run, args).result()


def medians(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the runs, of each figure the median (of an even number the larger one), and beside it all of them."""
    rows = []
    for same in zip(*(run["rows"] for run in runs), strict=True):
        of_runs = {name: [row[name] for row in same] for name in FIGURES if name in same[0]}
        found = {name: statistics.median_high(figures) for name, figures in of_runs.items()}
        rows.append(same[0] | found | {"error": max(row["error"] for row in same), "of_runs": of_runs})
    return rows


def summary(trace: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What has a target: the first kernel of one rank at its worst decode size, four ranks' item over one's, the
    worst FFN rank's coverage and padding."""
    ours = {(row["ranks"], row["tokens"]): row for row in rows if row["path"] == "ours"}
    decode = [row[FIRST] for (ranks, tokens), row in ours.items() if ranks == 1 and tokens <= 128]
    four, one = (ours.get((ranks, 32), {}).get("ready_us") for ranks in (4, 1))
    return {
        FIRST: max(decode, default=None),
        "graph_coverage": min(f["coverage"] for f in trace["fits"]),
        "padding_share": max(f["padding"] for f in trace["fits"]),
        "batch4_over_one": four / one if four and one else None,
        "trace": trace,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| path | ranks | tokens | to first kernel us | runs | to reply us | ready us | items | GEMM share |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        times = row["of_runs"][FIRST]
        cells = [row["path"], row["ranks"], row["tokens"], f"{row[FIRST]:.1f}", f"{min(times):.1f} to {max(times):.1f}"]
        cells += [f"{row[name]:.0f}" for name in ("arrival_to_reply_us", "ready_us")] + [row["items"]]
        cells.append(f"{row['gemm_share']:.0%}" if "gemm_share" in row else "")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--tokens", type=numbers, default=[1, 32, 128, 1024, 4096])
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=1, help="runs, each in a fresh process")
    parser.add_argument(
        "--limit", type=float, default=300, help="seconds after which a run gives up, saying where it was"
    )
    machine = f"{torch.cuda.device_count()}xH200"
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"ffn_server.{machine}.json")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error(f"--repeat is {args.repeat}, expected at least 1")
    runs = []
    for _ in range(args.repeat):
        runs.append(in_a_fresh_process(args))
        rows = medians(runs)
        figures, seconds = summary(runs[0]["trace"], rows), [run["seconds"] for run in runs]
        common.write(args.out, rows, versions={"cuda": str(torch.version.cuda)}, summary=figures, seconds=seconds)
    print(table(rows))
    print({name: value for name, value in figures.items() if name != "trace"}, seconds)


if __name__ == "__main__":
    main()
