"""Keys that stay stand behind each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.method.registry import get_method

pytestmark = pytest.mark.usefixtures("no_gradients")


def of(name: str = "knorm", retain: float = 0.4, **options: Any) -> Recipe:
    return Recipe("gaps", (Stage(name, retain, {"close_gaps": True, **options}),))


@pytest.mark.parametrize(("family", "kind"), [("llava", "uneven"), ("internvl", "image")])
def test_the_keys_of_the_first_layer_are_those_of_a_shorter_prompt(family: str, kind: str) -> None:
    """Its keys depend on a token and its position alone: a prompt of the tokens that stay has the same."""
    feed, seen = zoo.inputs(family, kind), []
    with accelerated(oracle.subject(family), of("streaming-llm"), processor=zoo.processor(family)) as model:
        text = oracle.text_model(model)
        hook = text.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
        cache = model(**feed, use_cache=True).past_key_values
        layer = cache.mmaccel.layers[0]
        token = torch.full((len(feed["input_ids"]), 1), 5)
        model(input_ids=token, past_key_values=cache, use_cache=True)
        hook.remove()
    embeds = seen[0]["inputs_embeds"]
    for row in range(len(embeds)):
        places = layer.index.by_head[row, 0].long()
        # the token behind the prompt is stored, too
        stays = (places >= 0) & (places < embeds.shape[1])
        shorter: Tensor = embeds[row, places[stays]][None]
        with torch.no_grad():
            wanted = oracle.bare(family)
            out = oracle.text_model(wanted)(inputs_embeds=shorter, use_cache=True).past_key_values
        torch.testing.assert_close(layer.stored()[0][row][:, stays], out.layers[0].keys[0], rtol=1e-4, atol=1e-5)
        assert int(seen[1]["position_ids"].reshape(len(embeds), -1)[row, 0]) == int(stays.sum())
        assert int(stays.sum()) < int(feed["attention_mask"][row].sum()), "nothing was evicted"


def test_all_keys_are_the_bare_model() -> None:
    feed = zoo.inputs("llava", "uneven")
    with accelerated(oracle.subject("llava"), of(retain=1.0)) as model:
        got = model.generate(
            **feed, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    wanted = oracle.bare("llava").generate(
        **feed, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    assert torch.equal(got.sequences, wanted.sequences)
    oracle.close(torch.stack(got.logits), torch.stack(wanted.logits))


def test_where_gaps_cannot_be_closed() -> None:
    for options in ({"every": 4}, {"layer_budget": "pyramid"}, {"head_budget": "adaptive"}):
        with pytest.raises(MmaccelError, match="close_gaps of knorm needs as many keys in all heads of all layers"):
            get_method("knorm")(close_gaps=True, **options)
    with pytest.raises(MmaccelError, match="close_gaps of quest needs"):
        get_method("quest")(close_gaps=True)
    model = zoo.model("llava")
    both = Recipe("both", (*of().stages, Stage("kivi")))
    with pytest.raises(UnsupportedError, match="close_gaps=True of knorm: kivi of recipe 'both'"):
        accelerate_vlm(model, both)
    with pytest.raises(UnsupportedError, match="chunk= and offload="):
        accelerate_vlm(model, of(), offload="host")
    with pytest.raises(UnsupportedError, match="have three axes"):
        accelerate_vlm(zoo.model("qwen2_5_vl"), of())
