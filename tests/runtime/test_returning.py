"""LazyLLM whole: tokens that a layer dropped come back while the model decodes, as a plain program does it token by token."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest
import torch
import zoo
from laws import helpers, oracle
from torch import Tensor
from torch.nn.functional import linear

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerated
from mmaccel.kv.reactivation import ReactivationMemory

pytestmark = pytest.mark.usefixtures("no_gradients")

STEPS = 10
#: layers that drop, and the share of a picture that is left behind each
CUTS = {1: 0.6, 3: 0.3}
RECIPE = Recipe("three", tuple(Stage("lazyllm-tokens", share, {"layer": layer}) for layer, share in CUTS.items()))
FAMILIES = ("llava", "qwen2_vl", "internvl")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@dataclass
class Naive:
    """One row, token by token, with dicts by place where mmaccel has tensors.

    keys, values : of each layer, ``[Hkv, d]`` by place. waiting : at the input of each layer that drops, hidden states.
    counts : how many tokens of all pictures go on there. returned : how many have come back, once for every such layer.
    """

    model: object
    cos: Tensor
    sin: Tensor
    visual: set[int] = field(default_factory=set)
    counts: dict[int, int] = field(default_factory=lambda: dict.fromkeys(CUTS, 0))
    returned: int = 0
    keys: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    values: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    waiting: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def forward(self, embeds: dict[int, Tensor], picture: set[int] = frozenset()) -> Tensor:
        """What the last layer makes of the last of these tokens, ``[D]``, of which some may be a ``picture``."""
        text, running, last = oracle.text_model(self.model), dict(embeds), max(embeds)
        # of other pictures a prompt sees what is stored
        others, paid = self.visual if picture else set(), {}
        self.visual = self.visual | picture
        among = self.visual - others
        for number, layer in enumerate(text.layers):
            if number in CUTS:
                count = int(CUTS[number] * len(picture) + 0.5)
                self.counts[number] += count
                order = sorted(among, key=lambda place: (-paid[place], place))
                among = set(order[: count if picture else self.counts[number]])
                waits = self.waiting.setdefault(number, {})
                for place in sorted(running.keys() & self.visual - among):
                    waits[place] = running.pop(place)
                back = among - running.keys() - self.keys.get(number, {}).keys()
                self.returned += len(back)
                running |= {place: waits.pop(place) for place in back}
            running, paid = self.layer(number, layer, running, among | others, last)
        return text.norm(running[last])

    def layer(self, number, layer, running, shown, last):
        """Every token of a layer that runs, and what the last one pays to each place, mean over heads."""
        attention, keys, values = layer.self_attn, self.keys.setdefault(number, {}), self.values.setdefault(number, {})
        asked, out, paid = {}, {}, {}
        for place, hidden in running.items():
            assert place not in keys, "computed twice"
            normed = layer.input_layernorm(hidden)
            query, key, value = (
                linear(normed, part.weight, part.bias).view(-1, attention.head_dim)
                for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            asked[place], keys[place] = self.turned(attention, query, key, place)
            values[place] = value
        for place, query in asked.items():
            seen = sorted(p for p in keys if p <= place and (p in shown or p not in self.visual))
            groups = len(query) // len(values[place])
            all_keys, all_values = (
                torch.stack([held[p] for p in seen], 1).repeat_interleave(groups, 0) for held in (keys, values)
            )
            weights = ((all_keys @ query[..., None])[..., 0] * attention.head_dim**-0.5).softmax(-1)
            if place == last:
                paid = dict(zip(seen, weights.mean(0).tolist(), strict=True))
            read = attention.o_proj((weights[..., None] * all_values).sum(1).flatten())
            hidden = running[place] + read
            out[place] = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return out, paid

    def turned(self, attention, query, key, place):
        """Behind RoPE."""
        turn = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        cos, sin = self.cos[None, place, None], self.sin[None, place, None]
        query, key = turn(query[None, :, None], key[None, :, None], cos, sin)
        return query[0, :, 0], key[0, :, 0]


def naive(family, feed, *prompts):
    """Logits of every step behind each of the ``prompts`` of one row, ``[T, V]``, and how many tokens came back.

    ``feed`` is the conversation; a prompt is where it begins and ends and the next one begins, or the conversation ends.
    """
    model, visual = oracle.bare(family), oracle.visual(family, feed)[0]
    door = oracle.at_the_door(model, feed)
    embeds, positions = door["inputs_embeds"], door.get("position_ids")
    if positions is None:
        positions = torch.arange(embeds.shape[1])[None]
    # of four axes the first is for masks
    cos, sin = oracle.text_model(model).rotary_emb(embeds, positions[-3:])
    row, found = Naive(model, cos[0], sin[0]), []
    for first, last, behind in prompts:
        spans = [(first, last), *((at, at + 1) for at in range(last, behind))]
        picture = set((visual[first:last].nonzero()[:, 0] + first).tolist())
        found.append([])
        for begin, end in spans:
            states = row.forward(
                {place: embeds[0, place] for place in range(begin, end)}, picture if begin == first else set()
            )
            found[-1].append(model.lm_head(states))
    return [torch.stack(steps) for steps in found], row.returned


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_a_plain_program_does(family):
    feed = zoo.inputs(family, "image")
    forced = oracle.force(family, 1, STEPS)
    whole, length = oracle.continued(family, feed, forced), feed["input_ids"].shape[1]
    (wanted,), returned = naive(family, whole, (0, length, length + STEPS - 1))
    with accelerated(oracle.subject(family), RECIPE, processor=zoo.processor(family)) as model:
        got, cache = oracle.decode(model, feed, forced)
        stats = model.mmaccel.stats()
    assert stats["tokens_returned"] == returned > STEPS
    assert cache.get_seq_length() == length + STEPS - 1
    oracle.close(got[0], wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_picture_adds_to_what_may_come_back(family):
    """A prompt behind an answer sees what is stored of the first picture, and its own answer chooses from both."""
    tiny, feed, second = oracle.subject(family), zoo.inputs(family, "image"), zoo.inputs(family, "image", seed=3)
    with accelerated(tiny, RECIPE, processor=zoo.processor(family)):
        first = helpers.generate(tiny, feed, new=STEPS)
        kept, whole = helpers.follow(feed, first, second)
        turned = helpers.generate(tiny, kept, new=STEPS, past_key_values=first.past_key_values)
        returned = tiny.mmaccel.stats()["tokens_returned"]
    length, both = feed["input_ids"].shape[1], whole["input_ids"].shape[1]
    conversation = oracle.continued(family, whole, turned.sequences[:, both:])
    # the cache has not seen the last token of an answer, which the next prompt begins with
    spans = (0, length, length + STEPS - 1), (length + STEPS - 1, both, both + STEPS - 1)
    wanted, every = naive(family, conversation, *spans)
    oracle.close(helpers.logits(first)[0], wanted[0])
    oracle.close(helpers.logits(turned)[0], wanted[1])
    assert 0 < returned < every


@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl"))
def test_nothing_dropped_is_the_bare_model(family):
    feed, forced = zoo.inputs(family, "uneven"), oracle.force(family, 2)
    with accelerated(oracle.subject(family), RECIPE.override(retain=1.0), processor=zoo.processor(family)) as model:
        got, _ = oracle.decode(model, feed, forced)
        assert model.mmaccel.stats()["tokens_returned"] == 0
    oracle.close(got, oracle.decode(oracle.bare(family), feed, forced)[0])


def test_twice_the_same_and_in_beams():
    feed, tiny = zoo.inputs("llava", "uneven"), oracle.subject("llava")
    with accelerated(tiny, RECIPE):
        once, again, beams = (helpers.generate(tiny, feed, new=STEPS, num_beams=n) for n in (1, 1, 3))
        assert torch.equal(helpers.logits(once), helpers.logits(again))
        # the best beam is scored by what a call with its tokens gives
        tokens, ways = beams.sequences[:, feed["input_ids"].shape[1] :], beams.beam_indices[:, :STEPS]
        got = helpers.logits(beams)[ways, torch.arange(STEPS)]
        oracle.close(got, oracle.decode(tiny, feed, tokens)[0])


def test_what_waits_is_held_and_counted():
    """Beside keys and values: the hidden states, cosines and sines of what waits at each layer, and where it stands."""
    feed, tiny = zoo.inputs("llava", "image"), oracle.subject("llava")
    with accelerated(tiny, RECIPE):
        cache = helpers.generate(tiny, feed, new=1).past_key_values
    reached, head = int(oracle.visual("llava", feed).sum()), oracle.text_model(tiny).layers[0].self_attn.head_dim
    widths = {"hidden": tiny.config.text_config.hidden_size, "cos": head, "sin": head, "positions": 1}
    kept = [int(share * reached + 0.5) for share in CUTS.values()]
    for waiting, stays in zip(cache.mmaccel.shared.memory(ReactivationMemory).at.values(), kept, strict=True):
        aside = waiting.aside
        assert aside.lengths.tolist() == [aside.places.shape[1]] == [reached - stays]
        assert {name: x.shape[-1] for name, x in aside.planes.items()} == widths
        reached = stays


def test_a_copy_of_a_conversation_goes_its_own_way():
    """What was restored, cropped, or counted anew without places that nothing stores goes on as if nothing had been."""
    feed, tiny = zoo.inputs("llava", "uneven"), oracle.subject("llava")
    stages = (Stage("divprune", 0.8), *RECIPE.stages)
    new = oracle.force("llava", 2, 6)
    with accelerated(tiny, Recipe("both", stages)):
        out = tiny(**feed, use_cache=True)

        def steps(cache):
            return torch.cat([tiny(input_ids=new[:, i : i + 1], past_key_values=cache).logits for i in range(6)], 1)

        state = out.past_key_values.mmaccel
        restore = state.snapshot()
        wanted = steps(out.past_key_values)
        restore()
        seen = state.seen
        state.rebase()
        assert state.seen < seen
        oracle.close(steps(out.past_key_values), wanted)


def test_a_picture_that_is_cropped_away_does_not_come_back():
    feed, tiny = zoo.inputs("llava", "image"), oracle.subject("llava")
    with accelerated(tiny, RECIPE):
        cache = helpers.generate(tiny, feed, new=4).past_key_values
        memory, seen = (
            cache.mmaccel.shared.memory(ReactivationMemory),
            int(oracle.visual("llava", feed)[0].long().argmax()) + 9,
        )
        cache.crop(seen - cache.get_seq_length())
        for waiting in memory.at.values():
            assert waiting.stayed.shape[1] == seen and int(waiting.aside.places.max()) < seen
            assert waiting.aside.lengths.tolist() == (waiting.aside.places >= 0).sum(1).tolist()
        out = tiny(input_ids=oracle.force("llava", 1, 2), past_key_values=cache)
        assert not out.logits.isnan().any() and cache.get_seq_length() == seen + 2


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ((Stage("lazyllm-tokens", 0.5), Stage("snapkv", 0.5)), "snapkv would drop"),
        ((Stage("lazyllm-tokens", 0.5), Stage("kivi")), "kivi would drop"),
        ((Stage("fastv", 0.5, {"layer": 1}), Stage("lazyllm-tokens", 0.3, {"layer": 2})), "fastv would drop"),
    ],
)
def test_what_it_cannot_be_combined_with(stages, said):
    with pytest.raises(MmaccelError, match=said), accelerated(oracle.subject("llava"), Recipe("mixed", stages)):
        pass


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gemma3", "attend to each other both ways"),
        ("paligemma", "attend to each other both ways"),
        ("qwen3_5", "keep a state"),
    ],
)
def test_models_whose_tokens_cannot_run_later(family, said):
    tiny, reader = oracle.subject(family), zoo.processor(family)
    with (
        pytest.raises(UnsupportedError, match=f"{said}.*; use 'lazyllm-prefill'"),
        accelerated(tiny, "lazyllm", processor=reader),
    ):
        pass
