"""A smaller model reads the prompt first: what it attends to by itself is what is seen, and what cannot read is refused."""

from __future__ import annotations

import gc
import shutil
import weakref

import pytest
import torch
import zoo
from transformers import AutoModelForImageTextToText

from mmaccel import SpecPC, SpecPrefill, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.families import draft as families_draft
from mmaccel.runtime import draft as drafts

FAMILY = "qwen2_5_vl"


def seen(method, feed, monkeypatch):
    """What a draft said of a prompt, by place."""
    found, read = [], drafts.read

    def noted(*args):
        found.append(read(*args))
        return found[-1]

    monkeypatch.setattr(drafts, "read", noted)
    model = zoo.model(FAMILY)
    with accelerated(model, method, retain=0.5):
        model(**feed)
    return found[0]


def attentions(feed, steps):
    """``[layers, heads, steps, S]`` of the draft's last prompt token and those that it writes, as transformers tells them."""
    model = AutoModelForImageTextToText.from_pretrained(zoo.draft(FAMILY), attn_implementation="eager").eval()
    out = model.generate(
        **feed, max_new_tokens=steps, min_new_tokens=steps, output_attentions=True, return_dict_in_generate=True
    )
    size = feed["input_ids"].shape[1]
    rows = [torch.stack([layer[0, :, -1, :size] for layer in step]) for step in out.attentions]
    return torch.stack(rows, 2)


@pytest.mark.parametrize("lookahead", (1, 3))
def test_the_draft_is_seen_as_it_attends(lookahead, monkeypatch):
    feed = zoo.inputs(FAMILY, "image")
    paid = attentions(feed, lookahead)
    # with nothing but the prompt to attend to
    wanted = (paid / paid.sum(-1, keepdim=True)).amax((0, 1)).mean(0)
    got = seen(SpecPrefill(lookahead=lookahead, kernel=0), feed, monkeypatch)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_a_window_of_rows_from_a_layer_on(monkeypatch):
    feed = zoo.inputs(FAMILY, "image")
    got = seen(SpecPC(window=1, kernel=1, layer=1, weighted=False, join="sum"), feed, monkeypatch)[0]
    torch.testing.assert_close(got, attentions(feed, 1)[1:].sum((0, 1, 2)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", ("left", "right"))
def test_padding_changes_nothing(side, monkeypatch):
    feed = zoo.inputs(FAMILY, "image")
    method = SpecPrefill(lookahead=2, kernel=3)
    alone = seen(method, feed, monkeypatch)
    width = {"left": (4, 0), "right": (0, 4)}[side]
    values = {
        "input_ids": zoo.model(FAMILY).generation_config.pad_token_id,
        "attention_mask": 0,
        "mm_token_type_ids": 0,
    }
    wide = {n: torch.nn.functional.pad(x, width, value=values[n]) if n in values else x for n, x in feed.items()}
    got = seen(method, wide, monkeypatch)
    torch.testing.assert_close(got[:, width[0] : got.shape[1] - width[1]], alone, rtol=1e-4, atol=1e-6)


def test_what_cannot_draft(tmp_path):
    model = zoo.model(FAMILY)
    with pytest.raises(UnsupportedError, match="is of family llava, and this model of qwen2_5_vl; name another"):
        accelerate_vlm(model, "specpc", draft=str(zoo.draft("llava")))
    other = zoo.model(FAMILY)
    other.resize_token_embeddings(other.config.text_config.vocab_size + 8)
    other.save_pretrained(tmp_path / "other")
    zoo.processor(FAMILY).save_pretrained(tmp_path / "other")
    with pytest.raises(
        UnsupportedError, match="has other prompts than this model: words .*; name one of the same series"
    ):
        accelerate_vlm(model, "specprefill", draft=str(tmp_path / "other"))
    shutil.copytree(zoo.draft(FAMILY), tmp_path / "draft")
    model.config._name_or_path = str(tmp_path / "empty")
    with pytest.raises(
        UnsupportedError, match="specprefill needs a smaller model of the same family, and none lies beside"
    ):
        accelerate_vlm(model, "specprefill")
    assert not hasattr(model, "mmaccel")
    # a folder of the user's own
    accelerate_vlm(model, "specprefill", draft=str(tmp_path / "draft")).mmaccel.remove()


def test_a_draft_is_loaded_once_and_goes_with_the_handle():
    first, second = zoo.model("llava"), zoo.model("llava")
    named = {"draft": str(zoo.draft("llava"))}
    gc.collect()
    before = len(families_draft._used)
    accelerate_vlm(first, "specpc", **named)
    accelerate_vlm(second, "specprefill", **named)
    assert len(families_draft._used) == before + 1
    draft = weakref.ref(first.mmaccel.plan.drafts[0].model)
    assert draft() is second.mmaccel.plan.drafts[0].model
    for model in (first, second):
        model.mmaccel.remove()
    gc.collect()
    assert draft() is None and len(families_draft._used) == before
