"""Whatever goes wrong inside a session, and wherever, it is what it was, and the next try gives what it would have given."""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from laws import helpers, oracle
from PIL import Image
from tail import few
from test_streaming import film, session
from torch import Tensor, nn

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerated, get_method, is_accelerated
from mmaccel.cli import main
from mmaccel.families.base import slides
from mmaccel.kv.cache import CacheState
from mmaccel.kv.layer import CompressedLayer
from mmaccel.kv.packed import QuantisedLayer
from mmaccel.media.files import Clip, Prompt, encode
from mmaccel.programs import streaming
from mmaccel.programs.streaming import VideoSession
from mmaccel.runtime.cache import recall

QUESTION = "what is it?"
HEADS = {"head_budget": "adaptive"}
RECIPES = {
    "infinipot-v": Recipe("cap", (Stage("infinipot-v", 0.5),)),
    "token method": Recipe(
        "tokens", (Stage("divprune", 0.5), Stage("fastv", 0.4, {"layer": 3}), Stage("snapkv", 0.5, HEADS))
    ),
    "merging in the tower": Recipe("merged", (Stage("tome", 0.5), Stage("knorm", 0.5))),
    "scheduled": Recipe("scheduled", (Stage("h2o", 0.5, {"recent": 8, "every": 2}),)),
    "codec": Recipe("codec", (Stage("knorm", 0.5), Stage("kivi", None, {"page": 16, "residual": 8, "group": 16}))),
}


class Fault(Exception):
    """What a test makes happen."""


class Faults:
    """Places of a model and of the cache where something can go wrong: ``counts`` says how often each was passed, and
    the ``number``-th time that ``place`` is passed, ``error`` is raised there."""

    def __init__(self, model: nn.Module, few: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.place, self.number, self.error = "", 0, Fault
        self._model, self._few = model, few

    def _pass(self, place: str, *about: Any) -> None:
        self.counts[place] += 1
        if (place, self.counts[place]) == (self.place, self.number):
            raise self.error

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            part = name.rpartition(".")[2]
            if part.endswith(("attn", "projector", "merger", "lm_head")) or name == "model" or (name and not self._few):
                yield name, module

    @contextmanager
    def watched(self) -> Iterator[Counter[str]]:
        """While it is entered, places are passed."""
        handles = []
        for name, module in self._modules():
            handles.append(module.register_forward_hook(lambda *about, name=name: self._pass(name)))
        functions = [
            (CompressedLayer, "update"),
            (CompressedLayer, "evict"),
            (QuantisedLayer, "pack"),
            (CacheState, "finalize"),
            (CacheState, "rebase"),
            (streaming, "encode"),
            (recall, "park"),
        ]
        self.counts.clear()
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in functions:
                patch.setattr(owner, name, self._then(getattr(owner, name), name))
            try:
                yield self.counts
            finally:
                for handle in handles:
                    handle.remove()

    def _then(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def done(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            self._pass(name)
            return out

        return done

    @contextmanager
    def at(self, place: str, number: int, error: type[BaseException]) -> Iterator[None]:
        """The ``number``-th time that ``place`` is passed inside, it goes wrong."""
        self.place, self.number, self.error = place, number, error
        with self.watched(), pytest.raises(error):
            yield
        self.place = ""


def frozen(thing: Any, known: dict[int, int] | None = None) -> Any:
    """Everything that hangs on a session but its model and processor, as plain values, and what of it is one and the same."""
    known = {} if known is None else known
    if thing is None or isinstance(thing, (bool, int, float, str, Recipe, torch.dtype, torch.device)):
        return thing
    if isinstance(thing, (nn.Module, type, types.FunctionType, weakref.ref, weakref.finalize)) or hasattr(
        thing, "tokenizer"
    ):
        return type(thing).__name__
    if id(thing) in known:
        return f"the {known[id(thing)]}th"
    known[id(thing)] = len(known)
    if isinstance(thing, Tensor):
        return thing.dtype, tuple(thing.shape), thing.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(thing, np.ndarray):
        return str(thing.dtype), thing.shape, thing.tobytes()
    if isinstance(thing, dict):
        return {name: frozen(value, known) for name, value in thing.items()}
    if isinstance(thing, (list, tuple, range)):
        return [frozen(value, known) for value in thing]
    slots = dataclasses.is_dataclass(thing) and not hasattr(thing, "__dict__")
    return type(thing).__name__, {} if slots else frozen(vars(thing), known)


def disturbed(family: str, recipe: Recipe | None, few: bool, **options: Any) -> Counter[str]:
    """Everything that can go wrong in two pushes and two questions goes wrong, in a session beside one in which nothing does;
    returns how often each place was passed."""
    ours, quiet = (session(family, CAPS.get(family, 60), recipe=recipe, **options) for _ in range(2))
    faults, passed = Faults(ours.model, few), Counter[str]()
    # transformers puts hooks of its own on some towers, in their first forward
    session(family, recipe=recipe).push(film(family, 4))
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in ours.model.modules())
    errors = (Fault, KeyboardInterrupt, torch.OutOfMemoryError)
    for stretch in range(2):
        for act in (
            lambda one, at=stretch: one.push(film(family, 6 + at, at)),
            lambda one: one.ask(QUESTION, 4),
        ):
            with faults.watched() as counts:
                wanted = act(quiet)
            counts, before = Counter(counts), frozen(vars(ours))
            passed += counts
            numbers = ((place, n) for place in counts for n in {1 if not few else counts[place], counts[place]})
            for i, (place, number) in enumerate(numbers):
                with faults.at(place, number, errors[i % 3]):
                    act(ours)
                assert frozen(vars(ours)) == before, f"after {place} {number}"
                assert not is_accelerated(ours.model)
            assert act(ours) == wanted
            assert frozen(vars(ours)) == frozen(vars(quiet))
            assert (ours.frames, ours.tokens(), ours.nbytes()) == (quiet.frames, quiet.tokens(), quiet.nbytes())
    after = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in ours.model.modules())
    assert after == hooks
    return passed


#: below what two pushes bring
CAPS = {"qwen2_5_vl": 40}


@pytest.mark.full
@pytest.mark.parametrize("name", few([name for name in RECIPES if name != "merging in the tower"], ["scheduled"]))
def test_a_fault_anywhere_leaves_no_trace(name: str) -> None:
    passed = disturbed("qwen2_5_vl", RECIPES[name], few=True)
    layers = [place for place in passed if "language_model.layers" in place]
    assert len(layers) >= 4 and passed["evict"] and passed["rebase"] and passed["encode"] and passed["lm_head"]
    assert any("visual.blocks" in place for place in passed) and any("merger" in place for place in passed)
    assert bool(passed["pack"]) == (name == "codec")


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llava_onevision", "scheduled"),
        ("qwen3_vl", "token method"),
        ("internvl", "merging in the tower"),
        ("smolvlm", "codec"),
        ("video_llava", "infinipot-v"),
    ],
)
def test_a_fault_in_any_module_leaves_no_trace(family: str, name: str) -> None:
    disturbed(family, RECIPES[name], few=False)


