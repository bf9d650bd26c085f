"""A simulated CUDA machine: tensors that say ``cuda:0``, hold their numbers on the CPU, and keep the rules of devices.

Inside ``with simulated.machine(devices=2) as gpu`` a tensor of one device refuses to meet one of another (CPU scalars
without axes excepted, as on the real thing), and every kernel that would be launched, every wait of the host for a device
and every timing event is noted, each with the place in mmaccel that asked for it. Triton kernels are launched up to the
launch itself, which only notes the devices of its arguments; the numbers come from the kernel's plain definition.

An operation that meets what another stream is still writing or reading raises :class:`NotWaited`.

What it does not prove: speed; numerics of half precision on a GPU; whether memory lives long enough; what real kernels
compute. Pinned memory of the host that a device is shown is counted apart: bytes that are copied
to and from it, by stream, and operations that read it where it is. An operation counts as one launch, though some are
several; attention is one. A copy to a device that is asked not to block is believed not to.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import walk_packages
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mmaccel_kernels
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mmaccel.families import draft
from mmaccel.families.load import load
from mmaccel.kv import host

#: operations that start no kernel beside views
FREE = {"detach", "alias", "_unsafe_view", "lift_fresh", "_reshape_alias", "empty", "empty_like", "new_empty"}
FREE |= {"empty_strided", "new_empty_strided", "_local_scalar_dense", "is_pinned"}
#: operations whose result, or its shape, the host waits for
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal"}
WAITS |= {"is_nonzero", "bincount", "_linalg_check_errors", "_is_all_true", "_is_any_true"}
#: operations that change the shape of what they are given, which a wrapper cannot
RESHAPES = {"unsqueeze_", "squeeze_", "t_", "transpose_", "resize_", "set_", "swapaxes_"}
#: functions that count as one launch, whatever PyTorch would make of them on the CPU
WHOLE = {nn.functional.scaled_dot_product_attention, torch.quantile, torch.Tensor.quantile}
WHOLE |= {torch.nanquantile, torch.Tensor.nanquantile}
COPIES = {"_to_copy", "copy_", "copy"}


class DevicesMixed(RuntimeError):
    """What the real thing says as "Expected all tensors to be on the same device"."""


class NotWaited(RuntimeError):
    """An operation of one stream needs what another has not finished, and has not waited for it."""


@dataclass
class Counts:
    """What has been asked of the machine; ``waits`` and ``launches`` by (operation, place), ``kernels`` by name.

    moved : bytes that were copied over the bus, by ("to host" or "to device", "main" or "side", the stream).
    remote : operations that read or write host memory where it is, by (operation, place).
    """

    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    events: int = 0
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    remote: Counter[tuple[str, str]] = field(default_factory=Counter)

    def since(self, earlier: Counts) -> Counts:
        """What came on top of ``earlier``."""
        return Counts(
            self.launches - earlier.launches,
            self.waits - earlier.waits,
            self.kernels - earlier.kernels,
            self.events - earlier.events,
            self.moved - earlier.moved,
            self.remote - earlier.remote,
        )

    def copy(self) -> Counts:
        """The counts as they stand."""
        held = (self.launches, self.waits, self.kernels)
        return Counts(*map(Counter, held), self.events, Counter(self.moved), Counter(self.remote))


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device; ``numbers`` is the CPU tensor that holds its content."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, device: torch.device) -> SimulatedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device,
        )
        made.numbers = numbers
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a simulated tensor outside its machine")

    def untyped_storage(self) -> Any:
        """The storage of the numbers, so that bytes can be counted."""
        return self.numbers.untyped_storage()

    def data_ptr(self) -> int:
        """Where the numbers are."""
        return self.numbers.data_ptr()

    def tolist(self) -> Any:
        """A copy to the CPU, for which the host waits."""
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"simulated({self.numbers!r}, device={str(self.device)!r})"


class Machine:
    """The machine while it is there. ``current`` is the current device, ``counts`` what was asked of it so far."""

    def __init__(self, devices: int) -> None:
        self.devices, self.current, self.counts = devices, 0, Counts()
        self.stream = "main"
        self.order = _Order()
        self._quiet = 0
        #: pinned buffers that a device was shown, by their addresses, which nobody else is given
        self._pinned: dict[int, Tensor] = {}

    # --- what tests use ----------------------------------------------------------------------------------------------
    def put(self, thing: Any, device: str = "cuda:0") -> Any:
        """A model (changed in place), a tensor, or inputs of a model (copied) on a device."""
        where = torch.device(device)
        if isinstance(thing, nn.Module):
            for module in thing.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        moved = SimulatedTensor(parameter.detach(), where)
                        module._parameters[name] = nn.Parameter(moved, requires_grad=False)
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = SimulatedTensor(buffer, where)
            return thing
        return tree_map(lambda x: SimulatedTensor(x, where) if isinstance(x, Tensor) else x, dict(thing))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What happens inside is not counted."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def numbers(self, x: Tensor) -> Tensor:
        """The content of a tensor, which no test waits for."""
        return x.numbers if isinstance(x, SimulatedTensor) else x

    def shown(self, buffer: Tensor, device: torch.device) -> Tensor:
        """Pinned memory of the host as a tensor of a device; see :func:`mmaccel.kv.host.on_device`."""
        if device.type == "cpu":
            return buffer.view(buffer.shape)
        self._pinned[buffer.untyped_storage().data_ptr()] = buffer
        return SimulatedTensor(buffer, device)

    def remote(self, x: Any) -> bool:
        """Whether a tensor of a device has its numbers in host memory."""
        return isinstance(x, SimulatedTensor) and x.numbers.untyped_storage().data_ptr() in self._pinned

    # --- counting ----------------------------------------------------------------------------------------------------
    def wait(self, what: str) -> None:
        """The host waits."""
        if not self._quiet:
            self.counts.waits[what, place()] += 1

    def reads(self, what: str, flat: list[Any]) -> None:
        """An operation on these arguments, some of which may be in host memory."""
        if not self._quiet and any(map(self.remote, flat)):
            self.counts.remote[what, place()] += 1

    def launch(self, what: str) -> None:
        """A kernel starts."""
        if not self._quiet:
            self.counts.launches[what, place()] += 1

    # --- operations --------------------------------------------------------------------------------------------------
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation that PyTorch dispatches."""
        flat, spec = tree_flatten((args, kwargs))
        mine = [x for x in flat if isinstance(x, SimulatedTensor)]
        name = func._schema.name.removeprefix("aten::")
        if kwargs.get("device") is not None:
            wanted: torch.device | None = self.device_of(kwargs["device"])
        else:
            wanted = mine[0].device if mine else None
        if not mine and (wanted is None or wanted.type != "cuda"):
            kwargs.pop("pin_memory", None)
            return func(*args, **kwargs)
        if name in RESHAPES:
            raise NotImplementedError(f"{name} is not simulated")
        if name not in COPIES:
            self._same_device(func, name, flat)
        self._count(func, name, args, kwargs, wanted)
        launched = not func.is_view and name not in FREE
        if launched:
            self.order.starts(self.stream, name, flat, _changed(func, args, kwargs))
        plain, back = [], {}
        for x in flat:
            if isinstance(x, SimulatedTensor):
                back[id(x.numbers)] = x
                x = x.numbers
            plain.append(torch.device("cpu") if isinstance(x, torch.device) else x)
        args, kwargs = tree_unflatten(plain, spec)
        if name in COPIES:
            kwargs.pop("pin_memory", None)
        made = func(*args, **kwargs)
        if launched:
            self.order.writes(self.stream, [x for x in tree_flatten(made)[0] if isinstance(x, Tensor)])
        if name == "_to_copy" and any(made is x for x in plain):
            made = made.clone()
        if wanted is None or wanted.type != "cuda" or (name == "copy_" and not isinstance(flat[0], SimulatedTensor)):
            return made

        return tree_map(lambda x: back[id(x)] if id(x) in back else _wrap(x, wanted), made)

    def device_of(self, device: Any) -> torch.device:
        """``device`` with its number."""
        device = torch.device(device)
        if device.type == "cuda":
            device = torch.device("cuda", self.current if device.index is None else device.index)
            if device.index >= self.devices:
                raise RuntimeError(f"CUDA error: invalid device ordinal: {device} of {self.devices}")
        return device

    def _same_device(self, func: Any, name: str, flat: list[Any]) -> None:
        """Refuse tensors of several devices, but for CPU scalars; indices may be on the CPU, and are then copied."""
        tensors = [x for x in flat if isinstance(x, Tensor)]
        there = {str(x.device) for x in tensors if x.device.type == "cuda"}
        here = [x for x in tensors if x.device.type != "cuda" and (x.dim() or name in ("cat", "stack"))]
        if _indexes(name):
            here = [
                x for x in here if x is tensors[0] or x.dtype not in (torch.long, torch.int, torch.bool, torch.uint8)
            ]
        if func._schema.is_mutable and tensors[0].device.type != "cuda":
            here.append(tensors[0])
        if len(there) + bool(here) > 1:
            raise DevicesMixed(
                f"{func} expected all tensors to be on the same device, but found {sorted(there)}{' and cpu' if here else ''}"
            )

    def _count(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], wanted: torch.device | None) -> None:
        if name in COPIES:
            source, target = (args[0], wanted) if name == "_to_copy" else (args[1], args[0].device)
            if not source.numel():
                return
            at_home = [x.type == "cpu" or self.remote(y) for x, y in ((source.device, source), (target, args[0]))]
            if name == "_to_copy":
                at_home[1] = target is not None and target.type == "cpu"
            if at_home[0] != at_home[1] and not self._quiet:
                self.counts.moved["to host" if at_home[1] else "to device", self.stream] += source.nbytes
            asks = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            if target is not None and source.device.type != target.type and (source.device.type == "cuda" or not asks):
                self.wait(f"copy to {target.type}")
            self.launch(name)
            return
        if not func.is_view and name not in FREE:
            self.reads(name, tree_flatten((args, kwargs))[0])
        if _indexes(name):
            indices = [x for x in args[1] if isinstance(x, Tensor)]
            masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
            # one number put where a mask says is a fill
            filled = "put" in name and len(masks) == len(indices) and args[2].numel() == 1 and not any(args[3:4])
            for _ in masks if not filled else ():
                self.wait("index by a mask")
            for x in indices:
                if x.device.type != "cuda":
                    self.wait("copy to cuda")
        if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait(name)
        if name == "segment_reduce" and not kwargs.get("unsafe", False):
            self.wait(name)
        if name not in FREE and not func.is_view:
            self.launch(name)


