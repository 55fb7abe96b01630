"""What the benchmarks of whole layers share: a stack of DeepSeek-V4-Flash's shape, processes, one profiled step."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

import afd_ops

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from deepseek_v4 import FLASH, Config, DeepseekV4, LocalExperts, RemoteExperts, Ubatch, interleave

__all__ = ["FLASH", "Config", "DeepseekV4", "LocalExperts", "RemoteExperts", "Ubatch", "interleave"]


def shaped(layers: int) -> Config:
    """V4-Flash, cut to its first layers: two sliding, then CSA and HCA in turn; the first three route by token id."""
    return dataclasses.replace(
        FLASH, layer_types=FLASH.layer_types[:layers], mlp_layer_types=FLASH.mlp_layer_types[:layers]
    )


@torch.no_grad()
def fill(name: str, tensor: Tensor, experts: int) -> Tensor:
    """Random on the device, by name: whoever makes a tensor, it is the same."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    generator = torch.Generator(tensor.device).manual_seed(seed)
    if name.endswith("tid2eid"):
        chances = torch.rand(len(tensor), experts, device=tensor.device, generator=generator)
        return tensor.copy_(chances.argsort(-1)[:, : tensor.shape[1]])
    if "norm" in name or name.endswith("scale"):
        return tensor.fill_(1)
    return tensor.normal_(0, 0.3 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5, generator=generator)


def routed(config: Config) -> afd_ops.GroupedSwiGLU:
    experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    new: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
    gate_up = [
        fill(f"{i}.gate_up", torch.empty(experts, 2 * inner, hidden, **new), experts) for i in range(config.layers)
    ]
    down = [fill(f"{i}.down", torch.empty(experts, hidden, inner, **new), experts) for i in range(config.layers)]
    return afd_ops.GroupedSwiGLU(gate_up, down, limit=config.swiglu_limit)


def built(config: Config, make_experts: Any, rows: int, positions: int, stages: int = 1) -> DeepseekV4:
    """All but the routed experts, on the current GPU."""
    with torch.device("cuda"):
        model = DeepseekV4(config, make_experts, rows=rows, positions=positions, stages=stages, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if ".ffn.experts." not in name:
            fill(name, parameter, config.n_routed_experts)
    return model


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


def ran(body: Any, processes: int, case: dict[str, Any], seconds: float) -> dict[str, str]:
    """body(rank, address, case) in fresh processes, killed when they are not done within `seconds`.

    Returns:
        {}, or {"failed": what went wrong}.
    """
    address = f"127.0.0.1:{29733 + os.getpid() % 1000}"
    context = mp.spawn(body, args=(address, case), nprocs=processes, join=False)
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{body.__name__} was not done within {seconds} s")
    except Exception:
        for process in context.processes:
            process.kill()
        traceback.print_exc()
        return {"failed": traceback.format_exc(limit=0).strip().splitlines()[-1]}
    return {}
