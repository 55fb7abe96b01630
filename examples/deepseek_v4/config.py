"""Sizes of a DeepSeek-V4 model, read from the fields of its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASH, LEARNED = "hash_moe", "moe"


@dataclass(frozen=True)
class Yarn:
    """How the rotary frequencies of the compressed layers are stretched."""

    factor: float = 16.0
    original_positions: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class Config:
    """The names are those of config.json where it has one."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int  # the last channels of a head
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    layer_types: tuple[str, ...]  # SLIDING, CSA or HCA
    mlp_layer_types: tuple[str, ...]  # HASH or LEARNED
    compress_rates: Mapping[str, int]  # of CSA and HCA
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    compress_rope_theta: float = 1.6e5
    yarn: Yarn = Yarn()

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    def __post_init__(self) -> None:
        if len(self.mlp_layer_types) != self.layers:
            raise ValueError(f"mlp_layer_types has {len(self.mlp_layer_types)} layers, layer_types has {self.layers}")
        for name, known in (("layer_types", {SLIDING, CSA, HCA}), ("mlp_layer_types", {HASH, LEARNED})):
            if strange := set(getattr(self, name)) - known:
                raise ValueError(f"{name} has {sorted(strange)}, expected some of {sorted(known)}")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups is {self.o_groups}, expected a divisor of {self.num_attention_heads} heads")
        if not 1 <= self.num_experts_per_tok <= self.n_routed_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok} of {self.n_routed_experts} experts")

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Config:
        """From the official fields (compress_ratios, num_hash_layers, rope_scaling) or those that transformers writes
        (layer_types, mlp_layer_types, rope_parameters).

        Raises:
            ValueError: a field asks for something DeepSeek-V4 does not have.
        """
        fixed = {
            "scoring_func": "sqrtsoftplus",
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "num_key_value_heads": 1,
        }
        for name, only in fixed.items():
            if values.get(name, only) != only:
                raise ValueError(f"{name} is {values[name]!r}, expected {only!r}")
        taken = {name: values[name] for name in Config.__dataclass_fields__ if name in values}
        layers = values["num_hidden_layers"]
        if "layer_types" not in values:
            ratios = values["compress_ratios"][:layers]  # what follows belongs to the draft block
            heavy = max(ratios)
            taken["layer_types"] = [SLIDING if r == 0 else HCA if r == heavy else CSA for r in ratios]
            taken["compress_rates"] = {CSA: min(filter(None, ratios)), HCA: heavy}
        if "mlp_layer_types" not in values:
            hashed = values["num_hash_layers"]
            taken["mlp_layer_types"] = [HASH] * hashed + [LEARNED] * (layers - hashed)
        taken |= {name: tuple(taken[name]) for name in ("layer_types", "mlp_layer_types")}
        rope = values.get("rope_scaling") or values.get("rope_parameters", {})
        rope = rope.get("compress", rope)
        if rope:
            taken["yarn"] = Yarn(
                rope["factor"], rope["original_max_position_embeddings"], rope["beta_fast"], rope["beta_slow"]
            )
        return Config(**taken)

    @staticmethod
    def from_folder(folder: Path) -> Config:
        return Config.from_dict(json.loads((folder / "config.json").read_text()))


_COMMON: dict[str, Any] = {
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "swiglu_limit": 10.0,
    "num_hash_layers": 3,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
}

FLASH = Config.from_dict(
    {
        **_COMMON,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4],
        "index_topk": 512,
    }
)

PRO = Config.from_dict(
    {
        **_COMMON,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4],
        "index_topk": 1024,
    }
)
