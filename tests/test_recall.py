"""Sessions that park frames and bring them back."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch
from laws import oracle
from tail import few
from test_sessions import disturbed, frozen
from test_streaming import FAMILIES, film, session
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError
from mmaccel.kv import parked
from mmaccel.kv.index import KeyIndex
from mmaccel.method import RecallPolicy
from mmaccel.method.registry import methods
from mmaccel.programs.streaming import VideoSession
from mmaccel.runtime.cache import recall
from mmaccel.runtime.call import readers

POLICIES = list(synthetic.offered(RecallPolicy))
#: those that give back the bits that were parked
EXACT = [name for name in POLICIES if methods()[name].pack is RecallPolicy.pack]
MOVABLE = tuple(name for name in FAMILIES if oracle.adapter(name).halves)
QUESTION = "what is it?"


def tight(family: str) -> int:
    """A cap that holds one stretch of four frames and some more."""
    one = session(family, 4096)
    one.push(film(family, 4))
    return int(one.tokens() * 1.4)


def whole(name: str, **options: Any) -> Stage:
    """A policy that brings back all frames."""
    return Stage(name, options={"frames": 10**6, **options})


def logits_of(one: VideoSession, steps: int = 4) -> Tensor:
    """The logits behind a question and behind the tokens of its answer, ``[steps, V]``."""
    seen: list[Tensor] = []
    handle = one.model.register_forward_hook(lambda module, args, out: seen.append(out.logits[0, -1]))
    try:
        one.ask(QUESTION, steps)
    finally:
        handle.remove()
    return torch.stack(seen[-steps:])


@contextmanager
def hiding(places: set[int]) -> Iterator[None]:
    """No query sees the keys at these places."""
    given = KeyIndex.mask

    def mask(self: KeyIndex, queries: Tensor, window: int | None, groups: Tensor | None = None) -> Tensor:
        visible = given(self, queries, window, groups)
        if visible is None:
            visible = self.by_head[:, :, None] <= queries[:, None, :, None]
        gone = torch.tensor(sorted(places) or [-2])
        return visible & ~torch.isin(self.by_head, gone)[:, :, None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyIndex, "mask", mask)
        # what reads earlier keys without a mask would see them
        patch.setattr(readers, "FEW_QUERIES", 1 << 20)
        yield


# ------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("name", few(EXACT, ("rekv",)))
@pytest.mark.parametrize("family", few(MOVABLE, ("qwen2_5_vl", "llava_onevision")))
def test_all_frames_recalled_all_the_time_are_a_session_without_a_cap(family: str, name: str) -> None:
    """Stretches and questions see every earlier frame."""
    ours = session(family, tight(family), recall=whole(name, while_reading=True))
    wanted = session(family, 1 << 20)
    for stretch in range(4):
        for one in (ours, wanted):
            one.push(film(family, 4, stretch))
        torch.testing.assert_close(logits_of(ours), logits_of(wanted), atol=2e-4, rtol=2e-4)
    assert ours.parked >= 8 and ours.recalled == list(range(ours.parked))


@pytest.mark.parametrize("family", few(MOVABLE, ("qwen2_5_vl", "smolvlm")))
def test_leaving_is_hiding_until_a_question_recalls(family: str) -> None:
    """A replay in a session without a cap, in which stretches do not see what was parked, and the question does."""
    ours = session(family, tight(family), recall=whole("rekv", contiguous=False))
    replay = session(family, 1 << 20, recall=whole("rekv", contiguous=False))
    gone: set[int] = set()
    for stretch in range(4):
        ours.push(film(family, 4, stretch))
        with hiding(gone):
            replay.push(film(family, 4, stretch))
        memory = replay._memory
        assert memory is not None
        gone = set(torch.isin(memory.places, torch.arange(len(ours._memory.parked))).nonzero()[:, 0].tolist())  # type: ignore[union-attr]
    assert gone and ours.parked
    torch.testing.assert_close(logits_of(ours), logits_of(replay), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", few(MOVABLE, ("qwen2_5_vl", "internvl")))
def test_recalled_keys_are_the_bits_that_were_parked(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stretches saw all frames, so that a session without a cap has the same keys."""
    ours, wanted = session(family, tight(family), recall=whole("rekv")), session(family, 1 << 20)
    for stretch in range(2):
        for one in (ours, wanted):
            one.push(film(family, 4, stretch))
    assert ours.parked
    seen: list[tuple[Tensor, Tensor]] = []
    finish = recall.AskFrames.finish

    def watched(self: recall.AskFrames) -> None:
        seen.extend((layer.keys.clone(), layer.values.clone()) for layer in self.state.layers)
        finish(self)

    monkeypatch.setattr(recall.AskFrames, "finish", watched)
    assert ours.ask(QUESTION, 4) == wanted.ask(QUESTION, 4)
    for (keys, values), layer in zip(seen, wanted._state.layers, strict=True):
        held = layer.stored()
        size = held[0].shape[2]
        assert torch.equal(keys[:, :, :size], held[0]) and torch.equal(values[:, :, :size], held[1])


