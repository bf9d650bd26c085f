"""Sessions on a video that goes on."""

from __future__ import annotations

import gc
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
import torch
import zoo
from laws import oracle
from tail import few
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerated, get_recipe, is_accelerated
from mmaccel.families.base import slides
from mmaccel.kv.cache import CacheState
from mmaccel.kv.codecs import Codec
from mmaccel.media.files import Clip, Prompt, encode
from mmaccel.programs.streaming import VideoSession
from mmaccel.runtime.call.runs import TextInputs
from mmaccel.runtime.prompt.reduce import WritePrompt

# those with sliding windows are refused
FAMILIES = tuple(
    name for name in zoo.FAMILIES if "video" in zoo.kinds(name) and not slides(oracle.adapter(name).config)
)
families = pytest.mark.parametrize("family", FAMILIES)


def session(family: str, cap: int = 100, **options: Any) -> VideoSession:
    model = oracle.subject(family)
    return VideoSession(model, processor=zoo.processor(family), cap_tokens=cap, **{"chunk": 4, **options})


def film(family: str, frames: int, seed: int = 0) -> np.ndarray:
    _, width, height = zoo._family(family).clip
    return zoo.clip(frames, width, height, seed)


def cells(one: VideoSession) -> list[Tensor]:
    """Of every layer the frame, row and column of what it stores, and the keys."""
    out = []
    for layer in one._state.layers:
        out += [layer.index.index, *layer.stored()]
    return out


@families
def test_without_pressure_it_is_the_model(family: str) -> None:
    """One stretch under a wide cap: the answer that the bare model gives to the same prompt."""
    frames, bare = film(family, 4), oracle.bare(family)
    # at a low rate Qwen places text before the time of the last frame, a session behind it
    inputs = encode(zoo.processor(family), [Prompt("what is it?", clip=Clip(frames, [0, 1, 2, 3], 4, 8.0))])
    wanted = bare.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    one = session(family, 4096, fps=8.0)
    one.push(frames)
    text = zoo.processor(family).tokenizer.decode(wanted, skip_special_tokens=True).strip()
    assert one.ask("what is it?", 8) == text and len(text) > 1


@pytest.mark.parametrize("family", few(FAMILIES, ("qwen2_5_vl",)))
def test_the_cap_holds_and_questions_leave_no_trace(family: str) -> None:
    asked, quiet = session(family), session(family)
    for stretch in range(5):
        for one in (asked, quiet):
            one.push(film(family, 4, stretch))
            assert one.tokens() <= 100
        first = asked.ask("what is it?", 5)
        assert asked.ask("where, and why?", 9) is not None
        assert asked.ask("what is it?", 5) == first
        for ours, theirs in zip(cells(asked), cells(quiet), strict=True):
            assert torch.equal(ours, theirs)
        assert asked.nbytes() == quiet.nbytes()
    assert asked.frames == 20 and asked.tokens() > 80
    assert asked.ask("what is it?", 5) == quiet.ask("what is it?", 5)


