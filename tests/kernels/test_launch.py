"""Which runs, kernel or definition, on which device, and what becomes of kernels that cannot be compiled.

Tensors here say that they are on a GPU of this test's choice, and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from threading import Thread
from typing import Any

import mmaccel_kernels
import pytest
import torch
import zoo
from mmaccel_kernels import launch, trial
from mmaccel_kernels.alike import keep_alike
from mmaccel_kernels.append import append
from mmaccel_kernels.best import best_units
from mmaccel_kernels.chosen import ChosenKeys, chosen_attention
from mmaccel_kernels.compact import compact
from mmaccel_kernels.decode import decode_attention, merge
from mmaccel_kernels.decode import triton as decode_kernel
from mmaccel_kernels.dpp import greedy_dpp
from mmaccel_kernels.importance import importance
from mmaccel_kernels.loki import low_rank_logits
from mmaccel_kernels.matching import best_match
from mmaccel_kernels.maxmin import max_min
from mmaccel_kernels.pack import quantise
from mmaccel_kernels.pages import Format, Pages, split
from mmaccel_kernels.quest import page_bounds
from mmaccel_kernels.votes import votes
from torch.nn.functional import normalize
from torch.overrides import TorchFunctionMode

from mmaccel import MmaccelError, accelerate_encoder, accelerate_vlm, accelerated
from mmaccel.cli import doctor, main
from mmaccel.kv.decoding import on_gpu


class Elsewhere(TorchFunctionMode):
    """All tensors say that they are on ``device``; what is to be made there is made here."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.device.__get__:
            return self.device
        kwargs = {name: "cpu" if name == "device" else x for name, x in (kwargs or {}).items()}
        return func(*("cpu" if isinstance(x, torch.device) else x for x in args), **kwargs)


class Machine:
    """launched : every kernel, and the device that was the current one. fail : what a launch of a kernel raises, by name."""

    def __init__(self) -> None:
        self.current = torch.device("cuda:0")
        self.launched: list[tuple[str, torch.device]] = []
        self.fail: dict[str, Exception] = {}

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def names(self) -> list[str]:
        return [name for name, _ in self.launched]


