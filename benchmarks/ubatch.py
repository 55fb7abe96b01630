"""A step cut into 1, 2 and 3 ubatches, between two GPUs: what of the round trips hides behind attention, and what not.

    python benchmarks/ubatch.py [--decode 32,128,512] [--prefill 2048,8192] [--trace DIR] [--out FILE]

One attention and one FFN rank, a process and a GPU each, over an NVSHMEM window; layers of DeepSeek-V4-Flash's shape,
bf16, all kinds of attention, no head. Attention side: torch's own kernels, not Inductor's, in the order of
examples/deepseek_v4/ubatches.py, captured as one CUDA graph per case and replayed. FFN side: an ExpertServer whose
experts are not captured. It holds 32 experts a layer, an eighth of Flash's, and gets every choice of every token: the
load of one of eight FFN ranks that serve eight attention ranks. Decode: requests at position --context. Prefill:
prompts of 256 tokens.

Per case and number of ubatches, times of a whole step, each the median of free-running trials:

    period_us       the step
    attention_us    the same with nothing sent: attention, gate, shared expert of all ubatches in all layers
    round_trips_us  dispatch, experts, combine of all ubatches in all layers, one after the other, nothing between
    hidden_share    1 - (period - attention) / round trips: with 1 ubatch, what the shared expert hides
    expected_us     afd_ops.split_step of the two
    chosen          afd_ops.choose_ubatches, from the undivided period and the two times of each split
    cosine          of the last streams with those of the undivided step, mean over tokens

--trace saves Chrome traces of one step, undivided and in halves, of the case that gains most by halves, and draws them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import stack
import timeline
import torch
from stack import FLASH, Config, DeepseekV4, RemoteExperts, Ubatch, interleave
from torch import Tensor

import afd_ops
from afd_ops.heap.nvshmem import NvshmemHeap

UBATCHES = (1, 2, 3)
TRACED = (1, 2)
PROMPT = 256  # tokens
WARM, TRIALS = 2, 5
TRIAL_US = 40_000.0  # steps of a trial: as many as take about so long, within
STEPS = (2, 20)
WAIT = 60.0  # seconds, for a reply or a rank
LIMIT = 240.0  # seconds, for everything
# The targets of this benchmark.
HIDDEN, LOSS = 0.8, 0.02


class Case(NamedTuple):
    kind: str
    tokens: int
    rows: int
    start: int

    @property
    def steps(self) -> int:
        """New tokens of each row."""
        return self.tokens // self.rows

    def cut(self, ubatches: int, vocabulary: int) -> list[Ubatch]:
        tokens = torch.randint(vocabulary, (self.rows, self.steps), generator=torch.Generator().manual_seed(0)).cuda()
        start = torch.full((self.rows,), self.start, device="cuda")
        slices = afd_ops.split_requests([self.steps] * self.rows, ubatches, alignment=1)
        if slices is None:
            raise ValueError(f"{self.rows} requests cannot be cut into {ubatches} ubatches")
        rows = [slice(s.start // self.steps, s.stop // self.steps) for s in slices]
        return [Ubatch(tokens[r], start[r], r.start) for r in rows]


def cases(args: argparse.Namespace) -> list[Case]:
    decode = [Case("decode", tokens, tokens, args.context) for tokens in args.decode]
    return decode + [Case("prefill", tokens, tokens // PROMPT, 0) for tokens in args.prefill]


# --- the attention rank ---------------------------------------------------------------------------


def model_for(config: Config, case: Case) -> DeepseekV4:
    return stack.built(config, RemoteExperts, case.rows, case.start + case.steps, max(UBATCHES))


def stepping(model: DeepseekV4, ubatches: Sequence[Ubatch]) -> Callable[[], list[Tensor]]:
    return lambda: interleave(model.layers, ubatches, [model.streams(u.tokens) for u in ubatches])


def sending(model: DeepseekV4, ubatches: Sequence[Ubatch]) -> Callable[[], None]:
    """Every round trip of a step alone, with rows and routing made up."""
    config = model.config
    inputs = []
    for ubatch in ubatches:
        count = ubatch.tokens.numel()
        x = torch.randn(count, config.hidden_size, dtype=torch.bfloat16, device="cuda")
        ids = torch.rand(count, config.n_routed_experts, device="cuda").topk(config.num_experts_per_tok).indices
        inputs.append((x, ids, torch.rand(ids.shape, device="cuda"), torch.zeros_like(x)))

    def work() -> None:
        for layer in model.layers:
            for stage, (x, ids, weights, base) in enumerate(inputs):
                experts: Any = layer.ffn.experts[stage]
                experts.combine(experts.dispatch(x, ids, weights), base)

    return work


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph, and what `work` returned: after a replay, its results."""
    for _ in range(WARM):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


