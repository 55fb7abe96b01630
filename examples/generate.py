"""Text in, text out: DeepSeek-V4 split over attention and FFN ranks.

    python examples/generate.py --check                                   2 attention + 2 FFN ranks, here
    python examples/generate.py --attention 1 --ffn 3 "A text." "Another."
    torchrun --nproc-per-node=4 examples/generate.py --check              the same, started by torchrun

Every attention rank continues prompts of its own, at its own pace: prompts in chunks of at most --chunk bytes, then all
its requests together, one byte a step, each at its own position. The routed experts live on the FFN ranks. A token is a
byte, also where the vocabulary is larger. Weights are random, seeded by name, unless --weights names a folder that
save_pretrained wrote. Ranks are processes of this host over shared memory, or, where there are two GPUs or more, GPU
processes over NVSHMEM.

--check runs every request again through the whole model in one process, prompt and answer at once, and compares all
logits: the last line says PASS or FAIL, and so does the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepseek_v4
import ranks
import torch
from deepseek_v4 import Checkpoint, Config, DeepseekV4, LocalExperts, Random, RemoteExperts, Ubatch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import afd_ops

TOLERANCE = 1e-5  # of the largest logit
TIE = 1e-5  # two scores closer than this may be ranked either way by two correct programs
PROMPTS = (
    "Attention ranks keep all state: keys and values, norms, the gate, and the expert that every token visits.",
    "FFN ranks hold routed experts and nothing else.",
    "A token crosses once to each FFN rank that owns one of its experts; what comes back is a weighted sum.",
    "Nobody waits for a neighbour.",
    "Routing never leaves the rank that made it.",
)
SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "compress_ratios": [0, 4, 16, 4],
    "num_hash_layers": 1,
    "sliding_window": 32,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 8,
    "rope_scaling": {"factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="DeepSeek-V4 split over attention and FFN ranks: text in, text out.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=int, default=default, metavar="N", help=text)

    parser.add_argument("prompts", nargs="*", default=PROMPTS, metavar="PROMPT", help="texts to continue")
    number("--attention", 2, "attention ranks")
    number("--ffn", 2, "FFN ranks")
    number("--new", 32, "bytes to generate for a request")
    number("--chunk", 64, "most tokens in a step of an attention rank")
    number("--ubatches", 1, "parts of a decode step, at most one per request; 0 or 1: not split")
    number("--seed", 0, "seed of the weights")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="config.json and safetensors; random if left out")

    def choice(name: str, choices: Sequence[str], text: str) -> None:
        parser.add_argument(name, choices=choices, default=choices[0], help=text)

    choice("--device", ranks.DEVICES, "auto: GPUs if there are two")
    choice("--dtype", ("float32", "bfloat16"), "of matrices and of the rows sent")
    choice("--compile", ("model", "layers", "none"), "decode steps: one graph, or one per kind of layer")
    parser.add_argument(
        "--backend", help="of torch.compile; aot_eager on CPU (inductor takes minutes), inductor on GPUs"
    )
    parser.add_argument("--deadline", type=float, default=300.0, metavar="S", help="longest wait for a rank")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    parser.add_argument("--metrics", action="store_true", help="what the FFN ranks do, a line per second")
    parser.add_argument("--swap-experts", action="store_true", help="exchange two experts: --check must say FAIL")
    args = parser.parse_args()
    for name in ("attention", "ffn", "new", "chunk"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.check and args.dtype != "float32":
        parser.error("--check needs --dtype float32: rounding changes which experts a token visits")
    args.ubatches = max(1, args.ubatches)
    if args.ubatches > 1 and args.compile == "layers":
        parser.error("--ubatches needs --compile model or none: another ubatch runs between the halves of a layer")
    if not all(args.prompts):
        parser.error("a prompt is empty")
    args.chunk = max(args.chunk, -(-len(args.prompts) // args.attention))  # a decode step has one token per request
    return args


# --- the attention side ---------------------------------------------------------------------------


class Decoder:
    """Continues prompts with a model; prompts run as they come, decode steps are compiled."""

    def __init__(self, args: argparse.Namespace, model: DeepseekV4, device: torch.device) -> None:
        self.args, self.model, self.device = args, model, device
        self.step: Any = model.interleaved if args.ubatches > 1 else model
        # Else Inductor may compute in front of dispatch what is to overlap with the experts.
        options = {"reorder_for_peak_memory": False, "triton.cudagraphs": device.type == "cuda"}
        how = {"backend": args.backend, "fullgraph": True, "options": options if args.backend == "inductor" else None}
        if args.compile == "model":
            self.step = torch.compile(self.step, **how)
        elif args.compile == "layers":
            for layer in model.layers:
                layer.compile(**how)

    def prompt(self, row: int, tokens: Tensor) -> Tensor:
        """tokens [L] -> the logits of all of them [L, V], in chunks."""
        done = []
        with torch.compiler.set_stance("force_eager"):
            for start in range(0, len(tokens), self.args.chunk):
                chunk = tokens[None, start : start + self.args.chunk]
                done.append(self.model(chunk, torch.tensor([start], device=self.device), row)[0])
        return torch.cat(done)

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """One token per request [B], at positions [B] -> logits [B, V]."""
        if self.args.ubatches == 1:
            return self.step(tokens[:, None], positions)[:, 0].clone()
        count = len(tokens)
        cuts = afd_ops.split_requests([1] * count, min(self.args.ubatches, count), alignment=1)
        assert cuts is not None, "no more ubatches than requests"
        return torch.cat(self.step([Ubatch(tokens[cut, None], positions[cut], cut.start) for cut in cuts]))[:, 0]


def greedy(logits: Tensor) -> Tensor:
    """[B, V] -> the likeliest byte of each row [B]."""
    return logits[:, :256].argmax(-1)


@torch.no_grad()
def run_attention(args: argparse.Namespace, model: DeepseekV4, window: afd_ops.Window) -> dict[str, Any]:
    """Everything an attention rank does, and what it found."""
    device = window.heap.device
    texts = [list(text.encode()) for text in args.prompts[window.role_rank :: args.attention]]
    decoder = Decoder(args, model, device)
    logits: list[list[Tensor]] = []
    began = time.perf_counter()
    for row, text in enumerate(texts):
        with window.step():
            logits.append([decoder.prompt(row, torch.tensor(text, device=device))])
    last = [greedy(rows[0][-1:]) for rows in logits]
    prompted = time.perf_counter()
    seconds: list[float] = []
    if texts:
        tokens, positions = torch.cat(last), torch.tensor([len(text) for text in texts], device=device)
        answers = [tokens.tolist()]
        for _ in range(args.new - 1):
            begin = time.perf_counter()
            with window.step():
                out = decoder.decode(tokens, positions)
                tokens, positions = greedy(out), positions + 1
                answers.append(tokens.tolist())
            seconds.append(time.perf_counter() - begin)
            for row in range(len(texts)):
                logits[row].append(out[row : row + 1])
    sent = window.stats()["bytes_sent"]
    window.close()  # the FFN ranks stop serving once every attention rank has said so
    answered = [[step[row] for step in answers] for row in range(len(texts))]
    result = {
        "texts": [bytes(text).decode() for text in texts],
        "answers": [bytes(new).decode("latin-1") for new in answered],
        "prompt": sum(map(len, texts)) / max(prompted - began, 1e-9),
        "first": seconds[0] if seconds else 0.0,
        "decode": len(texts) * len(seconds[2:]) / max(sum(seconds[2:]), 1e-9),
        "compiles": len(torch._dynamo.utils.get_compilation_metrics()),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "sent": sent,
    }
    if args.check:
        sequences = [text + new[:-1] for text, new in zip(texts, answered, strict=True)]
        result |= check(args, model.config, sequences, [torch.cat(rows).cpu() for rows in logits])
    return result


# --- the check ------------------------------------------------------------------------------------


class ClosestCall(TorchFunctionMode):
    """Notes by how little the last of any top-k was chosen."""

    gap = float("inf")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.topk and args[1] < args[0].shape[-1]:
            best = args[0].topk(args[1] + 1, dim=-1).values
            gaps = best[..., -2] - best[..., -1]
            self.gap = min(self.gap, gaps[gaps.isfinite()].min().item() if gaps.isfinite().any() else self.gap)
        return function(*args, **(kwargs or {}))


def check(args: argparse.Namespace, config: Config, sequences: list[list[int]], logits: list[Tensor]) -> dict[str, Any]:
    """Each sequence at once through the whole model in this process, against the logits that were computed split."""
    if not sequences:
        return {"difference": 0.0, "largest": 1.0, "ties": 0, "passed": True}
    source = weights_of(args)
    experts = deepseek_v4.load_experts(config, source, range(config.n_routed_experts))
    model = DeepseekV4(
        config,
        lambda layer, stage: LocalExperts(layer, experts, config.n_routed_experts),
        rows=1,
        positions=max(map(len, sequences)),
    )
    deepseek_v4.load(model, source)
    difference, largest, ties = 0.0, 0.0, 0
    for sequence, computed in zip(sequences, logits, strict=True):
        with ClosestCall() as closest:
            expected = model(torch.tensor([sequence]), torch.zeros(1, dtype=torch.int64))[0]
        apart, size = ((computed - expected).abs().max().item(), expected.abs().max().item())
        if closest.gap < TIE and TOLERANCE * size < apart < float("inf"):
            ties += 1
            continue
        difference = max(difference, apart) if apart == apart else float("nan")
        largest = max(largest, size)
    judged = ties < len(sequences)
    return {
        "difference": difference,
        "largest": largest,
        "ties": ties,
        "passed": judged and difference <= TOLERANCE * largest,
    }


# --- building -------------------------------------------------------------------------------------


def weights_of(args: argparse.Namespace) -> Checkpoint | Random:
    return Checkpoint(args.weights) if args.weights else Random(args.seed)


@contextlib.contextmanager
def opened(
    args: argparse.Namespace, config: Config, topology: afd_ops.Topology, device: torch.device
) -> Iterator[tuple[afd_ops.Window, afd_ops.Bootstrap]]:
    """This rank's window, over shared memory or between GPUs."""
    bootstrap = afd_ops.Bootstrap.from_env(timeout=args.deadline)
    with (
        ranks.heap_on(device, bootstrap) as heap,
        afd_ops.Window(
            topology,
            bootstrap,
            hidden=config.hidden_size,
            topk=config.num_experts_per_tok,
            tokens=args.chunk,
            stages=args.ubatches,
            dtype=getattr(torch, args.dtype),
            heap=heap,
            deadline=args.deadline,
        ) as window,
    ):
        yield window, bootstrap


