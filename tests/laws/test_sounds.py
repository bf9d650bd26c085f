"""Prompts with sounds: their tokens stay, as text does, and the laws hold beside them; or a method prunes them, too."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import zoo
from laws import helpers

from mmaccel import UnsupportedError, accelerated, methods
from mmaccel.method import TokenBatch

pytestmark = pytest.mark.usefixtures("no_gradients")

#: families of which models hear
HEARING = [family for family in zoo.FAMILIES if "audio_bos_token" in zoo._family(family).tokens]
KINDS = ("picture", "clip", "own", "batch")
RATE = 16000


@functools.cache
def feed(family: str, kind: str) -> Any:
    """A prompt with a sound behind a picture or behind a silent clip, with a clip and its `own` sound, or a batch of
    pictures with sounds of unequal lengths, padded on the left; or a `sound` alone."""
    worker, shape = zoo.processor(family), zoo._family(family)
    random = np.random.default_rng(3)
    noise = [random.normal(0, 0.1, seconds * RATE).astype(np.float32) for seconds in (3, 1)]
    words = worker.tokenizer
    sound = f"{words.audio_bos_token}{words.audio_token}{words.audio_eos_token}"
    media: dict[str, Any] = {"audio": noise[:1]}
    extra: dict[str, Any] = {}
    if kind in ("picture", "batch"):
        rows = 2 if kind == "batch" else 1
        media = {"audio": noise[:rows], "images": [[zoo.image(*shape.sizes[row], row)] for row in range(rows)]}
        text = [f"{shape.image}{sound}what{' is it' * row}?" for row in range(rows)]
    elif kind == "sound":
        text = [f"{sound}what?"]
    else:
        media["videos"] = [[zoo.clip(*shape.clip, 5)]]
        text = [f"{shape.video}{'' if kind == 'own' else sound}what?"]
    if kind == "own":
        media |= {"load_audio_from_video": True, "audio_from_video_indices": [0]}
        extra["use_audio_in_video"] = True
    return {**worker(text=text, padding=True, return_tensors="pt", **media), **extra}


def heard(family: str, given: Any) -> torch.Tensor:
    """`[B, S]` bool: the tokens of sounds."""
    return given["input_ids"] == zoo.processor(family).audio_token_id


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", HEARING)
def test_sounds_stay(family, kind):
    """Dropping visual tokens is hiding them, and every token of a sound is kept."""
    given = feed(family, kind)
    forced = oracle.force(family, len(given["input_ids"]))
    got = oracle.record(family, given, oracle.recipe("divprune", family), forced)
    prompt, steps = oracle.replay(family, given, forced, got.seen)
    oracle.close(got.prompt[got.kept], prompt[got.kept], what="prompt logits")
    oracle.close(got.steps, steps, what="decoded logits")
    oracle.apart(got.steps, oracle.replay(family, given, forced)[1])
    sounds, visual = heard(family, given), oracle.visual(family, given)
    assert sounds.any(1).all() and got.kept[sounds].all()
    assert not got.kept[visual].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", HEARING)
def test_nothing_changes_at_none(family, kind):
    """Without a method, logits of a prompt with sounds are those of the bare model."""
    given = feed(family, kind)
    forced = oracle.force(family, len(given["input_ids"]))
    bare = oracle.bare(family)
    wanted, steps = bare(**given).logits, oracle.decode(bare, given, forced)[0]
    model, valid = oracle.subject(family), given["attention_mask"].bool()
    with accelerated(model, "none", processor=zoo.processor(family)):
        oracle.close(model(**given).logits[valid], wanted[valid])
        oracle.close(oracle.decode(model, given, forced)[0], steps)


@pytest.mark.parametrize("family", HEARING)
def test_a_clip_and_its_sound_are_interleaved(family):
    """Chunks of both alternate, which is what the cases of `own` sounds are about."""
    given = feed(family, "own")
    kinds = 2 * oracle.visual(family, given).int() + heard(family, given).int()
    runs = torch.unique_consecutive(kinds[0][kinds[0] > 0])
    assert len(runs) >= 4


# ------------------------------------------------------------------------------------------- sounds that are pruned


def official_attention(family: str, given: Any) -> torch.Tensor:
    """`[n]`: the attention that tokens of sounds receive in the last layer of the bare sound tower, of its whole map."""
    model = oracle.bare(family)
    tower, caught = model.model.audio_tower, {}
    last = tower.layers[-1].self_attn

    def note(module: Any, args: Any, kwargs: Any) -> None:
        caught.update(kwargs)

    handle = last.register_forward_pre_hook(note, with_kwargs=True)
    try:
        model(**given)
    finally:
        handle.remove()
    hidden, bounds = caught["hidden_states"], caught["cu_seqlens"]
    window = torch.bucketize(torch.arange(len(hidden)), bounds[1:], right=True)
    total = torch.zeros(len(hidden))
    for head in range(last.num_heads):
        part = slice(head * last.head_dim, (head + 1) * last.head_dim)
        logits = last.q_proj(hidden)[:, part] @ last.k_proj(hidden)[:, part].T * last.head_dim**-0.5
        total += logits.masked_fill(window[:, None] != window, -torch.inf).softmax(1).sum(0) / last.num_heads
    if family == "qwen3_omni_moe":
        return total
    lengths = [(int(n) - 1) // 2 + 1 for n in given["feature_attention_mask"].sum(1)]
    return torch.cat(
        [
            (part[0 : n // 2 * 2 : 2] + part[1 : n // 2 * 2 : 2]) / 2
            for part, n in zip(total.split(lengths), lengths, strict=True)
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", HEARING)
def test_dropped_sounds_are_hidden_sounds(family: str, kind: str) -> None:
    """Dropping tokens of sounds, and frames, is hiding them; what is dropped counts."""
    given = feed(family, kind)
    forced = oracle.force(family, len(given["input_ids"]))
    got = oracle.record(family, given, oracle.recipe("omnizip", family, members=0, sounds=0.6), forced)
    prompt, steps = oracle.replay(family, given, forced, got.seen)
    oracle.close(got.prompt[got.kept], prompt[got.kept], what="prompt logits")
    oracle.close(got.steps, steps, what="decoded logits")
    oracle.apart(got.steps, oracle.replay(family, given, forced)[1])
    sounds, visual = heard(family, given), oracle.visual(family, given)
    for row, kept in enumerate(got.kept):
        assert int(kept[sounds[row]].sum()) == int(0.6 * int(sounds[row].sum()) + 0.5)
        assert int(kept[visual[row]].sum()) == int(0.3 * int(visual[row].sum()) + 0.5)
    text = given["attention_mask"].bool() & ~sounds & ~visual
    assert got.kept[text].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", HEARING)
def test_sounds_stay_by_the_attention_that_they_receive(family: str, kind: str) -> None:
    given, model = feed(family, kind), oracle.subject(family)
    sounds, visual = heard(family, given), oracle.visual(family, given)
    with accelerated(model, "omnizip", retain=0.5, members=0, sounds=0.4):
        model.generate(**given, max_new_tokens=2, do_sample=False)
        kept, stats = model.mmaccel.reduction.kept, model.mmaccel.stats()
        scores = model.mmaccel.history[0].scores()["sound_attention"]
    wanted = official_attention(family, given)
    oracle.close(scores[sounds], wanted, 1e-4, "attention")
    assert scores[~sounds].isnan().all()
    for row, mine in enumerate(sounds):
        best = scores[row][mine].topk(int(kept[row][mine].sum())).indices
        assert kept[row][mine.nonzero()[:, 0][best]].all()
    assert (stats["sound_tokens"], stats["sound_tokens_kept"]) == (int(sounds.sum()), int(kept[sounds].sum()))
    assert (stats["visual_tokens"], stats["visual_tokens_kept"]) == (int(visual.sum()), int(kept[visual].sum()))
    (stage,) = stats["stages"]
    assert (stage["tokens_in"], stage["tokens_kept"]) == (int(visual.sum()), int(kept[visual].sum()))
    assert "sound tokens (" in repr(stats)


@pytest.mark.parametrize("family", HEARING)
def test_anchors_hold_the_sounds_that_flow_into_them(family: str) -> None:
    """The first layer reads what the reduction makes of the embeddings."""
    given, model, entered = feed(family, "own"), oracle.subject(family), []
    embeds = oracle.at_the_door(oracle.bare(family), given)["inputs_embeds"]
    with accelerated(model, "omnizip", retain=0.5, sounds=0.4, anchors=0.2):
        handle = oracle.text_model(model).layers[0].register_forward_pre_hook(lambda _, args: entered.append(args[0]))
        try:
            model(**given)
        finally:
            handle.remove()
        made = model.mmaccel.reduction
    links, sounds = made.full_links(), heard(family, given)
    flows = links.slot != links.source
    assert (
        flows.any() and sounds[links.batch, links.slot][flows].all() and sounds[links.batch, links.source][flows].all()
    )
    oracle.close(entered[0], made.apply(embeds), what="embeddings")


@pytest.mark.parametrize("family", HEARING)
def test_a_row_with_its_sound_is_the_row_alone(family: str) -> None:
    given, model = feed(family, "batch"), oracle.subject(family)
    forced, valid = oracle.force(family, 2), given["attention_mask"].bool()
    features = given["feature_attention_mask"].bool()
    with accelerated(model, "omnizip", retain=0.4):
        together, _ = oracle.decode(model, given, forced)
        kept, sizes = model.mmaccel.reduction.kept, given["image_grid_thw"].prod(1).tolist()
        for row in range(2):
            alone = {
                "input_ids": given["input_ids"][row : row + 1, valid[row]],
                "attention_mask": given["attention_mask"][row : row + 1, valid[row]],
                "pixel_values": given["pixel_values"].split(sizes)[row],
                "image_grid_thw": given["image_grid_thw"][row : row + 1],
                "input_features": given["input_features"][row : row + 1],
                "feature_attention_mask": given["feature_attention_mask"][row : row + 1],
            }
            assert features[row].any()
            lone, _ = oracle.decode(model, alone, forced[row : row + 1])
            assert torch.equal(model.mmaccel.reduction.kept[0], kept[row, valid[row]])
            oracle.close(together[row : row + 1], lone)


@pytest.mark.parametrize("family", HEARING)
def test_a_prompt_of_sounds_alone(family: str) -> None:
    """They are pruned as beside pictures; other recipes leave such a prompt to the bare model."""
    given, model = feed(family, "sound"), oracle.subject(family)
    sounds, forced = heard(family, given), oracle.force(family, 1)
    with accelerated(model, "omnizip", sounds=0.5):
        got, cache = oracle.decode(model, given, forced)
        stats, kept = model.mmaccel.stats(), model.mmaccel.reduction.kept
    assert stats["sound_tokens"] == int(sounds.sum()) > stats["sound_tokens_kept"] == int(kept[sounds].sum())
    bare, _ = oracle.decode(oracle.bare(family), given, forced)
    oracle.apart(got, bare)
    with accelerated(model, "divprune"):
        same, _ = oracle.decode(model, given, forced)
        stats = model.mmaccel.stats()
    oracle.close(same, bare)
    assert stats["sound_tokens"] == stats["sound_tokens_kept"] == int(sounds.sum())


@pytest.mark.parametrize("family", HEARING)
@pytest.mark.parametrize("recipe", [["omnizip", "fastv"], ["omnizip", "snapkv"], ["omnizip", "kivi"]])
def test_later_stages_see_what_is_left(family: str, recipe: list[str]) -> None:
    given, model = feed(family, "own"), oracle.subject(family)
    options = {"fastv": {"layer": oracle.first_layer(family)}}.get(recipe[1], {})
    with accelerated(model, recipe, retain=0.4, **options):
        model.generate(**given, max_new_tokens=3, do_sample=False)
        stats = model.mmaccel.stats()
    assert stats["sound_tokens"] > stats["sound_tokens_kept"] > 0 and stats["kv_bytes"] < stats["kv_bytes_bare"]


def test_beams_hear_what_one_hears() -> None:
    """The best beam is scored by what a call with its tokens gives."""
    given, model = feed("qwen2_5_omni", "own"), oracle.subject("qwen2_5_omni")
    with accelerated(model, "omnizip", retain=0.5):
        beams = helpers.generate(model, given, new=4, num_beams=2, min_new_tokens=4)
        tokens, ways = beams.sequences[:, given["input_ids"].shape[1] :], beams.beam_indices[:, :4]
        got = helpers.logits(beams)[ways, torch.arange(4)]
        oracle.close(got, oracle.decode(model, given, tokens)[0])


@pytest.mark.parametrize("family", HEARING)
def test_without_a_cache_sounds_are_encoded_again(family: str) -> None:
    """At every step, and pruned alike; a later call has sounds of its own."""
    given, model, forced = feed(family, "own"), oracle.subject(family), oracle.force(family, 1, 3)
    with accelerated(model, "omnizip", retain=0.5):
        wanted, _ = oracle.decode(model, given, forced)
        got, _ = oracle.decode(model, given, forced, use_cache=False)
        oracle.close(got, wanted)
        other, _ = oracle.decode(model, feed(family, "picture"), forced)
    oracle.apart(other, wanted)


def test_a_second_turn_has_sounds_of_its_own() -> None:
    """The kept cache holds those of the first."""
    first, second, model = feed("qwen2_5_omni", "own"), feed("qwen2_5_omni", "sound"), oracle.subject("qwen2_5_omni")
    with accelerated(model, "omnizip", retain=0.5, sounds=0.5):
        out = helpers.generate(model, first)
        answer = out.sequences[:, first["input_ids"].shape[1] :]
        whole = torch.cat([first["input_ids"], answer, second["input_ids"]], dim=1)
        given = {**second, "input_ids": whole, "attention_mask": torch.ones_like(whole)}
        later = helpers.generate(model, given, past_key_values=out.past_key_values)
        stats = model.mmaccel.stats()
    heard_now = int(heard("qwen2_5_omni", second).sum())
    assert later.sequences.shape[1] == whole.shape[1] + 4
    assert stats["sound_tokens"] == heard_now > stats["sound_tokens_kept"] > 0


def test_a_model_that_hears_nothing_is_refused() -> None:
    with (
        pytest.raises(UnsupportedError, match="llava models hear none"),
        accelerated(oracle.subject("llava"), "omnizip"),
    ):
        pass


def test_the_more_of_a_chunk_is_heard_the_more_is_seen() -> None:
    """By hand: three chunks of two frames of ten tokens, beside which all, half and none of ten sound tokens stay."""
    frames = torch.cartesian_prod(torch.arange(2), torch.tensor([0]), torch.arange(10))
    cells = torch.cat(
        [part for chunk in range(3) for part in (frames + torch.tensor([2 * chunk, 0, 0]), torch.full((10, 3), -1))]
    )
    loud = torch.cat(
        [
            torch.full((20,), torch.nan),
            torch.ones(10),
            torch.full((20,), torch.nan),
            torch.ones(5),
            torch.zeros(5),
            torch.full((20,), torch.nan),
            torch.zeros(10),
        ]
    )
    tokens = TokenBatch(
        features=torch.randn(1, 90, 8, generator=torch.Generator().manual_seed(0)),
        valid=torch.ones(1, 90, dtype=torch.bool),
        cells=cells[None],
        grid=torch.tensor([[6, 1, 10]]),
        segment=torch.arange(6).repeat_interleave(torch.tensor([20, 10] * 3))[None],
        signals={"sound_attention": loud[None]},
    )
    method = methods()["omnizip"](sounds=0.5, members=0)
    kept = method.reduce(tokens, torch.tensor([30])).kept[0]
    assert [int(part.sum()) for part in kept[:90].split([20, 10] * 3)[1::2]] == [10, 5, 0]
    # of 13, 9 and 5, as many as the chunks leave, 30 tokens are 14.4, 10 and 5.6
    assert [int(part.sum()) for part in kept.split([20, 10] * 3)[::2]] == [14, 10, 6]
    # in the authors' program the middle one takes what is left up to its bounds: 0.65 of it is the most that may go
    official = method.by("official").reduce(tokens, torch.tensor([30])).kept[0]
    assert [int(part.sum()) for part in official.split([20, 10] * 3)[::2]] == [12, 12, 4]