# ------------------------------------------------------------------------------------------------------ what is pushed


def test_one_buffer_for_all_frames() -> None:
    """A camera that writes every frame to the same place."""
    frames, buffer = film("qwen2_5_vl", 6), np.zeros_like(film("qwen2_5_vl", 1))
    ours, wanted = session("qwen2_5_vl"), session("qwen2_5_vl")
    for frame in frames:
        buffer[0] = frame
        ours.push(buffer)
    wanted.push(frames)
    buffer[:] = 0
    assert ours.ask(QUESTION, 6) == wanted.ask(QUESTION, 6)
    assert frozen(vars(ours)) == frozen(vars(wanted))


@pytest.mark.parametrize("before", (2, 4), ids=("while frames wait", "between stretches"))
def test_a_video_has_one_size(before: int) -> None:
    one = session("qwen2_5_vl")
    one.push(film("qwen2_5_vl", before))
    height, width = film("qwen2_5_vl", 1).shape[1:3]
    state = frozen(vars(one))
    with pytest.raises(
        MmaccelError, match=f"must be {width} x {height} pixels like earlier ones, got {2 * width} x {height}; res"
    ):
        one.push(np.zeros((1, height, 2 * width, 3), dtype=np.uint8))
    assert frozen(vars(one)) == state
    one.push(film("qwen2_5_vl", 1))


