"""Pictures that are read apart from their prompts (Prompt Cache): reused anywhere, they give what reading them anew gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zoo
from laws import oracle
from PIL import Image
from tail import few

from mmaccel import MmaccelError, PromptCache, UnsupportedError, accelerated
from mmaccel.core.transformers_api import cache_in
from mmaccel.kv.cache import state_of
from mmaccel.media.files import Chat, encode
from mmaccel.method.keys import moves_keys

pytestmark = pytest.mark.usefixtures("no_gradients")


def may_join(name: str) -> bool:
    """Whether pictures of a family can be read apart and moved."""
    family = oracle.adapter(name)
    return moves_keys(family) and family.undivided is None and not family.marks_need_pixels


MOVING = [name for name in zoo.FAMILIES if may_join(name)]
#: processors that cut pictures into other tiles beside others, or take one at a time
CHANGING = ("llava_onevision", "got_ocr2")
JOINED = [name for name in MOVING if name not in CHANGING]


def pictures(count: int = 2) -> list[Any]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (60, 80, 3), dtype=np.uint8)) for _ in range(count)]


def asked(*content: Any) -> list[dict[str, Any]]:
    """A message whose parts are texts, and pictures in place of None."""
    parts = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in content]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("recipe", ("none", "divprune"))
@pytest.mark.parametrize("family", few(JOINED, ["llava", "qwen2_5_vl", "qwen3_vl"]))
def test_reused_pictures_are_those_of_a_model_in_which_they_see_only_themselves(family: str, recipe: str) -> None:
    """Keys computed at other places, in another order; what they give is the bare model under a mask."""
    model, processor, shown = oracle.subject(family), zoo.processor(family), pictures()
    messages = asked(None, "what is this, and", None, "where is it?")
    with accelerated(model, recipe, processor=processor, **({} if recipe == "none" else {"retain": 0.5})):
        prompts = PromptCache(model, processor)
        prompts.inputs(asked("one of many words and then", None, "what?", None), shown)
        assert (prompts.hits, prompts.misses) == (0, 2)
        feed = prompts.inputs(messages, shown[::-1])
        assert (prompts.hits, prompts.misses) == (2, 2)
        state = state_of(cache_in(feed))
        assert state is not None
        kept = [layer.index.by_head[0, 0].long() for layer in state.layers]
        forced = oracle.force(family, 1)
        got, _ = oracle.decode(model, feed, forced)
    whole = encode(processor, [Chat(tuple(messages), tuple(shown[::-1]))])
    visual = oracle.adapter(family).visual(whole["input_ids"])[0]
    seen, length = oracle.everything(oracle.bare(family), whole), len(visual)
    sizes = [len(one.ids) for one in prompts._kept.values()]
    apart, at = torch.ones(length, length, dtype=torch.bool), 0
    for size in sizes:
        begin = at + int(visual[at:].byte().argmax())
        at = begin + size
        apart[begin:at, :begin] = False
    end = at
    for number, left in enumerate(kept):
        there = torch.zeros(length, dtype=torch.bool)
        there[left] = there[end:] = True
        seen.prompt[number] = (apart & there)[None]
        seen.later[number] = seen.later[number] & there
    wanted = oracle.replay(family, dict(whole), forced, seen)[1]
    oracle.close(got, wanted, 5e-5)
    if recipe == "none":
        # pictures that see each other give something else
        oracle.apart(got, oracle.replay(family, dict(whole), forced)[1])


def test_a_picture_that_is_kept_is_neither_encoded_nor_read() -> None:
    model, processor = oracle.subject("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    read, encoded = list[int](), list[int]()
    with accelerated(model, "divprune", retain=0.5, processor=processor):
        prompts, shown = PromptCache(model, processor), pictures(3)
        prompts.inputs(asked(None, "what?", None, "where?"), shown[:2])
        family = model.mmaccel.family
        handles = [
            family.text.register_forward_pre_hook(lambda _, args, kw: read.append(1), with_kwargs=True),
            *(tower.register_forward_pre_hook(lambda *_: encoded.append(1)) for tower in family.towers()),
        ]
        try:
            prompts.inputs(asked("there", None, "and", None, "and", None, "what?"), [shown[2], shown[1], shown[0]])
        finally:
            for handle in handles:
                handle.remove()
    # three texts and the new picture
    assert len(encoded) == 1 and len(read) == 4 and (prompts.hits, prompts.misses) == (2, 3)


def test_the_least_recently_used_picture_goes_first() -> None:
    model, processor, shown = oracle.subject("llava"), zoo.processor("llava"), pictures(3)
    with accelerated(model, "none", processor=processor):
        prompts = PromptCache(model, processor)
        for one in (0, 1, 0):
            prompts.inputs(asked(None, "what?"), [shown[one]])
        prompts.limit = prompts.nbytes
        prompts.inputs(asked(None, "what?"), [shown[2]])
        assert prompts.nbytes <= prompts.limit and (prompts.hits, prompts.misses) == (1, 3)
        for one in (0, 2):
            prompts.inputs(asked(None, "what?"), [shown[one]])
        assert (prompts.hits, prompts.misses) == (3, 3)
        prompts.inputs(asked(None, "what?"), [shown[1]])
        assert (prompts.hits, prompts.misses) == (3, 4)
        plain = prompts.inputs(asked("what?"))
        assert cache_in(plain) is None
        prompts.clear()
        assert prompts.nbytes == 0


def test_what_cannot_be_read_apart_is_refused() -> None:
    model, processor = oracle.subject("llava"), zoo.processor("llava")
    with pytest.raises(MmaccelError, match="needs an accelerated model; call accelerate_vlm"):
        PromptCache(model, processor)
    for recipe, why in (("snapkv", "snapkv works while the question is read"), ("visiontrim", "looks at the question")):
        with accelerated(model, recipe, processor=processor), pytest.raises(MmaccelError, match=why):
            PromptCache(model, processor)
    with accelerated(model, "none"):
        prompts = PromptCache(model, processor)
    with accelerated(model, "divprune", retain=0.5), pytest.raises(MmaccelError, match="recipe 'none', with which the"):
        prompts.inputs(asked(None, "what?"), pictures(1))
    with accelerated(model, "none", offload="host"), pytest.raises(MmaccelError, match="offload= begin with the whole"):
        PromptCache(model, processor)
    with accelerated(model, "none"), pytest.raises(MmaccelError, match="`limit` must be .* at least 1 byte, got 0"):
        PromptCache(model, processor, limit=0)
    for family in zoo.FAMILIES:
        other = oracle.subject(family)
        if family in MOVING:
            continue
        with accelerated(other, "none"), pytest.raises(UnsupportedError, match="leave out the prompt cache"):
            PromptCache(other, zoo.processor(family))
    changing = oracle.subject("llava_onevision")
    with accelerated(changing, "none"):
        prompts = PromptCache(changing, zoo.processor("llava_onevision"))
        with pytest.raises(UnsupportedError, match="other tokens in this prompt than alone"):
            prompts.inputs(asked(None, None, "what?"), pictures())
