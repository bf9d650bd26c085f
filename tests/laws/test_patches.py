"""Patches that do not enter the tower: the tower runs on the others as if these were hidden, and so does the language model.

What is left out is hidden here from the attention of the bare tower, call by call, by an attention function that knows no
acceleration: it masks keys. Where a layer is read, a patch that was left out holds what became of the one that predicts it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import oracle
import pytest
import simulated
import torch
import zoo
from laws.helpers import PACKED, has_block, joined
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.vision_utils import get_vision_window_index

from mmaccel import MmaccelError, Recipe, Stage, accelerated, get_recipe, register
from mmaccel.families import family_of
from mmaccel.method import EncoderMethod, PatchMethod

pytestmark = pytest.mark.usefixtures("no_gradients")

METHODS = oracle.named(PatchMethod)
KINDS = ("image", "images", "video", "mixed", "uneven")
OPEN = tuple(family for family in zoo.FAMILIES if oracle.adapter(family).closed is None)
CASES = [(family, kind) for family in OPEN for kind in zoo.kinds(family) if kind in KINDS]
cases = pytest.mark.square(("family", "kind"), CASES, ids=str)


@register
@dataclass(frozen=True)
class Drawn(PatchMethod):
    """Test: some patches by chance, whatever is in them, other ones and others as many in every tile."""

    name = "test-drawn"
    made: ClassVar[list[tuple[tuple[int, ...], Tensor]]] = []

    def predict(self, pixels: Tensor) -> Tensor:
        n, h, w, _ = pixels.shape
        random = torch.Generator().manual_seed(h * w)
        share = torch.linspace(0.35, 0.65, n)[:, None]
        kept = torch.rand(n, h * w, generator=random) < share
        kept[:, 0] = True
        # by the last one that is encoded
        slot = torch.arange(h * w).expand(n, -1)
        self.made.append((tuple(pixels.shape), torch.where(kept, slot, 0).cummax(1).values))
        return self.made[-1][1]


# ---------------------------------------------------------------------------------------------------- the tower by hand


def _hidden(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention that does not see the keys which `module.left` says are gone; calls come in the order of the sequence."""
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    tokens = key.shape[0] * key.shape[2]
    there = module.left[module.seen : module.seen + tokens].view(len(key), 1, 1, -1)
    module.seen = (module.seen + tokens) % len(module.left)
    logits = (query.float() @ key.float().transpose(-1, -2)) * scaling
    # that of a packed tower keeps pictures apart
    logits = logits if attention_mask is None else logits + attention_mask
    # a window of which nothing is left is nobody's
    weight = logits.masked_fill(~there, -1e30).softmax(-1)
    return (weight @ value.float()).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("laws_tower", _hidden)
AttentionMaskInterface.register("laws_tower", lambda *args, **kwargs: None)


def sequences(family: str, model: Any, feed: Any) -> list[tuple[Tensor, Tensor]]:
    """Per run of a tower: which tokens of its sequence are encoded, and the token that each is predicted from, as
    :class:`Drawn` has chosen; from grids and sides alone."""
    queue, found = list(Drawn.made), []
    if family in PACKED:
        for modality in ("image", "video"):
            if (grids := feed.get(f"{modality}_grid_thw")) is not None:
                found.append(_packed(model, grids, joined(family, grids, modality), queue))
    elif family in oracle.ONE_CALL:
        found.append(_ragged(model, feed["image_sizes"], queue))
    else:
        cls = int(oracle.adapter(family).has_cls)
        for (n, h, w, d), source in queue:
            patch = family_of(model).vision.patch_size
            size = d // (3 * (patch**2 if isinstance(patch, int) else math.prod(patch)))
            side = math.isqrt(size)
            place = torch.arange(h * side * w * side).view(h, side, w, side).transpose(1, 2).reshape(h * w, size)
            target = torch.arange(place.numel()).repeat(n, 1)
            for tile in range(n):
                target[tile, place.flatten()] = place[source[tile]].flatten()
            own = torch.arange(n)[:, None] * (cls + target.shape[1])
            flat = torch.cat([own.expand(-1, cls), own + cls + target], 1).flatten()
            found.append((flat == torch.arange(len(flat)), flat))
    return found