NOISE = np.zeros((2, 8, 8, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "not NoneType;"),
        ("clip.mp4", "not str;"),
        (7, "not int;"),
        (NOISE.astype(np.float32), r"not ndarray of float32 \[2, 8, 8, 3\]"),
        (NOISE > 0, "not ndarray of bool"),
        (NOISE[..., 0], r"not ndarray of uint8 \[2, 8, 8\]"),
        (NOISE[..., :1], r"not ndarray of uint8 \[2, 8, 8, 1\]"),
        (NOISE[0], r"not ndarray of uint8 \[8, 8, 3\]; a single picture"),
        (NOISE[:, :0, :0], r"not ndarray of uint8 \[2, 0, 0, 3\]"),
        ([NOISE[0], NOISE[0, :4]], "of one size, not list"),
        (Image.new("RGB", (8, 8)), "not Image of uint8"),
        (Clip(NOISE, [0, 1], 2, 1.0), "not Clip;"),
        ({}, "not dict;"),
    ],
)
def test_what_is_no_frames(given: Any, said: str) -> None:
    one = session("qwen2_5_vl")
    with pytest.raises(MmaccelError, match=said) as caught:
        one.push(given)
    assert "Frames are one array [T, H, W, 3] of uint8" in str(caught.value) and "\n" not in str(caught.value)
    if not isinstance(given, Clip):
        with pytest.raises(MmaccelError, match="Frames are one array"):
            Clip(given, [0, 1], 2, 1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"chunk": value}, "chunk must be a whole number of at least 2") for value in (1, 2.5, "8", None, True, -3)),
        *(
            ({"cap_tokens": value}, "cap_tokens must be a whole number of at least 1")
            for value in (0, -5, 64.0, "many", None, True)
        ),
        *(({"fps": value}, "finite, with fps > 0") for value in (0, -1.0, float("nan"), float("inf"), "1", None, True)),
        *(({"processor": value}, "a processor= that takes videos") for value in (None, "name", zoo.processor("llava"))),
        *(({"recipe": value}, "is not a recipe") for value in (7, True)),
    ],
)
def test_what_is_no_session(options: dict[str, Any], said: str) -> None:
    given = {"processor": zoo.processor("qwen2_5_vl"), **options}
    with pytest.raises(MmaccelError, match=said):
        VideoSession(oracle.subject("qwen2_5_vl"), **given)
    with pytest.raises(UnsupportedError, match="model type 'NoneType'"):
        VideoSession(None, processor=zoo.processor("qwen2_5_vl"))


WINDOWED = [name for name in zoo.FAMILIES if "video" in zoo.kinds(name) and slides(oracle.adapter(name).config)]


@pytest.mark.parametrize(
    ("family", "words"), [*((name, {}) for name in WINDOWED), ("video_llava", {"sliding_window": 8})]
)
def test_sliding_windows_are_no_session(family: str, words: dict[str, Any]) -> None:
    """Also where a configuration does not list its layers, as Mistral's does not."""
    with pytest.raises(UnsupportedError, match="sliding windows cannot follow a stream"):
        VideoSession(zoo.model(family, **words), processor=zoo.processor(family))


def test_what_is_no_question() -> None:
    one = session("qwen2_5_vl")
    one.push(film("qwen2_5_vl", 5))
    state = frozen(vars(one))
    for question in (None, 7, ["what?"], b"what?"):
        with pytest.raises(MmaccelError, match=f"A question is text, not {type(question).__name__}"):
            one.ask(question)  # type: ignore[arg-type]
    with pytest.raises(MmaccelError, match="half a character"):
        one.ask("what is \ud800?")
    for longest in (0, -1, 2.0, "8", None, True):
        with pytest.raises(MmaccelError, match="max_new_tokens must be a whole number of at least 1"):
            one.ask(QUESTION, longest)  # type: ignore[arg-type]
    assert frozen(vars(one)) == state, "the frame that waits is waiting still"
    assert one.ask(QUESTION, np.int64(2)) is not None  # type: ignore[arg-type]


HOLDERS = {
    "llava_onevision": ("<image>", "<video>"),
    "llava_next_video": ("<image>", "<video>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "qwen3_vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>"),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    "smolvlm": ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_2>", "<video>"),
}


@pytest.mark.parametrize("family", HOLDERS)
def test_questions_hold_nothing_that_stands_for_pixels(family: str) -> None:
    one = session(family)
    one.push(film(family, 4))
    state = frozen(vars(one))
    for holder in HOLDERS[family]:
        with pytest.raises(MmaccelError, match="is a placeholder of pixels for this model; write it") as caught:
            one.ask(f"what does {holder} mean?")
        assert repr(holder) in str(caught.value)
        with pytest.raises(MmaccelError, match="is a placeholder of pixels"):
            encode(zoo.processor(family), [Prompt("and then?", earlier=((f"{holder}?", "yes"),))])
    assert frozen(vars(one)) == state
    assert one.ask("is an <object> or an image [1] < 2 here, or a video?", 2) is not None


