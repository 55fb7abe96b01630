"""Decoding with layers of DeepSeek-V4's shape: split between two GPUs, and whole on one.

    python benchmarks/deepseek_v4.py [--layers 4] [--batches 1,32,128] [--context 1024] [--trace DIR] [--out FILE]

Split: one attention and one FFN rank, a process and a GPU each, over an NVSHMEM window; the attention side is one
graph compiled by Inductor and replayed by cudagraph trees, the FFN side is an ExpertServer. Unsplit: the same modules
with the experts in the same graph. Weights are random, bf16, the same in both. `period_us` is a step of a free-running
decode loop, median of the trials; `combine_share` the part of one profiled step that the attention rank's combine
takes, which is waiting but for one pass over the rows; `cosine` compares the first step's logits, split and unsplit.

--trace saves both ranks' Chrome traces of one step, and draws them (timeline.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
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


def measure(loop: Loop, barrier: Callable[[], object], case: dict[str, Any], name: str) -> dict[str, Any]:
    """Warm-up, timing and one profiled step, on the rank that decodes; `serve` below is the FFN rank's half."""
    began = time.perf_counter()
    logits = loop().float().cpu()
    first = time.perf_counter() - began
    if not logits.isfinite().all():
        raise RuntimeError("the first step's logits are not finite")
    torch.save(logits, Path(case["scratch"]) / f"{name}.pt")
    for _ in range(WARM - 1):
        loop()
    torch.cuda.synchronize()
    barrier()
    times = [loop.microseconds() for _ in range(TRIALS)]
    barrier()
    path = Path(case["trace"]) / f"{name}.{case['batch']}.json"
    stack.profiled(barrier, loop, path)
    kernels = timeline.read(path)
    begin, end = timeline.span(kernels)
    return {
        "period_us": statistics.median(times),
        "trials_us": [round(t, 1) for t in times],
        "first_step_s": round(first, 1),
        "profiled_us": end - begin,
        "combine_share": timeline.share(kernels, "combine_kernel|await_kernel"),
        "kernels": len(kernels),
        "replays_per_step": timeline.launches(path),
        **graphs(),
    }


def serve(server: afd_ops.ExpertServer, barrier: Callable[[], object], case: dict[str, Any], layers: int) -> None:
    """Answers exactly what `measure` sends in each of its phases."""

    def steps(count: int, seconds: float = WAIT) -> None:
        answered, deadline = 0, time.monotonic() + seconds
        while answered < count * layers:
            answered += server.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{answered} of {count * layers} dispatches came within {seconds} s")

    with torch.inference_mode():
        steps(WARM, COMPILE)
        torch.cuda.synchronize()
        barrier()
        steps(TRIALS * STEPS)
        barrier()
        stack.profiled(barrier, lambda: steps(1), Path(case["trace"]) / f"ffn.{case['batch']}.json")


def split(rank: int, address: str, case: dict[str, Any]) -> None:
    torch.cuda.set_device(rank)
    config = stack.shaped(case["layers"])
    bootstrap = afd_ops.Bootstrap.connect(address, rank, 2, timeout=COMPILE)
    heap = NvshmemHeap(bootstrap, f"cuda:{rank}")
    with afd_ops.Window(
        afd_ops.Topology(1, 1, config.n_routed_experts), bootstrap, heap=heap, hidden=config.hidden_size,
        topk=config.num_experts_per_tok, tokens=case["batch"], dtype=torch.bfloat16, deadline=WAIT,
    ) as window:  # fmt: skip
        if window.role == "attention":
            model = stack.built(config, RemoteExperts, case["batch"], case["context"] + 1024)
            afd_ops.attach(model, window)
            bootstrap.barrier()
            with torch.no_grad():
                figures = measure(Loop(model, case), bootstrap.barrier, case, "attention")
            window.check()
            torch.save(figures, Path(case["scratch"]) / "split.figures")
        else:
            server = afd_ops.ExpertServer(window, stack.routed(config))
            bootstrap.barrier()
            serve(server, bootstrap.barrier, case, config.layers)
        bootstrap.barrier()
    heap.finalize()


def unsplit(rank: int, address: str, case: dict[str, Any]) -> None:
    config = stack.shaped(case["layers"])
    experts = stack.routed(config)
    model = stack.built(
        config,
        lambda layer, _: LocalExperts(layer, experts, config.n_routed_experts),
        case["batch"],
        case["context"] + 1024,
    )
    with torch.no_grad():
        figures = measure(Loop(model, case), lambda: None, case, "unsplit")
    torch.save(figures, Path(case["scratch"]) / "unsplit.figures")


def cosine(scratch: Path) -> float | None:
    paths = [scratch / "attention.pt", scratch / "unsplit.pt"]
    if not all(path.exists() for path in paths):
        return None
    a, b = (torch.load(path).flatten(0, 1) for path in paths)
    return torch.nn.functional.cosine_similarity(a, b, dim=-1).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="12.9 GB of experts each")
    parser.add_argument("--batches", default="1,32,128")
    parser.add_argument("--context", type=int, default=1024, help="position at which decoding starts")
    parser.add_argument("--paths", default="split,unsplit")
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
            for body, processes in ((split, 2), (unsplit, 1)):
                if body.__name__ not in args.paths:
                    continue
                figures = stack.ran(body, processes, case, COMPILE + 4 * WAIT)
                rows.append({"path": body.__name__, **sizes, **figures})
                print(rows[-1], flush=True)
            rows[-1]["cosine"] = cosine(Path(scratch))
            lanes = [trace / f"{name}.{batch}.json" for name in ("attention", "ffn")]
            if args.trace and all(path.exists() for path in lanes):
                title = f"one decode step of {args.layers} layers, batch {batch}"
                picture = timeline.render({path.name.split(".")[0]: timeline.read(path) for path in lanes}, title)
                (trace / f"step.{batch}.svg").write_text(picture)
        common.write(args.out, rows, versions={"cuda": str(torch.version.cuda)}, steps=STEPS, trials=TRIALS)


if __name__ == "__main__":
    main()
