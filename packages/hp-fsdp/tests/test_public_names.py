import hp_fsdp


def test_public_names():
    assert sorted(hp_fsdp.__all__) == [
        "CPUOffloadPolicy",
        "CommPolicy",
        "DataParallelMeshDims",
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
