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
import dataclasses
import hashlib
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import timeline
import torch
import torch.multiprocessing as mp
from torch import Tensor

import afd_ops
from afd_ops.heap.nvshmem import NvshmemHeap

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from deepseek_v4 import FLASH, Config, DeepseekV4, LocalExperts, RemoteExperts

WARM, STEPS, TRIALS = 5, 20, 5
WAIT = 120.0  # seconds, for a reply or a rank
COMPILE = 480.0  # seconds, for one measured case


def shaped(layers: int) -> Config:
    """V4-Flash, cut to its first layers: two sliding, then CSA and HCA in turn; the first three route by token id."""
    return dataclasses.replace(
        FLASH, layer_types=FLASH.layer_types[:layers], mlp_layer_types=FLASH.mlp_layer_types[:layers]
    )


@torch.no_grad()
def fill(name: str, tensor: Tensor) -> Tensor:
    """Random on the device, by name: whoever makes a tensor, it is the same."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    generator = torch.Generator(tensor.device).manual_seed(seed)
    if name.endswith("tid2eid"):
        chances = torch.rand(len(tensor), FLASH.n_routed_experts, device=tensor.device, generator=generator)
        return tensor.copy_(chances.argsort(-1)[:, : tensor.shape[1]])
    if "norm" in name or name.endswith("scale"):
        return tensor.fill_(1)
    return tensor.normal_(0, 0.3 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5, generator=generator)


def routed(config: Config) -> afd_ops.GroupedSwiGLU:
    experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    new: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
    gate_up = [fill(f"{i}.gate_up", torch.empty(experts, 2 * inner, hidden, **new)) for i in range(config.layers)]
    down = [fill(f"{i}.down", torch.empty(experts, hidden, inner, **new)) for i in range(config.layers)]
    return afd_ops.GroupedSwiGLU(gate_up, down, limit=config.swiglu_limit)


def built(config: Config, case: dict[str, Any], make_experts: Any) -> DeepseekV4:
    with torch.device("cuda"):
        model = DeepseekV4(
            config, make_experts, rows=case["batch"], positions=case["context"] + 1024, dtype=torch.bfloat16
        )
    for name, parameter in model.named_parameters():
        if ".ffn.experts." not in name:
            fill(name, parameter)
    return model


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


def profiled(barrier: Callable[[], object], work: Callable[[], object], path: Path) -> None:
    """The trace of one call of `work`; another call before it warms the profiler up."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    saved: list[bool] = []

    def save(profile: Any) -> None:
        profile.export_chrome_trace(str(path))
        saved.append(True)

    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=save) as profile:
        for _ in range(2):
            work()
            torch.cuda.synchronize()
            profile.step()
            barrier()  # neither rank works on before the other traces
    if not saved:
        raise RuntimeError(f"the profiler gave no trace for {path}")


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
    profiled(barrier, loop, path)
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
        profiled(barrier, lambda: steps(1), Path(case["trace"]) / f"ffn.{case['batch']}.json")


def split(rank: int, address: str, case: dict[str, Any]) -> None:
    torch.cuda.set_device(rank)
    config = shaped(case["layers"])
    bootstrap = afd_ops.Bootstrap.connect(address, rank, 2, timeout=COMPILE)
    heap = NvshmemHeap(bootstrap, f"cuda:{rank}")
    with afd_ops.Window(
        afd_ops.Topology(1, 1, config.n_routed_experts), bootstrap, heap=heap, hidden=config.hidden_size,
        topk=config.num_experts_per_tok, tokens=case["batch"], dtype=torch.bfloat16, deadline=WAIT,
    ) as window:  # fmt: skip
        if window.role == "attention":
            model = built(config, case, RemoteExperts)
            afd_ops.attach(model, window)
            bootstrap.barrier()
            with torch.no_grad():
                figures = measure(Loop(model, case), bootstrap.barrier, case, "attention")
            window.check()
            torch.save(figures, Path(case["scratch"]) / "split.figures")
        else:
            server = afd_ops.ExpertServer(window, routed(config))
            bootstrap.barrier()
            serve(server, bootstrap.barrier, case, config.layers)
        bootstrap.barrier()
    heap.finalize()


def unsplit(rank: int, address: str, case: dict[str, Any]) -> None:
    config = shaped(case["layers"])
    experts = routed(config)
    model = built(config, case, lambda layer, _: LocalExperts(layer, experts, config.n_routed_experts))
    with torch.no_grad():
        figures = measure(Loop(model, case), lambda: None, case, "unsplit")
    torch.save(figures, Path(case["scratch"]) / "unsplit.figures")


def ran(body: Any, processes: int, case: dict[str, Any]) -> dict[str, Any]:
    """Figures of fresh processes, or what went wrong."""
    address = f"127.0.0.1:{29733 + os.getpid() % 1000}"
    context = mp.spawn(body, args=(address, case), nprocs=processes, join=False)
    deadline = time.monotonic() + COMPILE + 4 * WAIT
    try:
        while not context.join(timeout=5):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{body.__name__} was not done within {COMPILE + 4 * WAIT} s")
    except Exception:
        for process in context.processes:
            process.kill()
        traceback.print_exc()
        return {"failed": traceback.format_exc(limit=0).strip().splitlines()[-1]}
    found: dict[str, Any] = torch.load(Path(case["scratch"]) / f"{body.__name__}.figures")
    return found


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
                figures = ran(body, processes, case)
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