def _indexes(name: str) -> bool:
    """Whether an operation takes a list of indices."""
    return name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


def _wrap(x: Any, device: torch.device) -> Any:
    return SimulatedTensor(x, device) if isinstance(x, Tensor) else x


def place() -> str:
    """The line of ours that is at work, else the model's."""
    frame, other = sys._getframe(1), "elsewhere"
    while frame is not None:
        name = frame.f_code.co_filename
        for package in ("/mmaccel/", "/mmaccel_kernels/"):
            # the wrapped `generate` is the model's
            if package in name and not name.endswith("/accelerate/vlm.py"):
                return f"{package[1:]}{name.rsplit(package, 1)[1]}:{frame.f_lineno}"
        if other == "elsewhere" and "/transformers/" in name:
            other = f"transformers/{name.rsplit('/transformers/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return other


class _Dispatch(TorchDispatchMode):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.machine.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What is to be seen before PyTorch takes it to pieces: attention, and tensors made of lists."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WHOLE and isinstance(args[0], SimulatedTensor):
            flat, spec = tree_flatten((args, kwargs))
            devices = {str(x.device) for x in flat if isinstance(x, Tensor)}
            if len(devices) > 1:
                raise DevicesMixed(
                    f"{func.__name__} expected all tensors to be on the same device, but found {sorted(devices)}"
                )
            self.machine.launch(func.__name__)
            self.machine.reads(func.__name__, flat)
            self.machine.order.starts(self.machine.stream, func.__name__, flat, [])
            plain, options = tree_unflatten([x.numbers if isinstance(x, SimulatedTensor) else x for x in flat], spec)
            with _disable_current_modes():
                return SimulatedTensor(func(*plain, **options), args[0].device)
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None:
            target = self.machine.device_of(kwargs["device"])
            if target.type == "cuda":
                if args and isinstance(args[0], SimulatedTensor):
                    return args[0].to(target, kwargs.get("dtype"))
                # numbers in a list are fetched one by one
                data = tree_map(lambda x: x.item() if isinstance(x, Tensor) else x, args)
                return func(*data, **{**kwargs, "device": "cpu"}).to(target)
        if func is torch.Tensor.new_tensor and isinstance(args[0], SimulatedTensor):
            options = {"dtype": args[0].dtype, **kwargs}
            target = options.pop("device", args[0].device)
            return torch.tensor(*args[1:], **options).to(target)
        return func(*args, **kwargs)


