"""Weights by the names that transformers' save_pretrained writes: from its files, or random.

An attention rank reads everything but `.ffn.experts.`, an FFN rank its own experts, tensor by tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import afd_ops

from .config import Config
from .model import DeepseekV4


class Source(Protocol):
    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        """The weight of that name."""


class Checkpoint:
    """The safetensors files of a folder; nothing is read but what is asked for.

    Raises:
        ValueError: a weight is missing or has another shape; names it.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        self.folder = folder
        self._files: dict[str, Any] = {}
        for name in sorted(names):
            file = safe_open(folder / name, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        if name not in self._files:
            raise ValueError(f"{self.folder} has no weight {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tensor.shape != torch.Size(shape):
            raise ValueError(f"{name} in {self.folder} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor


class Random:
    """Seeded by the name of each tensor: a rank makes its own share, and a whole model elsewhere has the same weights.

    Norms near 1, vectors near 0, matrices that keep a vector's size, k different experts for every token id.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        noise = torch.randn(*shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))
        if "norm" in name or name.endswith("scale"):
            return 1 + 0.1 * noise
        if "embed" in name:
            return noise
        return noise * (0.3 if len(shape) == 1 or name.endswith("ape") else shape[-1] ** -0.5)

    def table(self, name: str, rows: int, experts: int, topk: int) -> Tensor:
        return self.get(name, (rows, experts)).argsort(dim=-1)[:, :topk]


def file_name(name: str) -> str:
    """The name in the files of a parameter of `DeepseekV4`."""
    name = re.sub(r"\.hc_(attn|ffn)\.", r".hc_\1_", name)
    name = re.sub(r"^hc_head\.", "hc_head.hc_", name)
    return name if name.startswith("head.") else f"model.{name}"


@torch.no_grad()
def load(model: DeepseekV4, source: Source) -> None:
    """Fills a model, all but its routed experts."""
    config = model.config
    for name, parameter in model.named_parameters():
        if ".ffn.experts." in name:
            continue
        if name.endswith("tid2eid") and isinstance(source, Random):
            rows, topk = parameter.shape
            parameter.copy_(source.table(file_name(name), rows, config.n_routed_experts, topk))
        else:
            parameter.copy_(source.get(file_name(name), parameter.shape))


@torch.no_grad()
def load_experts(
    config: Config,
    source: Source,
    experts: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> afd_ops.GroupedSwiGLU:
    """The routed experts `experts` of every layer, in that order, and nothing else of the model."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    gate_up, down = [], []
    for layer in range(config.layers):
        gate_up.append(torch.empty(len(experts), 2 * inner, hidden, dtype=dtype, device=device))
        down.append(torch.empty(len(experts), hidden, inner, dtype=dtype, device=device))
        for row, expert in enumerate(experts):
            name = f"model.layers.{layer}.ffn.experts.{expert}"
            gate_up[-1][row, :inner] = source.get(f"{name}.w1.weight", (inner, hidden))
            gate_up[-1][row, inner:] = source.get(f"{name}.w3.weight", (inner, hidden))
            down[-1][row] = source.get(f"{name}.w2.weight", (hidden, inner))
    return afd_ops.GroupedSwiGLU(gate_up, down, limit=config.swiglu_limit)
