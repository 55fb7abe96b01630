"""A small mixture-of-experts model split over attention and FFN ranks, checked against one process.

    python examples/demo.py                                             2 attention + 2 FFN ranks, here
    torchrun --nproc-per-node=4 examples/demo.py --attention 2 --ffn 2  the same, started by torchrun

Every attention rank reads a text of its own, in steps of at most --tokens bytes (each step is a prompt of its
own), through decoder layers compiled into one graph per kind of gate. The routed experts live on the FFN
ranks. With at least two GPUs and nvshmem4py all that is on GPUs, else on the CPU. Afterwards each attention
rank runs the whole model alone, uncompiled, and compares. The last line says PASS or FAIL, and so does the
exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ranks
import torch
from byte_moe import ByteMoE, Config, Gate, expert_weights, unsplit
from torch import Tensor

import afd_ops

TOLERANCE = 1e-5  # of the largest logit
TIE = 1e-5  # two experts whose scores are closer than this may be chosen either way by two correct programs
PASSES = 2  # the first compiles, the second is timed
README = Path(__file__).resolve().parent.parent / "README.md"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A byte-level MoE model split over attention and FFN ranks, checked against one process.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=int, default=default, metavar="N", help=text)

    number("--attention", 2, "attention ranks")
    number("--ffn", 2, "FFN ranks")
    number("--layers", 4, "decoder layers")
    number("--experts", 8, "routed experts in a layer")
    number("--topk", 2, "routed experts for a token")
    number("--tokens", 256, "most tokens in a step")
    number("--bytes", 700, "bytes that attention rank 0 reads")
    number("--more", 77, "bytes that each next attention rank reads in addition")
    number("--seed", 0, "seed of the weights")
    parser.add_argument("--text", type=Path, metavar="FILE", default=README, help="what they read")
    parser.add_argument("--device", choices=ranks.DEVICES, default="auto", help="where the ranks compute")
    parser.add_argument("--eager", action="store_true", help="do not compile the decoder layers")
    parser.add_argument("--backend", default="inductor", help="torch.compile backend")
    parser.add_argument("--deadline", type=float, default=300.0, metavar="S", help="longest wait for a rank")
    parser.add_argument("--swap-experts", action="store_true", help="exchange two experts: must FAIL")
    args = parser.parse_args()
    for name in ("attention", "ffn", "bytes", "tokens", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.more < 0:
        parser.error("--more must not be negative")
    if args.swap_experts and args.experts < 2:
        parser.error("--swap-experts needs at least 2 experts")
    if not 1 <= args.topk <= args.experts:
        parser.error("--topk must lie between 1 and --experts")
    if not args.text.is_file() or not args.text.stat().st_size:
        parser.error(f"--text {args.text} must be a file with something in it")
    return args


def prompts(args: argparse.Namespace, role_rank: int) -> list[Tensor]:
    """The steps of one attention rank, int64 [T] each: its own stretch of the text, of its own length."""
    data = args.text.read_bytes()
    length = args.bytes + args.more * role_rank
    start = len(data) * role_rank // args.attention
    stretch = (data * (2 + length // len(data)))[start : start + length]
    steps = list(torch.tensor(list(stretch)).split(args.tokens))
    # A prompt of one token is legal but would be compiled apart (Dynamo specialises on size 1).
    return steps[:-1] if len(steps) > 1 and len(steps[-1]) == 1 else steps


def progress(total: int, shown: bool) -> Callable[[], object]:
    """A function to call after each of `total` steps: moves a bar in a terminal, does nothing elsewhere."""
    if shown and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            return tqdm(total=total, desc="attention 0", unit="step", leave=False).update
    return lambda: None


def reference(config: Config, steps: Sequence[Tensor]) -> list[tuple[Tensor, float]]:
    """What one process computes for each step: logits [T, V], and the closest call of its gates."""
    model = unsplit(config).to(steps[0].device)
    closest = [float("inf")]

    def watch(gate: Gate, inputs: tuple[Tensor, Tensor], _: object) -> None:
        if not gate.by_token and config.topk < config.experts:
            best = (gate.scores(inputs[0]) + gate.bias).topk(config.topk + 1, dim=-1).values
            closest.append((best[:, -2] - best[:, -1]).min().item())

    for module in model.modules():
        if isinstance(module, Gate):
            module.register_forward_hook(watch)
    results = []
    for tokens in steps:
        closest[:] = closest[:1]
        results.append((model(tokens), min(closest)))
    return results


@torch.inference_mode()
def run_attention(args: argparse.Namespace, model: ByteMoE, window: afd_ops.Window) -> dict[str, object]:
    """Everything an attention rank does, and what it found."""
    config, device = model.config, window.heap.device
    steps = [step.to(device) for step in prompts(args, window.role_rank)]
    tick = progress(PASSES * len(steps), window.role_rank == 0)
    outputs: list[list[Tensor]] = []
    seconds: list[float] = []
    for _ in range(PASSES):
        began = time.perf_counter()
        outputs.append([])
        for tokens in steps:
            with window.step():
                outputs[-1].append(model(tokens))
                ranks.synchronize(device)
            tick()
        seconds.append(time.perf_counter() - began)
    stats = window.stats()
    window.close()  # the FFN ranks stop serving once every attention rank has said so

    difference, largest, ties, judged = 0.0, 0.0, 0, 0
    for step, (expected, closest) in enumerate(reference(config, steps)):
        apart = _largest(torch.stack([done[step] for done in outputs]) - expected)
        if closest < TIE and TOLERANCE * _largest(expected) < apart < float("inf"):
            ties += 1
            continue
        judged += 1
        difference = _largest(torch.tensor([difference, apart]))  # unlike max(), keeps a NaN
        largest = max(largest, _largest(expected))
    tokens_read = sum(len(tokens) for tokens in steps)
    # Per token its row, and for each choice a position (two int32) and a weight (float32).
    token_bytes = 4 * config.hidden + 12 * config.topk
    return {
        "tokens": tokens_read,
        "steps": len(steps),
        "ties": ties,
        "difference": difference,
        "largest": largest,
        "passed": judged > 0 and difference <= TOLERANCE * largest,
        "graphs": 0 if args.eager else torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "first_pass": seconds[0],
        "tokens_per_second": tokens_read / seconds[-1],
        "sent": stats["bytes_sent"],
        "broadcast": PASSES * config.layers * tokens_read * token_bytes,
    }


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def build_attention(args: argparse.Namespace, config: Config) -> ByteMoE:
    """The model with remote experts; its decoder layers compile on their first call."""
    model = ByteMoE(config, afd_ops.RemoteExperts)
    if not args.eager:
        for layer in model.layers:
            layer.compile(fullgraph=True, dynamic=True, backend=args.backend)
    return model


def build_ffn(args: argparse.Namespace, config: Config, own: Sequence[int]) -> afd_ops.GroupedSwiGLU:
    """The routed experts `own` of every layer, and nothing else of the model."""
    if args.swap_experts:
        own = [{0: 1, 1: 0}.get(expert, expert) for expert in own]
    layers = [expert_weights(config, layer, own) for layer in range(config.layers)]
    gate_up, down = zip(*layers, strict=True)
    return afd_ops.GroupedSwiGLU(list(gate_up), list(down), limit=config.swiglu_limit)


# --- the report -----------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, but for the first."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    lines = []
    for line in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append("   ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def experts_text(own: Sequence[int]) -> str:
    if not own:
        return "no experts"
    if len(own) == 1:
        return f"expert {own[0]}"
    if list(own) == list(range(own[0], own[-1] + 1)):
        return f"experts {own[0]}-{own[-1]}"
    return "experts " + ",".join(map(str, own))


def report(topology: afd_ops.Topology, results: Sequence[dict]) -> str:
    """results: one per attention rank."""
    measured = [
        (
            f"attention {rank}",
            str(r["tokens"]),
            str(r["steps"]),
            f"{r['difference']:.1e}",
            f"{r['largest']:.2f}",
            str(r["graphs"]),
            f"{r['first_pass']:.1f} s",
            f"{r['tokens_per_second']:.0f}",
        )
        for rank, r in enumerate(results)
    ]
    head = ("", "tokens", "steps", "max |diff|", "max |logit|", "graphs", "first pass", "warm tokens/s")
    sent = [
        (f"attention {rank}", *(f"{n / 1e6:.2f} MB ({n / r['broadcast']:.0%})" for n in r["sent"]))
        for rank, r in enumerate(results)
    ]
    peers = [f"ffn {rank}: {experts_text(topology.experts_of(rank))}" for rank in range(topology.ffn_size)]
    lines = [
        table(head, measured),
        "",
        "sent to each FFN rank, and the share of what sending it every row would have taken:",
        table(("", *peers), sent),
        "",
    ]
    for rank, r in enumerate(results):
        if r["ties"]:
            lines.append(f"attention {rank}: {r['ties']} steps not judged: a gate has two experts in a tie")
    return "\n".join(lines)


def verdict(results: Sequence[dict]) -> str:
    failed = [rank for rank, r in enumerate(results) if not r["passed"]]
    if failed:
        ranks = ", ".join(f"attention {rank}" for rank in failed)
        return f"FAIL: not what one process computes, on {ranks} ({TOLERANCE:g} x max |logit| allowed)"
    worst = max(r["difference"] / r["largest"] for r in results)
    return f"PASS: what one process computes, within {worst:.1e} x max |logit| ({TOLERANCE:g} allowed)"


def main() -> int:
    args = arguments()
    world_size = args.attention + args.ffn
    if "RANK" not in os.environ:
        return ranks.launch(__file__, world_size)
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if started != world_size:
        raise SystemExit(f"{args.attention} attention + {args.ffn} FFN ranks, but {started} processes")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))

    config = Config(layers=args.layers, experts=args.experts, topk=args.topk, seed=args.seed)
    topology = afd_ops.Topology(attention_size=args.attention, ffn_size=args.ffn, num_experts=config.experts)
    bootstrap = afd_ops.Bootstrap.from_env(timeout=args.deadline)
    device = ranks.place(args.device, topology, rank)
    if rank == 0:
        how = "not compiled" if args.eager else f"compiled by {args.backend} during the first pass"
        print(
            f"{args.attention} attention + {args.ffn} FFN ranks, {device.type}; {config.layers} layers, "
            f"hidden {config.hidden}, {config.experts} experts, top {config.topk}, float32; {how}\n",
            flush=True,
        )
    result: dict[str, object] = {}
    with (
        ranks.heap_on(device, bootstrap) as heap,
        afd_ops.Window(
            topology,
            bootstrap,
            hidden=config.hidden,
            topk=config.topk,
            tokens=args.tokens,
            dtype=torch.float32,
            heap=heap,
            deadline=args.deadline,
        ) as window,
    ):
        if window.role == "attention":
            model = build_attention(args, config).to(device)
            afd_ops.attach(model, window)
            result = run_attention(args, model, window)
        else:
            experts = build_ffn(args, config, topology.experts_of(window.role_rank)).to(device)
            afd_ops.ExpertServer(window, experts).run()

    results = [json.loads(payload) for payload in bootstrap.all_gather(json.dumps(result))][: args.attention]
    if rank == 0:
        print(report(topology, results))
        print(verdict(results), flush=True)
    bootstrap.all_gather("printed")  # torchrun ends every rank as soon as one has failed
    return 0 if all(r["passed"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
