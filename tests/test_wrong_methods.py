"""A method that returns what it must not is named in one sentence, with what it returned and what it must return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from encoders.small import encoder, features, pixels
from laws.helpers import generate, inputs, model
from PIL import Image
from test_bad_input import one_sentence
from torch import Tensor

import mmaccel
from mmaccel import MmaccelError, accelerated, accelerated_encoder, prepare
from mmaccel.core.reduction import Links, Reduction, Residual
from mmaccel.method import registry
from mmaccel.method.sparse_read import Picked

#: what is wrong wherever a tensor is expected
WRONG: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda x: None,
    "class": lambda x: type(x),
    "array": lambda x: x.numpy(),
    "device": lambda x: x.to("meta"),
    "list": lambda x: x.tolist(),
    "shape": lambda x: x[..., None],
    "shorter": lambda x: x[..., :-1],
    "complex": lambda x: x.to(torch.complex64),
}
MASK: dict[str, Callable[[Tensor], Any]] = {"mask": lambda x: x > 0, "integers": lambda x: x.nan_to_num(0, 0, 0).long()}
NAN: dict[str, Callable[[Tensor], Any]] = {"NaN": lambda x: torch.full_like(x, torch.nan)}
FLOATS: dict[str, Callable[[Tensor], Any]] = {"floats": lambda x: x.float()}
FIGURES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "None": lambda made: None,
    "tensor": lambda made: next(iter(made.values())),
    "shape": lambda made: {name: x[:, :-1] for name, x in made.items()},
    "mask": lambda made: {name: x > 0 for name, x in made.items()},
    "nothing in it": lambda made: dict.fromkeys(made),
    "device": lambda made: {name: x.to("meta") for name, x in made.items()},
    "numbers for names": lambda made: dict(enumerate(made.values())),
}
#: of figures that a reduction reads at the tokens of a picture
NANS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "NaN": lambda made: {name: torch.full_like(x, torch.nan) for name, x in made.items()},
}
#: what is no object of the kind that is expected
OBJECTS: dict[str, Callable[[Any], Any]] = {
    "None": lambda made: None,
    "text": lambda made: "x",
    "list": lambda made: [made],
    "class": lambda made: type(made),
}


def _links(made: Reduction, **changed: Any) -> Reduction:
    """A reduction with links, some of which are changed: of every kept slot to itself."""
    batch, slot = made.kept.nonzero(as_tuple=True)
    links = Links(batch, slot, slot, torch.ones(len(slot)))
    return replace(
        made, links=replace(links, **{name: change(getattr(links, name)) for name, change in changed.items()})
    )


def _dropped(made: Reduction) -> Tensor:
    """A slot that is not kept, of every link."""
    return (~made.kept[0]).nonzero()[0].expand(int(made.kept.sum()))


REDUCTIONS: dict[str, Callable[[Reduction], Any]] = {
    "None": lambda made: None,
    "mask": lambda made: made.kept,
    "indices": lambda made: made.kept.nonzero()[:, 1],
    "shape": lambda made: replace(made, kept=made.kept[:, :-1]),
    "valid": lambda made: replace(made, valid=made.valid[:, :-1]),
    "numbers for a mask": lambda made: replace(made, kept=made.kept.long()),
    "no links": lambda made: replace(made, links=made.kept),
    "weights of other length": lambda made: _links(made, weight=lambda x: x[:-1]),
    "whole weights": lambda made: _links(made, weight=lambda x: x.long()),
    "weights of NaN": lambda made: _links(made, weight=lambda x: x * torch.nan),
    "weights of inf": lambda made: _links(made, weight=lambda x: x * torch.inf),
    "sources out of range": lambda made: _links(made, source=lambda x: x + 10_000),
    "negative slots": lambda made: _links(made, slot=lambda x: x - 10_000),
    "slots as floats": lambda made: _links(made, slot=lambda x: x.float()),
    "into dropped slots": lambda made: _links(made, slot=lambda x: _dropped(made)),
    "rows out of range": lambda made: _links(made, batch=lambda x: x + 9),
    "residual": lambda made: replace(made, residual=made.kept),
    "width of a residual": lambda made: replace(
        made, residual=Residual.to(made.kept, torch.zeros(*made.kept.shape, 3))
    ),
    "residual of NaN": lambda made: replace(
        made, residual=Residual.to(made.kept, torch.full((*made.kept.shape, 64), torch.nan))
    ),
}


def _picked(made: tuple[Picked, dict[str, Tensor]], **changed: Any) -> Any:
    return made[0]._replace(**{name: change(getattr(made[0], name)) for name, change in changed.items()}), made[1]


PICKED: dict[str, Callable[[Any], Any]] = {
    "None": lambda made: (None, made[1]),
    "units": lambda made: (made[0].units, made[1]),
    "long": lambda made: _picked(made, units=lambda x: x.long()),
    "mask": lambda made: _picked(made, units=lambda x: x > 0),
    "out of range": lambda made: _picked(made, units=lambda x: x + 1000),
    "negative": lambda made: _picked(made, units=lambda x: x - 1000),
    "counts": lambda made: _picked(made, counts=lambda x: x[..., None]),
    "no tuple": lambda made: None,
    "only units": lambda made: made[:1],
    "negative counts": lambda made: _picked(made, counts=lambda x: x - 100),
    "more than there are": lambda made: _picked(made, counts=lambda x: x + 100),
    "unsorted": lambda made: _picked(made, units=lambda x: x.flip(-1)),
    "duplicates": lambda made: _picked(made, units=lambda x: x[..., :1].expand_as(x)),
    "no dict": lambda made: (made[0], None),
    "no tensor": lambda made: (made[0], {"x": "y"}),
    "other rows": lambda made: (made[0], {"x": torch.zeros(9, 2)}),
}
SLOTS: dict[str, Callable[[Tensor], Any]] = {
    "out of range": lambda x: x + 10_000,
    "negative": lambda x: x - 10_000,
}
COUNTS: dict[str, Callable[[Tensor], Any]] = {
    **WRONG,
    **FLOATS,
    "out of range": lambda x: x + 10_000,
    "negative": lambda x: x - 10_000,
}
JOINS: dict[str, Callable[[Any], Any]] = {
    **OBJECTS,
    "number": lambda made: 3,
    "fewer": lambda made: made[:-1],
    "too low": lambda made: [0] * len(made),
    "too high": lambda made: [99] * len(made),
    "shares": lambda made: [0.5] * len(made),
}
FRAMES: dict[str, Callable[[Any], Any]] = {
    "None": lambda made: None,
    "mask": lambda made: np.ones(6, dtype=bool),
    "floats": lambda made: made.astype(np.float32),
    "NaN": lambda made: made * np.nan,
    "two axes": lambda made: made[None],
    "unsorted": lambda made: made[::-1],
    "duplicates": lambda made: np.zeros_like(made),
    "out of range": lambda made: made + 6,
    "negative": lambda made: made - 6,
    "too many": lambda made: np.arange(6),
    "ragged": lambda made: [[1], [1, 2]],
    "none of them": lambda made: made[:0],
}


# by choice: with which there is something to pack, and to read, in a short prompt
OPTIONS: dict[str, dict[str, Any]] = {
    "quest": {"page": 3, "least": 1, "layer": 1},
    "squeezed-attention": {"layer": 1},
    "kivi": {"page": 32, "residual": 0},
    "vidkv": {"page": 32, "protect": 0.5},
}


def _table(*rows: tuple[str, str, dict[str, Callable[[Any], Any]]]) -> list[Any]:
    """A case for every wrong result of a method's call."""
    return [
        pytest.param(name, call, wrong, id=f"{name}-{call}-{what}")
        for name, call, wrongs in rows
        for what, wrong in wrongs.items()
    ]


