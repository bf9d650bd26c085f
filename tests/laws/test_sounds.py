"""Prompts with sounds: their tokens count as text, so all of them stay, and the laws hold beside them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import zoo

from mmaccel import accelerated

pytestmark = pytest.mark.usefixtures("no_gradients")

#: families of which models hear
HEARING = [family for family in zoo.FAMILIES if "audio_bos_token" in zoo._family(family).tokens]
KINDS = ("picture", "clip", "own", "batch")
RATE = 16000


@functools.cache
def feed(family: str, kind: str) -> Any:
    """A prompt with a sound behind a picture or behind a silent clip, with a clip and its `own` sound, or a batch of
    pictures with sounds of unequal lengths, padded on the left."""
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