# ------------------------------------------------------------------------------------------------------- torch.cuda


class _Order:
    """What the side stream has begun and the main one has not waited for, and the other way round."""

    def __init__(self) -> None:
        self.steps = {"main": 0, "side": 0}
        #: of the side stream, of what the main one has not waited for: first and last byte, whether it writes, and its step
        self.pending: list[tuple[int, int, bool, int]] = []
        #: the last step of the main stream that wrote to a storage, and the one behind which the side stream works
        self.written: dict[int, int] = {}
        self.known = 0

    def starts(self, stream: str, what: str, flat: list[Any], changed: list[Any]) -> None:
        """An operation that reads ``flat`` and writes ``changed`` is put on a stream."""
        self.steps[stream] += 1
        if stream == "main" and not self.pending:
            self.writes(stream, changed)
            return
        written = {id(x) for x in changed}
        for x in flat:
            span = _span(x)
            if span is None:
                continue
            if stream == "side":
                if self.written.get(_numbers(x).untyped_storage().data_ptr(), 0) > self.known:
                    raise NotWaited(
                        f"{what} at {place()} is beside the stream that writes its {tuple(x.shape)} {x.dtype}."
                    )
                self.pending.append((*span, id(x) in written, self.steps[stream]))
                continue
            for first, last, writes, _ in self.pending:
                if span[0] < last and first < span[1] and (writes or id(x) in written):
                    raise NotWaited(
                        f"{what} at {place()} does not wait for the copy of its {tuple(x.shape)} {x.dtype}."
                    )
        self.writes(stream, changed)

    def writes(self, stream: str, changed: list[Any]) -> None:
        """A stream's last operation wrote these."""
        for x in changed:
            if stream == "main":
                self.written[_numbers(x).untyped_storage().data_ptr()] = self.steps[stream]
            elif (span := _span(x)) is not None:
                self.pending.append((*span, True, self.steps[stream]))

    def waits(self, stream: str, other: str, step: int) -> None:
        """A stream waits for another up to one of its steps."""
        if (stream, other) == ("side", "main"):
            self.known = max(self.known, step)
        elif (stream, other) == ("main", "side"):
            self.pending = [one for one in self.pending if one[3] > step]


