"""The tower of Pixtral: pictures of any size in one sequence, blocks of patches that make a token, marks behind rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws.helpers import generate, inputs, model
from torch.nn import functional
from transformers import AutoConfig

from mmaccel import UnsupportedError, accelerated
from mmaccel.families import described, family_of
from mmaccel.families import families as adapters
from mmaccel.families.tower import EncoderCall

pytestmark = pytest.mark.usefixtures("no_gradients")
FAMILIES = tuple(name for name in zoo.FAMILIES if adapters()[name].one_call)


def feed_of(family: str, *rows: list[tuple[int, int]]) -> dict[str, Any]:
    """Rows of pictures of these widths and heights."""
    return dict(zoo.encode(family, [([zoo.image(*size, i) for i, size in enumerate(row)], [], "?") for row in rows]))


def given(feed: dict[str, Any]) -> EncoderCall:
    return EncoderCall({name: feed[name] for name in ("pixel_values", "image_sizes")})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_picture_has_its_own_grid(family: str) -> None:
    """Wide, high, of one row, and of one token; rows of the batch have one or three of them."""
    feed = feed_of(family, [(64, 24)], [(8, 64), (60, 5), (7, 7)])
    ids, valid = feed["input_ids"], feed["attention_mask"].bool()
    layout = family_of(model(family)).layout(ids, valid, {"image": given(feed)})
    assert [(part.row, part.picture, part.tile.grid) for part in layout.segments] == [
        *((0, 0, (1, 3, 8)), (1, 1, (1, 8, 1))),
        *((1, 2, (1, 1, 8)), (1, 3, (1, 1, 1))),
    ]
    assert torch.equal(layout.visual, ids == model(family).config.image_token_id)
    # tokens follow each other through all pictures, whatever stands between their rows
    assert torch.cat([part.tile.source for part in layout.segments]).tolist() == list(range(24 + 8 + 8 + 1))
    first = layout.segments[0]
    between = ids[0, int(first.places[0]) : int(first.places[-1]) + 1].reshape(-1)
    marks = zoo.tokenizer(family).convert_tokens_to_ids("[IMG_BREAK]")
    assert int((between == marks).sum()) == (0 if family == "lighton_ocr" else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_those_that_the_projector_joins(family: str) -> None:
    """Pictures are numbered patch by patch; what the patch merger makes of the numbers says which it joined."""
    tiny, feed = model(family), inputs(family, "images")
    adapter, sizes = family_of(tiny), feed["image_sizes"]
    patches = int((sizes // adapter.vision.patch_size).prod(-1).sum())
    blocks = adapter.blocks(given(feed), patches)
    assert torch.equal(blocks.flatten().sort().values, torch.arange(patches))
    if family == "pixtral":
        assert torch.equal(blocks[:, 0], torch.arange(patches))
        return
    projector = tiny.model.vision_projection if family == "lighton_ocr" else tiny.model.multi_modal_projector
    seen: list[torch.Tensor] = []
    merger = projector.patch_merger
    handle = merger.merging_layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        merger(torch.arange(patches).double()[:, None].float().expand(-1, 32), [tuple(size) for size in sizes.tolist()])
    finally:
        handle.remove()
    assert torch.equal(seen[0].view(len(blocks), 32, -1)[:, 0].long(), blocks)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ("attention-received", "tome", "pixelprune"))
def test_pictures_attend_one_by_one(family: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mmaccel looks into the tower, no call of attention is as wide as all pictures, and none needs their mask."""
    calls: list[tuple[int, Any]] = []
    plain = functional.scaled_dot_product_attention

    def watched(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = kwargs.get("attn_mask")
        if query.shape[1] == 2 and not kwargs.get("is_causal"):
            calls.append((key.shape[2], None if mask is None else mask.shape[2]))
        return plain(query, key, *args, **kwargs)

    tiny, feed = model(family), inputs(family, "images")
    patches = (feed["image_sizes"] // family_of(tiny).vision.patch_size).prod(-1).tolist()
    with accelerated(tiny, recipe, retain=None if recipe == "pixelprune" else 0.5):
        assert tiny.config.vision_config._attn_implementation == "sdpa"
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        tiny.model.get_image_features(feed["pixel_values"], image_sizes=feed["image_sizes"])
        assert [width for width, _ in calls] == [sum(patches)] * 4
        calls.clear()
        tiny(**feed)
    assert len(calls) == 4 * len(patches)
    for at, (width, rows) in enumerate(calls):
        # weights of merged tokens are one row
        assert 0 < width <= patches[at % len(patches)] and rows in (None, 1)


@pytest.mark.parametrize("family", ("mistral3", "pixtral"))
def test_marks_stay(family: str) -> None:
    tiny, feed = model(family), inputs(family, "images")
    words = zoo.tokenizer(family)
    marks = torch.isin(feed["input_ids"], torch.tensor(words.convert_tokens_to_ids(["[IMG_BREAK]", "[IMG_END]"])))
    # 6 and 8 rows
    assert int(marks.sum()) == 14
    with accelerated(tiny, "random", retain=1):
        generate(tiny, feed)
        assert bool(tiny.mmaccel.reduction.kept[marks].all()) and tiny.mmaccel.stats()["visual_tokens_kept"] == 2


@pytest.mark.parametrize(
    ("kind", "patch", "size", "grid"),
    [
        ("mistral3", 14, (1540, 1540), (1, 55, 55)),
        ("mistral3", 14, (1036, 1540), (1, 37, 55)),
        ("llava", 16, (768, 1024), (1, 48, 64)),
        ("lighton_ocr", 14, (1540, 1092), (1, 55, 39)),
    ],
)
def test_real_sizes(kind: str, patch: int, size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    tower = {"model_type": "pixtral", "patch_size": patch}
    family = described(AutoConfig.for_model(kind, vision_config=tower))
    assert family.name == {"llava": "pixtral"}.get(kind, kind)
    call = EncoderCall({"pixel_values": torch.empty(1, 3, *size, device="meta"), "image_sizes": torch.tensor([size])})
    assert [tile.grid for (tile,) in family.pictures("image", call, torch.empty(1, 0))] == [grid]


def test_a_llava_is_known_by_its_tower() -> None:
    """CLIP, Pixtral, and one of which nothing is known."""
    assert (family_of(model("llava")).name, family_of(model("pixtral")).name) == ("llava", "pixtral")
    config = AutoConfig.for_model("llava", vision_config={"model_type": "dinov2"})
    with pytest.raises(UnsupportedError, match="a dinov2 tower is not supported; CLIP, SigLIP and Pixtral towers are"):
        described(config)


def test_pictures_without_sizes_are_as_large_as_their_tensor() -> None:
    """LLaVA may be called so."""
    feed = feed_of("pixtral", [(64, 48)])
    del feed["image_sizes"]
    with accelerated(model("pixtral"), "attention-received", retain=0.25):
        generate(model("pixtral"), feed)
        assert model("pixtral").mmaccel.stats()["visual_tokens_kept"] == 12
