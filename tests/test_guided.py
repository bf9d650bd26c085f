"""Policies that rate keys by guide texts, and leave means of the keys that they evict: in prompts and in sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from test_streaming import film, session
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerated
from mmaccel.core.transformers_api import DynamicCache, cache_argument
from mmaccel.kv.policies.hermes import HERMES
from mmaccel.kv.policies.streammem import StreamMem
from mmaccel.method.guides import GuidedPolicy, RatedKeys
from mmaccel.method.keys import moves_keys
from mmaccel.runtime.cache.guided_eviction import EvictByGuides

pytestmark = pytest.mark.usefixtures("no_gradients")

#: positions of one axis, and of three
FAMILIES = ("llava_onevision", "qwen2_5_vl")  # by choice: positions of one axis, and of three
HALVES = {"short": 0.25, "long": 0.5}


def recipe(name: str, retain: float | None = 0.3, variant: Any = "exact", **options: Any) -> Recipe:
    return Recipe(name, (Stage(name, retain, options),), variant=variant)


def bare_cache(family: str, feed: Any) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Keys and values of every layer of the bare model, and the positions ``[axes, B, S]`` of the prompt."""
    model, asked = oracle.bare(family), []
    text = oracle.adapter(family).text

    def note(module: Any, args: Any, kwargs: Any) -> None:
        asked.append(kwargs["position_ids"])

    hook = text.register_forward_pre_hook(note, with_kwargs=True)
    cache = DynamicCache()
    try:
        model(**feed, **cache_argument(cache), use_cache=True)
    finally:
        hook.remove()
    found = asked[0] if asked[0] is not None else torch.arange(feed["input_ids"].shape[1])[None]
    positions = found[-3:] if found.dim() == 3 else found[None]
    return [(layer.keys, layer.values) for layer in cache.layers], positions


