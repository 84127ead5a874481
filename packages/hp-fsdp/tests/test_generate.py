"""`generate` of a transformers model under FSDP, between steps of training."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hp_fsdp import fully_shard, register_fsdp_forward_method
from hp_fsdp.testing import assert_same, full_parameters
from hp_platform.testing import run_ranks

transformers = pytest.importorskip("transformers")


def made():
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def prompt(rank):
    return torch.randint(3, 31, (2, 5), generator=torch.Generator().manual_seed(rank))


def step(model, optimizer, ids):
    optimizer.zero_grad()
    torch.stack([model(input_ids=each, labels=each).loss for each in ids]).mean().backward()
    optimizer.step()


@pytest.mark.ranks
def test_generated_tokens_are_those_of_the_dense_model_and_training_goes_on():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model, dense = made(), made()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "generate")
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, dense)]
        for beams in (1, 2):
            options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
            options["num_beams"] = beams
            found, expected = (m.generate(prompt(rank), **options) for m in (model, dense))
            assert found.shape == (2, 9)
            assert torch.equal(found, expected)
            step(model, optimizers[0], [prompt(rank)])
            step(dense, optimizers[1], [prompt(other) for other in range(2)])
            assert_same(full_parameters(model), full_parameters(dense), rtol=1e-4, atol=1e-5)

    run_ranks(body, 2)
