"""Methods by which later layers of a tower compute fewer frames, or a part of the patches: against bare towers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import oracle
import pytest
import torch
import zoo
from torch import Tensor

from mmaccel import MmaccelError, UnsupportedError, accelerated, get_recipe, methods, register
from mmaccel.families import family_of
from mmaccel.method import FrameMergingMethod, RebuildingMethod

pytestmark = pytest.mark.usefixtures("no_gradients")


@register
class EveryOtherFrame(FrameMergingMethod):
    """Test: behind the first layer every other frame is left, as it is."""

    name = "test-every-other-frame"

    def depths(self) -> Sequence[float]:
        return (0,)

    def merge(self, frames: Tensor) -> Tensor:
        return torch.eye(len(frames))[::2]


@register
class PairsAtTheEnd(FrameMergingMethod):
    """Test: behind the last layer every two frames become their mean."""

    name = "test-pairs-at-the-end"

    def depths(self) -> Sequence[float]:
        return (-1,)

    def merge(self, frames: Tensor) -> Tensor:
        number = torch.arange(len(frames))
        member = (number[::2, None] == number // 2 * 2).float()
        return member / member.sum(1, keepdim=True)


@register
class EveryThird(RebuildingMethod):
    """Test: behind the first layer two of three patches are computed; the others change as the one before them does."""

    name = "test-every-third"

    def span(self, layers: int) -> tuple[int, int]:
        return 1, layers // 2

    def choose(self, before: Tensor, now: Tensor) -> Tensor:
        slot = torch.arange(len(now))
        return slot[slot % 3 < 2]

    def sources(self, left: Tensor, chosen: Tensor) -> Tensor:
        return (2 * torch.arange(len(left)) + 1).clamp(max=len(chosen) - 1)[:, None]


FRAMES = [
    (family, name) for family in zoo.FAMILIES for name in oracle.named(FrameMergingMethod) if oracle.fits(name, family)
]
PARTS = [
    (family, name) for family in zoo.FAMILIES for name in oracle.named(RebuildingMethod) if oracle.fits(name, family)
]
#: of ERNIE a step stays if either of its two frames does
CLIPS = [f for f in zoo.FAMILIES if oracle.fits(EveryOtherFrame.name, f) and f != "ernie4_5_vl_moe"]
OWN = {EveryOtherFrame.name, PairsAtTheEnd.name, EveryThird.name}


@pytest.mark.square("family", CLIPS)
def test_frames_that_are_left_are_as_the_bare_model_encodes_them(family: str) -> None:
    feed, model = zoo.inputs(family, "video"), oracle.subject(family)
    with accelerated(model, EveryOtherFrame.name, processor=zoo.processor(family)):
        got = oracle.at_the_door(model, feed)["inputs_embeds"]
        layout, kept = model.mmaccel.layout, model.mmaccel.reduction.kept
        stage = model.mmaccel.stats()["stages"][0]
    bare = oracle.at_the_door(zoo.model(family), feed)["inputs_embeds"]
    celled = torch.zeros_like(kept)
    for segment in layout.segments:
        celled[segment.row, segment.places] = segment.tile.cells[:, 0] >= 0
    stays = kept & celled
    assert 0 < stays.sum() < celled.sum(), "no frame went"
    oracle.close(got[stays], bare[stays], what="features of frames that are left")
    assert stage["tokens_kept"] < stage["tokens_in"]
    oracle.apart(got[celled & ~kept], bare[celled & ~kept])


@contextmanager
def averaged(model: Any, feed: Any) -> Iterator[None]:
    """The last layer of a bare model's tower gives every two frames their mean."""
    known = family_of(model)
    handles = []

    def mean(module: Any, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        flat = hidden.flatten(0, -2).clone()
        if "video_grid_thw" in feed:
            clips = [(t, h * w) for t, h, w in feed["video_grid_thw"].tolist()]
        else:
            clips = [(feed["pixel_values_videos"].shape[1], hidden.shape[1])] * len(feed["pixel_values_videos"])
        start = 0
        for frames, size in clips:
            one = flat[start : start + frames * size].view(frames, size, -1)
            for at in range(0, frames - 1, 2):
                one[at : at + 2] = one[at : at + 2].mean(0)
            start += frames * size
        made = flat.view(hidden.shape)
        return (made, *output[1:]) if isinstance(output, tuple) else made

    for tower in known.towers():
        handles.append(known.tower_layers(tower)[known.feature_layer].register_forward_hook(mean))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.square("family", CLIPS)
@pytest.mark.square("batch", (1, 2))
def test_merged_frames_are_means(family: str, batch: int) -> None:
    feed, model, bare = zoo.inputs(family, "video", batch=batch), oracle.subject(family), zoo.model(family)
    if family_of(bare).feature_layer != family_of(bare).tap_layer(-1):
        pytest.skip("the last layer is not the one that is read")
    with accelerated(model, PairsAtTheEnd.name, processor=zoo.processor(family)):
        got = oracle.at_the_door(model, feed)["inputs_embeds"]
    with averaged(bare, feed):
        wanted = oracle.at_the_door(bare, feed)["inputs_embeds"]
    oracle.close(got, wanted, what="features")


@pytest.mark.square(("family", "name"), FRAMES)
def test_pictures_keep_their_frames(family: str, name: str) -> None:
    feed, model = zoo.inputs(family, "images"), oracle.subject(family)
    with accelerated(model, name, processor=zoo.processor(family)):
        got = model(**feed).logits
    assert torch.equal(got, oracle.bare(family)(**feed).logits)


@pytest.mark.square(("family", "name"), [*FRAMES, *PARTS])
def test_a_row_in_a_batch_is_the_row_alone(family: str, name: str) -> None:
    kind = "video" if "video" in zoo.kinds(family) else "images"
    feed = zoo.inputs(family, kind, batch=2)
    forced = oracle.force(family, 2, 4)
    got = oracle.record(family, feed, oracle.recipe(name, family), forced)
    for row in range(2):
        other = oracle.record(family, zoo.single(family, feed, row), oracle.recipe(name, family), forced[row : row + 1])
        oracle.close(got.steps[row], other.steps[0])


@pytest.mark.square(("family", "name"), [case for case in PARTS if case[1] not in OWN])
def test_nothing_left_out_is_the_bare_model(family: str, name: str) -> None:
    """With all patches computed; of most of them left out something else comes out, of as many tokens."""
    feed, model = zoo.inputs(family, "images"), oracle.subject(family)
    wanted = oracle.bare(family)(**feed).logits
    with accelerated(model, name, processor=zoo.processor(family), reduction=0.0):
        # towers whose frames a mask keeps apart get a call each
        oracle.close(model(**feed).logits, wanted)
    with accelerated(model, name, processor=zoo.processor(family), reduction=0.7):
        oracle.apart(model(**feed).logits, wanted)
        stats = model.mmaccel.stats()
    assert stats["visual_tokens_kept"] == stats["visual_tokens"]
    assert 0 < stats["stages"][0]["tokens_kept"] < stats["stages"][0]["tokens_in"]


# by choice: towers of tiles whose layers run on their own, with and without a CLS token
@pytest.mark.parametrize("family", ("llava", "llava_onevision"))
def test_rebuilt_patches_are_as_in_a_tower_run_by_hand(family: str) -> None:
    feed, model, bare = zoo.inputs(family, "images"), oracle.subject(family), zoo.model(family)
    known, method = family_of(bare), EveryThird()
    blocks, last, cls = known.tower_layers(known.towers()[0]), known.feature_layer, int(known.has_cls)
    inputs: list[Tensor] = []
    hook = blocks[0].register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    bare(**feed)
    hook.remove()

    def run(number: int, x: Tensor) -> Tensor:
        made = blocks[number](x, attention_mask=None)
        return made[0] if isinstance(made, tuple) else made

    first, full = method.span(last + 1)
    x = before = inputs[0]
    for number in range(first):
        before, x = x, run(number, x)
    at, size = x, x.shape[1]
    chosen = method.choose(before[0, cls:], x[0, cls:])
    kept = torch.cat([torch.arange(cls), chosen + cls])
    left = torch.tensor([slot for slot in range(size) if slot not in set(kept.tolist())])
    source = chosen[method.sources(at[0, left], at[0, chosen + cls])[:, 0]] + cls

    def rebuilt(now: Tensor) -> Tensor:
        whole = at.clone()
        whole[:, kept] = now
        whole[:, left] = at[:, left] + whole[:, source] - at[:, source]
        return whole

    now = x[:, kept]
    for number in range(first, last + 1):
        # the MLP works token by token, so all of it may be computed here
        now = run(number, rebuilt(now))[:, kept] if number < first + full else run(number, now)
    got: list[Tensor] = []
    with accelerated(model, EveryThird.name, processor=zoo.processor(family)):
        tower = family_of(model).tower_layers(family_of(model).towers()[0])[last]
        hook = tower.register_forward_hook(
            lambda module, args, output: got.append(output[0] if isinstance(output, tuple) else output)
        )
        model(**feed)
        hook.remove()
    oracle.close(got[0], rebuilt(now), what="features")


@pytest.mark.square("family", [family for family in zoo.FAMILIES if not oracle.fits(EveryThird.name, family)])
@pytest.mark.square("name", oracle.named(FrameMergingMethod, RebuildingMethod))
def test_closed_towers_are_refused_in_one_sentence(family: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^[^.]*; use [^.]*\.$"), accelerated(oracle.subject(family), name):
        pass


@pytest.mark.parametrize("name", [EveryOtherFrame.name, EveryThird.name])
def test_one_method_in_the_tower_is_the_most(name: str) -> None:
    with pytest.raises(MmaccelError, match="at most one method"):
        get_recipe([name, "tome"]).build()


def test_frames_out_of_order_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods()[EveryOtherFrame.name], "merge", lambda self, frames: torch.eye(len(frames)).flip(0))
    model, feed = oracle.subject("llava_onevision"), zoo.inputs("llava_onevision", "video")
    with accelerated(model, EveryOtherFrame.name), pytest.raises(MmaccelError, match="frames out of order"):
        model(**feed)
