"""Law: a method that shows visual tokens again changes the MLP of one layer, in uncertain forwards, as a plain program does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import zoo
from laws import helpers

from mmaccel import MmaccelError, UnsupportedError, accelerated, get_recipe
from mmaccel.families import family_of
from mmaccel.kv.visual_memory import VisualMemory

pytestmark = pytest.mark.usefixtures("no_gradients")

#: whatever the weights are, a model is less sure than this
OPTIONS = {"threshold": 0.0, "ratio": 0.5, "start": 0.0, "end": 1.0}
STEPS = 5
#: kinds of language models: DeepStack, windows, both ways, recurrent states, experts
FAMILIES = tuple(family for family in zoo.FAMILIES if oracle.fits("memvr", family))


@contextmanager
def plain(model: Any, family: str, feed: Any, official: bool = False) -> Iterator[SimpleNamespace]:
    """A bare model of one row that looks again: the formulas of the paper, in hooks."""
    known, state = family_of(model), SimpleNamespace(entropies=[], looked=0, done=False, at=-1, memory=None)
    layers, visual = list(known.text.layers), oracle.visual(family, feed)

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        state.done, state.at = False, -1

    def before(number: int, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if number == 0 and hidden.shape[1] > 1:
            state.memory = hidden[visual]
        if not 1 < number < len(layers) or state.done:
            return
        best = known.logits(known.last_norm(hidden[:, -1:]))[0, 0].sort(descending=True).values[:10]
        share = best.softmax(0)
        state.entropies.append(float(-(share * share.log()).sum() / torch.tensor(10.0).log()))
        if state.entropies[-1] > OPTIONS["threshold"]:
            state.done, state.at = True, number

    def after(number: int, args: Any, output: Any) -> Any:
        if state.at != number:
            return None
        state.looked += 1
        own, x = output[0] if isinstance(output, tuple) else output, args[0]
        looked = torch.einsum("bqd,nd,ne->bqe", x, state.memory, state.memory)
        scale = own.abs().mean(-1, keepdim=True) / looked.abs().mean(-1, keepdim=True)
        scale = own.abs().mean() / looked.abs().mean() if official else scale
        made = (1 - OPTIONS["ratio"]) * own + OPTIONS["ratio"] * scale * looked
        return (made, *output[1:]) if isinstance(output, tuple) else made

    handles = [known.text.register_forward_pre_hook(enter, with_kwargs=True)]
    for number, layer in enumerate(layers):
        mlp = layer.mlp if hasattr(layer, "mlp") else layer.feed_forward
        handles.append(
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, number=number: before(number, args, kwargs), with_kwargs=True
            )
        )
        handles.append(mlp.register_forward_hook(lambda _, args, output, number=number: after(number, args, output)))
    try:
        yield state
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.square("family", FAMILIES)
@pytest.mark.square("variant", ["exact", "official"])
def test_it_looks_again_as_a_plain_program_does(family: str, variant: str) -> None:
    feed, forced = zoo.inputs(family, "image"), oracle.force(family, 1, STEPS)
    with plain(oracle.bare(family), family, feed, variant == "official") as state:
        wanted, _ = oracle.decode(oracle.bare(family), feed, forced)
    model = oracle.subject(family)
    with accelerated(model, "memvr", variant=variant, **OPTIONS):
        got, _ = oracle.decode(model, feed, forced)
        assert model.mmaccel.stats()["retraced"] == state.looked > 0
    oracle.close(got, wanted)
    bare, _ = oracle.decode(model, feed, forced)
    oracle.apart(bare, wanted)


def test_only_uncertain_forwards_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A threshold among the entropies of these steps: some forwards look again, at other layers, and some never do."""
    feed, forced, model = zoo.inputs("llava", "image"), oracle.force("llava", 1, STEPS), oracle.subject("llava")
    monkeypatch.setitem(OPTIONS, "threshold", 2.0)
    with plain(oracle.bare("llava"), "llava", feed) as state:
        oracle.decode(oracle.bare("llava"), feed, forced)
    each = torch.tensor(state.entropies).view(STEPS, -1)
    monkeypatch.setitem(OPTIONS, "threshold", float(each.amax(1).sort().values[1:3].mean()))
    with plain(oracle.bare("llava"), "llava", feed) as state:
        wanted, _ = oracle.decode(oracle.bare("llava"), feed, forced)
    with accelerated(model, "memvr", **OPTIONS):
        got, _ = oracle.decode(model, feed, forced)
        assert 0 < model.mmaccel.stats()["retraced"] == state.looked < STEPS
    oracle.close(got, wanted)


