"""Clipping and scaling where shards live on the host and the mesh's ranks communicate on devices.

Run by `test_offload` in a process of its own, on hp-platform's fake NPUs: their collectives refuse
tensors of other devices, and registering a device type cannot be undone.
"""

import math

import torch
import torch_npu  # noqa: F401  (registers the device type)
from torch import nn

import hp_platform
from hp_dtensor import DTensor, Layout, Shard
from hp_platform.testing import run_ranks


def body(rank):
    mesh = hp_platform.make_mesh({"dp": 2}, device_type="npu")
    layout = Layout(mesh, [Shard(0)], (4,))

    def parameters(last=2.0):
        """Two shards, of which rank 0 has 1, 1 and rank 1 has 0 and `last` as gradients."""
        found = []
        for _ in range(2):
            parameter = nn.Parameter(DTensor.of_layout(torch.zeros(2), layout))
            value = torch.ones(2) if rank == 0 else torch.tensor([0.0, last])
            parameter.grad = DTensor.of_layout(value, layout)
            found.append(parameter)
        return found

    for foreach in (False, True):
        held = parameters()
        norm = nn.utils.clip_grad_norm_(held, 1.0, foreach=foreach)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert math.isclose(norm.item(), math.sqrt(12), rel_tol=1e-5), norm
        for parameter in held:
            local = parameter.grad.to_local()
            assert local.device.type == "cpu"
            whole = torch.tensor([[1.0, 1.0], [0.0, 2.0]][rank]) / math.sqrt(12)
            torch.testing.assert_close(local, whole)
    zeros = sum((parameter.grad == 0).sum() for parameter in parameters())
    zeros = zeros.full_tensor() if isinstance(zeros, DTensor) else zeros
    assert zeros.item() == 2
    for last, wanted in ((math.inf, 0.0), (2.0, -0.5)):
        held = parameters(last)
        optimizer = torch.optim.SGD(held, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (1.0 if last == math.inf else 2.0)
        expected = wanted if rank == 0 else 0.0
        assert held[0].to_local()[0].item() == expected
        assert held[0].detach().full_tensor()[0].item() == wanted


if __name__ == "__main__":
    run_ranks(body, 2, backend="hccl")
