"""A smaller model reads the prompt: what it attends to, and writes, by itself is what is seen; what cannot read is refused."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import weakref

import pytest
import torch
import zoo
from tail import in_turn
from transformers import AutoModelForImageTextToText, LogitsProcessor

from mmaccel import (
    MmaccelError,
    SpecKV,
    SpecPC,
    SpecPrefill,
    SpecVLM,
    UnsupportedError,
    accelerate_vlm,
    accelerated,
    get_recipe,
)
from mmaccel.method import model_options as loaded_parts
from mmaccel.runtime.prompt import draft as drafts
from mmaccel.runtime.prompt import lookahead

pytestmark = pytest.mark.usefixtures("cheap_collections")

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


def test_a_mean_of_rows_and_heads_summed_over_layers(monkeypatch):
    feed = zoo.inputs(FAMILY, "image")
    got = seen(SpecVLM(window=1), feed, monkeypatch)[0]
    torch.testing.assert_close(got, attentions(feed, 1)[:, :, 0].mean(1).sum(0), rtol=1e-4, atol=1e-6)


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


class Forced(LogitsProcessor):
    """Writes ``words [B, n]``, whatever the model says."""

    def __init__(self, words):
        self.words = iter(words.T)

    def __call__(self, ids, scores):
        wanted = next(self.words, None)
        return scores if wanted is None else torch.full_like(scores, -1e9).scatter(1, wanted[:, None], 0.0)


# by choice: positions on three axes, and layers with states
@pytest.mark.square(("kind", "family"), in_turn(("uneven", "image"), zoo.FAMILIES, of=(FAMILY, "qwen3_5")), of="kinds")
def test_a_text_behind_the_prompt_is_what_an_answer_would_be(family, kind, monkeypatch):
    """The keys of what the draft writes are those of the same answer by the bare model; and nothing of it stays."""
    model, feed, found, text_behind = zoo.model(family), zoo.inputs(family, kind), [], lookahead.text_behind
    monkeypatch.setattr(lookahead, "text_behind", lambda *given: found.append(text_behind(*given)) or found[-1])
    loaded = AutoModelForImageTextToText.from_pretrained(zoo.draft(family)).eval()
    with torch.no_grad():
        words = loaded.generate(**feed, max_new_tokens=3, do_sample=False)[:, feed["input_ids"].shape[1] :]
        bare = model.generate(
            **feed, max_new_tokens=4, logits_processor=[Forced(words)], do_sample=False, return_dict_in_generate=True
        )
        with accelerated(model, SpecKV(lookahead=3, window=2), retain=0.5, processor=zoo.processor(family)):
            kept = model.generate(**feed, max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
            seen = feed["input_ids"].shape[1]
            figures = model.mmaccel.stats()["stages"][0]
            assert figures["tokens_kept"] < figures["tokens_in"]
    assert kept.past_key_values.get_seq_length() == seen
    layers = [layer for layer in bare.past_key_values.layers if getattr(layer, "keys", None) is not None]
    # the words before an end of the answer
    there = found[0].places >= 0
    assert len(layers) == len(found[0].found) and there.any()
    for layer, (_, keys, values) in zip(layers, found[0].found.values(), strict=True):
        for mine, theirs in ((keys, layer.keys), (values, layer.values)):
            mine, theirs = (x.transpose(1, 2)[there] for x in (mine, theirs[:, :, -words.shape[1] :]))
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)


def test_the_written_text_decides():
    """Another text behind the same prompt keeps other keys; a text of nothing keeps what the window asks for."""
    feed = zoo.inputs(FAMILY, "image")
    kept = []
    for seed in (1, 2):
        model = zoo.model(FAMILY)
        policy = SpecKV(draft=zoo.loaded_draft(FAMILY, seed), lookahead=6, window=1)
        with torch.no_grad(), accelerated(model, policy, retain=0.3):
            out = model(**feed)
        kept.append([layer.index.index.tolist() for layer in out.past_key_values.layers])
    assert kept[0] != kept[1]


def test_a_loaded_draft_is_the_callers():
    feed, loaded, model = zoo.inputs(FAMILY, "image"), zoo.loaded_draft(FAMILY), zoo.model(FAMILY)
    config, held = loaded.config, dict(vars(loaded))
    with torch.no_grad():
        before = loaded.generate(**feed, max_new_tokens=4, do_sample=False)
        named = answer(model, feed, SpecPC(draft=str(zoo.draft(FAMILY))))
        assert answer(model, feed, SpecPC(draft=loaded)) == named
        accelerate_vlm(model, "specpc", draft=loaded)
        assert model.mmaccel.plan.drafts[0].model is loaded
        assert all(one is not loaded for one in loaded_parts._parts.values())
        assert "draft=<Qwen2_5_VLForConditionalGeneration>" in repr(model.mmaccel)
        model.mmaccel.remove()
        assert torch.equal(loaded.generate(**feed, max_new_tokens=4, do_sample=False), before)
    assert loaded.config is config and vars(loaded) == held
    gone = weakref.ref(loaded)
    del loaded, held, config
    gc.collect()
    assert gone() is None


def answer(model, feed, method):
    with accelerated(model, method, retain=0.5):
        return model.generate(**feed, max_new_tokens=4, do_sample=False).tolist()


def test_what_cannot_be_given_as_a_loaded_draft():
    model, loaded = zoo.model(FAMILY), zoo.loaded_draft(FAMILY)
    with pytest.raises(UnsupportedError, match="is the model that it would draft for; give a smaller one"):
        accelerate_vlm(model, "specpc", draft=model)
    with pytest.raises(UnsupportedError, match="<Llava.*is of family llava, and this model of qwen2_5_vl"):
        accelerate_vlm(model, "specpc", draft=zoo.loaded_draft("llava"))
    with pytest.raises(MmaccelError, match="clip=<Qwen2_5_VL.*is of the wrong type"):
        accelerate_vlm(model, "cdpruner", clip=loaded)
    with pytest.raises(
        MmaccelError, match="is a loaded model, for which JSON has no word; save it and name the folder"
    ):
        get_recipe("specpc", draft=loaded).to_json()
    with pytest.raises(UnsupportedError, match=r"training mode; call draft.eval\(\) first"):
        accelerate_vlm(model, "speckv", draft=loaded.train())
    accelerate_vlm(loaded.eval(), "divprune")
    with pytest.raises(UnsupportedError, match=r"an accelerated model itself; call draft.mmaccel.remove\(\) first"):
        accelerate_vlm(model, "speckv", draft=loaded)
    loaded.mmaccel.remove()
    accelerate_vlm(model, "speckv", draft=loaded)
    accelerate_vlm(loaded, "divprune")
    with pytest.raises(UnsupportedError, match="an accelerated model itself"):
        model(**zoo.inputs(FAMILY, "image"))


def test_what_cannot_draft(tmp_path):
    model = zoo.model(FAMILY)
    with pytest.raises(UnsupportedError, match="is of family llava, and this model of qwen2_5_vl; name another"):
        accelerate_vlm(model, "specpc", draft=str(zoo.draft("llava")))
    words = model.config.text_config.vocab_size
    for number, (rows, placeholder, why) in enumerate(
        [(words + 1025, 0, f"words {words + 1025}, not {words}"), (words, 1, "image placeholder .*, not")]
    ):
        other = zoo.model(FAMILY)
        other.resize_token_embeddings(rows)
        other.config.image_token_id += placeholder
        other.save_pretrained(folder := tmp_path / f"other-{number}")
        zoo.processor(FAMILY).save_pretrained(folder)
        with pytest.raises(UnsupportedError, match=f"has other prompts than this model: {why}.*one of the same series"):
            accelerate_vlm(model, "specprefill", draft=str(folder))
    shutil.copytree(zoo.draft(FAMILY), tmp_path / "draft")
    model.config._name_or_path = str(tmp_path / "empty")
    with pytest.raises(
        UnsupportedError, match="specprefill needs a smaller model of the same family, and none lies beside"
    ):
        accelerate_vlm(model, "specprefill")
    assert not hasattr(model, "mmaccel")
    # a folder of the user's own
    accelerate_vlm(model, "specprefill", draft=str(tmp_path / "draft")).mmaccel.remove()


def test_a_draft_with_other_words_is_refused(tmp_path):
    """Where both tokenizers are known; tables of embeddings of one size do not show it. Added words may differ."""
    draft = zoo.loaded_draft(FAMILY)
    processor = copy.deepcopy(zoo.processor(FAMILY))
    for name, change in (("same", None), ("added", "<extra>"), ("other", "swap")):
        if change == "<extra>":
            processor.tokenizer.add_tokens([change])
        draft.save_pretrained(folder := tmp_path / name)
        processor.save_pretrained(folder)
        if change == "swap":
            table = json.loads((folder / "tokenizer.json").read_text())
            one, two = [word for word in table["model"]["vocab"] if word.isalpha()][:2]
            vocabulary = table["model"]["vocab"]
            vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
            (folder / "tokenizer.json").write_text(json.dumps(table))
            given = {"draft": str(folder), "processor": zoo.processor(FAMILY)}
            why = "has other prompts than this model: word '.*' is token .*, not"
            with pytest.raises(UnsupportedError, match=why):
                accelerate_vlm(zoo.model(FAMILY), "specpc", **given)
            # a model whose tokenizer is not known has loaded it
            with accelerated(zoo.model(FAMILY), "specpc", draft=str(folder)):
                with pytest.raises(UnsupportedError, match=why):
                    accelerate_vlm(zoo.model(FAMILY), "specpc", **given)
        else:
            with accelerated(zoo.model(FAMILY), "specpc", draft=str(folder), processor=zoo.processor(FAMILY)):
                pass


def test_a_draft_is_loaded_once_and_goes_with_the_handle():
    first, second = zoo.model("llava"), zoo.model("llava")
    named = {"draft": str(zoo.draft("llava"))}
    gc.collect()
    before = len(loaded_parts._parts)
    accelerate_vlm(first, "specpc", **named)
    accelerate_vlm(second, "specprefill", **named)
    assert len(loaded_parts._parts) == before + 1
    draft = weakref.ref(first.mmaccel.plan.drafts[0].model)
    assert draft() is second.mmaccel.plan.drafts[0].model
    for model in (first, second):
        model.mmaccel.remove()
    gc.collect()
    assert draft() is None and len(loaded_parts._parts) == before


@pytest.mark.parametrize("name", ["specpc", "specprefill", "speckv"])
@pytest.mark.parametrize("keep", [False, True])
def test_remove_frees_the_draft_at_once(name, keep):
    """Without the garbage collector, after a call, and where the caller keeps the handle, the answer and the cache."""
    model, feed = zoo.model("llava"), zoo.inputs("llava", "image")
    gc.collect()
    gc.disable()
    try:
        accelerate_vlm(model, name, draft=str(zoo.draft("llava")))
        draft = weakref.ref(model.mmaccel.plan.drafts[0].model)
        with torch.inference_mode():
            out = model.generate(**feed, max_new_tokens=3, return_dict_in_generate=True)
        handle = model.mmaccel
        kept = (handle, out) if keep else None
        model.mmaccel.remove()
        del handle, out
        assert draft() is None
        assert kept is None or kept[0].stats().kv_bytes > 0
    finally:
        gc.enable()


def test_what_a_program_loads_stays_until_it_ends(tmp_path):
    """Between two accelerated calls nobody uses a draft; a program holds it, and a folder that changes is read anew."""
    shutil.copytree(zoo.draft("llava"), tmp_path / "draft")
    model, named = zoo.model("llava"), {"draft": str(tmp_path / "draft")}

    def draft():
        with accelerated(model, "specpc", **named):
            return weakref.ref(model.mmaccel.plan.drafts[0].model)

    with loaded_parts.KeepLoaded():
        first = draft()
        with loaded_parts.KeepLoaded():
            assert draft()() is first() is not None
        assert first() is not None
        (tmp_path / "draft" / "config.json").touch()
        second = draft()
        assert second() is not first() is not None
    assert first() is None and second() is None
