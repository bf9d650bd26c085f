"""Heads that draft from the keys and hidden states of the model that verifies: assistants of Gemma 4."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import mmaccel
from mmaccel import MmaccelError, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.core.transformers_api import cache_of
from mmaccel.families.registry import families
from mmaccel.runtime.decoding import drafting
from mmaccel.runtime.decoding.head_draft import HeadDraft
from mmaccel.runtime.decoding.rows import Draft


def built() -> bool:
    """Whether this release of transformers can make an assistant: 5.23 refuses their configurations."""
    try:
        zoo.head("gemma4")
    except ValueError as error:
        return "layer types producing a cache" not in str(error)
    return True


pytestmark = [
    pytest.mark.usefixtures("no_gradients"),
    pytest.mark.skipif(not built(), reason="this release of transformers makes no assistant of Gemma 4"),
]

FAMILIES = sorted(name for name, family in families().items() if family.heads)
NEW = 20


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of five tokens in every block, whether or not they pay."""
    monkeypatch.setattr(drafting, "best_length", lambda rate, price, costs, most: (min(5, most), 2.0))


def generate(model: Any, feed: Any, **options: Any) -> Any:
    return model.generate(**feed, **{"max_new_tokens": NEW, "do_sample": False, **options})


def of_row(feed: Any, row: int, pictures: list[int]) -> dict[str, Tensor]:
    """The row of a batch alone, without padding; ``pictures`` are the numbers of those of every row."""
    own = feed["attention_mask"][row].bool()
    first, count = sum(pictures[:row]), pictures[row]
    alike = {name: x[row : row + 1, own] for name, x in feed.items() if x.shape[:2] == feed["input_ids"].shape}
    return {name: alike.get(name, x[first : first + count]) for name, x in feed.items()}


