"""Which runs, kernel or definition, on which device, and what becomes of kernels that cannot be compiled.

Tensors here say that they are on a GPU of this test's choice, and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import mmaccel_kernels
import pytest
import torch
import zoo
from mmaccel_kernels import launch, trial
from mmaccel_kernels.compact import compact
from mmaccel_kernels.decode import decode_attention
from mmaccel_kernels.decode import triton as decode_kernel
from mmaccel_kernels.dpp import greedy_dpp
from mmaccel_kernels.importance import importance
from mmaccel_kernels.matching import best_match
from mmaccel_kernels.maxmin import max_min
from mmaccel_kernels.pack import quantise
from mmaccel_kernels.pages import Format, Pages, split
from mmaccel_kernels.quest import page_bounds
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
    assert any(line.startswith(f"  decoding      definition (decode_attention: {why}") for line in lines)
    assert "  codec         kernel (quantise)" in lines
