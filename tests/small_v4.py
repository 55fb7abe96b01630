"""DeepSeek-V4 in small, as transformers names its fields; examples/ is on the path of whoever imports this."""

from __future__ import annotations

from typing import Any

from deepseek_v4.config import CSA, HASH, HCA, LEARNED, SLIDING

SMALL: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    layer_types=[SLIDING, CSA, HCA, CSA],
    compress_rates={CSA: 4, HCA: 8},
    mlp_layer_types=[HASH, LEARNED, LEARNED, LEARNED],
    sliding_window=8,
    index_n_heads=16,  # with few heads many scores of the indexer are exactly 0, and tie
    index_head_dim=16,
    index_topk=3,
    rope_theta=1e4,
    compress_rope_theta=1.6e5,
    max_position_embeddings=1024,
    rope_parameters=dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1),
)