@pytest.mark.parametrize("family", ("llava_onevision", "qwen2_5_vl", "smolvlm"))
def test_frames_are_counted_on(family: str) -> None:
    """All stretches are one clip; frames of several stretches are held at once, the newest among them, and the prefix."""
    one = session(family, 160)
    seen = []
    for stretch in range(6):
        one.push(film(family, 4, stretch))
        kinds = one._state.shared.places.grid_table[0]
        seen.append(int(kinds[:, 1].max()))
        assert set(kinds[:, 0].tolist()) == {-1, 0}
    assert seen == [seen[0] + i * (seen[0] + 1) for i in range(6)]
    for layer in one._state.layers:
        for head in layer.index.index[0].reshape(-1, len(layer.index)):
            held = one._state.shared.places.grid_table[0][head[head >= 0].long()]
            stretches = (held[:, 1][held[:, 0] >= 0] // (seen[0] + 1)).unique().tolist()
            assert len(stretches) >= 2 and stretches[-1] == 5
            assert head[: one._prefix].tolist() == list(range(one._prefix))


@pytest.mark.parametrize("family", ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni"))
def test_frames_of_later_stretches_are_as_far_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that place frames by their times: the rate of a stretch does not fall as the stream goes on."""
    one, spans = session(family, 1 << 20), []
    given = WritePrompt.before_text

    def watched(self: WritePrompt, text: TextInputs) -> None:
        given(self, text)
        positions = text.arguments["position_ids"]
        spans.append(int(positions.max() - positions[-3:, 0, -1].min()))

    monkeypatch.setattr(WritePrompt, "before_text", watched)
    for stretch in range(3):
        one.push(film(family, 4, stretch))
    assert len(set(spans)) == 1


@families
def test_a_question_reads_the_frames_that_wait(family: str) -> None:
    """Even a single one."""
    one = session(family)
    one.push(film(family, 5))
    assert one.frames == 4
    before = one._state.seen
    assert one.ask("what is it?", 2)
    assert one.frames == 5 and one._state.seen > before


@pytest.mark.parametrize("family", few(FAMILIES, ("qwen2_5_vl", "smolvlm")))
def test_forgetting_places_moves_no_position(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that goes on counting all places stores the same keys and gives the same answers."""
    short = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_omni_moe")
    cap = 30 if family == "llava_next_video" else 48 if family in short else 70
    ours, counting = session(family, cap), session(family, cap)
    for stretch in range(4):
        ours.push(film(family, 4, stretch))
        with monkeypatch.context() as patch:
            patch.setattr(CacheState, "rebase", lambda self: None)
            counting.push(film(family, 4, stretch))
    assert ours._state.seen < counting._state.seen
    for mine, theirs in zip(ours._state.layers, counting._state.layers, strict=True):
        for a, b in zip(mine.stored(), theirs.stored(), strict=True):
            assert torch.equal(a, b)
    assert ours.ask("what is it?", 5) == counting.ask("what is it?", 5)


def test_any_policy_can_follow() -> None:
    recipe = Recipe("mine", (Stage("random", 0.5), Stage("h2o", 0.5, {"recent": 20})))
    one = VideoSession(
        oracle.subject("qwen2_5_vl"), recipe, processor=zoo.processor("qwen2_5_vl"), cap_tokens=60, chunk=4
    )
    for stretch in range(4):
        one.push(film("qwen2_5_vl", 4, stretch))
        assert one.tokens() <= 60
        one.ask("what is it?", 3)
    assert one.tokens() == 60


@pytest.mark.parametrize("name", few(synthetic.offered(Codec), ("zipcache-codec", "gear")))
def test_the_cap_holds_in_bytes_whatever_packs(name: str) -> None:
    """Packed keys leave dead places in their pages, which count as no keys and take less than keys in full precision."""

    def stored(one: VideoSession) -> int:
        storages = (x.untyped_storage() for layer in one._state.layers for x in layer.tensors())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    stages = Stage("infinipot-v", 0.5), Stage(name)
    packed, plain = (session("qwen2_5_vl", 200, recipe=Recipe("p", stages[:n]), chunk=8) for n in (2, 1))
    sizes, whole = [], []
    for stretch in range(24):
        for one in (packed, plain):
            one.push(film("qwen2_5_vl", 8, stretch))
            assert one.tokens() <= 200
        sizes.append(stored(packed))
        whole.append(stored(plain))
    assert max(sizes[8:]) <= 1.05 * max(whole)
    places = packed._state.seen
    assert places <= 200 * 2 * len(packed._state.layers), "those of which a head still holds a key"


def test_the_model_is_what_it_was_between_calls() -> None:
    model = oracle.subject("qwen2_5_vl")
    with accelerated(model, "random"):
        one = session("qwen2_5_vl")
        one.push(film("qwen2_5_vl", 4))
        one.ask("what is it?", 2)
        assert model.mmaccel.recipe.name == "random"
    assert not hasattr(model, "mmaccel")


def test_an_interrupted_answer_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    one = session("qwen2_5_vl")
    one.push(film("qwen2_5_vl", 4))
    before = [tensor.clone() for tensor in cells(one)]
    first = one.ask("what is it?", 4)
    calls = []

    def stop(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = one.model.lm_head.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        one.ask("what is it?", 4)
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(before, cells(one), strict=True))
    assert one.ask("what is it?", 4) == first


def reachable(root: Any) -> tuple[int, int]:
    """Bytes of tensors and arrays, and containers, that hang on a session but not on its model or processor."""
    seen, storages, count = {id(root.model), id(root.processor)}, {}, 0
    queue = [root]
    while queue:
        thing = queue.pop()
        skipped = (type, types.ModuleType, types.FunctionType, types.CodeType, torch.nn.Module)
        if id(thing) in seen or isinstance(thing, skipped):
            continue
        seen.add(id(thing))
        count += 1
        if isinstance(thing, Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, np.ndarray):
            storages[id(thing)] = thing.nbytes
        else:
            queue.extend(gc.get_referents(thing))
    return sum(storages.values()), count


@pytest.mark.full
@pytest.mark.parametrize("family", ("qwen2_5_vl", "smolvlm"))
def test_an_hour_of_frames(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """3,600 frames, one a second, a question every ten minutes: nothing grows after the first two minutes."""
    monkeypatch.setattr(oracle.subject(family).config.get_text_config(), "max_position_embeddings", 1 << 20)
    one, stretches = session(family, 128, chunk=8), [film(family, 8, seed) for seed in range(5)]
    sizes, counts, places = [], [], []
    for stretch in range(450):
        one.push(stretches[stretch % 5])
        assert one.tokens() <= 128
        if stretch % 75 == 74:
            one.ask("what is it?", 4)
        if stretch >= 15:
            held, things = reachable(one)
            sizes.append(held)
            counts.append(things)
            places.append(one._state.seen)
    assert one.frames == 3600
    for figures in (sizes, counts, places):
        first, last = max(figures[:145]), max(figures[-145:])
        assert last <= 1.1 * first, f"grew from {first} to {last}"


def test_a_cap_below_the_sinks_and_the_newest_keys_is_refused() -> None:
    """At once, by the option and in a session; a cap that holds them is kept."""
    words = "cap=39 of snapkv is less than the keys that always stay, sinks=10 and recent=30; give a cap of at least 40"
    with pytest.raises(MmaccelError, match=words):
        get_recipe("snapkv").override(retain=0.5, sinks=10, recent=30, cap=39)
    recipe = get_recipe("snapkv").override(retain=0.5, sinks=10, recent=30)
    model, processor = zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    with pytest.raises(MmaccelError, match=words):
        VideoSession(model, recipe, processor=processor, cap_tokens=39)
    VideoSession(model, recipe, processor=processor, cap_tokens=40)


def test_what_cannot_be_meant() -> None:
    model, processor = oracle.subject("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    for options, said in (
        ({"recipe": "divprune"}, "never evicts"),
        ({"recipe": "dycoke-cache"}, "never evicts"),
        ({"chunk": 1}, "chunk must be a whole number of at least 2"),
        ({"cap_tokens": 1}, "cap_tokens must be greater than the 1 tokens"),
    ):
        with pytest.raises(MmaccelError, match=said):
            VideoSession(model, **{"processor": processor, **options})
    one = session("qwen2_5_vl")
    with pytest.raises(MmaccelError, match="push frames first"):
        one.ask("what is it?")
    with pytest.raises(MmaccelError, match="uint8"):
        one.push(np.zeros((2, 3, 8, 8), dtype=np.float32))
    one.push(film("qwen2_5_vl", 1))
    with pytest.raises(MmaccelError, match="pixels like earlier ones"):
        one.push(np.zeros((1, 20, 20, 3), dtype=np.uint8))
    windowed = oracle.subject(*[oracle.WINDOWED[1][0]], **oracle.WINDOWED[1][1])
    with pytest.raises(UnsupportedError, match="sliding windows"):
        VideoSession(windowed, processor=zoo.processor("internvl"))


# ------------------------------------------------------------------------------------- threads, and positions


def told(one: VideoSession, clip: np.ndarray) -> list[str]:
    """Answers to a question after every stretch."""
    answers = []
    for start in range(0, len(clip), 4):
        one.push(clip[start : start + 4])
        answers.append(one.ask("what is it?", 6))
    return answers


@pytest.mark.parametrize("family", few(FAMILIES, ("qwen2_5_vl",)))
def test_two_sessions_in_two_threads_answer_as_alone(family: str) -> None:
    """Each puts its recipe on the model while it works, so one waits for the other."""
    clips = [film(family, 16, seed) for seed in (1, 2)]
    wanted = [told(session(family, cap), clip) for cap, clip in zip((60, 90), clips, strict=True)]
    sessions, start = [session(family, cap) for cap in (60, 90)], threading.Barrier(2)

    def work(one: VideoSession, clip: np.ndarray) -> list[str]:
        torch.set_num_threads(1)
        start.wait()
        return told(one, clip)

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(work, sessions, clips)) == wanted
        sessions = [session(family, cap) for cap in (60, 90)]
    assert not is_accelerated(oracle.subject(family))


@pytest.mark.parametrize("family", few(FAMILIES, ("qwen2_5_vl", "smolvlm")))
def test_a_session_ends_with_the_positions_of_the_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = session(family, 60)
    one.push(film(family, 4))
    wanted = one.ask("what is it?", 4)
    config = one.model.config.get_text_config()
    left = int(one._state.seen - one._state.positions.offset.min()) + int(
        0 if one._state.positions.ahead is None else one._state.positions.ahead.max()
    )
    monkeypatch.setattr(config, "max_position_embeddings", left + 2)
    # a factor of scaled RoPE counts, and the rotary embeddings have been made with it
    rope = {name: value for name, value in (config.rope_parameters or {}).items() if name != "factor"}
    monkeypatch.setattr(config, "rope_parameters", rope)
    with pytest.raises(
        MmaccelError, match=f"used {left} of the model's {left + 2} positions, .* begin another session"
    ):
        one.ask("what is it?", 4)
    with pytest.raises(MmaccelError, match=r"of the model's .* positions"):
        one.push(film(family, 8, 1))
    monkeypatch.setattr(config, "max_position_embeddings", 4096)
    # what was refused left no trace
    assert one.ask("what is it?", 4) == wanted and one.frames == 4


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("family", "recipe"),
    few(
        [
            ("qwen2_5_vl", "infinipot-v"),
            ("qwen2_5_vl", "hermes"),
            ("smolvlm", "streammem"),
            ("internvl", Recipe("packed", (Stage("infinipot-v", 0.5), Stage("qserve")))),
        ],
        [("qwen2_5_vl", "hermes")],
    ),
)
def test_a_saved_session_goes_on(family: str, recipe: Any, tmp_path: Path) -> None:
    ours, wanted = (session(family, 120, recipe=recipe) for _ in range(2))
    for stretch in range(3):
        wanted.push(film(family, 5, stretch))
    wanted.ask("what is it?", 4)
    wanted.save(tmp_path / "stream.safetensors")
    ours.load(tmp_path / "stream.safetensors")
    for stretch in range(3, 6):
        assert (ours.frames, ours.tokens(), ours.visual_tokens) == (
            wanted.frames,
            wanted.tokens(),
            wanted.visual_tokens,
        )
        assert ours.ask("what is it?", 4) == wanted.ask("what is it?", 4)
        for one in (ours, wanted):
            one.push(film(family, 5, stretch))
    assert all(torch.equal(a, b) for a, b in zip(cells(ours), cells(wanted), strict=True))


def test_files_of_other_sessions_are_refused(tmp_path: Path) -> None:
    """In one sentence, and the session stays as it was."""
    one, file = session("qwen2_5_vl"), tmp_path / "stream.safetensors"
    with pytest.raises(MmaccelError, match="There is nothing to save; push at least 4 frames first"):
        one.save(file)
    one.push(film("qwen2_5_vl", 6))
    one.save(file)
    with pytest.raises(MmaccelError, match="Cannot write .* give another file"):
        one.save(tmp_path / "none" / "stream.safetensors")
    answer, frames = one.ask("what is it?", 4), one.frames
    others = {
        "with other options": {"cap": 60},
        "recipe 'infinipot-v', not 'hermes'": {"recipe": "hermes"},
        "cannot be loaded": {"recall": "rekv"},
    }
    for words, options in others.items():
        with pytest.raises(MmaccelError, match=words):
            session("qwen2_5_vl", **options).load(file)
    with pytest.raises(MmaccelError, match="another model"):
        session("internvl").load(file)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(MmaccelError, match="Cannot read|was changed"):
        one.load(file)
    assert one.frames == frames and one.ask("what is it?", 4) == answer
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        session("qwen2_5_vl", recall="rekv").save(file)
