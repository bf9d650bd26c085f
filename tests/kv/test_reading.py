"""Sparse reads: keys that are stored, and read only in the steps that choose them."""

from __future__ import annotations

import pytest
import torch
import zoo
from evicting import replay_steps, stage, step_by_step
from laws import oracle

from mmaccel import accelerated
from mmaccel.core.budget import resolve
from mmaccel.kv.index import KeyIndex
from mmaccel.kv.sparse import SparseMemory, SparseRead

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize(("family", "kind"), [("llava", "uneven"), ("qwen2_5_vl", "uneven"), ("internvl", "image")])
@pytest.mark.parametrize("how", ("dycoke", "official dycoke", "visionpulse", "visionpulse in blocks"))
def test_every_step_reads_what_it_attends_to(family: str, kind: str, how: str) -> None:
    """DyCoke and VisionPulse: hidden from the query of the step, in the layers behind the choice; stored all the same."""
    feed = zoo.inputs(family, kind)
    pulse = stage("visionpulse", layer=2, tau=2.0, block=2 if "blocks" in how else 1)
    recipe = pulse if "pulse" in how else stage("dycoke-cache", layer=2, alike=0.95)
    recipe = recipe.override(variant="official" if how.startswith("official") else "exact")
    forced = oracle.force(family, len(feed["input_ids"]), 8)
    length = feed["input_ids"].shape[1]
    everything = torch.ones(4, len(forced), 1, length + 8, dtype=torch.bool)
    logits, held, chosen = [], [], []
    with accelerated(oracle.subject(family), recipe, processor=zoo.processor(family)) as model:
        out = model(**feed, use_cache=True)
        cache = out.past_key_values
        for token in forced.T:
            logits.append(out.logits[:, -1])
            out = model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
            state, read = cache.mmaccel, everything.clone()
            visual = state.shared.places.grid_table[..., 0] >= 0
            assert torch.equal(visual, oracle.visual(family, feed))
            read[2:, :, 0, :length] = (state.shared.memory(SparseMemory).chosen | ~visual)[None]
            read[..., length + len(held) + 1 :] = False
            held.append(read)
            chosen.append(state.shared.memory(SparseMemory).chosen)
            assert model.mmaccel.stats()["kv_bytes"] == state.nbytes()
    logits.append(out.logits[:, -1])
    pads = ~feed["attention_mask"].bool()
    for read in held:
        read[..., :length] &= ~pads[None, :, None]
    heads = oracle.subject(family).config.get_text_config().num_key_value_heads
    wanted = replay_steps(family, feed, forced, [read.expand(-1, -1, heads, -1) for read in held])
    oracle.close(torch.stack(logits, dim=1), wanted)
    moves = torch.stack(chosen).long().diff(dim=0)
    assert (moves > 0).any() and (moves < 0).any(), "no key came back"
    counts, full = torch.stack(chosen).sum(-1), oracle.visual(family, feed).sum(-1)
    budget = torch.tensor([resolve(0.3, int(n)) for n in full])
    fresh = (counts - budget).abs() <= 1
    if "official" in how:
        fresh = (counts == budget) | (counts == full)
    if "pulse" in how:
        # blocks that hold text too are always read
        fresh = (counts >= 1) & (counts <= budget + ("blocks" in how) * full)
    assert fresh.all() and counts.min() < full.min()


def test_beams_read_what_they_chose() -> None:
    # what a beam chose first it reads to the end
    family, recipe = "llava", stage("dycoke-cache", layer=2, alike=-1.0)
    # some versions mix up the pictures of rows with several when they expand beams
    feed = zoo.inputs(family, "image", batch=2, question="a?")
    with accelerated(oracle.subject(family), recipe) as model:
        out = model.generate(
            **feed, max_new_tokens=7, num_beams=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    tokens, ways = out.sequences[:, feed["input_ids"].shape[1] :], out.beam_indices
    assert (ways[:, :7] != ways[:, :1]).any(), "no beam was ever reordered"
    steps = torch.arange(tokens.shape[1])
    beams = torch.stack(out.logits, dim=1)[ways[:, : len(steps)], steps]
    got, _, _ = step_by_step(family, feed, recipe, tokens[:, :-1])
    oracle.close(beams, got)


def test_reading_keeps_whatever_came_later() -> None:
    index = KeyIndex(torch.tensor([[0, 1, 2, 3, 4, 5], [-1, 1, 2, 3, 4, 5]]), True, 6)
    reading = SparseRead(torch.tensor([[True, False, True, False], [True, True, False, False]]))
    assert reading.index(index).index.tolist() == [[0, 2, 4, 5], [1, 4, 5, -1]]
    keys = torch.arange(12.0).view(2, 1, 6, 1)
    read, _ = reading.read(index, keys, keys)
    assert read[0, 0, :, 0].tolist() == [0, 2, 4, 5] and read[1, 0, :3, 0].tolist() == [7, 10, 11]
