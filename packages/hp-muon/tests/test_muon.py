"""The optimizer's conventions: what people do with any torch.optim.Optimizer, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import distribute_tensor as torch_distribute

from hp_dtensor import Layout, Replicate, Shard, distribute_tensor
from hp_muon import MatrixView, Muon, MuonError
from hp_muon.reference import DenseMuon
from hp_platform.testing import run_ranks

ARGUMENTS = {"ns_dtype": torch.float32}


def matrices(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(
            parameter.dtype
        )


def test_a_scheduler_changes_learning_rate_and_decay_live():
    mine, dense = matrices((4, 6)), matrices((4, 6))
    optimizer = Muon(mine, lr=0.1, **ARGUMENTS)
    reference = DenseMuon(dense, lr=0.1, **ARGUMENTS)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        reference.lr = 0.1 * 0.5**step
        reference.wd = optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        for parameters in (mine, dense):
            set_gradients(parameters, step)
        optimizer.step()
        reference.step()
        scheduler.step()
    torch.testing.assert_close(mine[0], dense[0])


def test_groups_have_their_own_settings():
    mine, dense = matrices((4, 6), (4, 6)), matrices((4, 6), (4, 6))
    first = {"params": mine[:1], "lr": 0.1, "momentum": 0.5, "nesterov": False}
    second = {"params": mine[1:], "scale": "jordan", "ns_steps": 3, "coefficients": "quintic"}
    optimizer = Muon([first, second], lr=0.2, **ARGUMENTS)
    references = [
        DenseMuon(dense[:1], lr=0.1, momentum=0.5, nesterov=False, **ARGUMENTS),
        DenseMuon(
            dense[1:], lr=0.2, scale="jordan", ns_steps=3, coefficients="quintic", **ARGUMENTS
        ),
    ]
    for step in range(3):
        set_gradients(mine, step)
        set_gradients(dense, step)
        optimizer.step()
        for reference in references:
            reference.step()
    for parameter, expected in zip(mine, dense):
        torch.testing.assert_close(parameter, expected)


def test_a_setting_changed_between_steps_takes_effect():
    mine, dense = matrices((4, 6)), matrices((4, 6))
    optimizer, reference = Muon(mine, **ARGUMENTS), DenseMuon(dense, **ARGUMENTS)
    for steps in (5, 2):
        optimizer.param_groups[0]["ns_steps"] = steps
        reference.iterate.keywords["steps"] = steps
        for parameters in (mine, dense):
            set_gradients(parameters, steps)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(mine[0], dense[0])


def test_the_closure_is_evaluated_with_gradients_and_its_loss_returned():
    (weight,) = matrices((3, 3))
    before = weight.detach().clone()
    optimizer = Muon([weight])

    def closure():
        optimizer.zero_grad()
        loss = weight.pow(2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(before.pow(2).sum().item())
    assert not torch.equal(weight, before)
    optimizer.zero_grad()
    assert weight.grad is None


def test_step_hooks_run():
    (weight,) = matrices((3, 3))
    optimizer = Muon([weight])
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after", "saved", "load", "loaded"]


def test_a_step_without_gradients_changes_nothing():
    parameters = matrices((3, 3), (2, 4, 5))
    before = [p.detach().clone() for p in parameters]
    Muon(parameters).step()
    assert all(torch.equal(p, b) for p, b in zip(parameters, before))


def test_a_zero_gradient_only_decays():
    (weight,) = matrices((3, 4))
    expected = weight.detach() * (1 - 0.1 * 0.5)
    weight.grad = torch.zeros_like(weight)
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), expected)


def test_parameters_of_every_dtype_have_float32_momentum():
    parameters = [nn.Parameter(torch.randn(4, 4).to(t)) for t in (torch.bfloat16, torch.float64)]
    optimizer = Muon(parameters)
    for _ in range(2):
        set_gradients(parameters)
        optimizer.step()
    for parameter in parameters:
        assert parameter.isfinite().all()
        assert optimizer.state[parameter]["momentum_buffer"].dtype is torch.float32


def test_non_contiguous_parameters_are_stepped_in_place():
    mine = [nn.Parameter(p.detach().mT) for p in matrices((6, 4))]
    dense = [nn.Parameter(p.detach().mT.contiguous()) for p in matrices((6, 4))]
    optimizer, reference = Muon(mine, **ARGUMENTS), DenseMuon(dense, **ARGUMENTS)
    set_gradients(mine)
    set_gradients(dense)
    optimizer.step()
    reference.step()
    torch.testing.assert_close(mine[0], dense[0])


def test_views_are_found_by_name():
    mine, dense = matrices((8, 6), (8, 6)), matrices((8, 6), (8, 6))
    view = MatrixView("(h d) m -> h d m", h=2)
    named = [("a.qkv.weight", mine[0]), ("a.up.weight", mine[1])]
    optimizer = Muon(named, views={"*.qkv.*": view}, **ARGUMENTS)
    reference = DenseMuon(dense, views=[view, None], **ARGUMENTS)
    for parameters in (mine, dense):
        set_gradients(parameters)
    optimizer.step()
    reference.step()
    for parameter, expected in zip(mine, dense):
        torch.testing.assert_close(parameter, expected)
    assert "4 x 6" in str(optimizer.plan)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4), (2, 0, 4)])
def test_parameters_without_elements_are_stepped_saved_and_loaded_beside_others(shape):
    parameters = matrices(shape, (3, 4))
    optimizer = Muon(parameters, normuon_beta2=0.9)
    for _ in range(2):
        set_gradients(parameters)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert parameters[1].isfinite().all()


def test_a_setting_made_wrong_between_steps_is_refused_before_anything_changes():
    (weight,) = matrices((4, 6))
    optimizer = Muon([weight])
    before = weight.detach().clone()
    for key, value, message in (("scale", "rms", "unknown scale"), ("ns_steps", 9, "5 steps")):
        good, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], value
        set_gradients([weight])
        with pytest.raises(MuonError, match=message):
            optimizer.step()
        optimizer.param_groups[0][key] = good
        assert torch.equal(weight, before)
        assert not any(s["momentum_buffer"].any() for s in optimizer.state.values())


@pytest.mark.parametrize(
    ("pattern", "sizes", "shape", "flat"),
    [
        ("o i h w -> o (i h w)", {}, (6, 4, 3, 2), (6, 24)),
        ("o i k -> o (i k)", {}, (6, 4, 3), (6, 12)),
        ("(g o) i h w -> g o (i h w)", {"g": 2}, (6, 4, 3, 2), (2, 3, 24)),
    ],
)
def test_convolution_kernels_step_as_the_matrices_their_view_names(pattern, sizes, shape, flat):
    (kernel,) = matrices(shape)
    dense = [nn.Parameter(kernel.detach().reshape(flat).clone())]
    optimizer = Muon([("c", kernel)], views={"c": MatrixView(pattern, **sizes)}, **ARGUMENTS)
    reference = DenseMuon(dense, **ARGUMENTS)
    for step in range(2):
        set_gradients([kernel], step)
        dense[0].grad = kernel.grad.reshape(flat)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(kernel.detach().reshape(flat), dense[0].detach())


def test_gradient_clipping_and_scaling_work_as_for_any_optimizer():
    (weight,) = matrices((4, 4))
    optimizer = Muon([weight], **ARGUMENTS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.pow(2).sum()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    before = weight.detach().clone()
    scaler.step(optimizer)
    assert not torch.equal(weight, before)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((4,), {}, r"'group 0 parameter 0' of shape \(4,\) holds no matrices"),
        ((4, 1, 3), {}, "holds no matrices"),
        ((8, 4, 3, 3), {}, r"4 dims.*'o i h w -> o \(i h w\)'"),
        ((4, 4), {"lr": -1.0}, "lr must be >= 0"),
        ((4, 4), {"lr": float("inf")}, "lr must be >= 0 and finite"),
        ((4, 4), {"ns_steps": 2.5}, "ns_steps must be an integer, got 2.5"),
        ((4, 4), {"momentum": 1.0}, "momentum must be in"),
        ((4, 4), {"ns_steps": 6}, "tuned for 5 steps"),
        ((4, 4), {"scale": "rms"}, "unknown scale 'rms'"),
        ((4, 4), {"ns_dtype": torch.int32}, "floating-point ns_dtype"),
        ((4, 4), {"views": {"*.qkv": MatrixView("a b -> b a")}}, "matches no parameter"),
    ],
)
def test_what_cannot_be_stepped_is_refused_at_construction(shape, arguments, message):
    with pytest.raises(MuonError, match=message):
        Muon(matrices(shape), **arguments)


def test_a_refused_group_is_not_added():
    optimizer = Muon(matrices((3, 3)))
    with pytest.raises(MuonError):
        optimizer.add_param_group({"params": matrices((3,))})
    assert len(optimizer.param_groups) == 1


@pytest.mark.ranks
def test_gradients_placed_unlike_their_parameter_are_refused_by_name():
    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        replicated = TorchDTensor.from_local(torch.ones(4, 4), mesh, [Replicate()])
        weight = nn.Parameter(replicated)
        optimizer = Muon([("w", weight)])
        for placement, message in ((Partial(), "'w'.*not summed"), (Shard(0), "'w'.*redistribute")):
            local = torch.ones(2, 4) if placement.is_shard() else torch.ones(4, 4)
            weight.grad = TorchDTensor.from_local(local, mesh, [placement])
            with pytest.raises(MuonError, match=message):
                optimizer.step()
            weight.grad = None

    run_ranks(body, 2)


@pytest.mark.ranks
def test_distributed_tensors_of_hp_dtensor_are_stepped_and_saved():
    dense = matrices((5, 4), (6, 3, 4))
    reference = DenseMuon(dense, **ARGUMENTS)
    for step in range(2):
        set_gradients(dense, step)
        reference.step()

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        placements = [Replicate(), Shard(0)]
        mine = [
            nn.Parameter(distribute_tensor(p.detach(), mesh, placements))
            for p in matrices((5, 4), (6, 3, 4))
        ]
        optimizer = Muon(mine, **ARGUMENTS)
        for step in range(2):
            full = matrices((5, 4), (6, 3, 4))
            set_gradients(full, step)
            for parameter, source in zip(mine, full):
                parameter.grad = distribute_tensor(source.grad, mesh, placements)
            optimizer.step()
        for parameter, expected in zip(mine, dense):
            torch.testing.assert_close(parameter.full_tensor(), expected.detach())
        momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert momentum.layout == Layout(mesh, placements, (5, 4))
        optimizer.load_state_dict(optimizer.state_dict())

    run_ranks(body, 4)


@pytest.mark.ranks
def test_parameters_on_different_meshes_are_stepped_together():
    shapes = [(5, 4), (4, 3, 6), (7, 6), (4, 3, 6)]
    dense = matrices(*shapes)
    reference = DenseMuon(dense, **ARGUMENTS)
    for step in range(3):
        set_gradients(dense, step)
        reference.step()

    def body():
        flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        places = [(flat, [Shard(0)]), (experts, [Shard(1), Shard(0)])] * 2
        mine = [
            nn.Parameter(torch_distribute(p.detach(), *place))
            for p, place in zip(matrices(*shapes), places)
        ]
        optimizer = Muon(mine, **ARGUMENTS)
        for step in range(3):
            full = matrices(*shapes)
            set_gradients(full, step)
            for parameter, source, place in zip(mine, full, places):
                parameter.grad = torch_distribute(source.grad, *place)
            optimizer.step()
        for parameter, expected in zip(mine, dense):
            torch.testing.assert_close(parameter.full_tensor(), expected.detach())

    run_ranks(body, 4)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"momentun": 0.9}, "'momentum' was meant"),
        ({"ns_dtype": torch.float32}, "holds for the whole optimizer"),
        ({"use_muon": False, "betas": (2.0, 0.9)}, "betas must be two numbers"),
        ({"use_muon": False, "eps": -1.0}, "eps >= 0"),
    ],
)
def test_settings_of_a_group_that_would_be_ignored_or_break_adamw_are_refused(group, message):
    with pytest.raises(MuonError, match=message):
        Muon([{"params": matrices((3, 3)), **group}])


def test_keys_that_schedulers_and_users_keep_in_a_group_are_left_alone():
    optimizer = Muon([{"params": matrices((3, 3)), "initial_lr": 0.1, "tag": "body"}])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    assert optimizer.param_groups[0]["tag"] == "body"


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_given_twice_is_refused():
    (weight,) = matrices((3, 3))
    with pytest.raises(MuonError, match="more than once"):
        Muon([weight, weight])


def test_a_view_that_is_not_a_matrix_view_is_refused():
    with pytest.raises(MuonError, match="expected a MatrixView, found str"):
        Muon([("w", nn.Parameter(torch.ones(4, 4)))], views={"w": "(h d) m -> h d m"})
    with pytest.raises(MuonError, match="positive integers"):
        MatrixView("(h d) m -> h d m", h=0)
