"""A step after a pause: whether anything has gone cold, in our kernels, the server's loop or the clocks.

    python benchmarks/idle_gap.py [--gaps 0,1,10,60] [--out FILE]

Attention on cuda:0, captured; FFN on cuda:1, an ExpertServer that polls meanwhile; one process. A step is LAYERS round
trips of TOKENS tokens, hidden 7168, top-8 of 32, the experts change nothing. Per gap: the step in us with the host's
launch and wait, at pace before the gap (median), the first, second .. after it, at pace again; and the SM clock of each
GPU in MHz before the gap, at its end, after the first step, at pace again. Every step's output is compared bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import common
import torch
import workload
from workload import Case

import afd_ops

LAYERS, TOKENS = 32, 64
AT_PACE, WATCHED = 200, 5


def clocks() -> list[int]:
    found = common._nvidia_smi("--query-gpu=clocks.sm", "--format=csv,noheader,nounits")
    return [int(words[0]) for words in found]


def step_us(graph: torch.cuda.CUDAGraph) -> float:
    begin = time.perf_counter()
    graph.replay()
    torch.cuda.current_stream().synchronize()
    return (time.perf_counter() - begin) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaps", default="0,1,10,60", help="seconds")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "idle_gap.2xH200.json")
    args = parser.parse_args()
    case = Case(TOKENS)
    attention, ffn = afd_ops.open_local(
        afd_ops.Topology(1, 1, workload.EXPERTS), devices=["cuda:0", "cuda:1"], deadline=20.0, **case.window
    )
    server = afd_ops.ExpertServer(ffn, lambda rows, *_: rows)
    stream = torch.cuda.Stream("cuda:1")

    def serve() -> None:
        with torch.cuda.stream(stream):
            server.run()

    torch.cuda.set_device(0)
    x, ids, weights = workload.inputs(case)
    zero = torch.zeros_like(x)
    experts = [afd_ops.RemoteExperts(layer).cuda().attach(attention) for layer in range(LAYERS)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for layer in experts:
            y = layer.combine(layer.dispatch(y, ids, weights), zero)
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    rows: list[dict[str, Any]] = []
    try:
        step_us(graph)
        want = y.clone()
        assert not bool(want.isnan().any()), attention.errors()
        for gap in map(float, args.gaps.split(",")):
            before = [step_us(graph) for _ in range(AT_PACE)]
            clock = {"before": clocks()}
            time.sleep(gap)
            clock["at the end of the gap"] = clocks()
            first = [step_us(graph)]
            clock["after the first step"] = clocks()
            first += [step_us(graph) for _ in range(WATCHED - 1)]
            after = [step_us(graph) for _ in range(AT_PACE)]
            clock["after"] = clocks()
            attention.check()
            assert torch.equal(y, want)
            row = {"path": "step", **case.row, "period_us": statistics.median(before), "drained_us": first[0]}
            row |= {
                "error": 0.0,
                "gap_s": gap,
                "layers": LAYERS,
                "first_us": first,
                "after_us": statistics.median(after),
            }
            rows.append(row | {"sm_clock_mhz": clock})
            print(f"gap {gap:5.1f} s: at pace {row['period_us']:.0f} us, then {[round(us) for us in first]}, ", end="")
            print(f"at pace {row['after_us']:.0f} us; SM clocks {clock}", flush=True)
            common.write(args.out, rows)
    finally:
        attention.close()
        thread.join(30)
        ffn.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
