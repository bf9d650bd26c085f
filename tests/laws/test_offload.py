"""Law: keys and values in host memory change no bit, wherever they are read; what is moved is what must be.

Every recipe of the registry answers with `offload="host"` as it does without, to the bit: padded batches, second turns,
evictions while decoding, codecs, drafts, and caches that are cropped, selected and repeated.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any

import oracle
import pytest
import simulated
import synthetic
import torch
import zoo
from laws.helpers import FAMILIES, cache, follow, gap, generate, inputs, logits, model, recipe_of
from laws.test_bytes import held
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerate_vlm, accelerated, get_recipe, prepare
from mmaccel.kv import head_groups, host
from mmaccel.kv.host import buffer_of
from mmaccel.method import ReadingPolicy

SQUARE = [
    (family, name)
    for family in FAMILIES
    for name in ("none", "test-fixed-cache", *oracle.named_recipes())
    if oracle.fits(name, family)
]
#: one for every form in which a layer is stored and read
FORMS = ("none", "divprune", "snapkv", "adakv", "kivi", "quest", "dycoke-cache", "h2o-decode")  # by choice: forms
#: an index of heads is read as soon as an eviction has stored it
PAGES_OF_HEADS = "pages of heads that differ"
READING = tuple(synthetic.offered(ReadingPolicy))


def made(name: str, family: str) -> Recipe:
    if name == PAGES_OF_HEADS:
        adaptive = Stage("snapkv", 0.4, {"kernel": 3, "head_budget": "adaptive:0.2"})
        return Recipe("stages", (adaptive, Stage("kivi", None, {"bits": 4, "page": 16, "group": 16, "residual": 0})))
    return get_recipe("none") if name == "none" else recipe_of(name, family)


def stored(state: Any) -> list[Tensor]:
    """All that the layers of a cache store."""
    return [x for layer in state.layers if not layer.empty for x in (*layer.stored(), layer.index.index)]


def same(one: Any, other: Any) -> None:
    """Two outputs of ``generate``, and what their caches hold, are equal to the bit."""
    assert torch.equal(one.sequences, other.sequences)
    assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))
    if hasattr(other.past_key_values, "mmaccel"):
        pairs = zip(stored(one.past_key_values.mmaccel), stored(other.past_key_values.mmaccel), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def in_host_memory(state: Any) -> bool:
    """Whether all keys and values are."""
    held = [x for layer in state.layers for x in (layer.keys, layer.values) if not layer.empty and x.numel()]
    ragged = [x for layer in state.layers if layer.ragged is not None for x in (layer.ragged.keys, layer.ragged.values)]
    return all(buffer_of(x) is not None for x in (*held, *(x for x in ragged if x.numel())))


@pytest.mark.square(("family", "name", "kind"), oracle.in_turn(SQUARE, lambda _: ("image", "uneven")))
def test_two_turns_are_the_same(family: str, name: str, kind: str) -> None:
    tiny, feed = model(family), inputs(family, kind)
    words, turns = inputs(family, "text", batch=len(feed["input_ids"])), []
    for offload in (None, "host"):
        with accelerated(tiny, made(name, family), processor=zoo.processor(family), offload=offload):
            first = generate(tiny, feed, new=18)
            kept = copy.deepcopy(first)
            second = generate(tiny, follow(feed, first, words)[0], past_key_values=first.past_key_values)
            turns.append((kept, second))
            figures = tiny.mmaccel.stats()
    for with_device, with_host in zip(*turns, strict=True):
        same(with_host, with_device)
    state = turns[1][1].past_key_values.mmaccel
    assert in_host_memory(state) and figures["kv_bytes"] == held(turns[1][1].past_key_values)
    assert figures.offload["host"] + figures.offload["device"] == figures["kv_bytes"]
    assert figures.offload["host"] > 0.5 * sum(x.nbytes for layer in state.layers for x in (layer.keys, layer.values))


@pytest.mark.parametrize("name", FORMS)
def test_beams_crops_and_rows_are_the_same(name: str) -> None:
    # a bare forward that is given no mask takes padding for tokens
    feed = inputs("llava", "image", batch=2) if name == "none" else inputs("llava", "uneven")
    tiny, token, found = model("llava"), feed["input_ids"][:, -1:], []
    for offload in (None, "host"):
        with accelerated(tiny, made(name, "llava"), offload=offload), torch.no_grad():
            beams, mine, steps = generate(tiny, feed, num_beams=3), cache(), []
            steps.append(tiny(**feed, past_key_values=mine, use_cache=True).logits[:, -1])
            restore = mine.mmaccel.snapshot() if name != "none" or offload else None

            def step(mine: Any = mine, steps: list[Tensor] = steps) -> None:
                tokens = token.repeat(len(mine.layers[0].keys) // len(token), 1)
                steps.append(tiny(input_ids=tokens, past_key_values=mine, use_cache=True).logits[:, -1])

            for change in (
                lambda: mine.crop(-1),  # noqa: B023
                lambda: mine.reorder_cache(torch.tensor([1, 0])),  # noqa: B023
                lambda: mine.batch_repeat_interleave(3),  # noqa: B023
            ):
                step()
                change()
                assert not offload or in_host_memory(mine.mmaccel)
            step()
            if restore is not None and name != "none":
                restore()
                step()
            found.append((beams, steps))
    same(found[1][0], found[0][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize(
    "how", [{"lookup": True}, {"lossless": True, "lookup": True}, {"lossless": True, "draft": "self"}]
)
def test_drafts_are_the_same(how: dict[str, Any]) -> None:
    tiny, feed = model("llava"), inputs("llava", "uneven")
    found, behind = [], []
    for offload in (None, "host"):
        with accelerated(tiny, "divprune", offload=offload, **how):
            found.append(tiny.generate(**feed, max_new_tokens=24, do_sample=False))
            figures = tiny.mmaccel.stats()
            # a second turn on the same cache
            turn = tiny.generate(**feed, max_new_tokens=4, return_dict_in_generate=True)
            more, _ = follow(feed, turn, inputs("llava", "text", batch=len(feed["input_ids"])))
            behind.append(tiny.generate(**more, past_key_values=turn.past_key_values, max_new_tokens=4))
    assert torch.equal(*behind)
    assert torch.equal(*found) and figures.offload["host"] > 0 and figures.drafting["drafted"] > 0


def test_a_cache_goes_on_without() -> None:
    """A cache in host memory is continued on the device, and the other way round."""
    tiny, feed = model("llava"), inputs("llava")
    words, found = inputs("llava", "text"), []
    for before, behind in ((None, None), ("host", None), (None, "host")):
        with accelerated(tiny, "snapkv", offload=before):
            out = generate(tiny, feed)
        with accelerated(tiny, "snapkv", offload=behind):
            found.append(generate(tiny, follow(feed, out, words)[0], past_key_values=out.past_key_values))
    same(found[1], found[0])
    same(found[2], found[0])
    assert in_host_memory(found[2].past_key_values.mmaccel)


# ------------------------------------------------------------------------------------------------ some heads at a time

#: nothing but attention looks at the keys of a step; and two forms that are fetched whole
GROUPED = ("none", "divprune", "snapkv", "kivi", "dycoke-cache")  # by choice: forms


@pytest.mark.square(
    ("family", "name"),
    [(family, name) for family in FAMILIES for name in GROUPED if name == "none" or oracle.fits(name, family)],
    of="pairs",
)
@pytest.mark.square("kind", ("image", "uneven"))
@pytest.mark.square("chunk", (None, 7))
def test_groups_of_heads_are_read_as_the_whole_layer(
    family: str, name: str, kind: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, feed = model(family), inputs(family, kind)
    words, turns = inputs(family, "text", batch=len(feed["input_ids"])), []
    for group in (1 << 40, 1):
        monkeypatch.setattr(head_groups, "GROUP", group)
        with accelerated(tiny, made(name, family), processor=zoo.processor(family), offload="host", chunk=chunk):
            first = generate(tiny, feed, new=18)
            kept = copy.deepcopy(first)
            second = generate(tiny, follow(feed, first, words)[0], past_key_values=first.past_key_values)
            turns.append((kept, second))
    for whole, grouped in zip(*turns, strict=True):
        assert torch.equal(grouped.sequences, whole.sequences)
        # a merge by vectors rounds the elements at their ends otherwise
        assert gap(logits(grouped), logits(whole)) < 1e-4
        assert in_host_memory(grouped.past_key_values.mmaccel)
    if chunk is None:
        # of steps behind a prompt no bit
        same(turns[1][0], turns[0][0])


class Alive:
    """The most bytes of groups of heads that were on the device together, and the largest group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self.group = self.count = 0
        copied, groups = head_groups.HeadStore._copied, weakref.WeakSet[Any]()

        def watched(store: Any, layer: Any, heads: slice) -> Any:
            made = copied(store, layer, heads)
            for copy_ in made.copies:
                groups.add(held := _Held(copy_.nbytes))
                vars(copy_)["held"] = held
            self.count += 1
            self.group = max(self.group, sum(x.nbytes for x in made.copies))
            self.most = max(self.most, sum(held.nbytes for held in groups))
            return made

        monkeypatch.setattr(head_groups.HeadStore, "_copied", watched)