@pytest.mark.parametrize("options", [{"threshold": 1.01}, {"ratio": 0.0}, {"shown": "dropped"}])
def test_a_model_that_never_looks_again_is_the_bare_one(options: dict[str, Any]) -> None:
    feed, model = zoo.inputs("llava", "uneven"), oracle.subject("llava")
    forced = oracle.force("llava", 2, STEPS)
    wanted, _ = oracle.decode(model, feed, forced)
    with accelerated(model, "memvr", **{**OPTIONS, **options}):
        got, _ = oracle.decode(model, feed, forced)
    assert torch.equal(got, wanted)


@pytest.mark.square("family", FAMILIES)
@pytest.mark.square("variant", ["exact", "official"])
def test_a_row_of_a_batch_looks_again_as_it_does_alone(family: str, variant: str) -> None:
    """Rows of other lengths, with other pictures or none."""
    kind = "uneven" if variant == "exact" else "textrow"
    feed, model = zoo.inputs(family, kind), oracle.subject(family)
    forced = oracle.force(family, len(feed["input_ids"]), STEPS)
    with accelerated(model, ["divprune", "memvr"], retain=0.4, variant=variant, **OPTIONS):
        got, _ = oracle.decode(model, feed, forced)
        for row in range(len(forced)):
            own = zoo.single(family, feed, row)
            alone, _ = oracle.decode(model, own, forced[row : row + 1])
            assert bool(model.mmaccel.stats()["retraced"]) == bool(oracle.visual(family, own).any())
            # the products of a recurrent state follow one from another, and what was rounded grows on the way
            tolerance = 4 * oracle.TOLERANCE if oracle.adapter(family).stateful else oracle.TOLERANCE
            oracle.close(got[row : row + 1], alone, tolerance)


def memory_of(cache: Any) -> VisualMemory:
    memory = cache.mmaccel.shared.memory(VisualMemory)
    assert memory is not None
    return memory


@pytest.mark.parametrize("name", ["divprune", "fastv", "tome"])
def test_what_was_dropped_is_known(name: str) -> None:
    """Whichever stage dropped it, before or inside the language model; and it is shown as it entered the prompt."""
    feed, model = zoo.inputs("llava", "uneven"), oracle.subject("llava")
    given = oracle.at_the_door(oracle.bare("llava"), feed)["inputs_embeds"]
    with accelerated(model, [name, "memvr"], retain=0.4, shown="dropped", **OPTIONS):
        cache = helpers.generate(model, feed, new=2).past_key_values
        kept, stats = model.mmaccel.reduction.kept, model.mmaccel.stats()
    memory, visual = memory_of(cache), oracle.visual("llava", feed)
    assert stats["retraced"] > 0
    for row in range(len(visual)):
        real = memory.places[row] >= 0
        at = memory.places[row][real].long()
        assert torch.equal(at, visual[row].nonzero()[:, 0])
        assert torch.equal(memory.dropped[row][real], ~kept[row][at]) and memory.dropped[row].any()
        if name != "tome":
            assert torch.equal(memory.features[row][real], given[row][at])
    assert {*map(id, memory.tensors())} <= {*map(id, cache.mmaccel.shared.tensors())}


def test_dropped_tokens_alone_are_another_memory() -> None:
    feed, model, forced = zoo.inputs("llava", "image"), oracle.subject("llava"), oracle.force("llava", 1, STEPS)
    made = {}
    for shown in ("all", "dropped"):
        with accelerated(model, ["divprune", "memvr"], retain=0.4, shown=shown, **OPTIONS):
            made[shown], _ = oracle.decode(model, feed, forced)
    oracle.apart(made["all"], made["dropped"])