@pytest.fixture
def machine(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    if device != "cpu":
        pytest.skip("these devices are made up")
    executor = pytest.importorskip("triton.runtime.interpreter").GridExecutor
    made, execute = Machine(), executor.__call__

    def launching(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.fn.__name__
        made.launched.append((name, made.current))
        if error := made.fail.get(name, made.fail.get("all")):
            raise error
        return execute(self, *args, **kwargs)

    monkeypatch.setattr(executor, "__call__", launching)
    about = types.SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(launch, "_failed", {})
    asked = (launch.usable, launch.obstacle, decode_kernel._capability, decode_kernel._multiprocessors)
    for once in asked:
        once.cache_clear()
    yield made
    for once in asked:
        once.cache_clear()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def packed() -> Pages:
    form = Format("int4", "channel", 16)
    start, count, cu_pages = split(torch.tensor([32, 16]), 16)
    plane = quantise(numbers(48, 16), start, count, form, page=16, tile=16)
    order = torch.arange(3, dtype=torch.int32)
    return Pages((plane,), (plane,), 16, 16, count, order, order.clone(), cu_pages, 2)


def five_of_twelve() -> Any:
    return normalize(numbers(1, 12, 16), dim=-1), torch.ones(1, 12, dtype=torch.bool), torch.tensor([5])


def appended() -> torch.Tensor:
    keys, values = torch.zeros(2, 1, 2, 6, 16)
    append(keys, values, *numbers(2, 1, 2, 1, 16), torch.tensor([3]))
    return keys + values


def chosen() -> torch.Tensor:
    always, units, picked = (torch.tensor(x, dtype=torch.int32) for x in ([[[0, 5]]], [[[[1, 2], [3, 4]]]], [[[1]]]))
    keys = ChosenKeys(always, units, picked, torch.ones(1, 1, dtype=torch.int32), 7)
    return chosen_attention(numbers(1, 4, 1, 16), *numbers(2, 1, 2, 8, 16), keys)[0]


def alike() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    units, before = torch.arange(3, dtype=torch.int32).view(1, 1, 3), numbers(1, 64)
    return units, before / before.norm(), units + 1


#: every operation, its kernels, and a use of it
OPERATIONS = {
    "best_match": (["_best_match"], lambda: best_match(numbers(1, 5, 16), numbers(1, 7, 16))[0]),
    "max_min": (["_pick_all"], lambda: max_min(*five_of_twelve())),
    "greedy_dpp": (["_step"] * 5, lambda: greedy_dpp(five_of_twelve()[0], torch.ones(1, 12), *five_of_twelve()[1:])),
    "compact": (["_compact"], lambda: compact(*numbers(2, 1, 2, 6, 8), torch.arange(12).view(1, 2, 6) % 3 > 0).keys),
    "quantise": (["_quantise"], lambda: packed().keys[0].scale),
    "importance": (["_row_sums", "_column_sums"], lambda: importance(numbers(1, 2, 3, 16), numbers(1, 1, 9, 16))),
    "decode_attention": (
        ["_decode", "_merge"],
        lambda: decode_attention(numbers(1, 4, 1, 16), *numbers(2, 1, 2, 3, 16), pages=packed())[0],
    ),
    "append": (["_append"], appended),
    "best_units": (["_best_units"], lambda: best_units(numbers(1, 2, 9), torch.tensor([[4]], dtype=torch.int32), 4)[0]),
    "chosen_attention": (["_attend_chosen", "_merge_chosen"], chosen),
    "low_rank_logits": (
        ["_low_rank_logits"],
        lambda: low_rank_logits(numbers(1, 4, 16), numbers(1, 2, 16, 4), numbers(1, 2, 5, 4)),
    ),
    "votes": (
        ["_logits", "_votes"],
        lambda: votes(numbers(1, 4, 16), numbers(1, 2, 9, 16), torch.arange(5, dtype=torch.int32).view(1, 1, 5)),
    ),
    "keep_alike": (["_keep_alike"], lambda: keep_alike(numbers(1, 4, 16), *alike(), 0.9)[0]),
    "page_bounds": (["_page_bounds"], lambda: page_bounds(numbers(1, 4, 16), numbers(1, 2, 5, 32))),
}
operations = pytest.mark.parametrize("operation", OPERATIONS)


def folders() -> Iterator[types.ModuleType]:
    """Those of :mod:`mmaccel_kernels` that hold a definition and a Triton program, and launch it."""
    for info in iter_modules(mmaccel_kernels.__path__):
        module = import_module(f"mmaccel_kernels.{info.name}")
        if any(name.endswith("_kernel") for name in vars(module)):
            yield module


def test_every_operation_is_found_by_its_folder() -> None:
    found = {name.removesuffix("_kernel") for module in folders() for name in vars(module) if name.endswith("_kernel")}
    assert found == set(OPERATIONS) == {operation.__name__ for operation in trial._USES}


def test_a_kernel_lies_beside_its_definition_and_takes_the_same() -> None:
    for module in folders():
        (name,) = (name.removesuffix("_kernel") for name in vars(module) if name.endswith("_kernel"))
        kernel, definition = getattr(module, f"{name}_kernel"), getattr(module, f"{name}_definition")
        assert getattr(module, name).__module__ == module.__name__
        assert kernel.__module__ == f"{module.__name__}.triton" and definition.__module__ == f"{module.__name__}.naive"
        assert inspect.signature(kernel) == inspect.signature(definition)


def test_every_function_fits_a_page() -> None:
    """Kernels first of all: 80 lines, decorators left out."""
    for path in Path(mmaccel_kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80, f"{path}: {node.name}"


# --- the device -------------------------------------------------------------------------------------------------------
@operations
def test_kernels_run_with_the_device_of_their_tensors_as_the_current_one(operation: str, machine: Machine) -> None:
    names, use = OPERATIONS[operation]
    want = use()
    assert not machine.launched
    with Elsewhere("cuda:1"):
        got = use()
    assert machine.names()[-len(names) :] == names
    assert {where for _, where in machine.launched} == {torch.device("cuda:1")}
    assert machine.current == torch.device("cuda:0")
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)


def test_a_device_is_asked_once_whether_kernels_build_there(machine: Machine) -> None:
    x = numbers(1, 5, 16)
    for where in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        with Elsewhere(where):
            best_match(x, x)
    asked = [where for name, where in machine.launched if name == "_count"]
    assert asked == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert machine.names().count("_best_match") == 4


def test_a_decode_step_asks_no_global_question(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(1, 2, 1, 16)
    assert not on_gpu(x)
    with Elsewhere("cuda:0"):
        assert on_gpu(x)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked again"))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: pytest.fail("asked again"))
        assert on_gpu(x)


def test_whether_kernels_are_available(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not mmaccel_kernels.available()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with Elsewhere("cuda:0"):
        assert mmaccel_kernels.available()
        launch.obstacle.cache_clear()
        machine.fail["_count"] = RuntimeError("Failed to find C compiler.")
        assert not mmaccel_kernels.available()


# --- kernels that cannot be built -------------------------------------------------------------------------------------
BROKEN = {
    "no C compiler": (
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        "cuda:1, plain torch is used: Failed to find C compiler.* install one",
    ),
    "no headers of Python": (
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),
        "gcc failed .* 1; .*headers of Python",
    ),
    "nothing can be written": (
        PermissionError(13, "Permission denied", "/root/.triton"),
        "Permission .*TRITON_CACHE_DIR",
    ),
    "no driver": (RuntimeError("0 active drivers ([])"), "0 active drivers .*install the Triton"),
}


@pytest.mark.parametrize("why", BROKEN)
def test_where_no_kernel_builds_definitions_run_after_one_warning(why: str, machine: Machine) -> None:
    error, words = BROKEN[why]
    machine.fail["all"] = error
    wants = {name: use() for name, (_, use) in OPERATIONS.items()}
    with Elsewhere("cuda:1"), pytest.warns(RuntimeWarning) as said:
        for name, (_, use) in OPERATIONS.items():
            assert torch.equal(use(), wants[name])
    assert machine.names() == ["_count"]
    (only,) = (str(warning.message) for warning in said)
    assert re.search(words, only), only


def test_a_device_that_counts_wrongly_runs_no_kernel(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(1, 5, 16)
    monkeypatch.setattr(launch, "_count", type("Idle", (), {"__getitem__": lambda self, grid: lambda x, n: None})())
    with Elsewhere("cuda:1"), pytest.warns(RuntimeWarning, match="wrong numbers; update the driver"):
        best_match(x, x)
    assert not machine.launched


def test_without_triton_definitions_run_after_one_warning(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(1, 5, 16)
    monkeypatch.setattr(launch, "triton", None)
    with Elsewhere("cuda:1"), pytest.warns(RuntimeWarning, match="Triton is not installed; run pip install"):
        best_match(x, x)
    assert not machine.launched


def refused_by_the_compiler() -> Exception:
    """As Triton raises it: every caller's line, and the reason as the cause."""
    from triton.compiler.errors import CompilationError

    outer = CompilationError("def _best_match():\n  inner()", None)
    outer.__cause__ = CompilationError("def inner():\n  a + b", None, "AssertionError(what it says)")
    return outer


@operations
def test_a_kernel_that_cannot_be_compiled_gives_way_to_its_definition(operation: str, machine: Machine) -> None:
    names, use = OPERATIONS[operation]
    want = use()
    machine.fail[names[-1]] = refused_by_the_compiler()
    with Elsewhere("cuda:1"), pytest.warns(RuntimeWarning) as said:
        for _ in range(3):
            torch.testing.assert_close(use(), want, atol=3e-6, rtol=1e-5)
    assert machine.names().count(names[-1]) == 1
    (only,) = (str(warning.message) for warning in said)
    assert only.startswith(
        f"The kernel {names[-1]} cannot be compiled for cuda:1, plain torch is used: AssertionError(what"
    )


@pytest.mark.parametrize(("least", "tried"), [(3, [5, 4, 3, 3]), (0, [5, 4, 3, 2, 1])])
def test_where_memory_does_not_hold_the_stages_fewer_are_compiled(
    least: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, without a warning; where not even one fits, the kernel cannot be compiled."""
    asked = []

    class Kernel:
        fn = launch._count.fn

        def __getitem__(self, grid: Any) -> Any:
            return self.launch

        def launch(self, *args: Any, **options: Any) -> str:
            assert options["STAGES"] == options["num_stages"]
            asked.append(options["num_stages"])
            if options["num_stages"] > least:
                raise launch.triton.OutOfResources(253976, 232448, "shared memory")
            return "made"

    monkeypatch.setattr(launch, "_failed", {})
    monkeypatch.setattr(launch, "_fewer", {})
    kernel, options = Kernel(), {"STAGES": 5, "num_stages": 5, "num_warps": 4}
    # what a kernel leaves out comes as None
    x = None, torch.zeros(1)
    if least:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [launch.enqueue(kernel, (1,), *x, **options) for _ in range(2)] == ["made", "made"]
    else:
        with pytest.warns(RuntimeWarning, match="cannot be compiled"), pytest.raises(launch.Unbuildable):
            launch.enqueue(kernel, (1,), *x, **options)
        with pytest.raises(launch.Unbuildable):
            launch.enqueue(kernel, (1,), *x, **options)
    assert asked == tried


def test_other_configurations_and_devices_go_on(machine: Machine) -> None:
    x = numbers(1, 5, 16)
    with Elsewhere("cuda:1"):
        machine.fail["_best_match"] = refused_by_the_compiler()
        with pytest.warns(RuntimeWarning):
            best_match(x, x)
        machine.fail.clear()
        best_match(x, x)
        assert machine.names().count("_best_match") == 1
        best_match(x.half(), x.half())
        assert machine.names().count("_best_match") == 2
    with Elsewhere("cuda:0"):
        best_match(x, x)
    assert machine.names().count("_best_match") == 3


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_other_errors_of_a_launch_are_not_hidden(error: Exception, machine: Machine) -> None:
    x = numbers(1, 5, 16)
    machine.fail["_best_match"] = error
    with Elsewhere("cuda:1"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)[:10]):
                best_match(x, x)


def test_everything_imports_and_runs_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, mmaccel, mmaccel_kernels\n"
        "from mmaccel_kernels.matching import best_match\n"
        "assert not mmaccel_kernels.available()\n"
        "print(best_match(torch.eye(2)[None], torch.eye(2).flip(0)[None])[1].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[1, 0]]"


# --- again and again ------------------------------------------------------------------------------------------------------
class Compiled:
    """As what Triton returns of a launch."""

    asm: dict[str, str] = {}

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.ran.append((grid, *args))


class Dispatched:
    """As a function under triton.jit, which looks at every argument."""

    arg_names = ("x", "n", "N", "M")

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.made = Compiled()

    def __getitem__(self, grid: Any) -> Any:
        def dispatch(*args: Any, **options: Any) -> Compiled:
            self.asked.append((grid, *args, options))
            return self.made

        return dispatch


def test_a_step_that_comes_again_is_not_dispatched_again() -> None:
    kernel, x = Dispatched(), torch.zeros(16)
    step = launch.Repeated(kernel, {"M": 3, "N": 2, "num_warps": 4})
    step.launch((1, 1, 1), False, x, 5)
    assert len(kernel.asked) == 1 and not kernel.made.ran
    step.launch((2, 1, 1), True, x, 5)
    assert kernel.asked[1:] == [((2, 1, 1), x, 5, {"M": 3, "N": 2, "num_warps": 4})] and not kernel.made.ran
    # the constants come in the order of the kernel, and grid and numbers may change
    step.launch((3, 1, 1), True, x, 6)
    assert kernel.made.ran == [((3, 1, 1), x, 6, 2, 3)]
    step.launch((3, 1, 1), False, x, 6)
    assert len(kernel.asked) == 3 and len(kernel.made.ran) == 1


def test_what_triton_compiles_for_is_even_or_not() -> None:
    x = torch.zeros(64, dtype=torch.float16)
    assert x.data_ptr() % 16 == 0
    assert launch.is_even((32, 16, 0), [x, x[8:]])
    assert not launch.is_even((32, 16), [x, x[1:]])
    assert not launch.is_even((32, 1), [x])
    assert not launch.is_even((32, 1 << 31), [x])


def test_a_step_by_the_compiler_is_the_step_of_the_dispatch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled for one step serves those after it: every launch is noted with all it is given."""
    if device != "cpu":
        pytest.skip("launches are made up")

    class Noted(Dispatched):
        def __init__(self, kernel: Any) -> None:
            super().__init__()
            self.arg_names = kernel.arg_names

        def __hash__(self) -> int:
            return id(self)

    kernels = [Noted(getattr(module, name)) for module, name in ((decode_kernel, "_decode"), (merge, "_merge"))]
    monkeypatch.setattr(decode_kernel, "_decode", kernels[0])
    monkeypatch.setattr(merge, "_merge", kernels[1])
    query, keys = numbers(1, 4, 1, 16), numbers(1, 2, 32, 16)
    filled = torch.tensor([3], dtype=torch.int32)
    for _ in range(3):
        decode_kernel.decode_attention_kernel(query, keys, keys, 1.0, tail=filled)
    for kernel in kernels:
        (first,), launched = kernel.asked, kernel.made.ran
        assert len(launched) == 2
        for later in launched:
            constants = [first[-1][name] for name in kernel.arg_names[len(first) - 2 :]]
            assert len(later) - 1 == len(kernel.arg_names) and list(later[len(first) - 1 :]) == constants
            # workspaces and numbers are those of the first step
            for one, other in zip(first[:-1], later, strict=False):
                if isinstance(one, torch.Tensor) and one.dtype == torch.float32 and one.dim() == 1:
                    assert one.data_ptr() == other.data_ptr()
                elif not isinstance(one, torch.Tensor):
                    assert one == other
    # another type is another kernel
    decode_kernel.decode_attention_kernel(query.half(), keys.half(), keys.half(), 1.0, tail=filled)
    assert [len(kernel.asked) for kernel in kernels] == [2, 2]


#: a device that compiles, and notes what it is told to launch
NOTING = """
import types
import torch
from mmaccel_kernels import launch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

launched = []

class Launcher:
    def __init__(self, source, metadata):
        self.name = source.fn.__name__
    def __call__(self, *args):
        launched.append((self.name, *args))

class Driver:
    launcher_cls = Launcher
    utils = types.SimpleNamespace(
        load_binary=lambda *args: (1, 1, 100, 0, 1024), unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
    )
    get_current_device = get_current_stream = lambda self, device=None: 0
    get_current_target = lambda self: GPUTarget("cuda", 80, 32)

driver.set_active(Driver())
from mmaccel_kernels.append import append_kernel
from mmaccel_kernels.decode import Flat, decode_attention_kernel, triton as kernel
kernel._multiprocessors = lambda device: 2
query, keys = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 32, 16)
flat = Flat(torch.zeros(16, 16), torch.zeros(16, 16), torch.tensor([0, 8, 16]), 8)
asked, enqueue = [], launch.enqueue
launch.enqueue = lambda kernel, *rest, **options: asked.append(kernel.fn.__name__) or enqueue(kernel, *rest, **options)
for filled in torch.tensor([3, 4, 5], dtype=torch.int32).split(1):
    append_kernel(keys, keys, keys[:, :, :1], keys[:, :, :1], filled)
    out = decode_attention_kernel(query, keys, keys, 1.0, flat, tail=filled)
assert asked == ["_append", "_decode", "_merge"], asked
names = [name for name, *_ in launched]
assert names == asked * 3, names
for first, later in zip(launched[:3] * 2, launched[3:], strict=True):
    assert len(first) == len(later)
    for one, other in zip(first, later, strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and one.shape == other.shape
        elif type(one).__name__ == "LazyDict":
            # for profilers
            assert one.data.keys() == other.data.keys()
        else:
            assert one == other, (one, other)
"""


@pytest.mark.kernel
def test_what_was_compiled_is_launched_as_triton_would() -> None:
    path = os.pathsep.join(sys.path[:1] + [str(Path(mmaccel_kernels.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run([sys.executable, "-W", "ignore", "-c", NOTING], env=environment, check=True)


# --- what one launch leaves to the next -----------------------------------------------------------------------------------
def test_a_workspace_is_kept_by_device_stream_and_thread(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x, stream = numbers(3), types.SimpleNamespace(cuda_stream=7)
    first, second = launch.workspace(x, 10, 3)
    assert (len(first) >= 10, len(second) >= 3) == (True, True) and first.dtype == torch.float32
    assert second.data_ptr() - first.data_ptr() >= 40 and second.data_ptr() % 16 == 0
    assert launch.workspace(x, 10, 3)[0] is first
    # fewer fit, more do not
    assert launch.workspace(x, 6, 2)[0].data_ptr() == first.data_ptr()
    assert len(launch.workspace(x, 1000)[0]) >= 1000
    made = [launch.workspace(x, 10)[0]]
    other = Thread(target=lambda: made.append(launch.workspace(x, 10)[0]))
    other.start()
    other.join()
    with Elsewhere("cuda:0"):
        made.append(launch.workspace(x, 10)[0])
        assert launch.workspace(x, 10)[0] is made[-1]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        made.append(launch.workspace(x, 10)[0])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        captured = [launch.workspace(x, 10)[0] for _ in range(2)]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert launch.workspace(x, 10)[0] is made[-1]
    assert len({part.data_ptr() for part in made + captured}) == 6


# --- the switch -------------------------------------------------------------------------------------------------------
@pytest.fixture
def gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Kernels work on the CPU, as far as anybody asks."""
    monkeypatch.setattr(launch, "usable", lambda device: True)
    return machine


def answer(model: Any, family: str = "llava") -> torch.Tensor:
    with torch.no_grad():
        return model.generate(**zoo.inputs(family), max_new_tokens=3, do_sample=False)


def test_a_model_with_kernels_off_launches_none_and_others_go_on(gpu: Machine) -> None:
    recipe = {"name": "two", "stages": [{"method": "divprune", "retain": 0.5}, {"method": "snapkv", "retain": 0.5}]}
    on, off = (zoo.model("llava") for _ in range(2))
    accelerate_vlm(on, recipe)
    want = answer(on)
    before = len(gpu.launched)
    assert {"_pick_all", "_compact"} <= set(gpu.names())
    accelerate_vlm(off, recipe, kernels="off")
    assert torch.equal(answer(off), want) and len(gpu.launched) == before
    with torch.no_grad():
        off(**zoo.inputs("llava"))
    assert len(gpu.launched) == before
    answer(on)
    assert len(gpu.launched) == 2 * before


def test_a_call_within_a_call_is_its_own(gpu: Machine) -> None:
    inner, outer = (accelerate_vlm(zoo.model("llava"), "divprune", kernels=kernels) for kernels in ("auto", "off"))
    seen = []

    def ask_the_other(*_: Any) -> None:
        answer(inner)
        seen.append(len(gpu.launched))

    handle = outer.lm_head.register_forward_pre_hook(ask_the_other)
    answer(outer)
    handle.remove()
    # each call of the inner model launches as much, and the outer model adds nothing
    each = seen[0]
    assert each > 0 and seen == [each * (i + 1) for i in range(len(seen))] and len(gpu.launched) == seen[-1]
    assert launch.allowed.get()


def test_the_switch_lasts_as_long_as_the_recipe(gpu: Machine) -> None:
    model = accelerate_vlm(zoo.model("llava"), "divprune", kernels="off")
    with accelerated(model, "divprune", kernels="auto"):
        answer(model)
        launched = len(gpu.launched)
        assert launched
    answer(model)
    assert len(gpu.launched) == launched and model.mmaccel.kernels == "off"
    with pytest.raises(MmaccelError):
        accelerate_vlm(model, "divprune", retain=-1)
    assert model.mmaccel.kernels == "off"


def test_an_encoder_has_the_switch_too(gpu: Machine) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=56, patch_size=14
    )
    torch.manual_seed(0)
    model = transformers.CLIPVisionModel(config).eval()
    pixels = numbers(2, 3, 56, 56)
    with torch.no_grad():
        want = accelerate_encoder(model, "tome")(pixels).last_hidden_state
        launched = len(gpu.launched)
        assert launched
        got = accelerate_encoder(model, "tome", kernels="off")(pixels).last_hidden_state
    assert len(gpu.launched) == launched
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("wrong", ["on", True, None, "Off"])
def test_an_unknown_value_is_refused_in_a_sentence(wrong: Any) -> None:
    model = zoo.model("llava")
    with pytest.raises(MmaccelError, match=f"kernels={wrong!r} is unknown; give 'auto', or 'off'"):
        accelerate_vlm(model, "divprune", kernels=wrong)
    assert not hasattr(model, "mmaccel")


# --- mmaccel doctor ---------------------------------------------------------------------------------------------------
@pytest.fixture
def two_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    about = types.SimpleNamespace(name="A GPU", total_memory=80 << 30, major=9, minor=0, multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    # what else it looks at is on no GPU
    monkeypatch.setattr(doctor, "_torchvision", lambda problems: True)
    with Elsewhere("cuda:1"):
        yield machine


def test_doctor_tells_of_every_device_what_every_site_runs(two_gpus: Machine, capsys: Any) -> None:
    assert main(["doctor", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["devices"]
    assert [d["device"] for d in (first, second)] == ["cuda:0", "cuda:1"] and first["capability"] == "9.0"
    assert first["kernels"] and first["why_not"] is None
    assert {site: taken["path"] for site, taken in second["sites"].items()} == {
        "frames": "definition",
        "encoder": "kernel",
        "projector": "kernel",
        "layers": "definition",
        "cache": "kernel",
        "codec": "kernel",
        "decoding": "kernel",
    }
    # each has been built and has run
    assert {"_best_match", "_pick_all", "_step", "_compact", "_quantise", "_decode"} <= set(two_gpus.names())


def test_doctor_tells_why_no_kernel_builds(two_gpus: Machine, capsys: Any) -> None:
    two_gpus.fail["all"] = RuntimeError("Failed to find C compiler.")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    about = lines.index("GPU             cuda:1  A GPU, 80.0 GiB, capability 9.0")
    assert lines[about + 1].startswith(
        "  kernels       do not build: Failed to find C compiler; install one, such as gcc"
    )
    assert "  decoding      definition (no kernel builds)" in lines
    assert two_gpus.names() == ["_count"] * 2


def test_doctor_tells_which_kernel_does_not_compile(two_gpus: Machine, capsys: Any) -> None:
    two_gpus.fail |= {"_best_match": refused_by_the_compiler(), "_decode": refused_by_the_compiler()}
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    why = "AssertionError(what it says)"
    assert any(line.startswith(f"  encoder       definition (best_match: {why}") for line in lines)
    assert any(line.startswith(f"  projector     kernel and definition (best_match: {why}") for line in lines)
    assert any(line.startswith(f"  decoding      kernel and definition (decode_attention: {why}") for line in lines)
    assert "  codec         kernel (quantise)" in lines
