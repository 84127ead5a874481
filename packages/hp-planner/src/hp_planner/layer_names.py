"""The names that models in public use give to the parts of attentions, MLPs and expert blocks."""

from __future__ import annotations

QUERY = ("q_proj", "wq", "q_lin", "query", "Wq", "query_proj", "project_q")
KEY = ("k_proj", "wk", "k_lin", "key", "Wk", "key_proj", "project_k")
VALUE = ("v_proj", "wv", "v_lin", "value", "Wv", "value_proj", "project_v")
FUSED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "kv_proj")
OUTPUT = ("o_proj", "wo", "out_lin", "out_proj", "dense", "c_proj", "Wo", "attention_out")

GATE = ("gate_proj", "w1")
UP = ("up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h", "fc_in", "lin1", "dense1")
FUSED_GATE_UP = ("gate_up_proj", "input_linear", "Wi")
DOWN = (
    "down_proj",
    "w2",
    "fc2",
    "c_proj",
    "dense_4h_to_h",
    "fc_out",
    "output_linear",
    "Wo",
    "lin2",
)
ROUTER = ("gate", "router", "wg", "layer")
SHARED_EXPERT = ("shared_expert", "shared_experts", "shared_mlp")
