"""`hp-train`: plan, check, train, evaluate, save and report, as one run over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor.plan import ShardingPlan
from hp_integration.assemble import assemble, assemble_single
from hp_integration.checkpoint import Progress, load_checkpoint, save_checkpoint
from hp_integration.checks import gradient_check, validate_step, vocabulary_axis
from hp_integration.data import frequency_loss
from hp_integration.data_parallel import DATA_AXES, DataParallel
from hp_integration.errors import InputError
from hp_integration.inputs import Inputs, read_inputs, read_options
from hp_integration.progress import progress
from hp_integration.report import Report
from hp_integration.schedule import learning_rate_schedule
from hp_integration.trainer import Trainer, evaluation_batches, training_batch
from hp_integration.world import (
    World,
    declare_hosts,
    device_mesh,
    process_group,
    require_shared_folder,
)
from hp_platform.agreement import agree
from hp_platform.errors import AgreementError
from hp_platform.failures import Activity, reported_failures, reported_stop
from hp_platform.ledger import Ledger, ledger
from hp_platform.topology import Topology

_INPUT_ERROR_STATUS = 2


@frozen
class Result:
    """What a run comes to, the same on every rank.

    Attributes:
        losses: of every training step, nats a token.
        evaluation_loss, frequency_loss: of the held-out text, by the model and by the
            frequencies of its tokens.
        checkpoint: the last checkpoint's folder.
    """

    losses: list[float]
    evaluation_loss: float
    frequency_loss: float
    checkpoint: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 2 for a mistake in the inputs."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    with reported_failures("hp-train") as activity:
        return _launch(arguments, activity) or 0


def _launch(arguments: Sequence[str], activity: Activity) -> int:
    with process_group() as world, reported_stop(activity):
        try:
            run(arguments, world, activity)
        except InputError as error:
            if world.is_leader:
                print(f"hp-train: error: {error}", file=sys.stderr, flush=True)
            world.barrier()  # the launcher stops everyone when the first rank has left
            return _INPUT_ERROR_STATUS
    return 0


def run(arguments: Sequence[str], world: World, activity: Activity | None = None) -> Result:
    """The whole run on the ranks of `world`.

    Args:
        activity: told what is going on, for the report of a failure.

    Raises:
        InputError: on every rank alike, before training.
    """
    activity = activity or Activity("hp-train")
    activity.phase = "reading the inputs"
    options = world.together(lambda: read_options(arguments, world.size))
    declare_hosts(options.devices_per_host, world.size)
    require_shared_folder(options.out, world)
    inputs = world.together(lambda: read_inputs(options))
    require_same_inputs(inputs, world)
    report = Report.of_rank(world)
    report.inputs(inputs, Topology.discover())
    activity.phase = "checking the plan"
    trainer = prepare(inputs, report)
    return train(trainer, inputs, world, report, activity)


def prepare(inputs: Inputs, report: Report) -> Trainer:
    """Checks the plan, then builds what trains, at its first step or where it stopped."""
    options = inputs.options
    if inputs.plan is None:
        data, vocabulary = DataParallel(), None
        assembly = assemble_single(inputs.make_model(), options)
    else:
        mesh = device_mesh(options.mesh)
        data, vocabulary = DataParallel.of_mesh(mesh), vocabulary_axis(mesh)
        if not inputs.plan.boundaries:
            report.nothing_to_check()
        elif options.checks:
            # Ranks that share experts check with the same rows, and train on different ones.
            check(inputs, inputs.plan, mesh, DataParallel.of_mesh(mesh, DATA_AXES), report)
        assembly = assemble(inputs.make_model(), inputs.plan, mesh, options)
    schedule = learning_rate_schedule(
        assembly.optimizer, warmup=options.warmup, steps=options.steps
    )
    trainer = Trainer(
        assembly.model, assembly.optimizer, schedule, inputs.corpus, options, data, vocabulary
    )
    if inputs.resume is not None:
        resume(trainer, inputs, report)
    return trainer


def check(
    inputs: Inputs, plan: ShardingPlan, mesh: DeviceMesh, data: DataParallel, report: Report
) -> None:
    """One validate-mode step on the first batch, and its gradients against the unsharded model's.

    Raises:
        HPError: where the plan and the model disagree first, or which gradients differ.
    """
    batch = training_batch(inputs.corpus, inputs.options, data, step=0)
    report.validated(plan, validate_step(inputs.make_model, plan, mesh, batch, data))
    gradients = gradient_check(inputs.make_model, plan, mesh, batch)
    report.gradients(gradients)
    gradients.raise_if_failed()


def resume(trainer: Trainer, inputs: Inputs, report: Report) -> None:
    """Puts the trainer where the checkpoint stopped."""
    assert inputs.resume is not None
    checkpoint, done = inputs.resume
    trainer.load(lambda state: load_checkpoint(checkpoint, state))
    trainer.step, trainer.losses = done.step, list(done.losses)
    report.resumed(checkpoint, done.step)


def train(
    trainer: Trainer, inputs: Inputs, world: World, report: Report, activity: Activity
) -> Result:
    """Production training, then evaluation, checkpoint, communication summary and picture."""
    log = train_steps(trainer, inputs, world, report, activity)
    activity.phase = "evaluation"
    batches = evaluation_batches(inputs.corpus, inputs.options)
    baseline = frequency_loss((batch.targets for batch in batches), inputs.corpus.vocabulary)
    evaluation = trainer.evaluate(batches)
    checkpoint = save(trainer, inputs, world, activity)
    result = Result(trainer.losses, evaluation, baseline, checkpoint)
    report.finished(inputs, result, log)
    world.barrier()
    return result


def train_steps(
    trainer: Trainer, inputs: Inputs, world: World, report: Report, activity: Activity
) -> Ledger | None:
    """Every remaining step; the last one is recorded in the ledger that is returned."""
    options = inputs.options
    log = None
    report.training(trainer.step, options.steps)
    with progress(
        report.console,
        first=trainer.step,
        steps=options.steps,
        tokens_per_step=options.batch_size * options.seq_len,
        every=options.log_every,
    ) as reporter:
        while trainer.step < options.steps:
            rate = trainer.learning_rate
            activity.phase = f"training step {trainer.step + 1}"
            if trainer.step == options.steps - 1:
                with ledger() as log:
                    loss = trainer.train_step()
            else:
                loss = trainer.train_step()
            reporter.step(trainer.step, loss, rate)
            if options.save_every and trainer.step % options.save_every == 0:
                save(trainer, inputs, world, activity)
    return log


def save(trainer: Trainer, inputs: Inputs, world: World, activity: Activity) -> Path:
    """A checkpoint of the trainer's present step."""
    activity.phase = f"saving the checkpoint of step {trainer.step}"
    done = Progress(trainer.step, trainer.losses, inputs.identity)
    return save_checkpoint(inputs.options.out, done, trainer.state_dict(), world)


def require_same_inputs(inputs: Inputs, world: World) -> None:
    """Compares digests of text, plan and options over all ranks.

    Raises:
        InputError: naming what differs and on which ranks, for example the standard library of
            another Python version on a second host.
    """
    plan = "none" if inputs.plan is None else inputs.plan.digest
    digests = {"text": inputs.corpus.digest, "plan": plan, "options": repr(inputs.options)}
    for name, value in digests.items():
        try:
            agree(name, value, world.axis)
        except AgreementError as error:
            raise InputError(" ".join(str(error).split())) from None


if __name__ == "__main__":
    sys.exit(main())
