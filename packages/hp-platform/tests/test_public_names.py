"""What the package offers."""

import hp_platform
import hp_platform.testing

NAMES = """
ALIGNMENT AgreementError BufferLayout CollectiveError Event HPError Handle Ledger MeshAxis Origin
PeerError RankFailure Receive Record Send Summary Tier Topology TopologyError agree aligned_empty
all_gather all_reduce all_reduce_fused all_to_all barrier broadcast exchange gather_objects ledger
make_mesh mark pad_to_alignment phase receive reduce reduce_scatter reported_failures
reported_stop send testing
"""


def test_public_names_are_these():
    assert hp_platform.__all__ == NAMES.split()
    assert all(hasattr(hp_platform, name) for name in NAMES.split())
    names = "Simulator TwoTierNetwork TwoTierUnavailable run_ranks two_tier"
    assert hp_platform.testing.__all__ == names.split()