def _packed(model: Any, grids: Tensor, places: Tensor, queue: list[Any]) -> tuple[Tensor, Tensor]:
    side = math.isqrt(places.shape[1])
    sizes = dict.fromkeys((h // side, w // side) for _, h, w in grids.tolist())
    rows: dict[tuple[int, int], list[Tensor]] = {}
    for size in sizes:
        shape, source = queue.pop(0)
        assert shape[1:3] == size
        rows[size] = list(source)
    blocks, first = [], 0
    for t, h, w in grids.tolist():
        for _ in range(t):
            blocks.append(first + rows[h // side, w // side].pop(0))
            first += h * w // side**2
    target = torch.cat(blocks)
    tower = family_of(model).towers()[0]
    if hasattr(tower, "window_size"):
        order, _ = get_vision_window_index(grids, 2, tower.window_size, tower.patch_size)
        rank = order.argsort()
        target = rank[target[order]]
    flat = torch.empty(places.numel(), dtype=torch.long)
    flat[places] = places[target]
    return flat == torch.arange(len(flat)), flat


def _ragged(model: Any, sizes: Tensor, queue: list[Any]) -> tuple[Tensor, Tensor]:
    side = getattr(model.config, "spatial_merge_size", 1)
    grids = [tuple(one) for one in (sizes // model.config.vision_config.patch_size).tolist()]
    drawn = {size: list(queue.pop(0)[1]) for size in dict.fromkeys(grids)}
    found, first = [], 0
    for h, w in grids:
        place = torch.arange(h * w).view(h // side, side, w // side, side).transpose(1, 2).reshape(-1, side * side)
        target = torch.empty(h * w, dtype=torch.long)
        target[place] = place[drawn[h, w].pop(0)]
        found.append(first + target)
        first += h * w
    flat = torch.cat(found)
    return flat == torch.arange(len(flat)), flat


@contextmanager
def hidden(family: str, model: Any, found: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """The towers of a bare model run as if patches were hidden; runs come in the order of `found`."""
    known, handles, run = family_of(model), [], [-1]

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        run[0] += 1
        for layer in known.tower_layers(module):
            attention = known.attention_of(layer)
            attention.left, attention.seen = found[run[0]][0], 0

    def filled(module: nn.Module, args: Any, output: Any) -> Any:
        out = output[0] if isinstance(output, tuple) else output
        made = out.flatten(0, -2)[found[run[0]][1]].view(out.shape)
        return (made, *output[1:]) if isinstance(output, tuple) else made

    model.set_attn_implementation({"vision_config": "laws_tower"})
    for tower in known.towers():
        handles.append(tower.register_forward_pre_hook(begin, with_kwargs=True))
        # `filled` is harmless between layers: nobody sees what it fills
        last = known.tower_layers(tower)[: known.feature_layer + 1]
        handles += [layer.register_forward_hook(filled, prepend=True) for layer in last]
        for layer in known.tower_layers(tower)[known.feature_layer + 1 :]:
            attention = known.attention_of(layer)
            attention.left, attention.seen = torch.ones(1, dtype=torch.bool), 0
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def planes(family: str, door: dict[str, Any]) -> list[Tensor]:
    """What enters the language model and what DeepStack adds, laid out over the prompt, `[B, S, D]`."""
    out: list[Tensor] = []
    length = door["inputs_embeds"].shape[1]
    oracle.with_planes(dict(door), length, lambda plane: out.append(plane) or plane)  # type: ignore[func-returns-value]
    return [door["inputs_embeds"], *out]


@cases
def test_leaving_out_of_the_tower_is_hiding_in_it(family: str, kind: str) -> None:
    feed, model = zoo.inputs(family, kind), oracle.subject(family)
    forced = oracle.force(family, len(feed["input_ids"]))
    what = Recipe("drawn", (Stage("test-drawn"),))
    with accelerated(model, what, processor=zoo.processor(family)):
        Drawn.made.clear()
        door = oracle.at_the_door(model, feed)
        found = sequences(family, model, feed)
        stats = model.mmaccel.stats()
    got = oracle.record(family, feed, what, forced)
    visual = oracle.visual(family, feed)
    dropped = visual & ~got.kept
    assert dropped.any() and torch.equal(got.kept | visual, feed["attention_mask"].bool())
    assert stats["visual_tokens"] - stats["visual_tokens_kept"] == int(dropped.sum())
    bare = zoo.model(family)
    plain = planes(family, oracle.at_the_door(bare, feed))
    with hidden(family, bare, found):
        wanted = planes(family, oracle.at_the_door(bare, feed))
    mine, seen = planes(family, door), visual & got.kept
    for ours, theirs, full in zip(mine, wanted, plain, strict=True):
        oracle.close(ours[seen], theirs[seen], what="features")
        oracle.close(ours[got.kept & ~visual], full[got.kept & ~visual], what="text")
    assert (
        max(float((one[seen] - full[seen]).abs().max()) for one, full in zip(mine, plain, strict=True)) > oracle.POWER
    )

    def with_ours(kwargs: dict[str, Any]) -> dict[str, Any]:
        embeds, queue = kwargs["inputs_embeds"].clone(), mine[1:]
        embeds[:, : visual.shape[1]] = torch.where(visual[..., None], mine[0], embeds[:, : visual.shape[1]])
        return oracle.with_planes({**kwargs, "inputs_embeds": embeds}, visual.shape[1], lambda _: queue.pop(0))

    prompt, steps = oracle.replay(family, feed, forced, got.seen, with_ours)
    oracle.close(got.prompt[got.kept], prompt[got.kept])
    oracle.close(got.steps, steps)


@pytest.mark.parametrize("family", [family for family in OPEN if len(oracle.adapter(family).read_layers) == 1])
def test_tokens_of_encoded_blocks_stay(family: str) -> None:
    """And no others, where a token is one block and every block a token."""
    feed, model = zoo.inputs(family), oracle.subject(family)
    Drawn.made.clear()
    with accelerated(model, "test-drawn", processor=zoo.processor(family)):
        model(**feed)
        kept = model.mmaccel.reduction.kept
    source = torch.cat([source.flatten() for _, source in Drawn.made])
    encoded = torch.cat([(one == torch.arange(one.shape[1])).flatten() for _, one in Drawn.made])
    visual, stands = oracle.visual(family, feed), has_block(family, feed)
    if int(stands.sum()) == len(source):
        assert torch.equal(kept[visual][stands], encoded)
    else:
        # stitched tiles: padding is cropped, newlines are added
        assert any("sizes" in name for name in feed)


# ---------------------------------------------------------------------------------------------- methods of the registry


def flat(feed: Any) -> Any:
    """The same with the lower part of every tile in one colour, less of every other one, and the last patches of a packed
    sequence."""
    feed = dict(feed)
    for name in [name for name in feed if name.startswith("pixel_values")]:
        x = feed[name].clone()
        if name.replace("pixel_values", "image_grid_thw") in feed or "video_grid_thw" in feed:
            patches = x.view(len(x), -1)
            patches[len(x) // 3 :] = patches[:1, :1]
        else:
            # tiles that are padding are zero and stay so
            tiles = x.view(-1, *x.shape[-3:])
            for number, tile in enumerate(tiles):
                tile[:, tile.shape[1] // (4 - 2 * (number % 2)) :] = tile[:, :1, :1]
        feed[name] = x
    return feed


SQUARE = [(family, name) for family in zoo.FAMILIES for name in METHODS if oracle.fits(name, family)]


@pytest.mark.square(("family", "name"), SQUARE)
@pytest.mark.square("kind", ("uneven", "textrow"))
def test_a_row_in_a_batch_is_the_row_alone(family: str, name: str, kind: str) -> None:
    feed = zoo.inputs(family, kind)
    # of a row by itself the flat part would be another one
    rows = [flat(zoo.single(family, feed, row)) for row in range(len(feed["input_ids"]))]
    whole = _together(family, feed, rows)
    forced = oracle.force(family, len(rows), 4)
    got = oracle.record(family, whole, oracle.recipe(name, family), forced)
    visual = oracle.visual(family, whole)
    assert (visual & ~got.kept).any(), "nothing was left out"
    assert (visual & got.kept).any(1)[visual.any(1)].all(), "nothing is left of a row"
    for row, alone in enumerate(rows):
        other = oracle.record(family, alone, oracle.recipe(name, family), forced[row : row + 1])
        pads = got.kept.shape[1] - alone["input_ids"].shape[1]
        assert torch.equal(
            got.kept[row, pads:], other.kept[0] if other.reduction is not None else alone["attention_mask"][0] > 0
        )
        oracle.close(got.steps[row], other.steps[0])


def _together(family: str, feed: Any, rows: list[Any]) -> Any:
    """The batch with the pixels of its rows."""
    whole = dict(feed)
    for name in [name for name in feed if name.startswith("pixel_values")]:
        parts = [row[name] for row in rows if name in row]
        if parts[0].dim() >= 4 and len({part.shape[1] for part in parts}) > 1:
            wide = max(part.shape[1] for part in parts)
            parts = [torch.cat([x, x.new_zeros(len(x), wide - x.shape[1], *x.shape[2:])], 1) for x in parts]
        made = torch.cat(parts)
        whole[name] = made if made.shape == feed[name].shape else flat(feed)[name]
    return whole


@pytest.mark.square(("family", "name"), SQUARE)
def test_pictures_without_copies_stay_whole(family: str, name: str) -> None:
    """Noise cannot be predicted: the model is the bare one to the bit."""
    feed, model = zoo.inputs(family, "images"), oracle.subject(family)
    for key in [key for key in feed if key.startswith("pixel_values")]:
        noise = torch.rand(feed[key].shape, generator=torch.Generator().manual_seed(0))
        # what is padding is zero and stays so
        feed[key] = torch.where(feed[key] == 0, feed[key], noise)
    with accelerated(model, name, processor=zoo.processor(family)):
        got = model(**feed).logits
        stats = model.mmaccel.stats()
    if stats["visual_tokens_kept"] == stats["visual_tokens"]:
        assert torch.equal(got, oracle.bare(family)(**feed).logits)
    else:
        assert any("sizes" in key or "mask" in key for key in feed), "noise was predicted"


@pytest.mark.square(("family", "name"), SQUARE)
def test_with_a_method_behind_the_tower_that_looks_into_it(family: str, name: str) -> None:
    """What is left is reduced again, and figures of the tower are those of the patches that it has seen."""
    feed, model = flat(zoo.inputs(family, "image")), oracle.subject(family)
    with accelerated(model, [name, "attention-received"], retain=0.2, processor=zoo.processor(family)):
        model(**feed)
        first, second = model.mmaccel.history
        figures = second.scores()["received_attention"]
    left = oracle.visual(family, feed) & first.reduction.kept
    assert not (second.reduction.kept & ~first.reduction.kept).any()
    assert int((left & second.reduction.kept).sum()) < int(left.sum())
    assert figures[left].nan_to_num(1.0).min() >= 0 and figures[left].isfinite().any()


@pytest.mark.square(("family", "name"), SQUARE)
def test_figures_of_the_tower_do_not_know_other_tiles(family: str, name: str) -> None:
    """Tiles that keep less than others are padded, and padding attends to nothing."""
    feed, model = zoo.inputs(family, "uneven"), oracle.subject(family)
    rows = [flat(zoo.single(family, feed, row)) for row in range(len(feed["input_ids"]))]
    figures = []
    with accelerated(model, [name, "attention-received"], retain=0.9, processor=zoo.processor(family)):
        for one in (_together(family, feed, rows), *rows):
            model(**one)
            figures.append(model.mmaccel.history[1].scores()["received_attention"])
    for mine, alone in zip(figures[0], figures[1:], strict=True):
        oracle.close(mine[-alone.shape[1] :].nan_to_num(-1.0), alone[0].nan_to_num(-1.0), 1e-5, "figures")


PLAIN = ("llava", "vipllava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "aya_vision", "idefics3", "smolvlm")


# by choice: families where a token is a block of pixels that can be found by its number
@pytest.mark.parametrize("family", PLAIN)
def test_exactly_what_is_a_copy_is_left_out(family: str) -> None:
    """One block in noise is made equal to the one on its left, and another nearly."""
    feed, model = zoo.inputs(family), oracle.subject(family)
    random = torch.Generator().manual_seed(0)
    pixels = torch.rand(feed["pixel_values"].shape, generator=random) + 0.1
    if pixels.dim() == 2:
        across, wanted = int(feed["image_grid_thw"][0, 2]) // 2, [1]
        copy, near = slice(4, 8), slice(4 * across + 8, 4 * across + 12)
        pixels[copy] = pixels[:4]
        pixels[near] = pixels[4 * across + 4 : 4 * across + 8] + 0.01
    else:
        tiles, total = pixels.shape[:-3].numel(), int(oracle.visual(family, feed).sum())
        side = math.isqrt(total // tiles)
        size, row, column = pixels.shape[-1] // side, 1, 2
        at = slice(row * size, (row + 1) * size)
        pixels[..., at, column * size : (column + 1) * size] = pixels[..., at, (column - 1) * size : column * size]
        pixels[..., :size, size : 2 * size] = pixels[..., :size, :size] + 0.01
        wanted = [tile * side * side + row * side + column for tile in range(tiles)]
    feed["pixel_values"] = pixels
    with accelerated(model, "pixelprune", processor=zoo.processor(family)):
        model(**feed)
        kept = model.mmaccel.reduction.kept
    assert (~kept[oracle.visual(family, feed)]).nonzero()[:, 0].tolist() == wanted
    with accelerated(model, "pixelprune", threshold=0.011, processor=zoo.processor(family)):
        model(**feed)
        more = model.mmaccel.reduction.kept
    assert int(kept.sum()) - int(more.sum()) == len(wanted), "what is nearly a copy stays"


@pytest.mark.parametrize("family", [family for family in zoo.FAMILIES if family not in OPEN])
@pytest.mark.parametrize("name", METHODS)
def test_closed_towers_are_refused_in_one_sentence(family: str, name: str) -> None:
    with pytest.raises(MmaccelError, match=r"^[^.]*; use [^.]*\.$"), accelerated(oracle.subject(family), name):
        pass


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("inside", oracle.named(EncoderMethod))
def test_not_together_with_merging_in_the_tower(name: str, inside: str) -> None:
    with pytest.raises(MmaccelError, match="not both; leave out one of them"):
        get_recipe([name, inside])


@pytest.mark.parametrize("name", METHODS)
def test_a_budget_is_refused(name: str) -> None:
    with pytest.raises(MmaccelError, match="has no budget to set.*; leave it out"):
        get_recipe(name, retain=0.5)


def test_what_is_predicted_by_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drawn, "predict", lambda self, pixels: torch.ones(pixels.shape[0], 3, dtype=torch.long))
    with (
        accelerated(oracle.subject("llava"), "test-drawn") as model,
        pytest.raises(MmaccelError, match="must (give|return)"),
    ):
        model(**zoo.inputs("llava"))


# what counts the tokens of experts does not run on the simulated machine
@pytest.mark.square(("family", "name"), [case for case in SQUARE if case[0] not in oracle.EXPERTS])
def test_on_a_device_as_on_the_cpu(family: str, name: str) -> None:
    """Nothing mixes devices where patches are left out, and the same are."""
    feed, reader = flat(zoo.inputs(family, "uneven")), zoo.processor(family)
    found = []
    for device in (None, "cuda:0"):
        model = zoo.model(family).requires_grad_(False)
        with contextlib.ExitStack() as held:
            given = feed
            if device is not None:
                gpu = held.enter_context(simulated.machine())
                model, given = gpu.put(model, device), gpu.put(feed, device)
            held.enter_context(accelerated(model, [name, "attention-received"], retain=0.3, processor=reader))
            model.generate(**given, max_new_tokens=2, do_sample=False)
            found.append(model.mmaccel.history[0].reduction.kept)
    assert torch.equal(*found) and not found[0].all()
