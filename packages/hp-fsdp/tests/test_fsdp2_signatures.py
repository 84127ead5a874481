"""Every public name and argument of the installed PyTorch's FSDP2 exists here, with its default."""

import inspect

import pytest
import torch.distributed.fsdp as torch_fsdp

import hp_fsdp

METHODS = sorted(name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_"))
FUNCTIONS = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]
POLICIES = ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"]


def arguments(function):
    return {
        name: (parameter.kind, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    }


def test_the_list_of_methods_is_that_of_the_tested_pytorch():
    assert len(METHODS) == 23, METHODS


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_the_same_arguments(method):
    ours = getattr(hp_fsdp.FSDPModule, method)
    assert arguments(ours) == arguments(getattr(torch_fsdp.FSDPModule, method))


@pytest.mark.parametrize("name", FUNCTIONS + POLICIES)
def test_a_function_takes_the_same_arguments(name):
    ours = arguments(getattr(hp_fsdp, name))
    theirs = arguments(getattr(torch_fsdp, name))
    if name == "fully_shard":
        assert list(ours)[-1] == "comm_policy"
        ours.pop("comm_policy")
        for policy in ("mp_policy", "offload_policy"):
            # Objects of classes of the same name.
            mine, other = ours.pop(policy), theirs.pop(policy)
            assert mine[0] == other[0]
            assert type(mine[1]).__name__ == type(other[1]).__name__
    assert ours == theirs


def test_every_public_name_of_fsdp2_can_be_imported():
    fsdp1 = ("Full", "Sharded", "State", "Local")
    names = {
        name
        for name in torch_fsdp.__all__
        if getattr(torch_fsdp, name).__module__ == "torch.distributed.fsdp"
        and not name.startswith(fsdp1)
    }
    assert names >= {"fully_shard", "FSDPModule", "DataParallelMeshDims"}
    assert not names - set(hp_fsdp.__all__)
