"""What a training step of a large model communicates and holds, without values and without ranks.

`python -m hp_integration.dry_run --config config.json --ranks 16` builds the model on the meta
device, shards it over PyTorch's `fake` group, runs two steps and shows the second one's ledger.
Nothing is computed or sent, so any model and any number of ranks fit on a laptop.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from torch.distributed.device_mesh import init_device_mesh

import hp_fsdp
from hp_integration.models import decoder_layers
from hp_platform import ledger
from hp_platform.ledger import Ledger, Summary

QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""The published sizes of Qwen3-30B-A3B."""


@frozen
class DryRun:
    """One step of one rank.

    Attributes:
        parameters: tensors; elements: their global elements.
        all_gathers, reduce_scatters, all_reduces: number of collectives.
        gathered, scattered, reduced: bytes that this rank contributes to or keeps of them: its
            share of a gather and of a reduce-scatter, the whole buffer of an all-reduce.
        memory: bytes on this rank.
        ledger: the step's ledger.
    """

    parameters: int
    elements: int
    all_gathers: int
    reduce_scatters: int
    all_reduces: int
    gathered: int
    scattered: int
    reduced: int
    memory: hp_fsdp.MemoryUse
    ledger: Summary

    def to_json(self) -> str:
        """One JSON object, without the ledger."""
        return json.dumps({k: v for k, v in asdict(self).items() if k != "ledger"})


def dry_run(
    config: dict[str, Any],
    ranks: int,
    *,
    replicas: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    comm_policy: str = "per_parameter",
    tokens: int = 8,
) -> DryRun:
    """Runs a step without values: every decoder layer a unit, and the root.

    Makes a process group of the `fake` backend, and ends it.

    Args:
        config: a transformers configuration as a dictionary, `model_type` included.
        ranks: data-parallel ranks in all.
        replicas: how many times shards are repeated over the slow tier; divides `ranks`.
        dtype: of parameters, gathers and reductions.
        comm_policy: as for `hp_fsdp.fully_shard`, but for "auto", which would have to measure.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = _abstract(config, dtype)
    elements = [parameter.numel() for parameter in model.parameters()]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        names: tuple[str, ...] = ("dp_shard",)
        sizes: tuple[int, ...] = (ranks,)
        if replicas > 1:
            names, sizes = ("dp_replicate", *names), (replicas, ranks // replicas)
        mesh = init_device_mesh("meta", sizes, mesh_dim_names=names)
        for _, layer in decoder_layers(model):
            # None would keep the last layer gathered between forward and backward.
            hp_fsdp.fully_shard(
                layer, mesh=mesh, comm_policy=comm_policy, reshard_after_forward=True
            )
        hp_fsdp.fully_shard(model, mesh=mesh, comm_policy=comm_policy)
        _step(model, tokens)  # records the order of gathers
        with ledger() as log:
            _step(model, tokens)
        memory = hp_fsdp.memory_use(model)
    finally:
        dist.destroy_process_group()
    return _summarised(elements, log, memory)


def _summarised(elements: list[int], log: Ledger, memory: hp_fsdp.MemoryUse) -> DryRun:
    gathers, scatters, reductions = (
        [r for r in log.records if r.operation == operation]
        for operation in ("all_gather", "reduce_scatter", "all_reduce")
    )
    return DryRun(
        parameters=len(elements),
        elements=sum(elements),
        all_gathers=len(gathers),
        reduce_scatters=len(scatters),
        all_reduces=len(reductions),
        gathered=sum(r.bytes // r.axis_size for r in gathers),
        scattered=sum(r.bytes // r.axis_size for r in scatters),
        reduced=sum(r.bytes for r in reductions),
        memory=memory,
        ledger=log.summary(),
    )


def _abstract(config: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    made = AutoConfig.for_model(config["model_type"], **values)
    made.use_cache = False
    # The only way to apply experts whose shapes do not depend on what the router chooses.
    made._experts_implementation = "batched_mm"
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made, dtype=dtype)


def _step(model: Any, tokens: int) -> None:
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    # A mask of its own keeps the model from looking for one in the values of the positions.
    mask = torch.zeros(1, 1, tokens, tokens, dtype=model.dtype, device="meta")
    model(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
    model.zero_grad()


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m hp_integration.dry_run", description=__doc__)
    parser.add_argument("--config", type=Path, help="a config.json; default: Qwen3-30B-A3B")
    parser.add_argument("--ranks", type=int, default=16, help="data-parallel ranks")
    parser.add_argument("--replicas", type=int, default=1, help="of them over the slow tier")
    parser.add_argument("--comm-policy", default="per_parameter")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    config = QWEN3_30B_A3B if options.config is None else json.loads(options.config.read_text())
    found = dry_run(
        config, options.ranks, replicas=options.replicas, comm_policy=options.comm_policy
    )
    if options.json:
        print(found.to_json())
        return 0
    print(f"{found.parameters} parameters, {found.elements:,} elements")
    print(found.ledger)
    print(f"this rank's share: {found.gathered:,} bytes gathered, {found.scattered:,} scattered")
    memory = found.memory
    print(
        f"memory: {memory.shards:,} bytes of shards, {memory.gradients:,} of their gradients, at "
        f"most {memory.passing:,} of gathered parameters and full gradients"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
