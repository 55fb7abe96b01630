"""Decoding with layers of DeepSeek-V4's shape: split between two GPUs, and whole on one.

    python benchmarks/deepseek_v4.py [--layers 4] [--batches 1,32,128] [--context 1024] [--trace DIR] [--out FILE]

Split: one attention and one FFN rank, a process and a GPU each, over an NVSHMEM window; the attention side is one
graph compiled by Inductor and replayed by cudagraph trees, the FFN side is an ExpertServer. Unsplit: the same modules
with the experts in the same graph, in a third process on the attention rank's GPU; both paths compile at the same time,
and run one after the other. The FFN side calls its experts eagerly. Weights are random, bf16, the same in both.
`period_us` is a step of a free-running decode loop, median of the trials. Of one step under the profiler, which takes
longer (`profiled_us`): `combine_share`, the part that the attention rank's combine takes, which is waiting but for one
pass over the rows; `behind_dispatch`, the kernels of each layer between dispatch and combine. `cosine` compares the
first step's logits, split and unsplit.

--trace saves both ranks' Chrome traces of one step, and draws them (timeline.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import stack
import timeline
import torch
from stack import FLASH, DeepseekV4, LocalExperts, RemoteExperts
from torch import Tensor

import afd_ops
from afd_ops.heap.nvshmem import NvshmemHeap

PATHS = {"split": "attention", "unsplit": "unsplit"}  # what the rank that decodes names its files
WAITING = "combine_kernel|await_kernel"
WARM, STEPS, TRIALS = 5, 20, 5
WAIT = 120.0  # seconds, for a reply or a rank
COMPILE = 480.0  # seconds, for one measured case


class Loop:
    """A decode loop: the step compiled, its inputs on the device, positions counted there."""

    def __init__(self, model: DeepseekV4, case: dict[str, Any]) -> None:
        # Else Inductor may compute in front of dispatch what is to overlap with the experts.
        options = {"triton.cudagraphs": True, "reorder_for_peak_memory": False}
        self.step = torch.compile(model, fullgraph=True, dynamic=False, options=options)
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.vocab_size
        self.tokens = torch.randint(0, vocabulary, (case["batch"], 1), generator=generator).cuda()
        self.positions = torch.full((case["batch"],), case["context"], device="cuda")

    def __call__(self) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        logits: Tensor = self.step(self.tokens, self.positions)
        self.positions += 1
        return logits

    def microseconds(self) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(STEPS):
            self()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / STEPS


def graphs() -> dict[str, int]:
    """What Inductor and cudagraph trees counted in this process."""
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    manager: Any = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return {
        "graphs_compiled": counters["stats"]["unique_graphs"],
        "graphs_recorded": manager.new_graph_id().id if manager else 0,  # counts from 0
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
    }


def prepared(loop: Loop, path: Path) -> float:
    """Compiles, warms up and saves the first step's logits; seconds of the first step."""
    began = time.perf_counter()
    logits = loop().float().cpu()
    first = time.perf_counter() - began
    if not logits.isfinite().all():
        raise RuntimeError("the first step's logits are not finite")
    torch.save(logits, path)
    for _ in range(WARM - 1):
        loop()
    torch.cuda.synchronize()
    return first


def measured(loop: Loop, barrier: Callable[[], object], path: Path) -> dict[str, Any]:
    """Timing and one profiled step; `serve` below is the FFN rank's half."""
    times = [loop.microseconds() for _ in range(TRIALS)]
    stack.profiled(barrier, loop, path)
    kernels = timeline.read(path)
    begin, end = timeline.span(kernels)
    return {
        "period_us": statistics.median(times),
        "trials_us": [round(t, 1) for t in times],
        "profiled_us": end - begin,
        "combine_share": timeline.share(kernels, WAITING),
        "behind_dispatch": timeline.between(kernels, "dispatch_kernel", WAITING),
        "kernels": len(kernels),
        "replays_per_step": timeline.launches(path),
        **graphs(),
    }


def serve(server: afd_ops.ExpertServer, layers: int, count: int, seconds: float = WAIT) -> None:
    """Answers exactly `count` steps."""
    answered, deadline = 0, time.monotonic() + seconds
    with torch.inference_mode():
        while answered < count * layers:
            answered += server.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{answered} of {count * layers} dispatches came within {seconds} s")
        torch.cuda.synchronize()


