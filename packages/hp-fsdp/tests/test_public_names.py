import hp_fsdp


def test_public_names():
    assert sorted(hp_fsdp.__all__) == [
        "CPUOffloadPolicy",
        "CommPolicy",
        "FSDPModule",
        "MemoryUse",
        "MixedPrecisionPolicy",
        "NotAvailableError",
        "OffloadPolicy",
        "ShardingError",
        "UnshardHandle",
        "UsageError",
        "explain",
        "full_state_dict",
        "fully_shard",
        "load_full_state_dict",
        "memory_use",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    ]
    assert all(hasattr(hp_fsdp, name) for name in hp_fsdp.__all__)


def test_every_public_method_of_fsdp2_exists():
    from torch.distributed.fsdp import FSDPModule

    theirs = {name for name in vars(FSDPModule) if not name.startswith("_")}
    missing = theirs - set(dir(hp_fsdp.FSDPModule))
    assert not missing, missing