def moved(family: str, keys: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """``keys [1, H, n, D]`` of positions ``before [axes, n]`` at positions ``after [axes, n]``, by RoPE in halves."""
    text = oracle.adapter(family).text

    def at(positions: Tensor) -> tuple[Tensor, Tensor]:
        given = positions[:, None] if len(positions) > 1 else positions
        return text.rotary_emb(keys, given)

    def half(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)

    (cos, sin), (new_cos, new_sin) = at(before), at(after)
    plain = keys * cos - half(keys) * sin
    return plain * new_cos + half(plain) * new_sin


def paying(monkeypatch: pytest.MonkeyPatch, weights: Any = None) -> None:
    """Guides pay every key what ``weights`` makes of the number of its layer and of its slots; by default its slot."""

    def paid(self: EvictByGuides) -> dict[int, Tensor]:
        made = weights or (lambda number, slots: (slots * (7 + number)) % 13 + 1.0)
        return {
            layer.number: made(layer.number, torch.arange(len(layer.index)).float()).expand(len(layer.keys), -1)
            for layer in self.state.layers
        }

    monkeypatch.setattr(EvictByGuides, "_paid", paid)


def left(family: str, feed: Any, made: Recipe) -> Any:
    """The layers of the cache of a prompt."""
    with accelerated(oracle.subject(family), made, processor=zoo.processor(family)) as model:
        return model(**feed, use_cache=True).past_key_values


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deep_layer_holds_the_mean_of_the_keys_that_it_lost(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paying(monkeypatch)
    feed = zoo.inputs(family, "video")
    states, positions = bare_cache(family, feed)
    visual = oracle.visual(family, feed)[0]
    cache = left(family, feed, recipe("hermes", **HALVES))
    policy = HERMES(**HALVES)
    budget = round(0.3 * int(visual.sum()) + 1e-9)
    for number, (layer, (keys, values)) in enumerate(zip(cache.layers, states, strict=True)):
        places = layer.index.index[0].long()
        held = torch.zeros_like(visual).scatter(0, places, True)
        assert held[~visual].all() and int(held[visual].sum()) == budget
        if policy.role(number, len(states)) != "deep":
            torch.testing.assert_close(layer.keys, keys[:, :, places])
            continue
        differs = (layer.values - values[:, :, places]).abs().amax((0, 1, 3)) > 1e-6
        assert int(differs.sum()) == 1, "one slot holds the mean"
        holder = int(places[differs])
        gone = visual & ~held
        gone[holder] = True
        assert holder == int(gone.nonzero().amax()), "it has the place of the newest key in it"
        slot = int(differs.nonzero())
        torch.testing.assert_close(layer.values[:, :, slot], values[:, :, gone].mean(2), rtol=1e-4, atol=1e-5)
        last = positions[:, 0, held & (torch.arange(len(held)) != holder)].amax() + 1
        at = positions[:, 0, gone]
        turned = moved(family, keys[:, :, gone], at, torch.full_like(at, int(last)))
        torch.testing.assert_close(layer.keys[:, :, slot], turned.mean(2), rtol=1e-4, atol=1e-5)
        others = ~differs
        torch.testing.assert_close(layer.keys[:, :, others], keys[:, :, places[others]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frame_that_loses_keys_leaves_their_weighted_mean(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paying(monkeypatch)
    feed = zoo.inputs(family, "video")
    states, positions = bare_cache(family, feed)
    visual = oracle.visual(family, feed)[0]
    cache = left(family, feed, recipe("streammem", 0.4))
    for number, (layer, (keys, values)) in enumerate(zip(cache.layers, states, strict=True)):
        places = layer.index.index[0].long()
        paid = (torch.arange(len(visual)).float() * (7 + number)) % 13 + 1.0
        differs = ((layer.values - values[:, :, places]).abs().amax((0, 1, 3)) > 1e-6).nonzero()[:, 0]
        assert len(differs), "frames leave means"
        frames = frames_of(family, feed)
        for slot in differs.tolist():
            holder = int(places[slot])
            mine = (frames == frames[holder]) & visual
            weight = (paid * mine)[mine] / paid[mine].sum()
            wanted = (values[:, :, mine] * weight[:, None]).sum(2)
            torch.testing.assert_close(layer.values[:, :, slot], wanted, rtol=1e-4, atol=1e-5)
            at = positions[:, 0, mine]
            turned = moved(family, keys[:, :, mine], at, positions[:, 0, holder][:, None].expand_as(at).contiguous())
            wanted = (turned * weight[:, None]).sum(2)
            torch.testing.assert_close(layer.keys[:, :, slot], wanted, rtol=1e-4, atol=1e-5)
        assert len(set(frames[places[differs]].tolist())) == len(differs), "one mean a frame"


def frames_of(family: str, feed: Any) -> Tensor:
    """``[S]`` long: the frame of every place, -1 for text and newlines."""
    with accelerated(oracle.subject(family), recipe("streammem")) as model:
        model(**feed, use_cache=True)
        layout = model.mmaccel.layout
    frames = torch.full((layout.valid.shape[1],), -1, dtype=torch.long)
    for segment in layout.segments:
        time = segment.tile.cells[:, 0]
        frames[segment.places] = torch.where(time < 0, -1, time + 1000 * segment.picture)
    return frames


@pytest.mark.parametrize("variant", ["exact", "official"])
def test_guides_are_read_behind_the_prompt(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their attention is that of the bare model behind the same prompt. In the authors' variant every layer is given the
    embeddings of the text, whose tokens see each other."""
    family, seen = "llava", []
    read = EvictByGuides._paid

    def noted(self: EvictByGuides) -> dict[int, Tensor]:
        seen.append((read(self), [ids for ids, _ in map(self._ids, self.policy.guides(""))]))
        return seen[-1][0]

    monkeypatch.setattr(EvictByGuides, "_paid", noted)
    feed = zoo.inputs(family, "image")
    made = recipe("hermes", variant=variant, local="what now?", theme="what is it about?", **HALVES)
    left(family, feed, made)
    ((paid, guides),) = seen
    policy, layers, length = HERMES(**HALVES), oracle.adapter(family).text.layers, feed["input_ids"].shape[1]
    assert len(paid) == len(layers) and len({len(ids[0]) for ids in guides}) == 3
    states, positions = bare_cache(family, feed)
    for number, layer in enumerate(layers):
        ids = guides[policy.guide(number, len(layers))]
        queries, keys = projected(family, feed, states, ids, number, variant, int(positions.max()) + 1)
        group = queries.shape[1] // keys.shape[1]
        logits = queries @ keys.repeat_interleave(group, 1).mT * layer.self_attn.scaling
        own = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
        own = own if variant == "official" else own.tril()
        visible = torch.cat([torch.ones(ids.shape[1], length, dtype=torch.bool), own], 1)
        wanted = logits.masked_fill(~visible, -torch.inf).softmax(-1).mean((1, 2))[:, :length]
        torch.testing.assert_close(paid[number], wanted, rtol=1e-4, atol=1e-6)


def projected(
    family: str, feed: Any, states: Sequence[tuple[Tensor, Tensor]], ids: Tensor, number: int, variant: str, begin: int
) -> tuple[Tensor, Tensor]:
    """Queries of a text behind a prompt in one layer, ``[1, Hq, n, D]``, and the keys of both."""
    text, cache, entered = oracle.adapter(family).text, DynamicCache(), []
    for at, (key, value) in enumerate(states):
        cache.update(key, value, at)
    layer = text.layers[number]

    def note(module: Any, args: Any, kwargs: Any) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    hook = layer.register_forward_pre_hook(note, with_kwargs=True)
    at = torch.arange(begin, begin + ids.shape[1])[None]
    try:
        text(input_ids=ids, position_ids=at, **cache_argument(cache), use_cache=True)
    finally:
        hook.remove()
    hidden = text.embed_tokens(ids) if variant == "official" else entered[0]
    hidden, attention = layer.input_layernorm(hidden), layer.self_attn
    width = attention.head_dim
    query, key = (
        made(hidden).unflatten(-1, (-1, width)).transpose(1, 2) for made in (attention.q_proj, attention.k_proj)
    )
    cos, sin = (x[:, None] for x in text.rotary_emb(hidden, at))

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return turned(query), torch.cat([states[number][0], turned(key)], 2)


@pytest.mark.parametrize("name", ["hermes", "streammem"])  # by choice: all that there are, checked below
@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_stays_under_its_cap(name: str, family: str) -> None:
    one, quiet = (session(family, recipe=recipe(name)) for _ in range(2))
    for stretch in range(5):
        one.push(film(family, 4, stretch))
        quiet.push(film(family, 4, stretch))
        assert one.tokens() <= 100
    assert {len(layer.index) for layer in one._state.layers} == {100}
    before = [layer.stored()[0].clone() for layer in one._state.layers]
    assert one.ask("what is it?", 4) == quiet.ask("what is it?", 4)
    for layer, keys in zip(one._state.layers, before, strict=True):
        assert torch.equal(layer.stored()[0], keys)


def test_every_guided_policy_is_tried() -> None:
    from mmaccel.method.registry import methods

    assert {name for name, kind in methods().items() if issubclass(kind, GuidedPolicy)} == {"hermes", "streammem"}


@pytest.mark.parametrize("options", [{"spare": 10**6}, {"reindex": "eager"}], ids=str)
def test_keys_get_positions_behind_each_other(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of any length takes as many positions as its cap, and a layer's keys are those of the model at the new ones."""
    family = "llava_onevision"
    paying(monkeypatch)
    feed = zoo.inputs(family, "video")
    states, positions = bare_cache(family, feed)
    cache = left(family, feed, recipe("hermes", short=0.5, long=0.0, **options))
    for layer, (keys, _) in zip(cache.layers, states, strict=True):
        places = layer.index.index[0].long()
        at = positions[:, 0, places]
        new = torch.arange(len(places))[None]
        torch.testing.assert_close(layer.keys, moved(family, keys[:, :, places], at, new), rtol=1e-4, atol=1e-5)
    state = cache.mmaccel
    assert state.seen - state.positions.offset.tolist()[0] == len(state.layers[0].index)
    one = session(family, recipe=recipe("hermes", **options))
    for stretch in range(6):
        one.push(film(family, 4, stretch))
    assert one._state.seen - int(one._state.positions.offset) <= 100 < one.visual_tokens


def test_keys_keep_their_positions_while_there_are_some() -> None:
    one = session("llava_onevision", recipe=recipe("hermes", spare=0))
    for stretch in range(6):
        one.push(film("llava_onevision", 4, stretch))
    assert one._state.seen - int(one._state.positions.offset) > one.visual_tokens


def test_the_authors_layers_count_their_own_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean stands directly before what follows, and all older keys of its layer one further back."""
    family = "llava_onevision"
    paying(monkeypatch)
    feed = zoo.inputs(family, "video")
    plain, official = (left(family, feed, recipe("hermes", variant=one, **HALVES)) for one in ("exact", "official"))
    policy = HERMES(**HALVES)
    for number, (ours, theirs) in enumerate(zip(plain.layers, official.layers, strict=True)):
        back = int(policy.role(number, len(plain.layers)) == "deep")
        at = torch.arange(50, 50 + len(ours.index))[None]
        torch.testing.assert_close(theirs.keys, moved(family, ours.keys, at, at - back), rtol=1e-4, atol=1e-5)


def test_the_last_question_and_answer_come_before_the_guides() -> None:
    one = session("llava_onevision", recipe=recipe("hermes"))
    one.push(film("llava_onevision", 4))
    answer = one.ask("what is it?", 3)
    with one._accelerated() as model:
        policy = model.mmaccel.plan.policy.method
        assert policy.dialogue == f"what is it? {answer}"
        assert all(text.startswith(policy.dialogue) for text in policy.guides(""))
    one.generate("and where?", 3)
    assert one._dialogue.startswith("and where? ")
    with pytest.raises(MmaccelError):
        one.ask("why?", 0)
    assert one._dialogue.startswith("and where? ")


def test_streammem_reads_what_the_template_writes() -> None:
    """Between a question and its answer, whatever it is asked."""
    assert StreamMem().guides("<end>answer:") == ("<end>answer:",)
    assert StreamMem(proxy="so?").guides("<end>answer:") == ("so?",)


@pytest.mark.parametrize("count", [1, 2, 5, 12, 30, 40])
@pytest.mark.parametrize(
    "policy", [HERMES(long=1.0), StreamMem(), StreamMem(prototypes=1.0), StreamMem(prototypes=0.0)]
)
def test_means_take_slots_of_the_budget(policy: GuidedPolicy, count: int) -> None:
    """With protected keys and keys of text among them; a mean is made of keys that go, its own slot among them."""
    random = torch.Generator().manual_seed(count)
    paid = torch.rand(2, 40, generator=random)
    compete = torch.rand(2, 40, generator=random) > 0.2
    must = compete & (torch.rand(2, 40, generator=random) > 0.9)
    frame = (torch.arange(40) // 9).expand(2, -1).clone()
    frame[:, 7] = -1
    scores = paid.masked_fill(must, torch.inf).masked_fill(~compete, -torch.inf)
    fold = policy.fold(RatedKeys(5, 8, scores, compete, paid, torch.tensor([count, count]), frame))
    assert fold is not None and (fold.weight > 0).all()
    for row in range(2):
        holders = fold.onto[row][fold.onto[row] >= 0].unique()
        assert compete[row, holders].all() and not must[row, holders].any()
        assert (fold.onto[row, holders] == holders).all(), "a slot is part of its own mean"
        assert len(holders) + int(must[row].sum()) <= max(count, int(must[row].sum()))
        if int(compete[row].sum()) <= count:
            assert not len(holders), "nothing goes"
        if isinstance(policy, StreamMem):
            assert len(holders) <= policy.prototypes * count
            assert len(set(frame[row, holders].tolist())) == len(holders)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 2}, "`every` must be 0 for hermes"),
        ({"compact": "pivot"}, "`compact` must be 'evict'"),
        ({"rest": "int4"}, "`rest` must be 'evict'"),
        ({"neighbours": 3}, "`neighbours` must be 0"),
        ({"close_gaps": True}, "`close_gaps` must be False"),
        ({"head_budget": "adaptive"}, "`head_budget` must be 'uniform'"),
        ({"layer_budget": "entropy"}, "must be uniform, pyramid or kvpress, got 'entropy'"),
        ({"cap": 50}, "give joint=True"),
        ({"age": (1.0, 0.5)}, "`age` must be ()"),
        ({"short": 1.5}, "short"),
        ({"spare": -1}, "spare"),
        ({"reindex": "never"}, "reindex"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MmaccelError, match=message.replace("(", r"\(").replace(")", r"\)")):
        HERMES(**options)


def test_recipes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(MmaccelError, match="keys move to other positions"):
        Recipe("two", (Stage("hermes", 0.3), Stage("kivi"))).build()
    feed = zoo.inputs("llava", "image")
    with (
        pytest.raises(MmaccelError, match="whole prompt"),
        accelerated(oracle.subject("llava"), recipe("hermes")) as model,
    ):
        model.generate(**feed, max_new_tokens=2, mmaccel={"chunk": 8})
    other = next(name for name in zoo.FAMILIES if not moves_keys(oracle.adapter(name)))
    with pytest.raises(UnsupportedError, match="cannot be moved"), accelerated(oracle.subject(other), recipe("hermes")):
        pass
    with (
        pytest.raises(UnsupportedError, match="three axes"),
        accelerated(oracle.subject("qwen2_5_vl"), recipe("hermes", reindex="eager")),
    ):
        pass


@pytest.mark.parametrize("name", ["hermes", "streammem"])  # by choice: see above
def test_a_cap_without_a_session(name: str) -> None:
    """Keys are evicted when a prompt was read, and none while an answer is decoded."""
    feed = zoo.inputs("llava", "image")
    made = recipe(name, 1.0, cap=20, joint=True)
    with accelerated(oracle.subject("llava"), made, processor=zoo.processor("llava")) as model:
        cache = model(**feed, use_cache=True).past_key_values
        assert {len(layer.index) for layer in cache.layers} == {20}
        for _ in range(3):
            model(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True)
        assert {len(layer.index) for layer in cache.layers} == {23}
