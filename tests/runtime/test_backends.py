"""Every attention back end below a wrapped model, with a stand-in for flash attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import zoo
from laws.helpers import FAMILIES, SHORT, close, follow, generate, inputs, logits, model, recipe_of
from laws.oracle import WINDOWED
from tail import in_turn
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmaccel import UnsupportedError, accelerate_vlm, accelerated
from mmaccel.families import family_of
from mmaccel.runtime.call.attention import TEXT
from mmaccel.runtime.call.attention_patch import register
from mmaccel.runtime.tower.attention import VISION

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_registered_names_do_not_say_flash() -> None:
    """Transformers takes a name with "flash" for flash attention; and a name without a mask function gets no mask."""
    for base in ("eager", "sdpa", "flash_attention_2", "flash_attention_3"):
        for kind in (TEXT, VISION):
            name = register(base, kind)
            assert "flash" not in name
            assert name in ALL_ATTENTION_FUNCTIONS.valid_keys()
            assert name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()


#: what transformers makes of flash attention 2 and 3 where their packages are not installed, and what a user may name
HUB = ("kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3@v1", "someone/fa-2:forward")
#: by which names the stand-in looked up its kernels
named: set[str] = set()


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[tuple[Any, ...]]:
    """A stand-in for the flash kernels: transformers' own function runs, and what it would call is done in plain torch."""
    # a model that is built behind the patches below would have no implementation
    model(request.node.callspec.params["family"])
    calls: list[tuple[Any, ...]] = []
    named.clear()

    def forward(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        named.add(kwargs.pop("attn_implementation"))
        assert kwargs.get("position_ids") is None
        assert attention_mask is None or (attention_mask.dim() == 2 and attention_mask.shape[1] == key.shape[1])
        assert kwargs["is_causal"]
        batch, rows, columns = len(query), query.shape[1], key.shape[1]
        real = torch.ones(batch, columns, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        window = kwargs.get("sliding_window")
        out = torch.zeros_like(query)
        for b in range(batch):
            # padding is taken out, what is left is aligned to the lower right, as the kernels do it
            keys = real[b].nonzero()[:, 0]
            mine = torch.arange(rows) if rows == 1 else real[b, -rows:].nonzero()[:, 0]
            at = torch.arange(len(keys) - len(mine), len(keys))[:, None] - torch.arange(len(keys))
            seen = (at >= 0) & (at < window if window else True)
            q, k, v = query[b, mine].transpose(0, 1), *(x[b, keys].transpose(0, 1) for x in (key, value))
            k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
            logit = (q @ k.transpose(1, 2) * kwargs["softmax_scale"]).masked_fill(~seen, -torch.inf)
            out[b, mine] = (logit.softmax(-1) @ v).transpose(0, 1)
        calls.append((rows, columns, attention_mask is not None))
        return out

    monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", forward)
    monkeypatch.setattr(
        transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, *args, **kwargs: name
    )
    monkeypatch.setattr(
        transformers.PreTrainedModel, "get_correct_attn_implementation", lambda self, name, *_, **__: name
    )
    return calls


@pytest.mark.square(
    ("kind", "method", "family"),
    in_turn(["image", "uneven"], ["test-fixed", "fastv", "snapkv", "test-fixed-cache"], FAMILIES, of=SHORT),
    of="kinds",
)
def test_on_top_of_flash_attention(family: str, method: str, kind: str, flash: list[tuple[Any, ...]]) -> None:
    """What flash attention is called with, and that a reduced run equals the one on sdpa, over two turns."""
    tiny, feed = model(family), inputs(family, kind)
    words = inputs(family, "text", batch=len(feed["input_ids"]))

    def talk() -> Tensor:
        with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
            first = generate(tiny, feed)
            second = generate(tiny, follow(feed, first, words)[0], past_key_values=first.past_key_values)
            return torch.cat([logits(first), logits(second)], dim=1)

    expected = talk()
    assert not flash
    tiny.config.text_config._attn_implementation_internal = "flash_attention_2"
    try:
        result = talk()
        assert tiny.config.text_config._attn_implementation == "flash_attention_2"
    finally:
        tiny.config.text_config._attn_implementation_internal = "sdpa"
    close(result, expected)
    # the prompt; and, unless heads differ, decoding and the block of the second turn, aligned to the lower right
    # no flash attention looks ahead within a picture, which tokens of some families do in every layer
    known = family_of(tiny)
    ahead = known.masks_above and all(map(known.is_bidirectional, range(4)))
    assert any(rows == columns for rows, columns, _ in flash) != ahead
    assert any(rows == 1 for rows, _, _ in flash) or method not in ("test-fixed", "fastv")
    assert any(1 < rows < columns for rows, columns, _ in flash) == (method in ("test-fixed", "fastv"))
    # where it does not read the prompt, it may never see padding
    assert ahead or any(padded for _, _, padded in flash) == (kind == "uneven")


@pytest.mark.parametrize("base", [*HUB, "flash_attention_3", "flash_attention_4"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_on_top_of_every_kernel_that_is_called_as_flash_attention(
    family: str, base: str, flash: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers registers a kernel of the hub by its own name, with the function and the mask of flash attention."""
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setitem(interface._global_mapping, base, interface["flash_attention_2"])
    tiny, feed, results = model(family), inputs(family, "uneven"), []
    for name in ("sdpa", base):
        monkeypatch.setattr(tiny.config.text_config, "_attn_implementation_internal", name)
        for recipe in ("divprune", "snapkv"):
            with accelerated(tiny, recipe_of(recipe, family), processor=zoo.processor(family)):
                results.append(logits(generate(tiny, feed)))
    close(torch.cat(results[2:]), torch.cat(results[:2]))
    assert flash and named == {base}
    assert not any("/" in name for name in ALL_ATTENTION_FUNCTIONS if name.startswith("mmaccel_"))


def test_an_implementation_that_is_no_attention_of_ours_is_refused_with_another_remedy() -> None:
    tiny = zoo.model("llava")
    for base in ("flex_attention", "paged|sdpa", "someone/unknown"):
        tiny.config.text_config._attn_implementation_internal = base
        with pytest.raises(UnsupportedError, match=r'attn_implementation="sdpa"') as refused:
            accelerate_vlm(tiny, "divprune")
        assert repr(base) in str(refused.value) and base not in str(refused.value).partition("load")[2]


@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl"))
@pytest.mark.parametrize("kind", ("image", "uneven"))
def test_flash_attention_where_tokens_come_back(family: str, kind: str, flash: list[tuple[Any, ...]]) -> None:
    """They stand between what is stored, which no flash mask says; where none does a step reads as before, over two turns."""
    tiny, feed, made = model(family), inputs(family, kind), []
    words = inputs(family, "text", batch=len(feed["input_ids"]))
    for name in ("sdpa", "flash_attention_2"):
        tiny.config.text_config._attn_implementation_internal = name
        with accelerated(tiny, recipe_of("lazyllm"), processor=zoo.processor(family)):
            first = generate(tiny, feed)
            assert tiny.mmaccel.stats()["tokens_returned"] > 0
            second = generate(tiny, follow(feed, first, words)[0], past_key_values=first.past_key_values)
        made.append(torch.cat([logits(first), logits(second)], dim=1))
    tiny.config.text_config._attn_implementation_internal = "sdpa"
    close(*made)
    assert any(rows == 1 for rows, _, _ in flash)


@pytest.mark.parametrize(("family", "overrides"), WINDOWED)
def test_flash_attention_with_windows(family: str, overrides: Any, flash: list[tuple[Any, ...]]) -> None:
    """Flash windows count stored keys, so they are used only while all of the prompt is inside."""
    tiny, feed = model(family, **overrides), inputs(family, "uneven")
    results = []
    for name in ("sdpa", "flash_attention_2"):
        tiny.config.text_config._attn_implementation_internal = name
        with accelerated(tiny, recipe_of("test-fixed"), processor=zoo.processor(family)):
            results.append(logits(generate(tiny, feed)))
    tiny.config.text_config._attn_implementation_internal = "sdpa"
    close(*results)


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_tokens_with_weights_do_without_flash_attention(family: str, flash: list[tuple[Any, ...]]) -> None:
    tiny, feed, results = model(family), inputs(family, "uneven"), []
    for name in ("sdpa", "flash_attention_2"):
        tiny.config.text_config._attn_implementation_internal = name
        with accelerated(tiny, recipe_of("test-fixed"), proportional="all"):
            results.append(logits(generate(tiny, feed)))
    tiny.config.text_config._attn_implementation_internal = "sdpa"
    close(*results)
    assert not flash


@pytest.mark.square(("kind", "family"), in_turn(["image", "uneven"], FAMILIES, of=SHORT), of="kinds")
def test_on_top_of_eager_attention(family: str, kind: str) -> None:
    """Eager attention has no causality of its own; attentions can be asked for and are as long as what was computed."""
    feed, processor = inputs(family, kind), zoo.processor(family)
    tiny, other = model(family), model(family, seed=0, attention_dropout=0.0)
    other.set_attn_implementation("eager")
    closed = family_of(tiny).closed is not None
    for method in ("test-fixed", "fastv", "snapkv", *(() if closed else ("attention-received",))):
        recipe = recipe_of(method, family)
        with accelerated(tiny, recipe, processor=processor), accelerated(other, recipe, processor=processor):
            one, two = generate(tiny, feed), generate(other, feed, output_attentions=True, output_hidden_states=True)
            close(logits(one), logits(two))
            places = int(other.mmaccel.reduction.kept.sum(1).max())
        last = two.attentions[0][-1]
        assert last.shape[-2:] == (places, places) and two.hidden_states[0][-1].shape[1] == places
        assert torch.allclose(last.sum(-1)[:, :, -1], torch.ones(()), atol=1e-5)
        known = family_of(tiny)
        assert kind != "image" or bool((last.triu(1) == 0).all()) != (known.masks_above and known.is_bidirectional(3))
    assert other.config.text_config._attn_implementation == "eager"