def reference(
    model: Any, head: Any, prompt: dict[str, Tensor], answer: list[int], pending: int, most: int
) -> list[int]:
    """What the head drafts behind an ``answer``, of which the model has not read the last tokens: from one forward of the whole
    text, as transformers' own loop does it."""
    length = prompt["input_ids"].shape[1]
    read = torch.tensor([answer[: len(answer) - pending]], dtype=torch.long)
    feed = dict(prompt)
    feed["input_ids"] = torch.cat([feed["input_ids"], read], 1)
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        feed[name] = torch.nn.functional.pad(feed[name], (0, read.shape[1]), value=value)
    out = model(**feed, output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
    shared = dict(out.shared_kv_states)
    if len(answer) > 1:
        # behind the prompt layers with windows keep what their next token reads
        window = model.config.text_config.sliding_window
        shared["sliding_attention"] = tuple(x[:, :, 1 - window :] for x in shared["sliding_attention"])
    state, certain, drafts = out.hidden_states[-1][:, -1:], answer[len(answer) - pending :], list[int]()
    position = torch.tensor([[length + read.shape[1]]])
    for step in range(pending + most - 1):
        token = certain[step] if step < pending else drafts[-1]
        embedded = model.get_input_embeddings()(torch.tensor([[token]]))
        made = head(
            inputs_embeds=torch.cat([embedded, state], -1),
            position_ids=position,
            attention_mask=feed["attention_mask"],
            shared_kv_states=shared,
            use_cache=False,
        )
        state = made.last_hidden_state
        if step >= pending - 1:
            drafts.append(int(made.logits[0, -1].argmax()))
    return drafts


@pytest.mark.parametrize("window", [512, 24], ids=["whole", "windows"])
@pytest.mark.parametrize("kind", ["image", "uneven"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_drafts_as_in_the_loop_of_transformers(
    family: str, kind: str, window: int, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every block, behind accepted and rejected tokens, in rows that part; and answers stay the same."""
    tiny, feed, head = zoo.model(family, sliding_window=window), zoo.inputs(family, kind), zoo.head(family)
    bare = generate(tiny, feed)
    truth = [row[feed["input_ids"].shape[1] :].tolist() for row in bare]
    seen: list[tuple[list[int], int, list[int], int]] = []
    draft = HeadDraft.draft

    def mixed(self: HeadDraft, rows: Any, most: Any) -> list[Draft]:
        """Notes what the head drafts, and drafts up to three right tokens in its place."""
        made, drafts = draft(self, rows, most), list[Draft]()
        for number, (row, one) in enumerate(zip(rows, made, strict=True)):
            seen.extend([(row.answer, len(row.pending), list(one.tokens), number)] if one.tokens else [])
            done = len(row.answer)
            right = (len(seen) + number) % 4
            wrong = 60 + truth[number][done + right] % 2 if done + right < NEW else 60
            drafts.append(Draft([*truth[number][done : done + right], wrong][: most[number]]))
        return drafts

    monkeypatch.setattr(HeadDraft, "draft", mixed)
    with accelerated(tiny, "divprune", retain=0.3, lossless=True, draft=head, processor=zoo.processor(family)):
        assert torch.equal(generate(tiny, feed), bare)
        figures = tiny.mmaccel.stats().drafting["sources"]["head"]
    assert 5 < figures["accepted"] < figures["drafted"] and len(seen) > 5
    pictures = [1] if kind == "image" else [1, 2]
    for answer, pending, drafts, number in seen:
        assert drafts == reference(tiny, head, of_row(feed, number, pictures), answer, pending, len(drafts))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_with_a_head_are_those_of_the_model(family: str, eager: None, tmp_path: Path) -> None:
    """Of every kind of prompt, from a folder, drawn ones too; the cache ends as that of the bare model does."""
    tiny, name = zoo.model(family), str(tmp_path / "head")
    zoo.head(family).save_pretrained(name)
    with accelerated(tiny, "none", lossless=True, draft=name, processor=zoo.processor(family)):
        for kind in ("images", "video", "text"):
            feed = zoo.inputs(family, kind)
            bare = generate(tiny, feed, mmaccel=False, return_dict_in_generate=True)
            out = generate(tiny, feed, return_dict_in_generate=True)
            stats = tiny.mmaccel.stats()
            assert torch.equal(out.sequences, bare.sequences)
            assert cache_of(out).get_seq_length() == cache_of(bare).get_seq_length()
            assert stats.drafting["sources"]["head"]["drafted"] > 20 and not any("off" in note for note in stats.notes)
        drawn = generate(tiny, feed, do_sample=True, num_return_sequences=3)
        assert len(drawn) == 3 and tiny.mmaccel.stats().drafting["drafted"] > 20
    assert not tiny.model.language_model._forward_hooks and "generate" not in vars(tiny)


def test_a_head_that_fails_leaves_the_answer(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed = zoo.model("gemma4"), zoo.inputs("gemma4")
    bare, head = generate(tiny, feed), zoo.head("gemma4")
    monkeypatch.setattr(head, "forward", lambda **_: 1 / 0)
    with accelerated(tiny, "none", lossless=True, draft=head):
        assert torch.equal(generate(tiny, feed), bare)
        assert any("drafts of head are off: division by zero" in note for note in tiny.mmaccel.stats().notes)


def held_by(thing: Any) -> list[Any]:
    """All objects that one keeps alive, but for what modules and classes hold."""
    found, left = {id(thing): thing}, [thing]
    while left:
        one = left.pop()
        parts = gc.get_referents(one)
        if isinstance(one, FunctionType):
            parts = [*(one.__closure__ or ()), *(one.__defaults__ or ()), one.__dict__]
        for part in parts:
            if id(part) not in found and not isinstance(part, (type, ModuleType)):
                found[id(part)] = part
                left.append(part)
    return list(found.values())


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_handle_that_is_kept_keeps_no_draft(kind: str, tmp_path: Path) -> None:
    """Neither a head nor a smaller model that was loaded for it; put on again, the handle loads it again."""
    tiny, name = zoo.model("gemma4"), str(tmp_path / "head")
    if kind == "head":
        zoo.head("gemma4").save_pretrained(name)
    else:
        name = str(zoo.draft("gemma4"))
    handle = accelerate_vlm(tiny, "none", lossless=True, draft=name).mmaccel
    generate(tiny, zoo.inputs("gemma4"))
    loaded = handle.drafts.head if kind == "head" else handle.drafts.family.model
    assert any(one is loaded for one in held_by(handle))
    handle.remove()
    assert not any(one is loaded for one in held_by(handle)) and handle.stats().drafting["tokens"] == NEW
    again = handle.again()
    assert (again.drafts.head if kind == "head" else again.drafts.family) is not None
    again.remove()


def folder(place: Path, **config: Any) -> str:
    """A folder with nothing but a configuration."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def test_heads_that_cannot_draft_are_refused(tmp_path: Path) -> None:
    """By a sentence that names the reason, before weights are read; and the model stays as it was."""
    tiny, head = zoo.model("gemma4"), zoo.head("gemma4")
    eagle = folder(tmp_path / "eagle", model_type="llama", architectures=["LlamaForCausalLMEagle3"])
    dflash = folder(tmp_path / "dflash", model_type="qwen3", architectures=["DFlashDraftModel"])
    speculator = folder(tmp_path / "speculator", model_type="llama", speculators_model_type="eagle3")
    muse = folder(tmp_path / "muse", model_type="muse_glimmer_assistant")
    for draft, words in (
        (eagle, "loads no EAGLE heads"),
        (speculator, "loads no EAGLE heads"),
        (dflash, "DFlash heads draft for none"),
        (muse, "another family"),
        (zoo.head("gemma4_unified"), "another family"),
    ):
        with pytest.raises(UnsupportedError, match=f"is a head, .*{words}.*; give"):
            accelerate_vlm(tiny, "none", lossless=True, draft=draft)
    with pytest.raises(UnsupportedError, match="is a head, and drafts for models of another family"):
        accelerate_vlm(zoo.model("qwen2_5_vl"), "none", lossless=True, draft=head)
    with pytest.raises(MmaccelError, match="give lossless=True, too"):
        accelerate_vlm(tiny, "divprune", draft=head)
    other = zoo.head("gemma4")
    other.config.backbone_hidden_size = 48
    with pytest.raises(UnsupportedError, match="a head of another model: channels of hidden states 48, not 64"):
        accelerate_vlm(tiny, "none", lossless=True, draft=other)
    with pytest.raises(UnsupportedError, match="in training mode"):
        accelerate_vlm(tiny, "none", lossless=True, draft=head.train())
    assert not mmaccel.is_accelerated(tiny)
    empty = folder(tmp_path / "empty", **head.config.to_dict())
    with pytest.raises(MmaccelError, match="Cannot load the draft"):
        accelerate_vlm(tiny, "none", lossless=True, draft=empty)
    with accelerated(tiny, "none", lossless=True, draft=head.eval(), offload="host"):
        generate(tiny, zoo.inputs("gemma4"))
        assert any("leave out offload=" in note for note in tiny.mmaccel.stats().notes)
