"""Law 2 with residuals: dropping tokens and adding to the others = hiding them in the bare model, what is added put there by
hand."""

from __future__ import annotations

from functools import partial

import oracle
import pytest
import random_selectors
import torch
import zoo
from laws.test_law2_proportional import logarithms

from mmaccel import FastV, Learned, MmaccelError, accelerated, get_recipe
from mmaccel.core.reduction import Reduction, Residual
from mmaccel.families import family_of
from mmaccel.method.selector import ModelFingerprint
from mmaccel.runtime.prompt import tokens
from mmaccel.runtime.prompt.tokens import TokenReducer

pytestmark = pytest.mark.usefixtures("no_gradients")


def selector(model, folder):
    """One with residuals, as a recipe."""
    fingerprint = ModelFingerprint.of(family_of(model))
    random_selectors.network(fingerprint.width, residual=True).save(folder, fingerprint, {})
    return Learned(folder)


def holds(family, feed, what, monkeypatch, weigh=lambda reduction, layout: None):
    """The law; ``weigh`` makes ``weights`` of the replay."""
    model, reduce, made = oracle.subject(family), TokenReducer.reduce, []
    forced = oracle.force(family, len(feed["input_ids"]))
    with monkeypatch.context() as patch:
        patch.setattr(TokenReducer, "reduce", lambda *given: made.append(reduce(*given)) or made[-1])
        got = oracle.record(family, feed, what, forced, model=model)
    at = made[-1].residual
    with accelerated(model, what, processor=zoo.processor(family)):
        model(**feed, **oracle.counted(family, feed))
        weights = weigh(model.mmaccel.reduction, model.mmaccel.layout)

    def written(kwargs):
        length, embeds = made[-1].kept.shape[1], kwargs["inputs_embeds"].clone()
        for batch, slot, value in zip(at.batch.flatten(), at.slot.flatten(), at.values.flatten(0, 1), strict=True):
            if slot >= 0:
                assert got.kept[batch, slot] and slot < length
                embeds[batch, slot] += value
        return {**kwargs, "inputs_embeds": embeds}

    prompt, steps = oracle.replay(family, feed, forced, got.seen, change=written, weights=weights)
    oracle.close(got.prompt[got.kept], prompt[got.kept], what="prompt logits")
    oracle.close(got.steps, steps, what="decoded logits")
    oracle.apart(got.steps, oracle.replay(family, feed, forced, got.seen, weights=weights)[1])


@pytest.mark.square("family", [family for family in zoo.FAMILIES if oracle.fits("learned", family)])
@pytest.mark.square("kind", ["video", "uneven"])
def test_what_is_added_is_what_the_language_model_reads(family, kind, tmp_path, monkeypatch):
    feed = zoo.inputs(family, kind if kind in zoo.kinds(family) else "images")
    holds(family, feed, get_recipe(selector(oracle.subject(family), tmp_path), retain=0.3), monkeypatch)


def test_weights_follow_what_tokens_showed(tmp_path, monkeypatch):
    """Who stands for whom is decided before anything is added."""
    feed = zoo.inputs("qwen2_5_vl", "uneven")
    what = get_recipe(selector(oracle.subject("qwen2_5_vl"), tmp_path), retain=0.3).override(proportional="all")
    weigh = partial(logarithms, "qwen2_5_vl", feed, kind="all")
    holds("qwen2_5_vl", feed, what, monkeypatch, weigh)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_nothing_is_added_where_every_token_stays(family, tmp_path):
    feed, model = zoo.inputs(family, "images"), oracle.subject(family)
    bare = oracle.bare(family)(**feed).logits
    with accelerated(model, selector(model, tmp_path), retain=1.0, processor=zoo.processor(family)):
        assert torch.equal(model(**feed).logits, bare)


def test_a_residual_inside_the_language_model_is_refused():
    kept, (count,) = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[4]])
    made = Reduction(kept, kept, residual=Residual.to(kept, torch.zeros(1, 4, 8)))
    with pytest.raises(MmaccelError, match="'fastv' has a residual.*make it a ProjectorMethod"):
        tokens.checked(FastV(), made, kept, count, 8)


def test_tokens_without_a_residual_are_not_all_added_to_one(monkeypatch):
    """A GPU adds what meets in a row one by one."""
    kept, values, met = torch.arange(8)[None] == 5, torch.ones(1, 8, 2), []
    add = torch.Tensor.index_add
    monkeypatch.setattr(
        torch.Tensor, "index_add", lambda x, dim, at, y: met.append(at.bincount().max()) or add(x, dim, at, y)
    )
    assert torch.equal(Residual.to(kept, values).add(torch.zeros(1, 8, 2)), kept[..., None].float().expand(1, 8, 2))
    assert met == [1]
