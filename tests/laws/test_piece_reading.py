"""Law: what a chunk of a prompt does not choose of earlier chunks is hidden from it, and what it chooses are the best keys by
the mean of its queries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import oracle
import pytest
import torch
import zoo
from laws.helpers import FAMILIES
from torch import Tensor

from mmaccel import accelerated
from mmaccel.method import ReadingPolicy
from mmaccel.method.registry import get_method
from mmaccel.runtime.cache.piece_reading import ReadByPiece

pytestmark = pytest.mark.usefixtures("no_gradients")

KINDS = ("image", "images", "video", "mixed", "uneven", "textrow")
SQUARE = oracle.in_turn(
    [(family, "tokenselect") for family in FAMILIES if oracle.fits("tokenselect", family)],
    lambda family: [kind for kind in zoo.kinds(family) if kind in KINDS],
)


@contextmanager
def watched(visual: Tensor, choices: list[tuple[int, int]]) -> Iterator[dict[int, Tensor]]:
    """By layer `[B, S, S]` bool, the keys that the queries of a prompt see; and in ``choices`` how many visual keys each chunk
    reads of how many there are before it, a row each."""
    seen: dict[int, Tensor] = {}
    original = ReadByPiece.keys_to_read

    def keys_to_read(self: ReadByPiece, layer: Any) -> Any:
        keys, piece = original(self, layer), self.split.now
        if piece is None or self.prompt is None:
            return keys
        index = self.state.layers[layer.number].index.index.long()
        rows, length = len(index), visual.shape[1]
        new, total = layer.query.shape[2], layer.key.shape[2]
        read = torch.ones(rows, total, dtype=torch.bool) if keys is None else keys.chosen.mask(total)[:, 0, 0]
        for row in range(rows):
            before = index[row, : total - new]
            rivals = (before >= 0) & visual[row, before.clamp(min=0)]
            assert read[row, total - new :].all() and read[row, : total - new][(before >= 0) & ~rivals].all()
            took = read[row, : total - new] & rivals
            choices.append((int(took.sum()), int(rivals.sum())))
            if keys is not None:
                best(layer, piece.chosen[row] >= 0, row, rivals, took)
        there = torch.zeros(rows, length + 1, dtype=torch.bool)
        there.scatter_(1, torch.where(read & (index >= 0), index, length), True)
        asked = torch.zeros(rows, length + 1, dtype=torch.bool)
        asked.scatter_(1, torch.where(piece.chosen < 0, length, piece.chosen), True)
        here = seen.setdefault(layer.number, torch.zeros(rows, length, length, dtype=torch.bool))
        here |= asked[:, :-1, None] & there[:, None, :-1]
        return keys

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadByPiece, "keys_to_read", keys_to_read)
        yield seen


def best(layer: Any, real: Tensor, row: int, rivals: Tensor, took: Tensor) -> None:
    """Check that ``took`` are those of the ``rivals`` with most votes of the mean query."""
    mean = layer.query[row][:, real].float().mean(1)
    keys = layer.key[row, :, : len(rivals)].float().repeat_interleave(len(mean) // layer.key.shape[1], dim=0)
    votes = (keys @ mean[..., None])[..., 0].masked_fill(~rivals, -torch.inf).softmax(-1).sum(0)
    if took.any() and (rivals & ~took).any():
        assert votes[took].min() >= votes[rivals & ~took].max() - 1e-5


@pytest.mark.square(("family", "method", "kind"), SQUARE, of="pairs")
@pytest.mark.square("chunk", (3, 7))
def test_what_a_chunk_does_not_choose_is_hidden_from_it(family: str, method: str, kind: str, chunk: int) -> None:
    tiny, feed = oracle.subject(family), zoo.inputs(family, kind)
    if oracle.adapter(family).latent:
        pytest.skip("keys of latents are read through a product of their own")
    forced, visual = oracle.force(family, len(feed["input_ids"])), oracle.visual(family, feed)
    what, choices = oracle.recipe(method, family, 0.3, prefill=True, layer=1), list[tuple[int, int]]()
    with (
        accelerated(tiny, what, processor=zoo.processor(family), chunk=chunk),
        watched(visual, choices) as seen,
    ):
        got = tiny(**feed, **oracle.counted(family, feed)).logits
    everything = oracle.everything(oracle.bare(family), feed)
    prompt = [seen.get(number, whole) for number, whole in enumerate(everything.prompt)]
    kept = feed["attention_mask"].bool()
    states = dict.fromkeys(oracle.adapter(family).recurrent, kept)
    wanted, _ = oracle.replay(family, feed, forced, oracle.Seen(prompt, everything.later, states))
    oracle.close(got[kept].nan_to_num(), wanted[kept].nan_to_num(), 2 * oracle.TOLERANCE)
    if not oracle.adapter(family).masks_above:
        # where tokens look ahead a picture is one chunk
        assert any(took < rivals for took, rivals in choices)


def test_prefill_is_of_tokenselect_alone() -> None:
    offered = [name for name in ("quest", "loki", "tokenselect") if get_method(name)(**options(name)).by_piece]
    assert offered == ["tokenselect"] and not get_method("tokenselect")().by_piece
    assert issubclass(get_method("quest"), ReadingPolicy)


def options(name: str) -> dict[str, Any]:
    return {"prefill": True} if name == "tokenselect" else {}


@pytest.mark.parametrize("chunk", (None, 10**6))
def test_a_prompt_in_one_piece_reads_everything(chunk: int | None) -> None:
    tiny, feed = oracle.subject("llava"), zoo.inputs("llava", "image")
    with accelerated(tiny, "none"):
        wanted = tiny(**feed).logits
    with accelerated(tiny, oracle.recipe("tokenselect", "llava", 0.3, prefill=True), chunk=chunk):
        assert torch.equal(tiny(**feed).logits, wanted)
        assert _note(tiny) == [
            f"prefill of tokenselect chose nothing: the text model read the {wanted.shape[1]} tokens of the prompt at once; "
            "give a smaller chunk, such as chunk=512"
        ]


def test_a_prompt_that_chose_says_so_by_its_chunks_alone() -> None:
    tiny, feed = oracle.subject("llava"), zoo.inputs("llava", "image")
    with accelerated(tiny, oracle.recipe("tokenselect", "llava", 0.3, prefill=True), chunk=16):
        tiny(**feed)
        assert not _note(tiny)
    with accelerated(tiny, oracle.recipe("tokenselect", "llava", 0.3)):
        tiny(**feed)
        assert not _note(tiny)


def _note(tiny: Any) -> list[str]:
    return [note for note in tiny.mmaccel.stats()["notes"] if "chose nothing" in note]