def test_pictures_of_a_conversation_are_shown_together() -> None:
    """A second turn adds its own; what is cropped, or stored nowhere after a recount, is forgotten; copies go their own way."""
    feed, model = zoo.inputs("llava", "image"), oracle.subject("llava")
    size = int(oracle.visual("llava", feed).sum())
    with accelerated(model, ["divprune", "memvr"], retain=0.4, **OPTIONS):
        first = helpers.generate(model, feed)
        second, _ = helpers.follow(feed, first, zoo.inputs("llava", "image", seed=1))
        out = helpers.generate(model, second, past_key_values=first.past_key_values)
        cache, memory = out.past_key_values, memory_of(out.past_key_values)
        assert int((memory.places >= 0).sum()) > size and memory.places[0].diff().min() > 0
        restore, seen = cache.mmaccel.snapshot(), feed["input_ids"].shape[1]
        cache.crop(seen - cache.get_seq_length())
        assert int((memory_of(cache).places >= 0).sum()) == size
        restore()
        cache.mmaccel.rebase()
        left = memory_of(cache)
        assert left.places.shape == left.dropped.shape == left.features.shape[:2]
        assert int((left.places >= 0).sum()) == int((~memory.dropped).sum()) and not left.dropped.any()


def test_beams_look_again() -> None:
    """The best beam is scored by what a call with its tokens gives."""
    feed, model = zoo.inputs("llava", "image"), oracle.subject("llava")
    with accelerated(model, ["divprune", "memvr"], retain=0.4, **OPTIONS):
        beams = helpers.generate(model, feed, new=STEPS, num_beams=3, min_new_tokens=STEPS)
        tokens, ways = beams.sequences[:, feed["input_ids"].shape[1] :], beams.beam_indices[:, :STEPS]
        got = helpers.logits(beams)[ways, torch.arange(STEPS)]
        oracle.close(got, oracle.decode(model, feed, tokens)[0])


# ---------------------------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        (["memvr", "memvr"], {}, "both would change the MLP"),
        (["lazyllm-tokens", "memvr"], {"retain": 0.5}, "would drop, pack or change"),
        ("memvr", {"chunk": 8}, "changes all tokens of a prompt"),
        ("memvr", {"start": 2, "end": 3}, "give layers further apart"),
        ("memvr", {"start": 1.5}, "`start` of memvr must be"),
        ("memvr", {"retain": 0.5}, "has no budget"),
    ],
)
def test_what_is_refused(recipe: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(MmaccelError, match=said), accelerated(oracle.subject("llava"), recipe, **options):
        pass


def test_assistants_are_refused_and_drafts_are_off() -> None:
    feed, model = zoo.inputs("llava", "image"), oracle.subject("llava")
    with (
        accelerated(model, "memvr", **OPTIONS),
        pytest.raises(UnsupportedError, match="Assisted decoding"),
    ):
        model.generate(**feed, max_new_tokens=4, prompt_lookup_num_tokens=2)
    with accelerated(model, "memvr", lookup=True, **OPTIONS):
        model.generate(**feed, max_new_tokens=4, do_sample=False)
        stats = model.mmaccel.stats()
    assert any("drafts are off: memvr" in note for note in stats["notes"]) or not stats["drafting"].get("drafted")


def test_layers_that_are_read_out() -> None:
    """Strictly between, and never the last; shares find a layer in every depth."""
    method = get_recipe("memvr").build()[0][1]
    assert list(method.readouts(32)) == list(range(6, 16))
    assert all(len(method.readouts(depth)) and max(method.readouts(depth)) < depth - 1 for depth in range(2, 60))
    method = get_recipe("memvr", start=3, end=6).build()[0][1]
    assert list(method.readouts(8)) == [4, 5] and list(method.readouts(6)) == [4] and not method.readouts(5)
