"""Muon in other people's training loops, as it is: transformers' Trainer, Accelerate, Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hp_muon import Muon, split_parameters

MODEL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 11, "tie_word_embeddings": False,
}  # fmt: skip


def optimizer_of(model: nn.Module) -> Muon:
    groups = split_parameters(model, lr=2e-2, adamw_lr=1e-2)
    return Muon(groups, ns_dtype=torch.float32)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 4, generator=generator)
    return [(x, x.sum(dim=-1, keepdim=True).sin()) for x in inputs]


def plain_loop(epochs: int) -> nn.Module:
    """What every trainer must reproduce."""
    model = small_model()
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=6)
    for _ in range(epochs):
        for inputs, targets in DataLoader(pairs(), batch_size=8):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), atol=1e-6, rtol=1e-5)


def test_the_trainer_of_transformers_trains_saves_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

    data = [{"input_ids": t, "labels": t} for t in (torch.arange(12 * 6) % 11).view(12, 6)]

    def trainer(steps: int) -> Any:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**MODEL))
        optimizer = optimizer_of(model)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=4,
            save_steps=3, report_to=[], use_cpu=True, max_grad_norm=1.0, logging_steps=1,
            gradient_accumulation_steps=2, disable_tqdm=True, save_total_limit=2,
            lr_scheduler_type="constant",
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))

    whole = trainer(6)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    resumed = trainer(6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_equal(resumed.model, whole.model)


def test_accelerate_takes_the_optimizer_and_its_schedule() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model: Any = small_model()
    optimizer: Any = optimizer_of(model)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=6)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(pairs(), batch_size=8), schedule
    )
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    assert_equal(accelerator.unwrap_model(model), plain_loop(2))


def test_lightning_takes_the_optimizer_and_its_schedule(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def training_step(self, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            return nn.functional.mse_loss(self.inner(inputs), targets)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.inner)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=6)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, DataLoader(pairs(), batch_size=8))
    assert_equal(module.inner, plain_loop(2))
