"""Law 1: keep everything = the unwrapped model."""

from __future__ import annotations

import oracle
import pytest
import torch
import zoo

from mmaccel import Recipe, UnsupportedError, accelerated, get_method
from mmaccel.method import ChunkMethod, EncoderMethod, LayerMethod, Policy, ProjectorMethod, ReactivatingMethod

pytestmark = pytest.mark.usefixtures("no_gradients")

#: by site; the language model may be read by two in a row
SITES = (EncoderMethod, ProjectorMethod, ProjectorMethod, LayerMethod, Policy)
#: every method that keeps what it is asked for, or may
KEEPERS = tuple(
    name
    for name in oracle.named(EncoderMethod, ProjectorMethod, LayerMethod, ChunkMethod, Policy)
    if get_method(name).budget in ("exact", "at_most")
)
CASES = [(family, kind) for family in zoo.FAMILIES for kind in zoo.kinds(family)]
cases = pytest.mark.square(("family", "kind"), CASES, ids=str)
UNPADDED = ("image", "images", "video", "mixed", "text")


def greedy(model, feed, **options):
    out = model.generate(
        **feed, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return out.sequences, torch.stack(out.logits, dim=1)


@cases
def test_replay_without_hiding_is_the_bare_model(family, kind):
    """The oracle itself: without hiding it is the unwrapped model."""
    feed = zoo.inputs(family, kind)
    forced = oracle.force(family, len(feed["input_ids"]))
    prompt, steps = oracle.replay(family, feed, forced)
    valid = feed["attention_mask"].bool()
    oracle.close(prompt[valid], oracle.bare(family)(**feed).logits[valid])
    oracle.close(steps, oracle.decode(oracle.bare(family), feed, forced)[0])


@pytest.mark.parametrize(("family", "overrides"), oracle.WINDOWS)
def test_replay_knows_sliding_windows(family, overrides):
    feed = zoo.inputs(family, "uneven")
    forced = oracle.force(family, 2)
    _, steps = oracle.replay(family, feed, forced, **overrides)
    oracle.close(steps, oracle.decode(oracle.bare(family, **overrides), feed, forced)[0])
    oracle.apart(steps, oracle.replay(family, feed, forced)[1])


@pytest.mark.parametrize(("family", "overrides"), oracle.RENEWED)
@pytest.mark.parametrize("kind", ("uneven", "video"))
def test_none_with_other_language_models(family, overrides, kind):
    feed, bare, model = zoo.inputs(family, kind), oracle.bare(family, **overrides), oracle.subject(family, **overrides)
    wanted = greedy(bare, feed)
    with accelerated(model, "none"):
        for mine, one in zip(greedy(model, feed), wanted, strict=True):
            assert torch.equal(mine, one)


@cases
def test_none_is_the_bare_model_to_the_bit(family, kind):
    feed, bare, model = zoo.inputs(family, kind), oracle.bare(family), oracle.subject(family)
    with accelerated(model, "none"):
        tokens, logits = greedy(model, feed)
        whole = model(**feed).logits
        assert model.mmaccel.stats()["visual_tokens"] == int(oracle.visual(family, feed).sum())
    wanted, wanted_logits = greedy(bare, feed)
    assert torch.equal(tokens, wanted) and torch.equal(logits, wanted_logits)
    assert torch.equal(whole, bare(**feed).logits)


def keeps_everything(family, kind, what, batch=1, **overrides):
    feed, bare, model = zoo.inputs(family, kind, batch=batch), oracle.bare(family, **overrides), None
    model = oracle.subject(family, **overrides)
    with accelerated(model, what, processor=zoo.processor(family)):
        tokens, logits = greedy(model, feed)
        whole = model(**feed).logits
        reduction, policy = model.mmaccel.reduction, model.mmaccel.plan.policy
        # the output of the attention comes from the pass that sums it
        own_pass = policy is not None and policy.method.observes
        if kind != "text" and model.mmaccel.plan.policy is not None:
            with pytest.raises(UnsupportedError, match="use_cache=False makes none"):
                model(**feed, use_cache=False)
            alone = whole
        else:
            alone = model(**feed, use_cache=False).logits
        if kind != "text":
            assert reduction.links is None or torch.equal(reduction.links.slot, reduction.links.source)
            assert torch.equal(reduction.kept, feed["attention_mask"].bool())
    wanted, wanted_logits = greedy(bare, feed)
    wanted_whole = bare(**feed).logits
    # it makes a mask for every step, and so adds in another order
    if kind in UNPADDED and family != "gemma4_unified" and not own_pass:
        assert torch.equal(logits, wanted_logits) and torch.equal(tokens, wanted)
        assert torch.equal(whole, wanted_whole) and torch.equal(alone, wanted_whole)
    else:
        valid = feed["attention_mask"].bool()
        oracle.close(logits, wanted_logits)
        oracle.close(whole[valid], wanted_whole[valid])
        oracle.close(alone[valid], wanted_whole[valid])


@pytest.mark.square(
    ("family", "name", "kind"),
    oracle.in_turn([(f, name) for f in zoo.FAMILIES for name in KEEPERS if oracle.fits(name, f)], zoo.kinds),
    of="pairs",
)
def test_keeping_everything_is_the_bare_model(family, name, kind):
    keeps_everything(family, kind, oracle.recipe(name, family, 1.0))


@pytest.mark.square(
    ("family", "overrides", "name"),
    [
        (family, given, name)
        for family, given in oracle.WINDOWS
        for name in KEEPERS
        if oracle.fits(name, family, **given)
    ],
)
def test_keeping_everything_with_sliding_windows(family, overrides, name):
    feed, what = zoo.inputs(family, "uneven"), oracle.recipe(name, family, 1.0)
    forced = oracle.force(family, 2)
    got = oracle.record(family, feed, what, forced, **overrides)
    bare, valid = oracle.bare(family, **overrides), feed["attention_mask"].bool()
    oracle.close(got.steps, oracle.decode(bare, feed, forced)[0])
    oracle.close(got.prompt[valid], bare(**feed).logits[valid])


@pytest.mark.square(
    ("family", "name"),
    [
        (family, name)
        for family in ("llava", "qwen2_5_vl", "qwen3_vl", "llava_onevision")
        for name in KEEPERS
        if oracle.fits(name, family)
    ],
)
def test_all_stages_keep_everything_in_batches_and_beams(family, name):
    keeps_everything(family, "image", oracle.recipe(name, family, 1.0), batch=2)
    feed, model = zoo.inputs(family, "image"), oracle.subject(family)
    with accelerated(model, oracle.recipe(name, family, 1.0)):
        tokens, logits = greedy(model, feed, num_beams=3, num_return_sequences=2)
    wanted, wanted_logits = greedy(oracle.bare(family), feed, num_beams=3, num_return_sequences=2)
    assert torch.equal(tokens, wanted)
    oracle.close(logits, wanted_logits)


@pytest.mark.square("turn", range(max(len(oracle.named(kind)) for kind in SITES)))
@pytest.mark.square("family", zoo.FAMILIES)
def test_a_recipe_of_every_site_keeps_everything(family, turn):
    """Each method takes its turn among those of its site that the family has; where keys are evicted no tokens come back."""
    alone = {name for name in KEEPERS if issubclass(get_method(name), ReactivatingMethod)}
    known = [
        [name for name in oracle.named(kind) if name in KEEPERS and name not in alone and oracle.fits(name, family)]
        for kind in SITES
    ]
    names = [names[(turn + shift) % len(names)] for shift, names in enumerate(known) if names]
    stages = [oracle.recipe(name, family, 1.0).stages[0] for name in names]
    keeps_everything(family, "image", Recipe("all", tuple(stages)))


# by choice: one whose positions are whole numbers, and one where those of frames and of all behind them may be between two
SLOW = (("qwen2_5_vl", 0.5), ("qwen2_5_vl", 8.0), ("qwen3_omni_moe", 0.7), ("qwen3_omni_moe", 8.3))


@pytest.mark.square(
    ("family", "seconds", "name"),
    [
        (family, seconds, name)
        for family, seconds in SLOW
        for name in KEEPERS
        if family in zoo.FAMILIES and oracle.fits(name, family)
    ],
)
def test_the_frames_of_a_slow_clip_may_stand_behind_the_question(family, seconds, name):
    """M-RoPE: ``generate`` goes on behind the question, a forward without positions and the next turn behind the frames."""
    feed, bare, model = zoo.inputs(family, "video"), oracle.bare(family), oracle.subject(family)
    rates = [seconds] * len(feed["video_grid_thw"])
    feed |= {"video_second_per_grid": torch.tensor(rates)} if "_omni" in family else {"second_per_grid_ts": rates}
    further = torch.tensor([[7, 11, 13]])

    def turns(model):
        first = model.generate(
            **feed,
            max_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            min_new_tokens=4,
        )
        ids = torch.cat([first.sequences, further], dim=1)
        second = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=first.past_key_values,
            max_new_tokens=3,
            min_new_tokens=3,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        stepped = [model(**feed, use_cache=True)]
        for token in (5, 6):
            stepped.append(model(input_ids=torch.tensor([[token]]), past_key_values=stepped[-1].past_key_values))
        return [*first.logits, *second.logits, *(step.logits[:, -1] for step in stepped)]

    with accelerated(model, name, retain=1.0):
        ours = turns(model)
    for step, (mine, wanted) in enumerate(zip(ours, turns(bare), strict=True)):
        torch.testing.assert_close(mine, wanted, atol=2e-5, rtol=1e-4, msg=lambda text, at=step: f"step {at}: {text}")
