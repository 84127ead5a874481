"""The names that models in public use give to the parts of MLPs and of blocks of experts."""

from __future__ import annotations

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
