"""Collectives, ledger, topology and device access on plain tensors.

The only caller of torch.distributed's communication in this project. Importing it needs
neither CUDA nor torch_npu and starts no process group.
"""

from hp_platform import testing
from hp_platform.agreement import agree
from hp_platform.axis import MeshAxis
from hp_platform.buffers import ALIGNMENT, BufferLayout, aligned_empty, pad_to_alignment
from hp_platform.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather_objects,
    reduce,
    reduce_scatter,
)
from hp_platform.errors import (
    AgreementError,
    CollectiveError,
    HPError,
    PeerError,
    RankFailure,
    TopologyError,
)
from hp_platform.failures import reported_failures, reported_stop
from hp_platform.fusion import all_reduce_fused
from hp_platform.handle import Handle
from hp_platform.ledger import Event, Ledger, Origin, Record, Summary, ledger, mark, phase
from hp_platform.mesh import make_mesh
from hp_platform.topology import Tier, Topology
from hp_platform.transfers import Receive, Send, exchange, receive, send

__all__ = [
    "ALIGNMENT",
    "AgreementError",
    "BufferLayout",
    "CollectiveError",
    "Event",
    "HPError",
    "Handle",
    "Ledger",
    "MeshAxis",
    "Origin",
    "PeerError",
    "RankFailure",
    "Receive",
    "Record",
    "Send",
    "Summary",
    "Tier",
    "Topology",
    "TopologyError",
    "agree",
    "aligned_empty",
    "all_gather",
    "all_reduce",
    "all_reduce_fused",
    "all_to_all",
    "barrier",
    "broadcast",
    "exchange",
    "gather_objects",
    "ledger",
    "make_mesh",
    "mark",
    "pad_to_alignment",
    "phase",
    "receive",
    "reduce",
    "reduce_scatter",
    "reported_failures",
    "reported_stop",
    "send",
    "testing",
]
