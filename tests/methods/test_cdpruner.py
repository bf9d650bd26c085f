"""CDPruner: the largest determinant, and its relevance by CLIP's own text tower."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from laws.helpers import model
from safetensors.torch import save_file
from tiled import batch_of, slots
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

import mmaccel
from mmaccel import MmaccelError, UnsupportedError, accelerated
from mmaccel.families import family_of
from mmaccel.pruning.cdpruner import CDPruner, conditional_diverse, mean_cosine, rescaled


# --- CDPruner ---------------------------------------------------------------------------------------------------------
def test_cdpruner_picks_the_largest_determinant() -> None:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(24, 10, generator=random, dtype=torch.float64)
    quality = torch.rand(24, generator=random, dtype=torch.float64) + 0.1
    unit = x / x.norm(dim=1, keepdim=True)
    kernel = quality[:, None] * (unit @ unit.T) * quality
    picks: list[int] = []
    for _ in range(8):
        others = [i for i in range(24) if i not in picks]
        picks.append(max(others, key=lambda i: float(torch.det(kernel[[*picks, i]][:, [*picks, i]]))))
    all_ = torch.ones(1, 24, dtype=torch.bool)
    ours = conditional_diverse(x.float()[None], quality.float()[None], all_, torch.tensor([8]))
    assert slots(ours[0]) == sorted(picks)


def test_cdpruner_goes_on_beyond_the_rank() -> None:
    copies = torch.eye(4)[torch.arange(12) % 4][None]
    relevance = torch.linspace(0.1, 1.0, 12)[None]
    all_ = torch.ones(1, 12, dtype=torch.bool)
    kept = [slots(conditional_diverse(copies, relevance, all_, torch.tensor([k]))[0]) for k in range(13)]
    assert kept[4] == [8, 9, 10, 11] and kept[6] == [6, 7, 8, 9, 10, 11] and kept[12] == list(range(12))
    flat = conditional_diverse(torch.randn(1, 40, 8), torch.ones(1, 40), torch.ones(1, 40) > 0, torch.tensor([30]))
    assert int(flat.sum()) == 30
    zero = conditional_diverse(torch.zeros(1, 5, 3), torch.zeros(1, 5), torch.ones(1, 5) > 0, torch.tensor([2]))
    assert slots(zero[0]) == [0, 1]


def test_cdpruner_follows_the_question() -> None:
    tokens = batch_of([[(1, 6, 6, False)]])
    features = torch.randn(1, 36, 12, generator=torch.Generator().manual_seed(1))
    asked = replace(tokens, features=features, question=features[:, 7:8], question_valid=torch.ones(1, 1) > 0)
    assert CDPruner().reduce(asked, torch.tensor([1])).kept[0, 7]
    away = replace(asked, question=-features[:, 7:8])
    assert not CDPruner().reduce(away, torch.tensor([30])).kept[0, 7]
    # padding of the question says nothing, and no question at all is plain diversity
    padded = replace(asked, question=torch.cat([features[:, 7:8], features[:, :3]], 1))
    padded = replace(padded, question_valid=torch.tensor([[True, False, False, False]]))
    count = torch.tensor([9])
    assert torch.equal(CDPruner().reduce(padded, count).kept, CDPruner().reduce(asked, count).kept)
    bare = replace(asked, question=None, question_valid=None)
    silent = replace(asked, question_valid=torch.zeros(1, 1) > 0)
    assert torch.equal(CDPruner().reduce(bare, count).kept, CDPruner().reduce(silent, count).kept)
    assert mean_cosine(features, features[:, 7:8], torch.ones(1, 1) > 0).argmax() == 7
    q = rescaled(torch.tensor([[3.0, 1.0, 2.0, 99.0]]), torch.tensor([[True, True, True, False]]))
    torch.testing.assert_close(q[0, :3], torch.tensor([1.0, 0.0, 0.5]), atol=1e-5, rtol=0)


# --- CDPruner with CLIP's own text tower ------------------------------------------------------------------------------
def clip_folder(kind: str, path: Path, width: int) -> Path:
    """A tiny CLIP model with random weights, as transformers or open_clip store it, and the tokenizer of the tiny models."""
    words = zoo.tokenizer("llava")
    words.save_pretrained(path)
    if kind == "transformers":
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = {**size, "vocab_size": len(words), "max_position_embeddings": 8, "eos_token_id": words.eos_token_id}
        vision = {**size, "hidden_size": width, "image_size": 28, "patch_size": 14}
        torch.manual_seed(0)
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(path)
        return path
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 28, "patch_size": 14, "width": width, "layers": 1, "head_width": width // 2},
        "text_cfg": {
            "context_length": 8,
            "vocab_size": len(words),
            "width": 32,
            "heads": 2,
            "layers": 2,
            "hf_tokenizer_name": "here",
        },
    }
    about = {"model_cfg": config, "preprocess_cfg": {"size": [28, 28]}}
    (path / "open_clip_config.json").write_text(json.dumps(about), encoding="utf-8")
    torch.manual_seed(0)
    import open_clip

    made = open_clip.CLIP(**{**config, "vision_cfg": config["vision_cfg"], "text_cfg": config["text_cfg"]})
    save_file(made.state_dict(), path / "open_clip_model.safetensors")
    return path


def relevance_by_hand(kind: str, folder: Path, hidden: Tensor, question: str) -> Tensor:
    """Negated mean cosine of the patches ``hidden [n, width]`` and the pieces of the question, from the whole models."""
    words = zoo.tokenizer("llava")
    if kind == "transformers":
        clip = CLIPModel.from_pretrained(folder)
        ids = words(question)["input_ids"]
        pieces = [ids[i : i + 8] for i in range(0, len(ids), 8)]
        rows = torch.tensor([piece + [0] * (8 - len(piece)) for piece in pieces])
        mask = torch.tensor([[1] * len(piece) + [0] * (8 - len(piece)) for piece in pieces])
        text = clip.text_projection(clip.text_model(input_ids=rows, attention_mask=mask).pooler_output)
        patches = clip.visual_projection(clip.vision_model.post_layernorm(hidden))
    else:
        import open_clip

        clip = open_clip.create_model(f"local-dir:{folder}")
        text = clip.encode_text(open_clip.get_tokenizer(f"local-dir:{folder}")([question]))
        patches = clip.visual.ln_post(hidden) @ clip.visual.proj
    return -torch.cosine_similarity(patches[:, None], text[None], dim=-1).mean(1)


@torch.no_grad()
@pytest.mark.parametrize("negate", [True, False])
@pytest.mark.parametrize("kind", ["transformers", "open_clip"])
def test_cdpruner_with_a_text_tower(kind: str, negate: bool, tmp_path: Path) -> None:
    tiny, feed = model("llava"), zoo.inputs("llava", "image")
    folder = clip_folder(kind, tmp_path, tiny.config.vision_config.hidden_size)
    options = {"processor": zoo.processor("llava"), "retain": 0.3, "clip": str(folder), "negate": negate}
    with accelerated(tiny, "cdpruner", **options):
        tiny(**feed)
        made, notes = tiny.mmaccel.reduction.kept, tiny.mmaccel.stats()["notes"]
        tiny(**feed)
        assert tiny.mmaccel.stats()["notes"] == notes and len(notes) == 1 and str(folder) in notes[0]
    with accelerated(tiny, "cdpruner", retain=0.3):
        tiny(**feed)
        assert "language model itself" in tiny.mmaccel.stats()["notes"][0]
        assert not torch.equal(tiny.mmaccel.reduction.kept, made)

    visual = zoo.visual_mask("llava", tiny, feed["input_ids"])[0]
    last = int(visual.nonzero().max()) + 1
    assert "\nASSISTANT:" in zoo.tokenizer("llava").decode(feed["input_ids"][0, last:])
    question = zoo.QUESTION
    seen = tiny.model.vision_tower(feed["pixel_values"], output_hidden_states=True).hidden_states
    hidden = seen[tiny.config.vision_feature_layer][0, 1:]
    cosine = relevance_by_hand(kind, folder, hidden, question) * (1 if negate else -1)
    features = tiny.model.get_image_features(feed["pixel_values"]).pooler_output[0][None]
    everything = torch.ones(1, len(cosine), dtype=torch.bool)
    count = torch.tensor([int(len(cosine) * 0.3 + 0.5)])
    kept = conditional_diverse(features, rescaled(cosine[None], everything), everything, count)
    assert torch.equal(made[0, visual], kept[0])


def test_text_towers_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, processor = model("llava"), zoo.processor("llava")
    width = tiny.config.vision_config.hidden_size
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for name, says in (
        ("nowhere", "is not a folder; give the folder"),
        ("ViT-B-32:nothing", "cannot be loaded"),
        ("ViT-X-1:openai", "cannot be loaded"),
        (str(tmp_path / "empty"), "cannot be loaded"),
        (str(clip_folder("open_clip", tmp_path / "other", 2 * width)), f"of width {2 * width}, but that of this llava"),
    ):
        with pytest.raises(MmaccelError, match=says):
            mmaccel.accelerate_vlm(tiny, "cdpruner", processor=processor, clip=name)
        assert not mmaccel.is_accelerated(tiny)
    with pytest.raises(UnsupportedError, match="give processor="):
        mmaccel.accelerate_vlm(tiny, "cdpruner", clip=str(tmp_path / "other"))
    tiny.config.vision_config.save_pretrained(tmp_path / "empty")
    with pytest.raises(MmaccelError, match="clip= takes CLIP models"):
        mmaccel.accelerate_vlm(tiny, "cdpruner", processor=processor, clip=str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(MmaccelError, match="mmaccel\\[clip\\]"):
        mmaccel.accelerate_vlm(tiny, "cdpruner", processor=processor, clip=str(tmp_path / "other"))


def test_words_are_the_first_stretch_between_special_tokens() -> None:
    words = zoo.tokenizer("llava")
    family = family_of(model("llava"), zoo.processor("llava"))
    end, plain = words.eos_token_id, words("what is it?", add_special_tokens=False)["input_ids"]
    blank = words(" ", add_special_tokens=False)["input_ids"]
    assert family.words(torch.tensor([end, *blank, end, *plain, end, *plain, *plain])) == "what is it?"
    assert family.words(torch.tensor([end])) == "" == family.words(torch.tensor([], dtype=torch.long))
