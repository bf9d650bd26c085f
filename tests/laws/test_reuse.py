"""Reuse between frames in the tower: as if everything was computed, and a part of it exchanged for that of other frames.

Hooks on the bare tower do that here: of the tokens that a method does not choose, values, what attention adds and what the MLP
adds are replaced by those of the reference frame, after all of it was computed. None of mmaccel's layers takes part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
import zoo
from torch import Tensor
from torch.nn import functional

from mmaccel import MmaccelError, UnsupportedError, accelerated, get_recipe, methods, register
from mmaccel.families import family_of
from mmaccel.method import EncoderMethod, PatchMethod, ProjectorMethod, ReuseMethod

pytestmark = pytest.mark.usefixtures("no_gradients")

METHODS = oracle.named(ReuseMethod)


@register
@dataclass(frozen=True)
class FromTheFirst(ReuseMethod):
    """Test: the first frame is the reference of all, and of the others every third token is computed."""

    name = "test-from-the-first"

    def references(self, frames: int) -> list[int]:
        return [0] * frames

    def recompute(self, keys: Tensor, stored: Tensor) -> Tensor:
        return torch.arange(0, keys.shape[1], 3).expand(len(keys), -1)


SQUARE = [(family, name) for family in zoo.FAMILIES for name in METHODS if oracle.fits(name, family)]
square = pytest.mark.parametrize(("family", "name"), SQUARE)
KINDS = ("video", "mixed")


def method_of(name: str) -> Any:
    return methods()[name]()


def frames_of(feed: Any, hidden: Tensor) -> list[list[tuple[int, int]]]:
    """Start and length of every frame of every clip in the tower's sequence, from the pixels' shapes alone."""
    if "video_grid_thw" in feed:
        clips = [[h * w] * t for t, h, w in feed["video_grid_thw"].tolist()]
    else:
        count = feed["pixel_values_videos"].shape[:2]
        clips = [[hidden.shape[1]] * count[1]] * count[0]
    found, start = [], 0
    for sizes in clips:
        found.append([])
        for size in sizes:
            found[-1].append((start, size))
            start += size
    return found


def kept_channels(fused: Any) -> int:
    """Channels of the keys, and of the values, that a projection makes beside as many queries as it reads."""
    return (fused.out_features - fused.in_features) // 2


@contextmanager
def exchanged(model: Any, feed: Any, method: ReuseMethod) -> Iterator[None]:
    """The towers of a bare model that is given clips run so."""
    known, handles, source, of_clips = family_of(model), [], [torch.empty(0)], [False]
    encode = known.inner.get_video_features

    def encode_clips(*args: Any, **kwargs: Any) -> Any:
        of_clips[0] = True
        try:
            return encode(*args, **kwargs)
        finally:
            of_clips[0] = False

    def choose(module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        flat = hidden.flatten(0, -2)
        source[0] = torch.arange(len(flat))
        if not of_clips[0]:
            return
        if hasattr(module, "qkv"):
            shared = kept_channels(module.qkv)
            weight = module.qkv.weight[-2 * shared : -shared]
            bias = None if module.qkv.bias is None else module.qkv.bias[-2 * shared : -shared]
        else:
            project = module.k_proj if hasattr(module, "k_proj") else module.k
            weight, bias = project.weight, project.bias
        keys = functional.linear(flat, weight, bias)
        for frames in frames_of(feed, hidden):
            for number, at in enumerate(method.references(len(frames))):
                if at == number:
                    continue
                (start, size), (first, _) = frames[number], frames[at]
                mine = keys[None, start : start + size], keys[None, first : first + size]
                stale = torch.ones(size, dtype=torch.bool)
                stale[method.recompute(*mine)[0]] = False
                source[0][start : start + size][stale] = torch.arange(first, first + size)[stale]

    def values(module: Any, args: Any, output: Tensor) -> Tensor:
        flat = output.flatten(0, -2).clone()
        part = flat[:, -kept_channels(module) :] if module.out_features > module.in_features else flat
        part.copy_(part[source[0]])
        return flat.view(output.shape)

    def added(module: Any, args: Any, output: Any) -> Any:
        out = output[0] if isinstance(output, tuple) else output
        made = out.flatten(0, -2)[source[0]].view(out.shape)
        return (made, *output[1:]) if isinstance(output, tuple) else made

    known.inner.get_video_features = encode_clips
    for tower in known.towers():
        for layer in known.tower_layers(tower):
            attention = known.attention_of(layer)
            handles.append(attention.register_forward_pre_hook(choose, with_kwargs=True))
            names = [name for name in ("qkv", "v_proj", "v") if hasattr(attention, name)]
            projection = getattr(attention, names[0])
            handles.append(projection.register_forward_hook(values))
            handles += [module.register_forward_hook(added) for module in (attention, layer.mlp)]
    try:
        yield
    finally:
        del known.inner.get_video_features
        for handle in handles:
            handle.remove()


def entering(door: dict[str, Any]) -> list[Tensor]:
    """What enters the language model, and what DeepStack adds."""
    return [door["inputs_embeds"], *(door.get("deepstack_visual_embeds") or [])]


@pytest.mark.square(
    ("family", "name", "kind"),
    [
        (*case, kind)
        for case in [*SQUARE, *((family, FromTheFirst.name) for family in dict(SQUARE))]
        for kind in KINDS
        if kind in zoo.kinds(case[0])
    ],
)
@pytest.mark.square("batch", (1, 2))
def test_what_is_reused_is_as_if_exchanged(family: str, name: str, kind: str, batch: int) -> None:
    feed, model, bare = zoo.inputs(family, kind, batch=batch), oracle.subject(family), zoo.model(family)
    with accelerated(model, name, processor=zoo.processor(family)):
        got = entering(oracle.at_the_door(model, feed))
        stage = model.mmaccel.stats()["stages"][0]
    with exchanged(bare, feed, method_of(name)):
        wanted = entering(oracle.at_the_door(bare, feed))
    plain = entering(oracle.at_the_door(bare, feed))
    for ours, theirs, full in zip(got, wanted, plain, strict=True):
        oracle.close(ours, theirs, what="features")
        oracle.apart(ours, full)
    assert 0 < stage["tokens_kept"] < stage["tokens_in"], "nothing was saved"


@square
def test_equal_frames_lose_nothing(family: str, name: str) -> None:
    """Where a frame is its reference, what is reused is what would be computed."""
    feed, model = zoo.inputs(family, "video"), oracle.subject(family)
    pixels = feed["pixel_values_videos"]
    if "video_grid_thw" in feed:
        (t, _, _) = feed["video_grid_thw"][0].tolist()
        feed["pixel_values_videos"] = pixels[: len(pixels) // t].repeat(t, 1)
    else:
        feed["pixel_values_videos"] = pixels[:, :1].expand_as(pixels).clone()
    with accelerated(model, name, processor=zoo.processor(family)):
        got = model(**feed).logits
        stage = model.mmaccel.stats()["stages"][0]
    oracle.close(got, oracle.bare(family)(**feed).logits)
    assert stage["tokens_kept"] < stage["tokens_in"]


@square
def test_a_row_in_a_batch_is_the_row_alone(family: str, name: str) -> None:
    feed = zoo.inputs(family, "video", batch=2)
    forced = oracle.force(family, 2, 4)
    got = oracle.record(family, feed, oracle.recipe(name, family), forced)
    for row in range(2):
        other = oracle.record(family, zoo.single(family, feed, row), oracle.recipe(name, family), forced[row : row + 1])
        oracle.close(got.steps[row], other.steps[0])


@square
def test_pictures_are_left_as_they_are(family: str, name: str) -> None:
    feed, model = zoo.inputs(family, "images"), oracle.subject(family)
    with accelerated(model, name, processor=zoo.processor(family)):
        got = model(**feed).logits
    assert torch.equal(got, oracle.bare(family)(**feed).logits)


@square
def test_with_a_method_behind_the_tower(family: str, name: str) -> None:
    """Its own pruner, and one that asks for features of a layer; not one that looks at attention inside the tower."""
    feed, model, reader = zoo.inputs(family, "video"), oracle.subject(family), zoo.processor(family)
    with accelerated(model, [name, "stc-pruner"], retain=0.5, processor=reader):
        model(**feed)
        stats = model.mmaccel.stats()
        assert [stage["method"] for stage in stats["stages"]] == [name, "stc-pruner"]
        assert stats["visual_tokens_kept"] < stats["visual_tokens"]
    taps = {
        other: {tap.kind for tap in methods()[other]().taps()}
        for other in oracle.named(ProjectorMethod)
        if other != "learned"
    }
    for other in (one for one in taps if oracle.fits(one, family)):
        if taps[other] - {"features"}:
            with pytest.raises(MmaccelError, match=f"cannot combine '{name}' with '{other}'.*leave out one of them"):
                get_recipe([name, other]).build()


@pytest.mark.square("family", [family for family in zoo.FAMILIES if not any(case[0] == family for case in SQUARE)])
@pytest.mark.square("name", METHODS)
def test_towers_without_clips_are_refused_in_one_sentence(family: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^[^.]*; use [^.]*\.$"), accelerated(oracle.subject(family), name):
        pass


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("inside_too", oracle.named(EncoderMethod, PatchMethod))
def test_one_method_in_the_tower_is_the_most(name: str, inside_too: str) -> None:
    with pytest.raises(MmaccelError, match="at most one method|not both"):
        get_recipe([name, inside_too] if issubclass(methods()[inside_too], EncoderMethod) else [inside_too, name])


def test_references_that_are_none_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    name = METHODS[0]
    monkeypatch.setattr(methods()[name], "references", lambda self, frames: [max(0, i - 1) for i in range(frames)])
    model, feed = oracle.subject("llava_onevision"), zoo.inputs("llava_onevision", "video")
    with accelerated(model, name), pytest.raises(MmaccelError, match="must refer every frame"):
        model(**feed)