def test_the_same_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    assert main(["ask", str(tmp_path / "a.png"), "what is <image> here?", "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert not out and "holds '<image>', which is a placeholder of pixels" in err and len(err.strip().splitlines()) == 1


def test_what_is_no_clip() -> None:
    for given in (Image.new("RGB", (8, 8)), NOISE, "clip.mp4"):
        with pytest.raises(MmaccelError, match=f"takes a mmaccel.media.files.Clip, not {type(given).__name__}"):
            encode(zoo.processor("qwen2_5_vl"), [Prompt("what?", clip=given)])  # type: ignore[arg-type]
    for fps in (0, -1.0, float("nan"), float("inf"), "1", None):
        with pytest.raises(MmaccelError, match="fps > 0"):
            Clip(NOISE, [0, 1], 2, fps)  # type: ignore[arg-type]
    for times in ([0.0, float("nan")], [0.0, float("inf")], [1.0, 0.5], [0.0], [[0.0, 1.0]]):
        with pytest.raises(MmaccelError, match="finite and do not go backwards"):
            Clip(NOISE, [0, 1], 2, 1.0, np.asarray(times))
    with pytest.raises(MmaccelError, match="one or more of them"):
        Clip(NOISE[:0], [], 2, 1.0)
    for indices in ([0], [1, 0]):
        with pytest.raises(MmaccelError, match="go backwards"):
            Clip(NOISE, indices, 2, 1.0)
    assert Clip(NOISE, [3, 3], 4, 2).timestamps.tolist() == [1.5, 1.5]


# ------------------------------------------------------------------------------------------- caches that a user has kept


def two_turns(model: Any, family: str) -> tuple[Any, dict[str, Any]]:
    """The cache after a first turn, and what a second one with another picture feeds."""
    first = helpers.inputs(family)
    out = helpers.generate(model, first, past_key_values=helpers.cache())
    return out.past_key_values, helpers.follow(first, out, helpers.inputs(family, seed=3))[0]


@pytest.mark.parametrize(
    ("recipe", "error"),
    [
        ("fastv", Fault),
        ("snapkv", KeyboardInterrupt),
        ("h2o-decode", torch.OutOfMemoryError),
        ("kivi", KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl"))
def test_a_kept_cache_that_was_broken_off_is_refused(family: str, recipe: str, error: type[BaseException]) -> None:
    """Every way of going on with it, accelerated or bare; once it is reset, it is as good as new."""
    model, said = oracle.subject(family), "A forward with this cache was broken off"
    faults = Faults(model, few=True)
    with accelerated(model, recipe):
        wanted = helpers.generate(model, helpers.inputs(family), past_key_values=helpers.cache()).sequences
        cache, more = two_turns(model, family)
        with faults.at(next(name for name, _ in faults._modules() if "language_model.layers.2" in name), 2, error):
            helpers.generate(model, more, past_key_values=cache)
        refusals = [lambda: helpers.generate(model, more, past_key_values=cache)] * 2
        refusals.append(lambda: model(input_ids=more["input_ids"][:, -1:], past_key_values=cache))
        for again in refusals:
            with pytest.raises(MmaccelError, match=said):
                again()
    for again in refusals:
        with pytest.raises(MmaccelError, match=said):
            again()
    with accelerated(model, recipe):
        cache.reset()
        again = helpers.generate(model, helpers.inputs(family), past_key_values=cache)
        assert torch.equal(again.sequences, wanted)


@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl"))
def test_a_kept_cache_survives_what_happens_before_it_is_changed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second picture that cannot be encoded, or whose tokens a method refuses: the cache goes on with the next one."""
    model = oracle.subject(family)
    faults, recipe = Faults(model, few=True), Recipe("two", (Stage("divprune", 0.5), Stage("snapkv", 0.5)))
    with accelerated(model, recipe):
        cache, more = two_turns(model, family)
        wanted = helpers.generate(model, more, past_key_values=cache).sequences
        cache, more = two_turns(model, family)
        tower = next(name for name, _ in faults._modules() if "projector" in name or "merger" in name)
        with faults.at(tower, 1, Fault):
            helpers.generate(model, more, past_key_values=cache)
        with monkeypatch.context() as patch, pytest.raises(MmaccelError, match="not this one"):
            patch.setattr(get_method("divprune"), "reduce", refuse)
            helpers.generate(model, more, past_key_values=cache)
        assert torch.equal(helpers.generate(model, more, past_key_values=cache).sequences, wanted)


def refuse(*about: Any) -> None:
    raise MmaccelError("not this one")
