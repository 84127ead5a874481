"""A torch_npu for machines without NPUs: the real one's names and arguments, on CPU memory.

Importing it registers the device type, the device module and the communication backend with
PyTorch in the way the real package does. Its functions and methods take exactly the arguments
that were written down of the real wheel of this version, and what the fake does not do itself
raises. Tensors of device "npu" hold a CPU tensor; only the few operators are there that
hp-platform's own code needs.
"""

import inspect
import json
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__version__ = "2.13.0"

_recorded = json.loads((Path(__file__).parents[2] / f"torch_npu-{__version__}.json").read_text())

log = []
"""Every call of the device module and every process group made, in order."""


class NpuTensor(torch.Tensor):
    """A tensor that says it is on an NPU; its values are in `raw`."""

    @staticmethod
    def __new__(cls, raw):
        made = torch._C._acc.create_empty_tensor(tuple(raw.shape), raw.dtype)
        made.__class__ = cls
        made.raw = raw
        return made


class _State:
    device = 0
    peak = 4096
    streams = []  # noqa: RUF012
    generator = torch.Generator()


def _checked(name, parameters, behaviour):
    kinds = {
        "positional": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "keyword": inspect.Parameter.KEYWORD_ONLY,
        "star": inspect.Parameter.VAR_POSITIONAL,
        "double star": inspect.Parameter.VAR_KEYWORD,
    }
    signature = inspect.Signature(
        [
            inspect.Parameter(
                parameter,
                kinds[kind],
                default=None if default and "star" not in kind else inspect.Parameter.empty,
            )
            for parameter, kind, default in parameters
        ]
    )

    def call(*arguments, **keywords):
        signature.bind(*arguments, **keywords)
        log.append(name)
        if behaviour is None:
            raise NotImplementedError(f"the fake torch_npu has no {name}")
        return behaviour(*arguments, **keywords)

    return call


class _UseStream:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        _State.streams.append(self.stream)

    def __exit__(self, *error):
        _State.streams.pop()


def _class_of(name):
    methods = {
        method: _checked(f"{name}.{method}", [["self", "positional", False], *parameters],
                         lambda self, *rest: True)
        for method, parameters in _recorded["classes"][name].items()
        if method != "__new__"
    }  # fmt: skip
    made = _checked(name, _recorded["classes"][name]["__new__"], lambda *a, **k: None)
    return type(name, (), {**methods, "__init__": lambda self, *a, **k: made(*a, **k)})


def _set_device(device):
    _State.device = device


def _reset_peak():
    _State.peak = 1024


_behaviour = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 2,
    "current_device": lambda: _State.device,
    "set_device": _set_device,
    "synchronize": lambda device=None: None,
    "current_stream": lambda device=None: _State.streams[-1] if _State.streams else npu.Stream(),
    "stream": _UseStream,
    "memory_allocated": lambda device=None: 1024,
    "max_memory_allocated": lambda device=None: _State.peak,
    "memory_reserved": lambda device=None: 8192,
    "reset_peak_memory_stats": lambda device=None: _reset_peak(),
    "get_rng_state": lambda device=None: _State.generator.get_state(),
    "set_rng_state": lambda new_state, device=None: _State.generator.set_state(new_state),
    "manual_seed": lambda seed: _State.generator.manual_seed(seed),
    "manual_seed_all": lambda seed: _State.generator.manual_seed(seed),
}


def _device_module():
    module = types.ModuleType("torch_npu.npu")
    for name, parameters in _recorded["functions"].items():
        setattr(module, name, _checked(name, parameters, _behaviour.get(name)))
    for name in ("Stream", "Event"):
        setattr(module, name, _class_of(name))
    module._is_in_bad_fork = lambda: False  # PyTorch's own code asks for this one
    return module


