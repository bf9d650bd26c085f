"""Dual chunk attention: short prompts are the bare model's, long ones are read at distances that are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from laws.helpers import FAMILIES
from tail import few
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.accelerate.positions import check_positions
from mmaccel.method.registry import get_method
from mmaccel.runtime.cache.dual_chunk import dual_chunk_attention

pytestmark = pytest.mark.usefixtures("no_gradients")

#: the axes of M-RoPE one behind the other, and interleaved
AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # by choice: both orders


def of(size: int, window: int, *others: Stage) -> Recipe:
    options = {"chunk_size": size, "local_window": window}
    return Recipe("long", (*others, Stage("dca", options=options)))


def logits_of(model: Any, feed: Any, forced: Tensor) -> Tensor:
    return oracle.decode(model, feed, forced)[0]


@pytest.mark.parametrize(("family", "kind"), [("llava", "uneven"), ("internvl", "image")])
def test_a_prompt_of_one_chunk_is_the_bare_model(family: str, kind: str) -> None:
    feed = zoo.inputs(family, kind)
    forced = oracle.force(family, len(feed["input_ids"]), 3)
    with accelerated(oracle.subject(family), of(4096, 512), processor=zoo.processor(family)) as model:
        got = logits_of(model, feed, forced)
    oracle.close(got, logits_of(oracle.bare(family), feed, forced))


def test_two_chunks_whose_neighbours_are_read_at_true_distances_are_the_bare_model() -> None:
    """A chunk as large as twice what keys take of it moves no query of the second chunk."""
    feed = zoo.inputs("llava", "uneven")
    length, forced = feed["input_ids"].shape[1], oracle.force("llava", len(feed["input_ids"]), 3)
    half = (length + 4) // 2 + 1
    with accelerated(oracle.subject("llava"), of(2 * half, half)) as model:
        got = logits_of(model, feed, forced)
    wanted = logits_of(oracle.bare("llava"), feed, forced)
    oracle.close(got, wanted)
    with accelerated(oracle.subject("llava"), of(9, 2)) as model:
        other = logits_of(model, feed, forced)
    assert not torch.allclose(other, wanted, atol=1e-3), "nothing is turned"


@pytest.mark.parametrize("family", ["llava", "internvl"])
@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_a_prompt_about_as_long_as_a_chunk_is_the_bare_model(family: str, more: int) -> None:
    """Also where its last token, or one of the answer, is the first of the second chunk."""
    feed = zoo.inputs(family, "image")
    step, forced = feed["input_ids"].shape[1] + more, oracle.force(family, len(feed["input_ids"]), 3)
    with accelerated(oracle.subject(family), of(2 * step, step), processor=zoo.processor(family)) as model:
        got = logits_of(model, feed, forced)
    oracle.close(got, logits_of(oracle.bare(family), feed, forced))


def test_it_is_the_definition_pair_by_pair() -> None:
    """Each pair of a query and a key at the positions of the paper, turned by RoPE as it is written down."""
    text, random, (size, window) = oracle.adapter("llava").text, torch.Generator().manual_seed(0), (9, 2)
    width, length, step = text.config.head_dim, 40, size - window
    frequencies = text.config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2).double() / width)

    def rope(x: Tensor, position: int) -> Tensor:
        angles = (position * frequencies).repeat(2)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    query, key, value = (torch.randn(heads, length, width, generator=random).double() for heads in (4, 2, 2))
    wanted = torch.zeros(length, 4, width).double()
    for head in range(4):
        for at in range(length):
            logits = []
            for came in range(at + 1):
                apart = at // step - came // step
                place = (at % step, min(at % step + step, size), min(2 * step - 1, size))[min(apart, 2)]
                logits.append(rope(query[head, at], place) @ rope(key[head // 2, came], came % step) * 0.3)
            wanted[at, head] = torch.stack(logits).softmax(0) @ value[head // 2, : at + 1]
    turned = [torch.stack([rope(x[:, at], at % step) for at in range(length)], 1)[None].float() for x in (query, key)]
    places = torch.arange(length)[None]
    sight = places[0, :, None] >= places[0]
    got = dual_chunk_attention(
        text, *turned, value[None].float(), places, places[:, None], sight[None, None], 0.3, (size, step)
    )
    torch.testing.assert_close(got[0].double(), wanted, atol=1e-5, rtol=0)


def test_steps_are_what_a_prompt_is() -> None:
    """A row alone, and an answer that is read with the prompt, give the same logits."""
    feed = zoo.inputs("llava", "uneven")
    forced = oracle.force("llava", len(feed["input_ids"]), 3)
    with accelerated(oracle.subject("llava"), of(24, 8, Stage("divprune", 0.5))) as model:
        whole = logits_of(model, feed, forced)
        for row in range(len(forced)):
            single = zoo.single("llava", feed, row)
            alone = logits_of(model, single, forced[row : row + 1])
            oracle.close(whole[row], alone[0])
            longer = oracle.continued("llava", single, forced[row : row + 1])
            out = model(**longer, use_cache=True).logits[0, -len(alone[0]) :]
            oracle.close(alone[0], out)


@pytest.mark.parametrize("family", few(FAMILIES, AXES))
def test_models_whose_positions_have_several_axes_are_refused_by_name(family: str) -> None:
    """The paper's chunks are of one axis; rows and columns of a picture would lose their distances."""
    model, said = zoo.model(family), ""
    axes = "mrope_section" in (model.config.get_text_config().rope_parameters or {})
    try:
        accelerate_vlm(model, of(24, 8))
    except UnsupportedError as error:
        said = str(error)
    fixed = "keys of this" in said and "cannot be moved to other positions" in said
    assert ("have three axes, and keys are moved along one; leave it out" in said) == (axes and not fixed)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_tokenselect_moves_no_positions_and_knows_no_longer_prompts(family: str) -> None:
    """A prompt beyond the trained length is refused, with one axis and with three."""
    feed, recipe = zoo.inputs(family, "image"), Recipe("votes", (Stage("tokenselect", 0.1),))
    model = zoo.model(family, max_position_embeddings=12)
    with pytest.raises(MmaccelError, match="this model has 12 positions in all, so show fewer"):
        check_positions(model, recipe, feed, 4)


def test_what_is_refused() -> None:
    with pytest.raises(MmaccelError, match="`local_window` of dca must be less than chunk_size=8, got 8"):
        get_method("dca")(chunk_size=8, local_window=8)
    with pytest.raises(MmaccelError, match="dca evicts nothing"):
        get_method("dca")(every=4)
    with pytest.raises(UnsupportedError, match="dca: positions of this .* have three axes"):
        accelerate_vlm(zoo.model("qwen2_5_vl"), of(24, 8))
    for family in ("paligemma", "molmo2"):
        with pytest.raises(
            UnsupportedError, match="dca reads the keys up to a query, and the language model of .* both ways"
        ):
            accelerate_vlm(zoo.model(family), of(24, 8))