def _numbers(x: Any) -> Tensor:
    return x.numbers if isinstance(x, SimulatedTensor) else x


def _span(x: Any) -> tuple[int, int] | None:
    """The bytes between which a tensor of a device, or of pinned memory, lies."""
    if not isinstance(x, Tensor) or not x.numel():
        return None
    plain = _numbers(x)
    places = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True)) + 1
    return plain.data_ptr(), plain.data_ptr() + places * plain.element_size()


def _changed(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    found = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[at] if at < len(args) else None)
            found += [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
    return found


class _Stream:
    def __init__(self, machine: Machine, device: int, name: str = "main") -> None:
        self.machine, self.device, self.device_index = machine, torch.device("cuda", device), device
        self.cuda_stream, self.name = 0, name

    def synchronize(self) -> None:
        self.machine.wait("stream")

    def wait_stream(self, other: _Stream) -> None:
        """Devices wait for each other, the host for none."""
        self.machine.order.waits(self.name, other.name, self.machine.order.steps[other.name])

    def wait_event(self, event: _Event) -> None:
        """Devices wait for each other, the host for none."""
        self.machine.order.waits(self.name, *event.recorded)

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event(self.machine)
        event.record(self)
        return event


class _Event:
    def __init__(self, machine: Machine, enable_timing: bool = False, **options: Any) -> None:
        self.machine, self.timing, self.device = machine, enable_timing, None
        self.recorded = ("main", 0)

    def record(self, stream: _Stream | None = None) -> None:
        stream = stream or _Stream(self.machine, self.machine.current)
        if self.device is not None and self.device != stream.device:
            raise RuntimeError(f"Event device {self.device} does not match recording stream's device {stream.device}.")
        self.device = stream.device
        self.recorded = stream.name, self.machine.order.steps[stream.name]
        self.machine.counts.events += not self.machine._quiet

    def synchronize(self) -> None:
        self.machine.wait("event")

    def query(self) -> bool:
        return True

    def wait(self, stream: _Stream | None = None) -> None:
        """Devices wait for each other, the host for none."""
        (stream or _Stream(self.machine, self.machine.current)).wait_event(self)

    def elapsed_time(self, end: _Event) -> float:
        if not (self.timing and end.timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.device is None or end.device is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.device != end.device:
            raise RuntimeError(f"CUDA error: invalid resource handle: events of {self.device} and {end.device}")
        return 1.0


def _patches(machine: Machine) -> dict[str, Any]:
    """Names in :mod:`torch.cuda` and what stands for them."""

    def number(device: Any) -> int:
        device = torch.device("cuda", device) if isinstance(device, int) else device
        return machine.current if device is None else machine.device_of(device).index

    def exchange(device: int) -> int:
        before = machine.current
        machine.current = device if device >= 0 else before
        return before

    @contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        before, machine.stream = machine.stream, stream.name
        try:
            yield
        finally:
            machine.stream = before

    properties = SimpleNamespace(
        name="simulated", major=8, minor=0, multi_processor_count=4, total_memory=1 << 34, warp_size=32
    )
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: machine.devices,
        "current_device": lambda: machine.current,
        "set_device": lambda device: exchange(number(device)) and None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "current_stream": lambda device=None: _Stream(machine, number(device)),
        "default_stream": lambda device=None: _Stream(machine, number(device)),
        "Stream": lambda device=None, **options: _Stream(machine, number(device), "side"),
        "stream": on,
        "Event": lambda enable_timing=False, **options: _Event(machine, enable_timing),
        "synchronize": lambda device=None: machine.wait("synchronize"),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "mem_get_info": lambda device=None: (1 << 34, 1 << 34),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
    }


# ----------------------------------------------------------------------------------------------------------- kernels


class _Launched:
    """What stands for a Triton kernel: it notes the launch, and checks the devices of what it is given."""

    def __init__(self, machine: Machine, name: str, kernel: Any) -> None:
        self.machine, self.name, self.kernel = machine, name, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    def run(self, *args: Any, **options: Any) -> None:
        devices = {x.device.index if x.device.type == "cuda" else "cpu" for x in args if isinstance(x, Tensor)}
        if devices != {self.machine.current}:
            raise DevicesMixed(
                f"kernel {self.name} was launched on cuda:{self.machine.current} with tensors of {sorted(map(str, devices))}"
            )
        self.machine.launch(self.name)
        self.machine.reads(self.name, list(args))
        if not self.machine._quiet:
            self.machine.counts.kernels[self.name] += 1


def _kernels(machine: Machine, stack: ExitStack) -> None:
    """Every operation that has a kernel runs its host code, and takes its numbers from the definition."""
    for info in walk_packages(mmaccel_kernels.__path__, "mmaccel_kernels."):
        module = import_module(info.name)
        # nothing can be built for a GPU that is not there, so it is not tried
        told = {
            "usable": lambda device: device.type == "cuda",
            "obstacle": lambda device: None,
            "exact": lambda device: True,
        }
        for name, said in told.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, said))
        for name, thing in list(vars(module).items()):
            if type(thing).__module__.startswith("triton.runtime") and hasattr(thing, "run"):
                stack.enter_context(mock.patch.object(module, name, _Launched(machine, name, thing)))
            elif name.endswith("_kernel") and callable(thing):
                definition = getattr(module, name.removesuffix("_kernel") + "_definition", None)
                if definition is not None:
                    stack.enter_context(mock.patch.object(module, name, _both(machine, thing, definition)))


def _both(machine: Machine, kernel: Callable[..., Any], definition: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        kernel(*args, **options)
        with machine.quiet():
            return definition(*args, **options)

    return run


def _loaded(machine: Machine, name: str, device: str, dtype: str) -> Any:
    """A draft on a simulated device."""
    with _disable_current_modes(), machine.quiet():
        model, _ = load(name, device="cpu", dtype=dtype)
    return machine.put(model.requires_grad_(False), device)


@contextmanager
def machine(devices: int = 1) -> Iterator[Machine]:
    """A machine with so many devices, for as long as the block runs."""
    torch._C._ensureCUDADeviceGuardSet()
    made = Machine(devices)
    with ExitStack() as stack:
        for name, value in _patches(made).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        _kernels(made, stack)
        loaded = lambda kind, name, where, load: _loaded(made, name, *where)  # noqa: E731
        stack.enter_context(mock.patch.object(draft, "load_once", loaded))
        stack.enter_context(mock.patch.object(host, "on_device", made.shown))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_Functions(made))
        stack.enter_context(_Dispatch(made))
        yield made