class FakeHccl(dist.ProcessGroup):
    """Groups of fake NPUs: gloo underneath, and HCCL's refusals on top."""

    class Options:
        """What `pg_options` must be."""

        def __init__(self):
            self.hccl_config = {}

    def __init__(self, given):
        super().__init__(given.group_rank, given.group_size)
        self._name = given.group_id
        self._gloo = dist.ProcessGroupGloo(
            given.store, given.group_rank, given.group_size, timeout=given.timeout
        )

    @property
    def group_name(self):
        return self._name

    def getBackendName(self):  # noqa: N802
        return "hccl"

    def shutdown(self):
        pass

    def _raw(self, tensor):
        if not isinstance(tensor, NpuTensor) or not tensor.is_contiguous():
            raise RuntimeError("Tensors must be contiguous and on npu")
        return tensor.raw

    def _check_op(self, options):
        known = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        if not any(options.reduceOp == op for op in known):
            raise RuntimeError(f"{options.reduceOp} is not supported by HCCL")

    def allreduce(self, tensors, options):
        self._check_op(options)
        return self._gloo.allreduce([self._raw(t) for t in tensors], options)

    def broadcast(self, tensors, options):
        return self._gloo.broadcast([self._raw(t) for t in tensors], options)

    def reduce(self, tensors, options):
        self._check_op(options)
        return self._gloo.reduce([self._raw(t) for t in tensors], options)

    def all_gather_single(self, output, tensor, *options):
        return self._gloo._allgather_base(self._raw(output), self._raw(tensor), *options)

    def reduce_scatter_single(self, output, tensor, options):
        self._check_op(options)
        return self._gloo._reduce_scatter_base(self._raw(output), self._raw(tensor), options)

    def all_to_all_single(self, output, tensor, *rest):
        return self._gloo.alltoall_base(self._raw(output), self._raw(tensor), *rest)

    def send(self, tensors, rank, tag):
        return self._gloo.send([self._raw(t) for t in tensors], rank, tag)

    def recv(self, tensors, rank, tag):
        return self._gloo.recv([self._raw(t) for t in tensors], rank, tag)


def _make_group(group_options, pg_options):
    config = None
    if pg_options is not None:
        assert isinstance(pg_options, FakeHccl.Options), pg_options
        config = dict(pg_options.hccl_config)
        assert set(config) <= set(_recorded["configuration keys"])
    log.append(("group", tuple(group_options.global_ranks_in_group), config))
    return FakeHccl(group_options)


def _register_operators():
    def raw(value):
        return value.raw if isinstance(value, NpuTensor) else value

    def implement(name, behaviour):
        torch.library.impl(name, "privateuseone")(behaviour)

    def copy_from(source, target, non_blocking=False):
        raw(target).copy_(raw(source))
        return target

    def in_place(name):
        def behaviour(tensor, *rest):
            getattr(tensor.raw, name)(*(raw(value) for value in rest))
            return tensor

        return behaviour

    implement("aten::_copy_from", copy_from)
    implement(
        "aten::empty_strided",
        lambda size, stride, dtype=None, layout=None, device=None, pin_memory=None: NpuTensor(
            torch.empty_strided(size, stride, dtype=dtype)
        ),
    )
    implement(
        "aten::empty.memory_format",
        lambda size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None: (
            NpuTensor(torch.empty(size, dtype=dtype))
        ),
    )
    implement("aten::view", lambda tensor, size: NpuTensor(tensor.raw.view(size)))
    implement("aten::div_.Tensor", in_place("div_"))
    implement("aten::zero_", in_place("zero_"))
    implement("aten::fill_.Scalar", in_place("fill_"))
    implement("aten::_local_scalar_dense", lambda tensor: tensor.raw.item())


npu = _device_module()
_compiled = types.ModuleType("torch_npu._C")
_compiled._distributed_c10d = types.ModuleType("torch_npu._C._distributed_c10d")
_compiled._distributed_c10d.ProcessGroupHCCL = FakeHccl
sys.modules["torch_npu.npu"] = npu
sys.modules["torch_npu._C"] = _compiled
sys.modules["torch_npu._C._distributed_c10d"] = _compiled._distributed_c10d
_setup_privateuseone_for_python_backend("npu", npu)
_register_operators()
dist.Backend.register_backend("hccl", _make_group, extended_api=True, devices=["npu"])
