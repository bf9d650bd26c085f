"""ERNIE 4.5 VL: the types of tokens choose their experts, and follow those that are left; pairs of frames make one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws.helpers import generate, inputs, model, recipe_of

from mmaccel import Recipe, Stage, accelerated

NAME = "ernie4_5_vl_moe"
TYPES = "moe_mm_token_type_ids"


def types_given(what: Any, feed: dict[str, Any], **options: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Types that each layer was given of a prompt, ``[B, q]``, and the tokens that are left at the end ``[B, S]``."""
    tiny, seen = model(NAME), []
    with accelerated(tiny, what, processor=zoo.processor(NAME), **options), torch.no_grad():
        # behind the hooks that change the arguments
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs[TYPES]), with_kwargs=True)
            for layer in tiny.model.language_model.layers
        ]
        try:
            tiny(**feed)
            return seen, tiny.mmaccel.reduction.kept
        finally:
            for hook in hooks:
                hook.remove()


@pytest.mark.parametrize("kind", ["image", "uneven"])
def test_types_follow_the_tokens_that_are_left(kind: str) -> None:
    feed = inputs(NAME, kind)
    seen, kept = types_given("divprune", feed, retain=0.3)
    for row, types in enumerate(seen[0]):
        wanted = feed[TYPES][row, kept[row]]
        assert torch.equal(types[-len(wanted) :], wanted) and set(wanted.tolist()) == {0, 1}
    assert len(seen) == 4


@pytest.mark.parametrize("kind", ["image", "video"])
def test_visual_tokens_go_to_experts_of_their_own(kind: str) -> None:
    """Without types the answer is another one, so that a lost type would show in every law."""
    tiny, feed = model(NAME), inputs(NAME, kind)
    plain = {name: x for name, x in feed.items() if name != TYPES}
    with accelerated(tiny, recipe_of("divprune", NAME)), torch.no_grad():
        assert not torch.allclose(tiny(**feed).logits[:, -1], tiny(**plain).logits[:, -1], atol=1e-3)


def test_two_frames_make_one_step_of_a_clip() -> None:
    tiny, feed = model(NAME), inputs(NAME, "video")
    with accelerated(tiny, "divprune", retain=0.5):
        generate(tiny, feed, new=1)
        (segment,) = tiny.mmaccel.layout.segments
    t, h, w = feed["video_grid_thw"][0].tolist()
    assert segment.tile.grid == (t // 2, h // 2, w // 2)


def test_taps_of_a_step_are_the_mean_of_its_frames() -> None:
    """Attention that both frames of a pair receive, by hand from the blocks of each."""
    from mmaccel.families import family_of
    from mmaccel.families.tower import EncoderCall

    family, grid = family_of(model(NAME)), torch.tensor([[4, 4, 6], [2, 4, 4]])
    values = [torch.rand(1, int(h * w), 3) for t, h, w in grid.tolist() for _ in range(t)]
    got = family.to_tokens("video", EncoderCall({"video_grid_thw": grid}), values)
    blocks = [frame[0].view(-1, 4, 3).mean(1) for frame in values]
    wanted = [(one + other) / 2 for one, other in zip(blocks[::2], blocks[1::2], strict=True)]
    torch.testing.assert_close(got, torch.cat(wanted))


def test_a_recipe_of_many_sites() -> None:
    """Types reach layers behind a drop inside the language model, too."""
    stages = (Stage("divprune", 0.6), Stage("fastv", 0.4, {"layer": 2}), Stage("snapkv", 0.5, {"window": 8}))
    feed = inputs(NAME)
    seen, kept = types_given(Recipe("three", stages), feed)
    assert seen[0].shape[1] > seen[3].shape[1]
    assert torch.equal(seen[3][0], feed[TYPES][0, kept[0]])
