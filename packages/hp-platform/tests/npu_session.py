"""Drives hp-platform on the fake NPUs of `fake_npu`; run by `test_npu` in a process of its own.

Prints, as JSON, the lines of `hccl.py` and `devices.py` that were run, for registering a device
type cannot be undone and must not reach the other tests.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fake_npu"))

WATCHED = {"hccl.py", "devices.py"}
lines = defaultdict(set)


def trace(frame, event, argument):
    name = Path(frame.f_code.co_filename)
    if name.name in WATCHED and name.parent.name == "hp_platform":
        lines[name.name].add(frame.f_lineno)
        return note
    return None


def note(frame, event, argument):
    lines[Path(frame.f_code.co_filename).name].add(frame.f_lineno)
    return note


def device_answers():
    import torch
    import torch_npu

    from hp_platform.devices import device
    from hp_platform.errors import HPError

    npu = device()
    assert (npu.type, npu.backend, npu.count()) == ("npu", "hccl", 2)
    assert npu.current() == torch.device("npu", 0)
    assert npu.set(1) == torch.device("npu", 1)
    npu.set(0)
    npu.synchronize()
    stream, event = npu.stream(), npu.event()
    with npu.use_stream(stream):
        assert npu.current_stream() is stream
    event.record(stream)
    event.wait(stream)
    event.synchronize()
    assert event.query()
    stream.wait_event(event)
    stream.wait_stream(npu.current_stream())
    stream.synchronize()
    figures = npu.memory_allocated(), npu.max_memory_allocated(), npu.memory_reserved()
    assert figures == (1024, 4096, 8192)
    npu.reset_peak_memory_stats()
    assert npu.max_memory_allocated() == 1024
    npu.manual_seed(3)
    state = npu.get_rng_state()
    npu.manual_seed(4)
    npu.set_rng_state(state)
    assert torch.equal(npu.get_rng_state(), state)
    assert "Stream.wait_event" in torch_npu.log
    torch_npu.npu.is_available = lambda: False
    with pytest.raises(HPError, match="no usable npu device"):
        device("npu")
    torch_npu.npu.is_available = lambda: True


def scalars(axis):
    """Case: a norm on the CPU, a group on the NPUs; every collective carries it."""
    import torch

    import hp_platform as hp

    rank, found = axis.rank, []
    for op, right in (("sum", 3.0), ("avg", 1.5), ("max", 2.0), ("min", 1.0)):
        norm = torch.tensor(rank + 1.0)
        result = hp.all_reduce(norm, axis, op=op).wait()
        assert result is norm
        assert norm.device.type == "cpu"
        found.append(norm.item() == right)
    count = torch.tensor([rank + 1], dtype=torch.int64)
    found.append(hp.all_reduce(count, axis).wait().tolist() == [3])
    found.append(hp.broadcast(torch.tensor(rank + 5.0), axis, source=1).wait().item() == 6.0)
    reduced = hp.reduce(torch.tensor(rank + 1.0), axis, destination=0).wait()
    found.append(rank == 1 or reduced.item() == 3.0)
    gathered = hp.all_gather(torch.tensor([rank + 1.0]), axis).wait()
    assert gathered.device.type == "cpu"
    found.append(gathered.tolist() == [1.0, 2.0])
    other = torch.tensor([rank + 1.0])
    if rank == 0:
        hp.send(other, axis, destination=1).wait()
    else:
        hp.receive(other, axis, source=0).wait()
    found.append(other.item() == 1.0)
    several = torch.full((3,), rank + 1.0)
    assert hp.all_reduce(several, axis).wait() is several
    found.append(several.tolist() == [3.0] * 3)
    pair = [torch.full((2,), rank + 1.0), torch.ones(1)]
    hp.all_reduce_fused(pair, axis).wait()
    found.append([t.tolist() for t in pair] == [[3.0, 3.0], [2.0]])
    shard, whole = torch.full((2,), rank + 1.0), torch.zeros(4)
    hp.all_gather(shard, axis, output=whole).wait()
    found.append(whole.tolist() == [1.0, 1.0, 2.0, 2.0])
    shard = hp.reduce_scatter(torch.arange(4.0), axis, op="avg").wait()
    found.append(shard.tolist() == [2.0 * rank, 2.0 * rank + 1])
    swapped = hp.all_to_all(torch.tensor([0.0, 1.0]).add(2 * rank), axis).wait()
    found.append(swapped.tolist() == [float(rank), 2.0 + rank])
    with pytest.raises(hp.CollectiveError, match="is on cpu, the axis communicates on npu:0"):
        hp.exchange([hp.Send(torch.ones(2), 1 - rank), hp.Receive(several, 1 - rank)], axis)
    with pytest.raises(hp.CollectiveError, match=r"hccl cannot reduce torch\.float64; convert to"):
        hp.all_reduce(torch.tensor(1.0, dtype=torch.float64), axis)
    return found


def on_a_rank(rank):
    import torch
    import torch_npu

    import hp_platform as hp
    from hp_platform.hccl import HcclGroupOptions

    sys.settrace(trace)
    torch_npu.log.clear()
    options = {"dp": HcclGroupOptions("data", 32), "tp": HcclGroupOptions()}
    for _ in range(2):
        mesh = hp.make_mesh({"dp": 2, "tp": 1}, device_type="npu", options=options)
    made = [entry for entry in torch_npu.log if entry[0] == "group"]
    axis = hp.MeshAxis.of_mesh(mesh, "dp", hp.Topology.from_hosts(["a", "a"]))
    assert (axis.backend, axis.device) == ("hccl", torch.device("npu", 0))
    found = scalars(axis)
    ours = torch.full((2,), rank + 1.0).to("npu")
    found.append(hp.all_reduce(ours, axis, op="avg").wait().to("cpu").tolist() == [1.5, 1.5])
    whole = hp.reduce_scatter(torch.full((4,), rank + 1.0).to("npu"), axis).wait()
    found.append(whole.to("cpu").tolist() == [3.0, 3.0])
    swapped = hp.all_to_all(torch.tensor([0.0, 1.0]).add(2 * rank).to("npu"), axis).wait()
    found.append(swapped.to("cpu").tolist() == [float(rank), 2.0 + rank])
    hp.barrier(axis)
    return made, found, {name: sorted(seen) for name, seen in lines.items()}


def main():
    import hp_platform.hccl as hccl
    from hp_platform.errors import HPError

    sys.settrace(trace)

    options = hccl.HcclGroupOptions("dp", 64)
    assert options.memory_bytes == 2 * 64 * 2**20
    with pytest.raises(HPError, match="torch_npu, which is not loaded"):
        hccl.process_group_options(options)
    with pytest.raises(HPError, match="at least 1 MB"):
        hccl.HcclGroupOptions(buffer_megabytes=0)
    device_answers()
    given = hccl.process_group_options(options)
    assert given.hccl_config == {"hccl_buffer_size": 64, "group_name": "dp"}

    from hp_platform.testing import run_ranks

    results = run_ranks(on_a_rank, 2, backend="hccl")
    for made, found, seen in results:
        assert all(found), found
        expected = {"hccl_buffer_size": 32, "group_name": "data"}
        assert made == [("group", (0, 1), expected)], made
        for name, numbers in seen.items():
            lines[name].update(numbers)
    sys.settrace(None)
    print(json.dumps({name: sorted(numbers) for name, numbers in lines.items()}))


if __name__ == "__main__":
    main()
