"""Ranks that are threads of one process, as in PyTorch's own tests, train like processes."""

import multiprocessing
import threading
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

from hp_fsdp import fully_shard
from hp_fsdp.testing import full_gradients

WORLD = 2


def make():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + index, parameter.numel()).view_as(parameter))
    return model


def data(rank):
    return torch.linspace(-1, 1 + rank, 8).view(2, 4)


def training():
    model, dense = make(), make()
    for child in (model[0], model[2]):
        fully_shard(child)
    fully_shard(model)
    for _ in range(2):
        model(data(dist.get_rank())).square().sum().backward()
        for rank in range(WORLD):
            (dense(data(rank)).square().sum() / WORLD).backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, dense.get_parameter(name).grad)


def an_axis_that_nothing_was_sent_over_before():
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    model, dense = nn.Sequential(nn.Linear(4, 6)), nn.Linear(4, 6)
    model[0].load_state_dict(dense.state_dict())
    for tensor in (*model.parameters(), *dense.parameters()):
        tensor.detach().copy_(torch.arange(tensor.numel()).view_as(tensor))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    for shard, whole in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(shard.full_tensor(), whole)


def run_as_threads(check, reports):
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()

    def run(rank):
        try:
            dist.init_process_group("threaded", rank=rank, world_size=WORLD, store=store)
            check()
            reports.put("")
        except BaseException:
            reports.put(traceback.format_exc())

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.ranks
@pytest.mark.parametrize("check", [training, an_axis_that_nothing_was_sent_over_before])
def test_ranks_may_be_threads_of_one_process(check):
    context = multiprocessing.get_context("fork")
    reports = context.Queue()
    process = context.Process(target=run_as_threads, args=(check, reports))
    process.start()
    try:
        for _ in range(WORLD):
            # At once: the peers of a thread that fails wait for ever.
            assert reports.get(timeout=100) == ""
    finally:
        process.kill()
        process.join()
