"""Pass 1: what each parameter is for (paper section 4.1).

A role is proposed by the last segments of a parameter's qualified name (`hp_planner.rules`) and
confirmed by what the graph knows: the module's class and forward, shapes, and the neighbours in
the same module. A name that matches but is not confirmed gives no role, with the reason kept;
lint then stops and says which override settles it. Nothing is replicated because its name is
unknown.
"""

from __future__ import annotations

import enum

from attrs import frozen

from hp_planner.graph import ParameterNode


class Role(enum.Enum):
    """What a parameter is for. A bias has the role of its weight."""

    EMBEDDING = "embedding"
    POSITION = "position_table"
    HEAD = "head"
    NORM = "norm"
    HEAD_NORM = "head_norm"
    QUERY = "query_projection"
    KEY = "key_projection"
    VALUE = "value_projection"
    FUSED_QKV = "fused_query_key_value"
    ATTENTION_GATE = "attention_gate"
    ATTENTION_OUTPUT = "attention_output"
    QUERY_DOWN = "latent_query_down"
    QUERY_UP = "latent_query_up"
    KEY_VALUE_DOWN = "latent_key_value_down"
    KEY_VALUE_UP = "latent_key_value_up"
    LATENT_NORM = "latent_norm"
    INDEXER = "sparse_attention_indexer"
    SINK = "attention_sink"
    GATE = "gate_projection"
    UP = "up_projection"
    FUSED_GATE_UP = "fused_gate_up"
    DOWN = "down_projection"
    ACTIVATION = "activation_scalar"
    ROUTER = "router"
    ROUTER_BIAS = "router_correction"
    SHARED_EXPERT_GATE = "shared_expert_gate"
    EXPERT_GATE_UP = "expert_gate_up"
    EXPERT_DOWN = "expert_down"
    EXPERT_BIAS = "expert_bias"
    STATE_SPACE = "state_space"
    STATE_SPACE_IN = "state_space_input"
    STATE_SPACE_OUT = "state_space_output"
    AUXILIARY = "auxiliary"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


NO_TEMPLATE = (Role.UNKNOWN, Role.UNSUPPORTED)


@frozen
class RoleAssignment:
    """One name of one parameter with its role.

    Attributes:
        boundary: the module whose boundary the parameter belongs to.
        reason: the rule and what confirmed it, or why there is no role.
    """

    parameter: ParameterNode
    role: Role
    boundary: str
    reason: str

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def is_bias(self) -> bool:
        return self.parameter.leaf == "bias"

    @property
    def label(self) -> str:
        return f"{self.role.value}_bias" if self.is_bias else self.role.value
