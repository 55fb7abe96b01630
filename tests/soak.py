"""Stress: chained round trips between processes, every row compared with ==, memory flat; then the planted mistakes.

    python tests/soak.py [--pairs N] [--attention A] [--ffn F] [--seed S] [--no-mutants]
    python tests/soak.py --device cuda [--seconds S] [--seed S] [--brief] [--mutants FOLDER] [--out FILE]

Payloads are small integers, so that sums are exact in any order. Each step's input depends on the output before. Token
counts, routing, lanes and delays are random; the seed is printed. Exit status 0: the library held and every mutant was
caught. On GPUs (tests/soak_gpu.py) the mutants are those that `python tests/mutants.py FOLDER` has built; the file says
of each whether it was caught, and no more is asked of those that the hardware may forgive.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
from mutants import CUDA_MUTANTS, MUTANTS, build
from torch import Tensor

import afd_ops

EXPERTS, TOPK, TOKENS, HIDDEN = 5, 2, 16, 16


def answer(x: Tensor, ids: Tensor, weights: Tensor, base: Tensor) -> Tensor:
    """harness.expert for all tokens at once; exact, and fast enough for 10^5 pairs."""
    scale = torch.where(ids >= 0, ids % 3 + 1, 0).float() * weights
    shift = torch.where(ids >= 0, ids, 0).float() * weights
    return base + x * scale.sum(1, keepdim=True) + shift.sum(1, keepdim=True)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def soak(topology: afd_ops.Topology, bootstrap: afd_ops.Bootstrap, sizes: dict[str, Any], pairs: int, seed: int) -> Any:
    with afd_ops.Window(topology, bootstrap, **sizes) as window:
        harness.fill_with_nan(window)
        bootstrap.barrier()
        rng = random.Random(seed + bootstrap.rank)
        torch.manual_seed(seed + bootstrap.rank)
        if window.role == "ffn":
            return soak_ffn(topology, window, rng)
        modules = [[afd_ops.RemoteExperts(layer, stage).attach(window) for layer in range(4)] for stage in range(2)]
        before, done, last = 0.0, 0, torch.zeros(1, HIDDEN)
        while done < pairs:
            flights = []
            for stage in rng.choice(((0,), (1,), (0, 1), (0, 0), (0, 1, 1, 0))):
                tokens = rng.choice((0, 1, TOKENS, rng.randint(0, TOKENS)))
                x = (torch.randint(0, 7, (tokens, HIDDEN)) + last) % 7 - 3
                ids = torch.randint(-1, EXPERTS, (tokens, TOPK))
                if rng.random() < 0.1:
                    ids[:] = rng.randrange(EXPERTS)
                weights, base = (
                    torch.randint(0, 3, (tokens, TOPK)).float(),
                    torch.randint(-3, 4, (tokens, HIDDEN)).float(),
                )
                module = modules[stage][rng.randrange(4)]
                flights.append((module, module.dispatch(x, ids, weights), (x, ids, weights, base)))
                if rng.random() < 0.002:
                    time.sleep(rng.random() * 0.002)
            rng.shuffle(flights)
            for module, ticket, step in flights:
                out = module.combine(ticket, step[3])
                wrong = (out != answer(*step)).any(1).nonzero().flatten().tolist()
                if wrong:
                    raise AssertionError(
                        f"pair {done}: rows {wrong} of {len(out)} differ (seed {seed}, rank {bootstrap.rank})"
                    )
                if len(out):
                    last = out[-1:] % 7
                done += 1
            if before == 0.0 and done >= pairs // 10:
                before = resident_mb()
        return {"pairs": done, "grown_mb": resident_mb() - before, **window.stats()}


def soak_ffn(topology: afd_ops.Topology, window: afd_ops.Window, rng: random.Random) -> Any:
    experts = harness.experts_of(topology, window.role_rank)

    def slow(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        if rng.random() < 0.002:
            time.sleep(rng.random() * 0.002)
        return experts(rows, scales, offsets, layer)

    before = resident_mb()
    afd_ops.ExpertServer(window, slow).run()
    return {"pairs": 0, "grown_mb": resident_mb() - before, **window.stats()}


def on_gpus(args: argparse.Namespace) -> int:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before any process looks at a GPU
    import soak_gpu

    phases = soak_gpu.BRIEF if args.brief else soak_gpu.PHASES
    if torch.cuda.device_count() < 2:
        phases = tuple(phase for phase in phases if phase.local)
    with tempfile.TemporaryDirectory() as folder:
        rows = soak_gpu.soak(phases, args.seed, args.seconds, Path(folder) / "rows.json")
    result = soak_gpu.summary(rows, phases, args.seed)
    ok = result["held"]
    write(args.out, result)
    print(
        f"{result['pairs']} pairs in {result['seconds']} s; rate of wrong ones below {result['rate_below']} with 95 %"
    )
    result["mutants"] = []
    for index, mutant in enumerate(CUDA_MUTANTS if args.mutants else ()):
        begin = time.monotonic()
        place = (args.mutants / str(index)).resolve()
        command = [sys.executable, __file__, "--device", "cuda", "--brief", "--seconds", "10", "--seed", str(args.seed)]
        try:
            run = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": str(place)},
                capture_output=True,
                text=True,
                cwd=place,
                timeout=90,
            )
            code, said, told = run.returncode, run.stdout, run.stderr
        except subprocess.TimeoutExpired:
            code, said, told = 1, str(place), "no end: an error"
        assert str(place) in said, f"the mutant was not what ran:\n{told}"
        symptoms = [line for line in said.splitlines() if "rror: " in line] or told.splitlines() or ["none"]
        caught = code != 0
        row = {"mutant": mutant.name, "forgiven": mutant.forgiven, "caught": caught, "symptom": symptoms[-1][:300]}
        result["mutants"].append(row | {"seconds": round(time.monotonic() - begin, 1)})
        verdict = "caught" if caught else "MISSED, as hardware may" if mutant.forgiven else "MISSED"
        print(f"{verdict}: {mutant.name}: {row['symptom'] if caught else ''}", flush=True)
        ok = ok and (caught or mutant.forgiven)
        write(args.out, result)
    print("PASS" if ok else "FAIL")
    return 0 if ok else 1


def write(path: Path | None, result: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=100_000, help="round trips, all attention ranks together")
    parser.add_argument("--attention", type=int, default=2)
    parser.add_argument("--ffn", type=int, default=2)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--no-mutants", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=120.0, help="cuda: of the phases that have no number of pairs")
    parser.add_argument("--brief", action="store_true", help="cuda: the few phases that mutants get")
    parser.add_argument("--mutants", type=Path, help="cuda: folder of the built mutants")
    parser.add_argument("--out", type=Path, help="cuda: result file")
    args = parser.parse_args()
    print(f"soak of {Path(afd_ops.__file__).parent} with seed {args.seed}", flush=True)

    if args.device == "cuda":
        return on_gpus(args)
    topology = afd_ops.Topology(args.attention, args.ffn, EXPERTS)
    sizes = dict(hidden=HIDDEN, topk=TOPK, tokens=TOKENS, dtype=torch.float32, stages=2, depth=2, deadline=5.0)
    start = time.monotonic()
    results = harness.run_processes(topology, soak, -(-args.pairs // args.attention), args.seed, timeout=3600, **sizes)
    seconds = time.monotonic() - start
    pairs = sum(r["pairs"] for r in results)
    grown = max(r["grown_mb"] for r in results)
    print(f"exact: {pairs} pairs of {args.attention}A{args.ffn}F in {seconds:.0f} s, every row equal; ", end="")
    print(f"memory grew by {grown:.1f} MB at most; {sum(r['items'] for r in results)} items", flush=True)
    held = grown < 16
    if not held:
        print("FAIL: memory is not flat")

    caught = 0
    for mutant in () if args.no_mutants else MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            build(mutant, Path(folder))
            command = [sys.executable, __file__, "--no-mutants", "--pairs", "20000", "--seed", str(args.seed)]
            # From its own folder: the forkserver looks there first.
            run = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True, cwd=folder
            )
        symptom = next((line.strip() for line in reversed(run.stderr.splitlines()) if "rror" in line), "no error")
        print(f"{'caught' if run.returncode else 'MISSED'}: {mutant.name}: {symptom[:160]}", flush=True)
        assert folder in run.stdout, "the mutant was not what ran"
        caught += run.returncode != 0
    ok = held and (args.no_mutants or caught == len(MUTANTS))
    print("PASS" if ok else "FAIL")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