def spoil(name: str, call: str, wrong: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``call`` of a registered method return something wrong, as a user's own method might."""
    kind = mmaccel.methods()[name]
    right = getattr(kind, call)
    inner = right.__func__ if isinstance(vars(kind).get(call), classmethod) else right

    def called(self: Any, *given: Any, **named: Any) -> Any:
        return wrong(inner(self, *given, **named))

    body = {call: classmethod(called) if inner is not right else called, "__module__": __name__}
    # the method's own name: whoever asks for it gets the wrong one
    monkeypatch.setattr(registry, "_methods", {**registry._methods, name: type(kind.__name__, (kind,), body)})


def named(call: Callable[[], Any], name: str, returned: str) -> None:
    """It ends in one sentence that names the method and the call."""
    with pytest.raises(
        MmaccelError, match=rf"(?s)^Method '{name}' returned .* from {returned}\(\).*; it must return .*"
    ) as caught:
        call()
    one_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("name", "call", "wrong"),
    _table(
        ("divprune", "fit", OBJECTS),
        ("divprune", "taps", {**OBJECTS, "texts": lambda made: ("features",)}),
        ("divprune", "marks", OBJECTS),
        ("divprune", "remark", {what: wrong for what, wrong in OBJECTS.items() if what != "text"}),
        ("divprune", "reduce", REDUCTIONS),
        ("fastv", "layers", OBJECTS),
        ("fastv", "reduce", {"None": REDUCTIONS["None"], "mask": REDUCTIONS["mask"]}),
        ("fastv", "observe", {**FIGURES, **NANS}),
        ("flexselect", "observe", FIGURES),
        ("sparsevlm-step", "prepare", FIGURES),
        ("lazyllm", "recall", {**WRONG, **FLOATS}),
        ("homer", "reduce", {"None": REDUCTIONS["None"]}),
        ("homer", "observe", {**FIGURES, **NANS}),
        ("homer", "joins", JOINS),
        ("snapkv", "score", {**WRONG, **MASK, **NAN}),
        ("adakv", "score", {**WRONG, **MASK, **NAN}),
        ("h2o", "observe", {**WRONG, **MASK}),
        ("h2o-decode", "score", {**WRONG, **NAN}),
        ("quest", "summarise", {"shape": lambda made: {k: x[:0] for k, x in made.items()}, "nothing": dict.fromkeys}),
        ("quest", "summarise", {**OBJECTS, "device": FIGURES["device"]}),
        ("quest", "wanted", COUNTS),
        ("squeezed-attention", "level", {**WRONG, **MASK}),
        ("quest", "rate", {**WRONG, **MASK, **NAN}),
        ("quest", "pick", PICKED),
        ("speckv", "score", {**WRONG, **NAN}),
        ("specpc", "see", {**WRONG, **MASK, **NAN}),
        ("specpc", "finalize", {**WRONG, **MASK, **NAN}),
        ("specpc", "begin", {**OBJECTS, "too high": lambda made: 99, "negative": lambda made: -1}),
        ("tome", "match", {**WRONG, **FLOATS, "mask": lambda x: x > 0, **SLOTS}),
        ("tome", "weigh", {**WRONG, **MASK, **NAN}),
        ("tome", "fewest", {**OBJECTS, "zero": lambda made: 0, "too many": lambda made: 10_000}),
        ("pixelprune", "predict", {**WRONG, **FLOATS, "mask": lambda x: x > 0, **SLOTS}),
        (
            "pixelprune",
            "predict",
            {"chain": lambda x: (torch.arange(x.shape[-1]) - 1).clamp(min=0).expand_as(x).contiguous()},
        ),
        ("kivi", "pack", OBJECTS),
        ("kivi", "formats", OBJECTS),
        ("kivi", "key_planes", {"None": WRONG["None"], "list": list, "nothing": lambda made: ()}),
        ("kivi", "key_planes", {"fewer pages": lambda made: (replace(made[0], codes=made[0].codes[:-1]),)}),
        ("kivi", "value_planes", {"floats": lambda made: (replace(made[0], codes=made[0].codes.float()),)}),
        ("kivi", "meta", COUNTS),
        ("kivi", "packable", COUNTS),
        ("vidkv", "for_salient", {what: wrong for what, wrong in OBJECTS.items() if what != "None"}),
        ("vidkv", "salient", {**WRONG, **FLOATS}),
    ),
)
def test_a_wrong_result_is_named(name: str, call: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, tiny, feed = mmaccel.get_recipe(name), model("llava_next"), inputs("llava_next", "image")
    method = recipe.stages[-1].method
    spoil(method, call, wrong, monkeypatch)
    options = {"draft": str(zoo.draft("llava_next"))} if name in ("speckv", "specpc") else OPTIONS.get(name, {})

    def run() -> None:
        with accelerated(tiny, recipe.override(**options), processor=zoo.processor("llava_next")):
            generate(tiny, feed)

    named(run, method, call)
    # the next call is not harmed
    assert torch.isfinite(torch.stack(generate(tiny, feed).logits)).all()


@pytest.mark.parametrize(
    ("name", "call", "wrong"),
    _table(
        (
            "tome",
            "schedule",
            {"None": lambda made: None, "shares": lambda made: [0.5] * len(made), "short": lambda made: made[:-1]},
        ),
        ("tome", "schedule", {"negative": lambda made: [-1] * len(made), "all": lambda made: [10_000] * len(made)}),
        ("tome", "match", {"None": WRONG["None"], **SLOTS}),
    ),
)
def test_a_wrong_result_in_an_encoder_by_itself(
    name: str, call: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(name, call, wrong, monkeypatch)
    tower = encoder("clip")
    with accelerated_encoder(tower, name, retain=0.5):
        named(lambda: features(tower, pixels()), name, call)


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        *(
            (("references"), wrong)
            for wrong in (lambda made: None, lambda made: made[:-1], lambda made: [True] * len(made))
        ),
        *(("recompute", wrong) for wrong in [*FLOATS.values(), *SLOTS.values(), lambda x: x.flip(-1)]),
        # fewer tokens are right, too
        *(("recompute", wrong) for what, wrong in WRONG.items() if what != "shorter"),
        ("recompute", lambda x: x[:, :1].expand(-1, 3)),
    ],
)
def test_a_wrong_result_between_frames(call: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil("stc-cacher", call, wrong, monkeypatch)
    tiny = model("qwen2_5_vl")
    with accelerated(tiny, "stc-cacher", processor=zoo.processor("qwen2_5_vl")):
        named(lambda: generate(tiny, inputs("qwen2_5_vl", "video")), "stc-cacher", call)


@pytest.mark.parametrize("wrong", FRAMES.values(), ids=FRAMES)
def test_wrong_frames(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil("uniform-frames", "pick", wrong, monkeypatch)
    processor = prepare(zoo.processor("qwen2_5_vl"), "uniform-frames", retain=0.5)
    clip = zoo.clip(6, 64, 48, 0)
    text = zoo.processor("qwen2_5_vl").apply_chat_template(zoo.messages([], [clip], "what?"), tokenize=False)
    named(lambda: processor(text=text, videos=[clip], return_tensors="pt"), "uniform-frames", "pick")


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        ("clip", lambda made: None),
        ("clip", lambda made: made.astype(np.float32)),
        ("clip", lambda made: made[..., 0]),
        ("clip", lambda made: made.tolist()),
        ("choose", lambda made: None),
        ("choose", lambda made: np.ones(len(made), dtype=bool)),
        ("choose", lambda made: made[::-1]),
        ("choose", lambda made: made + 1),
    ],
)
def test_wrong_clips(call: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil("resize", call, wrong, monkeypatch)
    processor, clip = prepare(zoo.processor("qwen2_5_vl"), "resize", retain=0.5), zoo.clip(6, 64, 48, 0)
    text = zoo.processor("qwen2_5_vl").apply_chat_template(zoo.messages([], [clip], "what?"), tokenize=False)
    named(lambda: processor(text=text, videos=[clip], return_tensors="pt"), "resize", call)


@pytest.mark.parametrize("wrong", [lambda made: None, np.asarray])
def test_wrong_pictures(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil("resize", "picture", wrong, monkeypatch)
    processor = prepare(zoo.processor("llava"), "resize", retain=0.5)
    picture = Image.new("RGB", (60, 48))
    named(lambda: processor(text="<image>what?", images=[picture], return_tensors="pt"), "resize", "picture")