@pytest.mark.parametrize(
    "family", ("llava_onevision", "qwen2_5_vl", "internvl")
)  # by choice: without times between frames
def test_keys_move_as_rope_moves_them(family: str) -> None:
    """The first layer's keys of a stretch that was read later are those of the same stretch read first, turned; without RoPE
    their means are the same."""
    first, later = (session(family, 1 << 20, recall="rekv") for _ in range(2))
    later.push(film(family, 4, 1))
    for one in (first, later):
        one.push(film(family, 4))
    ours, theirs = first._memory, later._memory
    assert ours is not None and theirs is not None
    count = len(ours.seen)
    for a, b in zip(ours.seen, theirs.seen[count:], strict=True):
        torch.testing.assert_close(a.summaries[0], b.summaries[0], atol=1e-5, rtol=1e-4)
    with first._accelerated() as model:
        plan = model.mmaccel.plan
        forward = type("Forward", (), {"plan": plan, "device": torch.device("cpu")})()
        run = recall.RecallRun(forward, methods()["rekv"](), first._state, ours)  # type: ignore[arg-type]
        keys = first._state.layers[0].keys[:, :, ours.prefix :]
        apart = theirs.begins[1] - ours.begins[0]
        turned = run._turned(keys, [apart] * keys.shape[2])
    torch.testing.assert_close(turned, later._state.layers[0].keys[:, :, -keys.shape[2] :], atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------ what it holds


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", few(MOVABLE, ("qwen2_5_vl",)))
def test_the_device_holds_the_same_however_long_it_goes_on(family: str, name: str) -> None:
    cap = tight(family)
    one = session(family, cap, recall=Stage(name, options={"frames": 2}))
    sizes, host = [], []
    for stretch in range(8):
        one.push(film(family, 4, stretch))
        assert one.tokens() <= cap
        sizes.append(one.nbytes())
        host.append(one.parked_bytes())
        assert one.ask(QUESTION, 3) is not None and one.nbytes() == sizes[-1]
    assert len(set(sizes[3:])) == 1 and len({b - a for a, b in zip(host[3:], host[4:], strict=False)}) == 1
    assert one.parked > 20 and 0 < len(one.recalled) < one.parked


def test_questions_leave_no_trace_and_recall_their_own_frames() -> None:
    asked, quiet = (session("qwen2_5_vl", 60, recall=Stage("rekv", options={"frames": 2})) for _ in range(2))
    for stretch in range(6):
        for one in (asked, quiet):
            one.push(film("qwen2_5_vl", 4, stretch))
        first = asked.ask(QUESTION, 4), asked.recalled
        second = asked.ask("Where did the small red circle go? Count them, then name the last one.", 4), asked.recalled
        assert (asked.ask(QUESTION, 4), asked.recalled) == first
    assert first[1] and second[1] != first[1]
    assert frozen(asked._cache) == frozen(quiet._cache)


def test_a_stream_goes_on_beyond_the_positions_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys on the device move back, and the answers are those of a model with more positions."""
    ours, wanted = (session("qwen2_5_vl", 60, recall="rekv") for _ in range(2))
    for stretch in range(10):
        wanted.push(film("qwen2_5_vl", 4, stretch))
        with monkeypatch.context() as patch:
            patch.setattr("mmaccel.programs.streaming.position_limit", lambda model: 50)
            ours.push(film("qwen2_5_vl", 4, stretch))
    assert ours._memory.begins[-1] < 50 < wanted._memory.begins[-1]  # type: ignore[union-attr]
    ours._memory.limit = None  # type: ignore[union-attr]
    torch.testing.assert_close(logits_of(ours), logits_of(wanted), atol=2e-4, rtol=2e-4)
    ours._memory.limit = 50  # type: ignore[union-attr]
    with pytest.raises(MmaccelError, match=r"newest frames and \d+ recalled ones take \d+ of the model's 50 positions"):
        ours.ask(QUESTION, 4)


def test_sessions_of_one_model_in_threads() -> None:
    wanted, found = [], {}
    for seed in range(3):
        one = session("qwen2_5_vl", 60, recall="rekv")
        for stretch in range(4):
            one.push(film("qwen2_5_vl", 4, 10 * seed + stretch))
        wanted.append((one.ask(QUESTION, 6), one.recalled))
    sessions = [session("qwen2_5_vl", 60, recall="rekv") for _ in range(3)]
    for one in sessions:
        one.model = sessions[0].model

    def follow(seed: int) -> None:
        for stretch in range(4):
            sessions[seed].push(film("qwen2_5_vl", 4, 10 * seed + stretch))
        found[seed] = sessions[seed].ask(QUESTION, 6), sessions[seed].recalled

    threads = [threading.Thread(target=follow, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed] for seed in range(3)] == wanted


@pytest.mark.parametrize(
    "recipe", (None, Recipe("tokens", (Stage("divprune", 0.5), Stage("fastv", 0.4, {"layer": 3}))))
)
def test_recipes_that_leave_the_cache_alone(recipe: Recipe | None) -> None:
    one = session("qwen2_5_vl", 60, recipe=recipe, recall="rekv")
    for stretch in range(5):
        one.push(film("qwen2_5_vl", 4, stretch))
    assert one.ask(QUESTION, 3) is not None and one.parked and one.tokens() <= 60


# ------------------------------------------------------------------------------------------------------ faults


@pytest.mark.full
@pytest.mark.parametrize("name", POLICIES)
def test_a_fault_anywhere_leaves_no_trace(name: str) -> None:
    passed = disturbed("qwen2_5_vl", None, few=True, recall=name)
    assert passed["park"] and passed["rebase"]


def test_a_folder_holds_what_host_memory_would(tmp_path: Path) -> None:
    ours, wanted = session("qwen2_5_vl", 60, recall="rekv", park=tmp_path), session("qwen2_5_vl", 60, recall="rekv")
    for stretch in range(4):
        for one in (ours, wanted):
            one.push(film("qwen2_5_vl", 4, stretch))
        assert ours.ask(QUESTION, 5) == wanted.ask(QUESTION, 5) and ours.recalled == wanted.recalled
    assert ours.parked_bytes() == wanted.parked_bytes() > 0 and ours.nbytes() == wanted.nbytes()
    assert not list(tmp_path.iterdir()), "a file without a name"


@pytest.mark.parametrize(
    "error", (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError("no"))
)
def test_a_full_disk_loses_nothing(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, wanted = session("qwen2_5_vl", 60, recall="rekv", park=tmp_path), session("qwen2_5_vl", 60, recall="rekv")
    for stretch in range(3):
        for one in (ours, wanted):
            one.push(film("qwen2_5_vl", 4, stretch))
    state, size, write = frozen(vars(ours)), length(ours), parked.content_of
    count = 0

    def fails(x: Tensor) -> memoryview:
        nonlocal count
        count += 1
        if count == 6:
            raise error
        return write(x)

    with monkeypatch.context() as patch, pytest.raises(BaseException) as caught:
        patch.setattr(parked, "content_of", fails)
        ours.push(film("qwen2_5_vl", 4, 3))
    if isinstance(error, Exception):
        assert isinstance(caught.value, MmaccelError) and "cannot take more frames" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert count == 6 and length(ours) == size and frozen(vars(ours)) == state
    for one in (ours, wanted):
        one.push(film("qwen2_5_vl", 4, 3))
    assert ours.ask(QUESTION, 5) == wanted.ask(QUESTION, 5) and ours.parked_bytes() == length(ours)


def length(one: VideoSession) -> int:
    """Bytes of the file with parked frames."""
    return os.fstat(one._file._file.fileno()).st_size  # type: ignore[union-attr]


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from test_streaming import film, session
one = session("qwen2_5_vl", 60, recall="rekv", park={folder!r})
for stretch in range(4):
    one.push(film("qwen2_5_vl", 4, stretch))
print(one.parked, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    """No handler of Python runs."""
    words = KILLED.format(paths=[str(Path(__file__).parent)], folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert int(done.stdout) > 0 and done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    one = session("qwen2_5_vl", 60, recall="rekv", park=tmp_path)
    for stretch in range(3):
        one.push(film("qwen2_5_vl", 4, stretch))
    state = frozen(vars(one))
    one._file._file.truncate(10)  # type: ignore[union-attr]
    with pytest.raises(MmaccelError, match="A parked frame cannot be read"):
        one.ask(QUESTION)
    assert frozen(vars(one)) == state


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recall": "knorm"}, "'knorm' recalls no frames; use one of "),
        ({"recall": "rekw"}, "no method 'rekw'"),
        ({"recall": 7}, "takes the name of a method such as 'rekv', or a Stage with one, got 7"),
        ({"recall": Stage("rekv", options={"frames": 0})}, "frames"),
        ({"recall": "rekv", "recipe": "infinipot-v"}, "changes the cache"),
        ({"recall": "rekv", "recipe": "kivi"}, "changes the cache"),
        ({"recall": "rekv", "park": "/no/such/folder"}, "is not a folder that can be written to"),
        ({"recall": "rekv", "park": None}, "park= is 'host' or a folder"),
        ({"park": "/tmp"}, "goes with recall="),
    ],
)
def test_what_is_no_recall(options: dict[str, Any], said: str) -> None:
    with pytest.raises(MmaccelError, match=said):
        session("qwen2_5_vl", **options)


def test_a_cap_below_the_beginning_and_one_frame() -> None:
    one = session("qwen2_5_vl", 12, recall="rekv")
    state = frozen(vars(one))
    for _ in range(2):
        with pytest.raises(MmaccelError, match=r"cap_tokens must be at least \d+, the tokens of .*, got 12\."):
            one.push(film("qwen2_5_vl", 4))
        assert frozen(vars(one)) == state


def test_models_whose_keys_cannot_be_moved() -> None:
    fixed = [name for name in FAMILIES if name not in MOVABLE]
    assert fixed
    for family in fixed:
        with pytest.raises(
            UnsupportedError, match="cannot be moved to other positions; leave out recall=|sliding windows"
        ):
            session(family, recall="rekv")
