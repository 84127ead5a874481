"""The training loop: one step, the evaluation, and what a checkpoint has to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hp_dtensor import Layout, Replicate
from hp_dtensor.dtensor import DTensor
from hp_integration.data import (
    Batch,
    Corpus,
    evaluation_batch,
    global_batch,
    mixed_seed,
    rank_slice,
)
from hp_integration.data_parallel import DataParallel
from hp_integration.loss import vocabulary_cross_entropy
from hp_integration.options import Options
from hp_platform.axis import MeshAxis


def next_token_loss(model: nn.Module, batch: Batch, vocabulary: MeshAxis | None = None) -> Tensor:
    """Mean cross-entropy (nats a token) of `batch`; a plain scalar.

    In validate mode the logits are a `DTensor`, and the loss is computed with their layout.

    Args:
        vocabulary: the axis over which the logits may be sharded, where the plan leaves them so.
    """
    logits = model(input_ids=batch.inputs).logits
    size: int = model.config.vocab_size  # type: ignore[assignment,union-attr]
    local = logits.to_local() if isinstance(logits, DTensor) else logits
    if vocabulary is not None and local.shape[-1] != size:
        scores, ids = local.flatten(0, 1).float(), batch.targets.flatten()
        return vocabulary_cross_entropy(scores, ids, vocabulary)
    targets = _declared_beside(logits, batch.targets)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def _declared_beside(logits: Tensor, targets: Tensor) -> Tensor:
    """`targets`, equal on the ranks that share `logits`, as a replicated DTensor beside one."""
    if not isinstance(logits, DTensor):
        return targets
    layout = logits.layout
    everywhere = [Replicate()] * len(layout.placements)
    return DTensor.of_layout(targets, Layout(layout.mesh, everywhere, tuple(targets.shape)))


def training_batch(corpus: Corpus, options: Options, data: DataParallel, step: int) -> Batch:
    """This rank's rows of the global batch of `step`."""
    batch = global_batch(
        corpus,
        seed=options.seed,
        step=step,
        batch_size=options.batch_size,
        sequence_length=options.seq_len,
    )
    return rank_slice(batch, rank=data.rank, ranks=data.ranks)


def evaluation_batches(corpus: Corpus, options: Options) -> list[Batch]:
    """The global batches of the evaluation, the same for every run over the same text."""
    return [
        evaluation_batch(
            corpus,
            index=index,
            count=options.eval_batches,
            batch_size=options.batch_size,
            sequence_length=options.seq_len,
        )
        for index in range(options.eval_batches)
    ]


@define(eq=False)
class Trainer:
    """A model, its optimizer and its place in the data.

    Attributes:
        vocabulary: the axis over which the logits may be sharded.
        step: number of optimizer steps taken; also the index of the next batch.
        losses: of every step so far, averaged over the global batch, in nats a token.
    """

    model: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    corpus: Corpus
    options: Options
    data: DataParallel
    vocabulary: MeshAxis | None = None
    step: int = 0
    losses: list[float] = field(factory=list)

    def train_step(self) -> float:
        """One forward, backward and optimizer step; returns the global batch's loss."""
        batch = training_batch(self.corpus, self.options, self.data, self.step)
        # Dropout, where a model has any, then depends on the step and the rows alone, so a
        # resumed run repeats it.
        torch.manual_seed(mixed_seed(self.options.seed, self.step, self.data.rank))
        loss = next_token_loss(self.model, batch, self.vocabulary)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        self.losses.append(self.data.mean(loss))
        return self.losses[-1]

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss of global `batches`, each rank taking its rows; training mode is restored."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        count = 0
        with torch.no_grad():
            for batch in batches:
                rows = rank_slice(batch, rank=self.data.rank, ranks=self.data.ranks)
                total += next_token_loss(self.model, rows, self.vocabulary).double()
                count += 1
        self.model.train()
        return self.data.mean(total / count)

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, as the next step will use it."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Everything a checkpoint holds beside the step and the losses."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load(self, read: Callable[[dict[str, Any]], None]) -> None:
        """Takes over the state that `read` fills in; every rank calls it together."""
        state = self.state_dict()
        read(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
