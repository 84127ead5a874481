"""Names whose action in a forward is known: they treat every head, or every inner feature, alike.

A forward that uses only these and its own parts may be given a share of the heads or features. A
name that is missing here costs speed, never a wrong result: the block is then sharded linear layer
by linear layer (`hp_planner.manners`).
"""

from __future__ import annotations

# Attributes that count heads, or features over all heads. A forward that reads one views its
# tensors with it; the plan divides the attribute when it is applied.
HEAD_COUNTS = frozenset(
    {"num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads"}
    | {"num_kv_heads"}
)
HEAD_FEATURES = frozenset({"hidden_size", "embed_dim", "all_head_size", "inner_dim", "hidden_dim"})
FEATURE_COUNTS = frozenset({"intermediate_size", "inner_dim"})
LOCAL_SIZES = HEAD_COUNTS | HEAD_FEATURES | FEATURE_COUNTS

ATTENTION_ARGUMENTS = frozenset(
    {"attention_mask", "position_ids", "position_embeddings", "cache", "past_key_values"}
    | {"past_key_value", "layer_past", "use_cache", "cache_position", "output_attentions"}
    | {"layer_idx", "prev_topk_indices"}
)

# Shapes and devices, casts, and calls that act on one element at a time.
_ELEMENTWISE = frozenset(
    {"view", "reshape", "shape", "size", "transpose", "contiguous", "unsqueeze", "torch", "nn"}
    | {"functional", "F", "to", "dtype", "device", "float", "float32", "type_as", "training"}
    | {"dropout", "sigmoid", "getattr", "get", "isinstance", "ValueError", "config", "clamp_"}
    | {"clamp", "tanh", "relu", "silu", "gelu", "pow", "square", "mul"}
)
# Attention functions of transformers and what they are told; rotary embeddings; caches.
_ATTENTION = frozenset(
    {"eager_attention_forward", "get_interface", "ALL_ATTENTION_FUNCTIONS", "scaling", "scale"}
    | {"_attn_implementation", "attention_dropout", "sliding_window", "is_causal", "layer_idx"}
    | {"apply_rotary_pos_emb", "apply_rotary_emb", "apply_rotary_pos_emb_interleave", "cat"}
    | {"rope_interleave", "rotary_dim", "rotary_ndims", "rope_parameters", "use_rope"}
    | {"head_dim", "head_size", "num_key_value_groups", "update", "is_local_attention"}
    | {"is_sliding", "clip_qkv", "attn_logit_softcapping", "get_llama_4_attn_scale"}
    | {"residual_dropout", "use_qk_norm", "qk_layernorm", "q_norm", "k_norm", "q_layernorm"}
    | {"k_layernorm", "query_layernorm", "key_layernorm", "sinks", "attention_interface"}
    | {"repeat_kv", "softmax", "matmul", "resid_dropout", "attn_dropout", "rope_scaling"}
)
PER_HEAD_NAMES = HEAD_COUNTS | HEAD_FEATURES | _ELEMENTWISE | _ATTENTION
LATENT_NAMES = PER_HEAD_NAMES | frozenset(
    {"split", "expand", "expand_kv", "copy_", "new_empty", "kv_lora_rank", "q_lora_rank"}
    | {"qk_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"}
    | {"q_a_proj", "q_b_proj", "q_a_layernorm", "q_proj"}
    # A sparse attention's mask, one for all heads.
    | {"scatter", "bool", "long", "finfo", "min", "new_ones", "masked_fill", "indexer"}
)
MLP_NAMES = (_ELEMENTWISE - {"transpose", "cat", "shape", "size", "view", "reshape"}) | frozenset(
    {"act_fn", "act", "activation", "activation_fn", "residual_dropout", "relu2"}
)
MOE_NAMES = frozenset(
    {"view", "shape", "reshape", "size", "input_size", "dtype", "to", "float", "hidden_dim"}
    | {"sigmoid", "F", "functional", "nn", "torch", "e_score_correction_bias", "expert_bias"}
    | {"jitter_noise", "uniform_", "empty_like", "training", "enable_moe_fp32_combine"}
)