def microseconds(graph: torch.cuda.CUDAGraph) -> list[float]:
    """Of one replay, in each trial."""

    def one_of(count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / count

    one_of(1)
    count = max(STEPS[0], min(STEPS[1], round(TRIAL_US / one_of(1))))
    return [one_of(count) for _ in range(TRIALS)]


def timed_case(model: DeepseekV4, window: afd_ops.Window, case: Case) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    undivided = torch.empty(0)
    for count in UBATCHES:
        ubatches = case.cut(count, model.config.vocab_size)
        afd_ops.attach(model, window)
        graph, out = captured(stepping(model, ubatches))
        period = microseconds(graph)
        window.check()
        streams = torch.cat([streams.flatten(0, 1).flatten(1) for streams in out])
        undivided = streams if count == 1 else undivided
        cosine = torch.nn.functional.cosine_similarity(streams.float(), undivided.float(), dim=-1).mean().item()
        del graph, out, streams
        trips, _ = captured(sending(model, ubatches))
        round_trips = microseconds(trips)
        window.check()
        del trips
        afd_ops.attach(model, None)
        graph, _ = captured(stepping(model, ubatches))
        attention = microseconds(graph)
        del graph, _
        torch.cuda.empty_cache()
        rows.append(
            {
                "ubatches": count,
                "period_us": statistics.median(period),
                "attention_us": statistics.median(attention),
                "round_trips_us": statistics.median(round_trips),
                "trials_us": [round(t, 1) for t in period],
                "cosine": cosine,
            }
        )
    return judged(rows, model.config.layers)


def judged(rows: list[dict[str, Any]], layers: int) -> list[dict[str, Any]]:
    """The rows of a case, undivided first, with what follows from their times."""
    undivided = rows[0]["period_us"]
    splits = {row["ubatches"]: (row["attention_us"], row["round_trips_us"]) for row in rows[1:]}
    chosen = afd_ops.choose_ubatches(undivided, splits, layers)
    for row in rows:
        attention, trips = row["attention_us"], row["round_trips_us"]
        row["hidden_share"] = 1 - (row["period_us"] - attention) / trips
        row["expected_us"] = afd_ops.split_step(attention, trips, row["ubatches"] * layers)
        row["against_undivided"] = row["period_us"] / undivided - 1
        row["chosen"] = chosen
    return rows


@torch.no_grad()
def timed(window: afd_ops.Window, config: Config, todo: Sequence[Case]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case in todo:
        began = time.perf_counter()
        model = model_for(config, case)
        found = timed_case(model, window, case)
        del model
        for row in found:
            print(line(case._asdict() | row), flush=True)
        print(f"  {time.perf_counter() - began:.1f} s", flush=True)
        rows += [{"path": f"ubatches={row['ubatches']}", **case._asdict(), **row} for row in found]
    return rows


def line(row: dict[str, Any]) -> str:
    chosen = "*" if row["chosen"] == row["ubatches"] else " "
    return (
        f"{row['kind']:8s} T={row['tokens']:5d}  ubatches {row['ubatches']}{chosen}"
        f"  step {row['period_us']:9.1f} us ({row['against_undivided']:+6.1%})  expected {row['expected_us']:9.1f}"
        f"  attention {row['attention_us']:9.1f}  round trips {row['round_trips_us']:9.1f}"
        f"  hidden {row['hidden_share']:6.1%}  cosine {row['cosine']:.4f}"
    )


@torch.no_grad()
def traced(
    window: afd_ops.Window, barrier: Callable[[], object], config: Config, todo: Sequence[Case], folder: Path
) -> None:
    """The last of the cases."""
    case = todo[-1]
    model = model_for(config, case)
    afd_ops.attach(model, window)
    for count in TRACED:
        graph, _ = captured(stepping(model, case.cut(count, config.vocab_size)))
        stack.profiled(barrier, graph.replay, folder / f"attention.{count}.json")
        window.check()


# --- the FFN rank ---------------------------------------------------------------------------------


def answer(server: afd_ops.ExpertServer, dispatches: int) -> None:
    answered, deadline = 0, time.monotonic() + WAIT
    while answered < dispatches:
        answered += server.step()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{answered} of {dispatches} dispatches came within {WAIT} s")


@torch.inference_mode()
def traced_answers(server: afd_ops.ExpertServer, barrier: Callable[[], object], layers: int, folder: Path) -> None:
    """Exactly what `traced` sends."""
    for count in TRACED:
        answer(server, WARM * count * layers)
        torch.cuda.synchronize()
        work = lambda dispatches=count * layers: answer(server, dispatches)  # noqa: E731
        stack.profiled(barrier, work, folder / f"ffn.{count}.json")


# --- both -----------------------------------------------------------------------------------------


def divided(rank: int, address: str, case: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore", "RemoteExperts of layer")  # they are detached on purpose
    torch.cuda.set_device(rank)
    args: argparse.Namespace = case["args"]
    todo = cases(args)
    config = dataclasses.replace(stack.shaped(args.layers), n_routed_experts=args.experts)
    bootstrap = afd_ops.Bootstrap.connect(address, rank, 2, timeout=WAIT)
    heap = NvshmemHeap(bootstrap, f"cuda:{rank}")
    experts = stack.routed(config) if rank else None
    capacity = max(case.tokens for case in todo)

    def opened() -> afd_ops.Window:
        return afd_ops.Window(
            afd_ops.Topology(1, 1, config.n_routed_experts), bootstrap, heap=heap, hidden=config.hidden_size,
            topk=config.num_experts_per_tok, tokens=capacity, dtype=torch.bfloat16, stages=max(UBATCHES), depth=1,
            deadline=WAIT,
        )  # fmt: skip

    with opened() as window:
        if experts is None:
            rows = timed(window, config, todo)
            torch.save(rows, Path(case["scratch"]) / "divided.figures")
        else:
            afd_ops.ExpertServer(window, experts).run()  # until the attention rank closes its window
    if args.trace:
        with opened() as window:
            if experts is None:
                halves = [row["against_undivided"] for row in rows if row["ubatches"] == TRACED[-1]]
                most = halves.index(min(halves))
                traced(window, bootstrap.barrier, config, todo[: most + 1], args.trace)
            else:
                traced_answers(afd_ops.ExpertServer(window, experts), bootstrap.barrier, config.layers, args.trace)
            bootstrap.barrier()
    heap.finalize()


def drawn(folder: Path, title: str, share: float) -> str:
    """The beginning of the steps, a share of the longest one, one below the other, all from 0."""
    steps = {n: [timeline.read(folder / f"{role}.{n}.json") for role in ("attention", "ffn")] for n in TRACED}
    spans = {n: timeline.span(attention) for n, (attention, _) in steps.items()}
    order = sorted(TRACED, key=lambda n: spans[n][0] - spans[n][1])
    lanes = {}
    for n in order:
        shift = spans[order[0]][0] - spans[n][0]
        for role, kernels in zip(("attention", "ffn"), steps[n], strict=True):
            lanes[f"{role}, {n}"] = [kernel._replace(begin=kernel.begin + shift) for kernel in kernels]
    begin, end = spans[order[0]]
    first = f"attention, {order[0]}"  # gives the picture its length
    lanes[first] = [kernel for kernel in lanes[first] if kernel.begin < begin + share * (end - begin)]
    return timeline.render(lanes, title)


def targets(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The least share hidden where attention is the longer side, and what the worst choice loses."""
    split = [r["hidden_share"] for r in rows if r["ubatches"] > 1 and r["attention_us"] >= r["round_trips_us"]]
    losses = [r["against_undivided"] for r in rows if r["ubatches"] == r["chosen"]]
    return {
        "hidden_where_attention_is_longer": min(split, default=None),
        "hidden_target": HIDDEN,
        "worst_loss_of_the_choice": max(losses),
        "loss_target": LOSS,
    }


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32, help="of a layer, all on the FFN rank; 1.6 GB per 32")
    parser.add_argument("--decode", type=numbers, default="32,64,128,256,512", help="batches")
    parser.add_argument("--prefill", type=numbers, default="2048,4096,8192", help=f"tokens, in prompts of {PROMPT}")
    parser.add_argument("--context", type=int, default=4096, help="position of the decoded tokens")
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces and a picture")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ubatch.2xH200.json")
    args = parser.parse_args()
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "4G")  # for heaps that cannot grow: a window's memory stays taken
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        failed = stack.ran(divided, 2, {"args": args, "scratch": scratch}, LIMIT)
        if failed:
            print(failed["failed"])
            return 1
        rows = torch.load(Path(scratch) / "divided.figures")
    sizes: dict[str, Any] = {
        "layers": args.layers, "experts": args.experts, "hidden": FLASH.hidden_size, "dtype": "bfloat16",
        "topk": FLASH.num_experts_per_tok, "capacity": max(row["tokens"] for row in rows), "drained_us": None,
        "error": None,
    }  # fmt: skip
    reached = targets(rows)
    print(reached)
    rows = [{**sizes, **row} for row in rows]
    common.write(args.out, rows, versions={"cuda": str(torch.version.cuda)}, trials=TRIALS, targets=reached)
    if args.trace:
        halves = [row for row in rows if row["ubatches"] == TRACED[-1]]
        best = min(halves, key=lambda row: row["against_undivided"])
        title = f"the first quarter of a step, {best['kind']} of {best['tokens']} tokens: undivided, and in halves"
        (args.trace / "ubatch.svg").write_text(drawn(args.trace, title, 0.25))
    return 0


if __name__ == "__main__":
    sys.exit(main())
