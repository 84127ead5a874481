"""State-space and linear attention, and what else mixes positions in a way of its own.

No template splits what happens between the projections: every rank computes it whole. The linear
layers around it are sharded one by one.
"""

from __future__ import annotations

from hp_planner.boundaries import Boundary
from hp_planner.manners import Manner
from hp_planner.templates.block import whole, whole_block
from hp_planner.templates.context import Context
from hp_planner.templates.contracts import Drafted
from hp_planner.templates.linear import by_linear


def mixer(context: Context, boundary: Boundary) -> Drafted:
    """Sharded linear layer by linear layer, unless it lies in a block that is sharded as one."""
    if boundary.manner is Manner.WHOLE or context.sharded_home(boundary) is not None:
        return whole(context, boundary)
    inside = by_linear(context, boundary)
    around = whole_block(context, boundary, boundary.problem)
    return Drafted(inside.contracts, (*around, *inside.specs))
