"""The algorithm's stages, replaced one by one: momentum, orthogonalization, scale, afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hp_muon import MatrixView, Muon, MuonError, QKClip
from hp_muon.reference import DenseMuon
from hp_platform.testing import run_ranks

PLAIN = {"lr": 1.0, "weight_decay": 0.0, "scale": "none", "ns_dtype": torch.float32}


def weight(*shape, gradient=None):
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.ones(shape) if gradient is None else gradient
    return parameter


def test_an_orthogonalization_of_ones_own_is_applied_to_stacks_of_matrices():
    seen = []

    def sign(matrices):
        seen.append(matrices.shape)
        return matrices.sign()

    stack, single = weight(3, 4, 5), weight(4, 5)
    Muon([stack, single], orthogonalize=sign, **PLAIN).step()
    assert seen == [(4, 4, 5)]
    assert torch.equal(stack.detach(), -torch.ones(3, 4, 5))


def test_an_orthogonalization_must_keep_the_shape():
    optimizer = Muon([weight(4, 5)], orthogonalize=lambda m: m.mT, **PLAIN)
    with pytest.raises(MuonError, match=r"orthogonalize returned shape \(1, 5, 4\)"):
        optimizer.step()


def test_a_momentum_rule_of_ones_own_sees_and_updates_the_momenta():
    def heavy(momenta, gradients, momentum, nesterov):
        torch._foreach_lerp_(momenta, gradients, 0.5)
        return momenta

    parameter = weight(2, 2, gradient=torch.eye(2))
    optimizer = Muon([parameter], momentum_rule=heavy, orthogonalize=lambda m: m, **PLAIN)
    optimizer.step()
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], 0.75 * torch.eye(2))
    assert torch.equal(parameter.detach(), -1.25 * torch.eye(2))


def test_a_scale_of_ones_own_sees_the_logical_matrix_and_stays_out_of_the_groups():
    arguments = {**PLAIN, "scale": lambda rows, cols: rows + 100 * cols}
    parameter = weight(6, 5)
    optimizer = Muon(
        [("w", parameter)], orthogonalize=lambda m: m, momentum=0.0, nesterov=False,
        views={"w": MatrixView("(h r) c -> h r c", h=2)}, **arguments,
    )  # fmt: skip
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((6, 5), -503.0))
    assert optimizer.state_dict()["param_groups"][0]["scale"] == "custom"


def test_the_hook_after_the_update_sees_every_muon_parameter_by_name():
    seen = []
    groups = [
        {"params": [("w", weight(2, 2, gradient=torch.eye(2)))]},
        {"params": [("b", weight(2))], "use_muon": False},
    ]
    Muon(
        groups, post_update=lambda name, p: seen.append((name, p.detach().clone())), **PLAIN
    ).step()
    ((name, value),) = seen
    assert name == "w"
    assert torch.equal(value, groups[0]["params"][0].detach())


@pytest.mark.parametrize("name", ["orthogonalize", "momentum_rule", "post_update"])
def test_a_stage_that_is_no_function_is_refused(name):
    with pytest.raises(MuonError, match=f"{name} must be a function"):
        Muon([weight(2, 2)], **{name: "sign"})


def test_rows_of_a_normuon_update_have_a_common_size():
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(6, 9, generator=generator) * torch.arange(1.0, 7)[:, None]
    plain, even = (weight(6, 9, gradient=gradient.clone()) for _ in range(2))
    Muon([plain], coefficients="quintic", **PLAIN).step()
    Muon([even], coefficients="quintic", normuon_beta2=0.95, **PLAIN).step()
    rows = even.detach().square().mean(dim=1)
    torch.testing.assert_close(rows, torch.full((6,), float(rows.mean())), rtol=1e-4, atol=0)
    torch.testing.assert_close(even.detach().norm(), plain.detach().norm())
    spread = plain.detach().square().mean(dim=1)
    assert spread.max() > 1.02 * spread.min()


@pytest.mark.ranks
def test_qk_clip_scales_the_heads_above_the_limit_on_any_layout():
    clip_arguments = {"weights": {"*.q": 0.5, "*.k": 0.5}, "tau": 10.0}
    full = torch.arange(1.0, 25).reshape(8, 3)
    factors = torch.tensor([1.0, 0.5, 1.0, 0.25])  # sqrt(10 / 40), sqrt(10 / 160)
    expected = full * factors.repeat_interleave(2)[:, None]

    def body():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        for placement in (Shard(0), Shard(1), Replicate()):
            clip = QKClip(**clip_arguments)
            parameter = nn.Parameter(distribute_tensor(full.clone(), mesh, [placement]))
            parameter.grad = distribute_tensor(torch.zeros(8, 3), mesh, [placement])
            named = [("layer.q", parameter)]
            optimizer = Muon(named, post_update=clip, lr=0.1, weight_decay=0.0)
            clip.observe("layer.q", torch.tensor([1.0, 40.0, 10.0, 7.0]))
            clip.observe("layer.q", torch.tensor([2.0, 3.0, 4.0, 160.0]))
            optimizer.step()
            torch.testing.assert_close(parameter.full_tensor().detach(), expected)
            optimizer.step()  # nothing was observed since
            torch.testing.assert_close(parameter.full_tensor().detach(), expected)

    run_ranks(body, 3)


def test_qk_clip_refuses_heads_that_do_not_divide_the_rows():
    clip = QKClip({"q": 1.0})
    clip.observe("q", torch.tensor([200.0, 1.0, 1.0]))
    with pytest.raises(MuonError, match=r"'q' has 8 rows.*3 heads"):
        clip("q", nn.Parameter(torch.ones(8, 2)))


def test_the_finite_check_can_be_left_out():
    parameter = weight(2, 2, gradient=torch.full((2, 2), torch.nan))
    Muon([parameter], check_finite=False).step()
    assert parameter.isnan().all()


def test_kinds_of_matrices_of_one_parameter_step_as_separate_parameters():
    """Query, key and value of unequal sizes, of which the fused weight is the concatenation."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(rows, 6, generator=generator) for rows in (8, 2, 2)]
    gradients = [torch.randn(p.shape, generator=generator) for p in parts]
    separate = [nn.Parameter(part.clone()) for part in parts]
    fused = nn.Parameter(torch.cat(parts))
    view = MatrixView("(x d) m -> (x d) m", x=(4, 1, 1), d=2)
    optimizer = Muon([("qkv", fused)], views={"qkv": view}, ns_dtype=torch.float32)
    reference = DenseMuon(separate, ns_dtype=torch.float32)
    for step in range(3):
        fused.grad = torch.cat(gradients) * (step + 1)
        for parameter, gradient in zip(separate, gradients):
            parameter.grad = gradient * (step + 1)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(fused.detach(), torch.cat(separate).detach(), atol=1e-5, rtol=1e-5)


def test_a_split_that_does_not_fit_is_refused_by_name():
    view = MatrixView("(x d) m -> (x d) m", x=(4, 1, 1), d=3)
    with pytest.raises(MuonError, match=r"'qkv'.*length 12 does not fit"):
        Muon([("qkv", weight(12, 6))], views={"qkv": view})