@dataclasses.dataclass(eq=False)
class _Held:
    nbytes: int


@pytest.mark.parametrize("name", ["none", "divprune"])
def test_no_more_than_two_groups_are_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits no more often, copies run beside the work, and no attention reads host memory where it is."""
    (whole, _) = moved(name, 4)
    monkeypatch.setattr(head_groups, "GROUP", 1)
    alive = Alive(monkeypatch)
    counts, figures = moved(name, 4)
    heads = zoo.model("llava").config.text_config.num_key_value_heads
    # the prompt parks its keys; each of three steps reads each head of four layers
    assert alive.count == 3 * 4 * heads and heads > 1
    assert alive.most == 2 * alive.group and alive.group < 1.5 * figures.offload["host"] / 4 / heads
    assert figures.offload["fetched"] == sum(step.moved["to device", "side"] for step in counts)
    for less, more in zip(whole, counts, strict=True):
        assert sum(more.waits.values()) == sum(less.waits.values()), more.waits - less.waits
    for step in counts[1:]:
        assert not [what for what, _ in step.remote if what == "scaled_dot_product_attention"]
    # the first group of each layer but the first is copied before the layer attends
    assert figures.offload["ahead"] == pytest.approx(figures.offload["fetched"] * 3 / 4 / heads, rel=0.02)


# ---------------------------------------------------------------------------------------------------- what is moved


def moved(name: str, depth: int, kind: str = "image") -> tuple[list[simulated.Counts], Any]:
    """The counts of a prompt and of every step on a simulated device, and the figures of the call."""
    chosen, counts = made(name, "llava"), list[simulated.Counts]()
    worker, given = prepare(zoo.processor("llava"), chosen), inputs("llava", kind)
    tiny = zoo.model("llava", num_hidden_layers=depth).requires_grad_(False)
    with simulated.machine() as gpu, accelerated(gpu.put(tiny), chosen, processor=worker, offload="host"):
        tiny.register_forward_pre_hook(lambda *_: counts.append(gpu.counts.copy()))
        tiny.generate(**gpu.put(given), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        counts.append(gpu.counts.copy())
        figures = tiny.mmaccel.stats()
    return [after.since(before) for before, after in zip(counts, counts[1:], strict=False)], figures


@pytest.mark.parametrize("name", (*FORMS, *READING))
def test_no_wait_grows_with_layers(name: str) -> None:
    """The host waits in no layer, whole layers are copied on a stream of their own, and attention over everything never reads
    host memory where it is."""
    (few, _), (many, figures) = (moved(name, depth) for depth in (4, 8))
    for less, more in zip(few, many, strict=True):
        assert sum(more.waits.values()) == sum(less.waits.values()), more.waits - less.waits
    fetched = sum(step.moved["to device", "side"] for step in many)
    assert fetched == figures.offload["fetched"]
    for step in many[1:]:
        assert not [what for what, _ in step.remote if what == "scaled_dot_product_attention"]
    # of every step all but the first layer, with its room
    assert fetched - figures.offload["ahead"] <= len(many[1:]) * 1.3 * figures.offload["host"] / 8


def test_an_index_of_heads_is_not_read_before_it_is_copied() -> None:
    """An eviction stores it, and packing reads it at once: the simulated device raises where that does not wait."""
    moved(PAGES_OF_HEADS, 4)


@pytest.mark.parametrize("name", READING)
def test_chosen_keys_alone_cross_the_bus(name: str) -> None:
    """A step moves fewer bytes than the cache has, and far fewer where a summary is rated."""
    tiny, feed = model("llava"), inputs("llava", "images")
    options = {"layer": 0, "least": 1} if name == "quest" else {}
    with accelerated(tiny, recipe_of(name, retain=0.05, **options), offload="host"):
        generate(tiny, feed, new=8)
        figures = tiny.mmaccel.stats()
    assert figures.offload["fetched"] == 0 < figures.offload["read"]
    assert figures.offload["a_step"] < figures.offload["host"] * (0.9 if name == "tokenselect" else 0.6)


# --------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed = model("llava"), inputs("llava")
    with pytest.raises(MmaccelError, match="offload='disk' is unknown; give 'host'"):
        accelerate_vlm(tiny, "snapkv", offload="disk")
    with accelerated(tiny, "none", offload="host"):
        with pytest.raises(UnsupportedError, match="offload='host' keeps the KV cache in host memory"):
            tiny.generate(**feed, use_cache=False, max_new_tokens=2)
        with pytest.raises(UnsupportedError, match="cache_implementation='static' cannot hold"):
            tiny.generate(**feed, cache_implementation="static", max_new_tokens=2)
        with pytest.raises(UnsupportedError, match="give offload='host' to accelerate_vlm"):
            tiny.generate(**feed, cache_implementation="offloaded", max_new_tokens=2)


def test_a_full_host_is_said_in_one_sentence_and_the_model_answers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed = model("llava"), inputs("llava")
    wanted = generate(tiny, feed)
    empty = torch.empty

    def full(*args: Any, **options: Any) -> Tensor:
        if "pin_memory" in options:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.")
        return empty(*args, **options)

    with accelerated(tiny, "none", offload="host"):
        with monkeypatch.context() as patch:
            patch.setattr(host.torch, "empty", full)
            with pytest.raises(MmaccelError, match="The host has no .* MiB of memory left for keys and values"):
                generate(tiny, feed)
        got = generate(tiny, feed)
    assert torch.equal(logits(got), logits(wanted))
