"""What an eager call costs the host beyond launching its kernels.

    python benchmarks/host_cost.py [--tokens 1,128]

One process, attention on cuda:0 and FFN on cuda:1, whose captured half is launched ahead. Host time of dispatch and of
combine, nothing synchronised, beside that of as many launches of a trivial op (an in-place negation of four floats). Of
each figure the median over the trials of the mean over PAIRS.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import workload
from torch import Tensor

import afd_ops

PAIRS, TRIALS = 64, 40
TARGET = 5.0  # microseconds per call
LONG = 64  # tokens beyond which combine is a wait and a sum

Step = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def steps(experts: afd_ops.RemoteExperts, window: int) -> dict[str, Step]:
    """(x, ids, weights) -> ticket and (ticket, base) -> out, by how they are called."""
    port, order, ops = experts.port, experts.order, torch.ops.afd
    return {
        "torch.ops": (
            lambda x, ids, weights: ops.dispatch(x, ids, weights, port, order, window),
            lambda ticket, base: ops.combine(ticket, base, port, order, window),
        ),
        "RemoteExperts": (experts.dispatch, experts.combine),
    }


def split_us(step: Step, inputs: tuple[Tensor, ...], base: Tensor) -> tuple[float, float]:
    """Host microseconds of a dispatch and of a combine, mean over PAIRS."""
    dispatch, combine = step
    clock = time.perf_counter
    sending = taking = 0.0
    for _ in range(PAIRS):
        begun = clock()
        ticket = dispatch(*inputs)
        sent = clock()
        combine(ticket, base)
        taking += clock() - sent
        sending += sent - begun
    return sending * 1e6 / PAIRS, taking * 1e6 / PAIRS


def whole_us(experts: afd_ops.RemoteExperts, inputs: tuple[Tensor, ...], base: Tensor) -> float:
    """Host microseconds of a pair in RemoteExperts.forward, its check included."""
    begun = time.perf_counter()
    for _ in range(PAIRS):
        experts(*inputs, base)
    return (time.perf_counter() - begun) * 1e6 / PAIRS


def launch_us(trivial: Tensor) -> float:
    """Host microseconds of one bare launch through an op."""
    negate = torch.ops.aten.neg_.default
    begun = time.perf_counter()
    for _ in range(2 * PAIRS):
        negate(trivial)
    return (time.perf_counter() - begun) * 1e6 / (2 * PAIRS)


def measure(tokens: int) -> dict[str, float]:
    """Medians by what was timed."""
    case = workload.Case(tokens)
    attention, ffn = afd_ops.open_local(
        afd_ops.Topology(1, 1, workload.EXPERTS), devices=["cuda:0", "cuda:1"], deadline=20.0, poll_interval=10.0,
        **case.window,
    )  # fmt: skip
    inputs, module = workload.inputs(case), afd_ops.RemoteExperts(0).to("cuda:0").attach(attention)
    base, trivial = torch.zeros_like(inputs[0]), torch.ones(4, device="cuda:0")
    port, rows, stream = ffn.port(), tokens * case.topk, torch.cuda.Stream("cuda:1")

    def serve() -> None:
        item = torch.ops.afd.arrive(port, ffn.id)
        received, _, _ = torch.ops.afd.receive(item, port, ffn.id, rows)
        torch.ops.afd.reply(received, item, port, ffn.id)

    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        ticket = module.dispatch(*inputs)
        torch.cuda.synchronize(0)
        with torch.cuda.device(1), torch.cuda.stream(stream):
            serve()
        torch.cuda.synchronize(1)
        module.combine(ticket, base)
        torch.cuda.synchronize(0)
        with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream):
            for _ in range(PAIRS):
                serve()

    def answered(timed: Callable[[], Any]) -> Any:
        with torch.cuda.device(1), torch.cuda.stream(stream):
            graph.replay()
        found = timed()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        return found

    times: dict[str, list[float]] = {}
    for trial in range(TRIALS + 1):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                suffix = "" if mode is torch.inference_mode else ", no_grad"
                found = {f"launch{suffix}": launch_us(trivial)}
                torch.cuda.synchronize(0)
                for how, step in steps(module, attention.id).items():
                    sent, taken = answered(partial(split_us, step, inputs, base))
                    found |= {f"{how} dispatch{suffix}": sent, f"{how} combine{suffix}": taken}
                found[f"RemoteExperts(){suffix}"] = answered(partial(whole_us, module, inputs, base))
            for name, us in found.items():
                if trial > 0:  # the first one warms up
                    times.setdefault(name, []).append(us)
    attention.check()
    for window in (attention, ffn):
        window.close()
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", default="1,128")
    args = parser.parse_args()
    for tokens in map(int, args.tokens.split(",")):
        times = measure(tokens)
        bare = {suffix: times.pop(f"launch{suffix}") for suffix in ("", ", no_grad")}
        print(f"T={tokens}: one launch of a trivial op {bare['']:.1f} us, under no_grad {bare[', no_grad']:.1f} us")
        for name, us in times.items():
            taking = 2 if tokens > LONG else 1
            calls, launches = (2, 1 + taking) if "()" in name else (1, taking if "combine" in name else 1)
            beyond = (us - launches * bare[", no_grad" if "no_grad" in name else ""]) / calls
            met = "met" if beyond <= TARGET else "MISSED"
            print(
                f"  {name:32s} {us:6.1f} us, {launches} launches, beyond them {beyond:5.1f} us a call"
                f"  <= {TARGET:g} us {met}"
            )


if __name__ == "__main__":
    main()