def build_attention(args: argparse.Namespace, config: Config, window: afd_ops.Window) -> DeepseekV4:
    mine = args.prompts[window.role_rank :: args.attention]
    with window.heap.device:
        model = DeepseekV4(
            config,
            RemoteExperts,
            rows=max(1, len(mine)),
            positions=max((len(text.encode()) for text in mine), default=1) + args.new,
            stages=window.geometry.stages,
            dtype=window.dtype,
        )
    deepseek_v4.load(model, weights_of(args))
    afd_ops.attach(model, window)
    return model


def build_ffn(args: argparse.Namespace, config: Config, window: afd_ops.Window) -> afd_ops.GroupedSwiGLU:
    own: Sequence[int] = window.topology.experts_of(window.role_rank)
    if args.swap_experts:
        own = [{0: 1, 1: 0}.get(expert, expert) for expert in own]
    return deepseek_v4.load_experts(config, weights_of(args), own, window.dtype, window.heap.device)


# --- the report -----------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, but for the first."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    lines = []
    for line in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append("   ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def report(args: argparse.Namespace, results: Sequence[dict[str, Any]]) -> str:
    """results: one per attention rank."""
    lines = []
    for rank, r in enumerate(results):
        lines += [
            f"attention {rank}: {text!r}\n          -> {new!r}"
            for text, new in zip(r["texts"], r["answers"], strict=True)
        ]
    head = [
        "",
        "requests",
        "prompt tokens/s",
        "first step",
        "decode tokens/s",
        "compiles",
        "graphs",
        "sent to FFN ranks",
    ]
    rows = []
    for rank, r in enumerate(results):
        sent = " + ".join(f"{n / 1e6:.2f}" for n in r["sent"]) + " MB"
        figures = [
            f"{r['prompt']:.0f}",
            f"{r['first']:.1f} s",
            f"{r['decode']:.0f}",
            str(r["compiles"]),
            str(r["graphs"]),
        ]
        rows.append([f"attention {rank}", str(len(r["texts"])), *figures, sent])
        if args.check:
            rows[-1] += [f"{r['difference']:.1e}", f"{r['largest']:.2f}"]
    if args.check:
        head += ["max |diff|", "max |logit|"]
    lines += ["", table(head, rows)]
    ties = sum(r.get("ties", 0) for r in results)
    return "\n".join(lines + ([f"{ties} requests not judged: two scores tie"] if ties else []))


def verdict(results: Sequence[dict[str, Any]]) -> str:
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
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # several ranks may share a GPU

    config = Config.from_folder(args.weights) if args.weights else Config.from_dict(SMALL)
    if config.vocab_size < 256:
        raise SystemExit(f"vocab_size is {config.vocab_size}, expected at least 256: a token is a byte")
    topology = afd_ops.Topology(args.attention, args.ffn, config.n_routed_experts)
    device = ranks.place(args.device, topology, rank)
    args.device = device.type
    args.backend = args.backend or ("inductor" if device.type == "cuda" else "aot_eager")
    with opened(args, config, topology, device) as (window, bootstrap):
        if rank == 0:
            how = "not compiled" if args.compile == "none" else f"decode compiled by {args.backend} ({args.compile})"
            print(
                f"{args.attention} attention + {args.ffn} FFN ranks on {device.type}; {config.layers} layers, "
                f"{config.n_routed_experts} experts, top {config.num_experts_per_tok}, {args.dtype}; {how}\n",
                flush=True,
            )
        result: dict[str, Any] = {}
        if window.role == "attention":
            result = run_attention(args, build_attention(args, config, window), window)
        else:
            server = afd_ops.ExpertServer(window, build_ffn(args, config, window))
            with afd_ops.metrics.printing(server, sys.stderr) if args.metrics else contextlib.nullcontext():
                server.run()
        results = [json.loads(payload) for payload in bootstrap.all_gather(json.dumps(result))][: args.attention]
    passed = not args.check or all(r["passed"] for r in results)
    if rank == 0:
        print(report(args, results))
        if args.check:
            print(verdict(results), flush=True)
    bootstrap.all_gather("printed")  # torchrun ends every rank as soon as one has failed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
