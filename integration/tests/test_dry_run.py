import json

import pytest
from torch.distributed import is_initialized

from hp_integration.dry_run import QWEN3_30B_A3B, dry_run, main

SMALL = {
    **QWEN3_30B_A3B,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "vocab_size": 512,
}


def test_a_small_model_on_replicas_counts_every_collective():
    found = dry_run(SMALL, 8, replicas=2)
    assert not is_initialized()
    assert found.parameters == 2 * 11 + 3
    # The root stays gathered; every layer is gathered again in backward.
    assert found.all_gathers == 3 + 2 * 2 * 11
    assert found.reduce_scatters == found.parameters
    assert found.all_reduces == 3
    assert found.scattered >= 2 * found.elements / 4
    assert found.memory.shards >= 2 * found.elements / 4
    together = dry_run(SMALL, 8, replicas=2, comm_policy="shared_buffer")
    assert together.all_gathers == 3 + 2
    assert together.elements == found.elements
    assert abs(together.scattered - found.scattered) < 0.1 * found.scattered


@pytest.mark.slow
def test_qwen3_30b_on_16_ranks_has_the_published_counts_and_bytes(capsys):
    assert main(["--ranks", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 531
    assert found["elements"] == 30_532_122_624
    assert found["reduce_scatters"] == 531
    assert found["all_gathers"] == 531 + 48 * 11
    assert found["scattered"] == pytest.approx(3.8165e9, rel=1e-4)
    assert found["gathered"] == pytest.approx(7.670e9, rel=0.02)
    assert found["memory"]["shards"] == pytest.approx(2 * 30_532_122_624 / 16, rel=1e-3)
    # Two layers gathered and the root, of 1.25 and 1.24 GB.
    layer, root = 2 * 30_532_122_624 / 48, 2 * 2 * 151_936 * 2048
    assert found["memory"]["passing"] < 3 * layer + root