def decode(
    model: DeepseekV4, all_ready: Callable[[], object], pair: Callable[[], object], case: dict[str, Any], name: str
) -> None:
    """A rank that decodes: compiled together with the others, timed when it is its turn."""
    scratch = Path(case["scratch"])
    with torch.no_grad():
        loop = Loop(model, case)
        first = prepared(loop, scratch / f"{name}.pt")
        all_ready()
        if name == "unsplit":
            all_ready()  # the split path was timed meanwhile
        figures = measured(loop, pair, Path(case["trace"]) / f"{name}.{case['batch']}.json")
    torch.save({"first_step_s": round(first, 1), **figures}, scratch / f"{name}.figures")
    if name != "unsplit":
        all_ready()
    all_ready()


def play(rank: int, address: str, case: dict[str, Any]) -> None:
    """0: attention, 1: FFN, 2: both in one."""
    torch.cuda.set_device(rank % 2)
    config, batch, positions = stack.shaped(case["layers"]), case["batch"], case["context"] + 1024
    everyone = afd_ops.Bootstrap.connect(address, rank, 3, name="everyone", timeout=COMPILE)
    all_ready = everyone.barrier
    if rank == 2:
        experts = stack.routed(config)
        whole = stack.built(
            config, lambda layer, _: LocalExperts(layer, experts, config.n_routed_experts), batch, positions
        )
        decode(whole, all_ready, lambda: None, case, "unsplit")
        return
    pair = afd_ops.Bootstrap(everyone.store, rank, 2, timeout=COMPILE)
    heap = NvshmemHeap(pair, f"cuda:{rank}")
    with afd_ops.Window(
        afd_ops.Topology(1, 1, config.n_routed_experts), pair, heap=heap, hidden=config.hidden_size,
        topk=config.num_experts_per_tok, tokens=batch, dtype=torch.bfloat16, deadline=WAIT,
    ) as window:  # fmt: skip
        if window.role == "attention":
            model = stack.built(config, RemoteExperts, batch, positions)
            afd_ops.attach(model, window)
            decode(model, all_ready, pair.barrier, case, "attention")
            window.check()
        else:
            server = afd_ops.ExpertServer(window, stack.routed(config))
            serve(server, config.layers, WARM, COMPILE)
            all_ready()
            serve(server, config.layers, TRIALS * STEPS)
            path = Path(case["trace"]) / f"ffn.{batch}.json"
            stack.profiled(pair.barrier, lambda: serve(server, config.layers, 1), path)
            all_ready()
            all_ready()
        pair.barrier()
    heap.finalize()


def cosine(scratch: Path) -> float:
    a, b = (torch.load(scratch / f"{name}.pt").flatten(0, 1) for name in PATHS.values())
    return torch.nn.functional.cosine_similarity(a, b, dim=-1).mean().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="12.9 GB of experts each")
    parser.add_argument("--batches", default="1,32,128")
    parser.add_argument("--context", type=int, default=1024, help="position at which decoding starts")
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces and pictures of one step")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "deepseek_v4.2xH200.json")
    args = parser.parse_args()
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    rows: list[dict[str, Any]] = []
    sizes: dict[str, Any] = {
        "layers": args.layers, "context": args.context, "hidden": FLASH.hidden_size, "dtype": "bfloat16",
        "topk": FLASH.num_experts_per_tok, "drained_us": None, "error": None,
    }  # fmt: skip
    for batch in map(int, args.batches.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            sizes |= {"tokens": batch, "capacity": batch}
            trace = args.trace or Path(scratch)
            trace.mkdir(parents=True, exist_ok=True)
            case = {
                "layers": args.layers, "batch": batch, "context": args.context, "scratch": scratch, "trace": str(trace),
            }  # fmt: skip
            failed = stack.ran(play, 3, case, COMPILE + 4 * WAIT)
            if failed:
                print(failed["failed"])
                return 1
            for path, name in PATHS.items():
                rows.append({"path": path, **sizes, **torch.load(Path(scratch) / f"{name}.figures")})
            rows[-1]["cosine"] = cosine(Path(scratch))
            print(*rows[-2:], sep="\n", flush=True)
            lanes = [trace / f"{name}.{batch}.json" for name in ("attention", "ffn")]
            if args.trace:
                title = f"one decode step of {args.layers} layers, batch {batch}"
                picture = timeline.render({path.name.split(".")[0]: timeline.read(path) for path in lanes}, title)
                (trace / f"step.{batch}.svg").write_text(picture)
        common.write(args.out, rows, versions={"cuda": str(torch.version.cuda)}, steps=STEPS, trials=TRIALS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
