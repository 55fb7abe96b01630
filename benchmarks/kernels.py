"""Each kernel of the round trip alone, with nothing to wait for: where the time of benchmarks/round_trip.py goes.

    python benchmarks/kernels.py [--tokens 1,16,128,1024] [--hidden 7168] [--dtype bfloat16,float8_e4m3fn]

One process, attention on the first GPU and FFN on the last. COUNT dispatches go into COUNT rings; then the FFN
side answers them all; then all are combined. Times are per kernel, from the profiler, in a replayed graph.
"""

from __future__ import annotations

import argparse
import re

import torch
from common import ATTENTION, FFN
from torch.profiler import ProfilerActivity, profile

import afd_ops

EXPERTS, TOPK, COUNT = 32, 8, 64


def kernels(tokens: int, hidden: int, dtype: torch.dtype, count: int = COUNT) -> dict[str, float]:
    """Mean microseconds by kernel name, over `count` rings."""
    topology = afd_ops.Topology(1, 1, EXPERTS)
    a, f = afd_ops.open_local(
        topology,
        devices=[ATTENTION, FFN],
        hidden=hidden,
        topk=TOPK,
        tokens=tokens,
        dtype=dtype,
        depth=count,
        rows=tokens * TOPK,
        poll_interval=5.0,
        deadline=20.0,
    )
    experts, port = afd_ops.RemoteExperts(0).to(ATTENTION).attach(a), f.port()
    x = torch.randn(tokens, hidden, device=ATTENTION).to(a.wide_dtype)
    zeros = torch.zeros(tokens * TOPK, hidden, dtype=a.wide_dtype, device=FFN)
    ids = torch.stack([torch.randperm(EXPERTS, device=ATTENTION)[:TOPK] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, TOPK, device=ATTENTION)

    def answer() -> None:
        item = torch.ops.afd.arrive(port, f.id)
        rows, _, _ = torch.ops.afd.receive(item, port, f.id, tokens * TOPK)
        torch.ops.afd.reply(rows if dtype == a.wide_dtype else zeros, item, port, f.id)

    send, take, serve = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.inference_mode():
        ticket = experts.dispatch(x, ids, weights)
        answer()
        experts.combine(ticket, x)
        torch.cuda.synchronize(ATTENTION)
        torch.cuda.synchronize(FFN)
        with torch.cuda.graph(send):
            tickets = [experts.dispatch(x, ids, weights) for _ in range(count)]
        with torch.cuda.graph(take, pool=send.pool()):
            for ticket in tickets:
                experts.combine(ticket, x)
        with torch.cuda.device(FFN), torch.cuda.graph(serve, stream=torch.cuda.Stream(FFN)):
            for _ in range(count):
                answer()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(2):
                send.replay()
                torch.cuda.synchronize(ATTENTION)
                with torch.cuda.device(FFN):
                    serve.replay()
                torch.cuda.synchronize(FFN)
                take.replay()
                torch.cuda.synchronize(ATTENTION)
        a.check()
    for window in (a, f):
        window.close()
    times = {}
    for event in found.key_averages():
        name = re.search(r"(\w+)_kernel", event.key)
        if name and event.self_device_time_total > 0:
            times[name.group(1)] = event.self_device_time_total / event.count
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", default="1,16,128,1024")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--dtype", default="bfloat16,float8_e4m3fn")
    args = parser.parse_args()
    for tokens in map(int, args.tokens.split(",")):
        for dtype in args.dtype.split(","):
            times = kernels(tokens, args.hidden, getattr(torch, dtype))
            found = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
            print(f"T={tokens:5d}  {dtype:13s}  {found}", flush=True)


if __name__ == "__main__":
    main()
