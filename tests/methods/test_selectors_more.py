"""Further selectors against their definitions, on cases small enough to check by hand: DART, FasterVLM, HiPrune, VASparse,
VisionTrim, VFlowOpt, token-level correlation, QG-VTC, representation shift."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from batches import dense
from test_cdpruner import clip_folder
from torch import Tensor

from mmaccel import MmaccelError, accelerated
from mmaccel.core.reduction import Reduction
from mmaccel.families import family_of
from mmaccel.families.text import TextTower
from mmaccel.layers.dart import DART
from mmaccel.layers.vasparse import VASparse
from mmaccel.merging.qg_vtc import QGVTC
from mmaccel.merging.vflowopt import VFlowOptMerge
from mmaccel.method import LayerAttention, TokenBatch
from mmaccel.pruning.fastervlm import FasterVLM
from mmaccel.pruning.hiprune import HiPrune
from mmaccel.pruning.representation_shift import RepresentationShift
from mmaccel.pruning.tokencorr import TokenCorr, count_similar
from mmaccel.pruning.visiontrim import VisionTrim, complements
from mmaccel.runtime.tower.taps import received_attention


def one_unit(features: Tensor, /, grid: tuple[int, int, int] | None = None, **signals: Tensor) -> TokenBatch:
    """A batch of one unit, of a ``grid`` or without cells."""
    n = len(features)
    cells = torch.full((n, 3), -1)
    if grid is not None:
        cells = torch.cartesian_prod(*map(torch.arange, grid))
    return TokenBatch(
        features=features[None],
        valid=torch.ones(1, n, dtype=torch.bool),
        cells=cells[None],
        grid=torch.tensor([grid or (1, 1, n)]),
        segment=torch.zeros(1, n, dtype=torch.long),
        signals={name: value[None] for name, value in signals.items()},
    )


def kept(method, tokens: TokenBatch, count: int) -> list[int]:
    return method.reduce(tokens, torch.tensor([count])).kept[0].nonzero()[:, 0].tolist()


def directions(*degrees: float) -> Tensor:
    """Unit vectors in a plane."""
    angle = torch.deg2rad(torch.tensor(degrees))
    return torch.stack([angle.cos(), angle.sin()], -1)


# --- DART -------------------------------------------------------------------------------------------------------------
def looked_at(norms: list[float], question: Tensor, spoken: list[float], *degrees: float) -> TokenBatch:
    tokens = one_unit(directions(*degrees), key_norm=torch.tensor(norms))
    return replace(
        tokens,
        question=question[None],
        question_valid=torch.ones(1, len(question), dtype=torch.bool),
        question_signals={"key_norm": torch.tensor([spoken])},
    )


def test_dart_keeps_what_is_least_like_its_pivots() -> None:
    # slot 1 is the visual pivot; the word at 170 degrees has the larger norm
    tokens = looked_at([1, 9, 2, 3, 4], directions(90, 170), [1.0, 5.0], 0, 10, 95, 170, 185)
    method = DART(image_pivots=1, text_pivots=1)
    # the pivot at 10 degrees picks 185 (cosine -1 nearly), the word at 170 picks 0
    assert kept(method, tokens, 3) == [0, 1, 4]
    # one more token for the first pivot: 170
    assert kept(method, tokens, 4) == [0, 1, 3, 4]
    assert kept(method, tokens, 1) == [1]
    # without words all are the visual pivot's: 185, then 170
    assert kept(DART(image_pivots=1, text_pivots=0), tokens, 3) == [1, 3, 4]


def test_dart_counts_as_the_program() -> None:
    assert DART().official_count(128 / 576, 576) == 4 + 8 * 16
    assert DART().official_count(1.0, 10) == 10
    with pytest.raises(MmaccelError, match="image_pivots"):
        DART(image_pivots=0)


def test_dart_looks_at_keys_of_all_heads() -> None:
    key = torch.tensor([[[[1.0, -2.0], [3.0, 0.0]], [[0.5, 0.5], [-1.0, 1.0]]]])
    attention = LayerAttention(key, key, None, 1.0, torch.ones(1, 2, dtype=torch.bool))
    assert DART().by("official").observe(attention)["key_norm"].tolist() == [[4.0, 5.0]]
    expected = torch.tensor([[5**0.5 + 0.5**0.5, 3 + 2**0.5]])
    torch.testing.assert_close(DART().observe(attention)["key_norm"], expected)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_dart_is_shown_the_prompt_behind_the_last_norm(family: str, monkeypatch) -> None:
    """Features, question and the norms of its keys stand at the places of the prompt, also in a padded batch."""
    model, seen = zoo.model(family), []
    text = family_of(model).text
    hidden: list[Tensor] = []
    given = zoo.inputs(family, "uneven")

    inner = DART.reduce

    def spied(self, tokens, count):
        seen.append(tokens)
        return inner(self, tokens, count)

    monkeypatch.setattr(DART, "reduce", spied)
    layer = 3 if family == "qwen3_vl" else 2
    keys: list[Tensor] = []
    spot = text.layers[layer].register_forward_pre_hook(
        lambda module, args, kwargs: hidden.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    look = DART.observe

    def looked(self, attention):
        keys.append(attention.key)
        return look(self, attention)

    monkeypatch.setattr(DART, "observe", looked)
    with torch.no_grad():
        model(**given)
        spot.remove()
        with accelerated(model, "dart", retain=0.5, layer=layer):
            model(**given)
    spot.remove()
    (tokens,), (key,) = seen, keys
    normed, ids = text.norm(hidden[0]), given["input_ids"]
    visual = family_of(model).visual(ids)
    norms = torch.hypot(*key.float().chunk(2, -1)).sum((1, 3))
    rows = visual.any(1).nonzero()[:, 0].tolist()
    assert len(tokens.valid) >= len(rows)
    for unit in range(len(tokens.valid)):
        mine = tokens.features[unit, tokens.valid[unit]]
        row = next(r for r in rows if torch.isclose(normed[r], mine[0], atol=1e-5).all(-1).any())
        after = int(visual[row].nonzero().max()) + 1
        words = tokens.question[unit, tokens.question_valid[unit]]
        torch.testing.assert_close(words, normed[row, after:], rtol=1e-4, atol=1e-5)
        spoken = tokens.question_signals["key_norm"][unit, tokens.question_valid[unit]]
        torch.testing.assert_close(spoken, norms[row, after:], rtol=1e-4, atol=1e-5)
        own = tokens.signals["key_norm"][unit, tokens.valid[unit]]
        assert torch.isin(own, norms[row, visual[row]]).all()


# --- FasterVLM, VASparse ----------------------------------------------------------------------------------------------
def test_fastervlm_takes_the_most_attended() -> None:
    tokens = one_unit(torch.zeros(5, 1), cls_attention=torch.tensor([[0.1, 0.4, torch.nan, 0.2, 0.4]]))
    assert kept(FasterVLM(query="cls"), tokens, 2) == [1, 4]
    assert kept(FasterVLM(query="cls"), tokens, 5) == [0, 1, 2, 3, 4]


def test_vasparse_averages_over_all_queries_and_heads() -> None:
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 7, 4, generator=random) for heads in (4, 2))
    seen = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7).clone()
    # the second row begins with two tokens of padding
    seen[1, :, :, :2], seen[1, :, :2] = False, False
    attention = LayerAttention(query, key, seen, 0.5, torch.ones(2, 7, dtype=torch.bool))
    full = attention.attention(0, 7).nan_to_num(0.0)
    mean = full.mean(1).sum(1) / torch.tensor([[7], [5]])
    torch.testing.assert_close(VASparse().observe(attention)["received_mean"], mean)
    assert VASparse().official_count(0.5, 7) == 3 and VASparse().official_count(1.0, 7) == 6


# --- HiPrune ----------------------------------------------------------------------------------------------------------
def test_hiprune_takes_anchors_their_neighbours_and_registers() -> None:
    middle, deep = torch.zeros(12), torch.arange(12) / 100
    middle[3] = 1.0
    tokens = one_unit(torch.zeros(12, 1), (1, 3, 4), received_attention=torch.stack([middle, deep]))
    # one anchor, the right end of the upper row: beside it 2, below it 7
    method = HiPrune(alpha=1.0)
    assert kept(method, tokens, 5) == [2, 3, 7, 10, 11]
    # the program wraps to the next row, and a place above the picture is its first
    official = HiPrune(alpha=1.0).by("official")
    assert kept(official, tokens, 5) == [0, 2, 3, 4, 7]
    # too small a budget for all buffers of an anchor amid others: it stays, and those that the deep layer attends to
    amid = replace(tokens, signals={"received_attention": torch.stack([middle.roll(2), deep])[None]})
    assert kept(method, amid, 3) == [5, 6, 9]
    assert HiPrune().official_count(0.334, 576) == 192


def test_hiprune_neighbours_are_of_the_same_frame_and_still_there() -> None:
    middle, deep = torch.zeros(8), torch.zeros(8)
    middle[3] = 1.0
    tokens = one_unit(torch.zeros(8, 1), (2, 2, 2), received_attention=torch.stack([middle, deep]))
    assert kept(HiPrune(alpha=1.0), tokens, 4) == [0, 1, 2, 3]
    there = torch.tensor([True, False, True, True, True, True, True, True])
    thin = replace(
        tokens,
        features=tokens.features[:, there],
        valid=tokens.valid[:, there],
        cells=tokens.cells[:, there],
        segment=tokens.segment[:, there],
        tile=tokens.tile[:, there],
        signals={"received_attention": tokens.signals["received_attention"][..., there]},
    )
    assert kept(HiPrune(alpha=1.0), thin, 3) == [0, 1, 2]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_share_of_the_tower_is_a_layer(family: str) -> None:
    made = family_of(zoo.model(family))
    depth = len(made.tower_layers(made.towers()[0]))
    assert made.tap_layer(0.0) == made.merging_layers()[0] and made.tap_layer(0.99) == made.merging_layers()[-1]
    wished = int(0.5 * depth + 0.5)
    assert abs(made.tap_layer(0.5) - wished) == min(abs(layer - wished) for layer in made.merging_layers())


# --- VisionTrim -------------------------------------------------------------------------------------------------------
def test_visiontrim_merges_three_times_to_the_target_that_says_the_same() -> None:
    x = directions(0, 90, 10, 20, 80)
    words = directions(0, 90)[None]
    tokens = replace(one_unit(x), question=words, question_valid=torch.ones(1, 2, dtype=torch.bool))
    # 10 and 20 degrees have the largest sum of cosines with both words
    target, links = complements(x[None], tokens, torch.tensor([[True, True, True, True, False]]), torch.tensor([2]))
    assert target[0].nonzero()[:, 0].tolist() == [2, 3] and links is not None
    weight = dense(Reduction(target, tokens.valid, links))[0]
    # with two orthogonal words agreement is the cosine: 0 is nearest to 10 degrees at first, and 90 to 20
    assert weight[2].tolist() == [3.0, 0.0, 1.0, 0.0, 0.0]
    assert weight[3].tolist() == [0.0, 3.0, 0.0, 1.0, 0.0]


def _attended(x: Tensor, words: Tensor) -> TokenBatch:
    attention, n = torch.arange(len(x)).float()[None], len(x)
    signals = {"cls_attention": attention, "received_attention": attention, "features": x[None]}
    return replace(
        one_unit(x, (1, 1, n), **signals),
        question=words,
        question_valid=torch.ones(words.shape[:2], dtype=torch.bool),
    )


def test_visiontrim_shares_its_budget() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(20, 6, generator=random)
    tokens = _attended(x, torch.randn(1, 3, 6, generator=random))
    for share, merged in ((0.25, 2), (3, 3), (0, 0), (1.0, 8)):
        made = VisionTrim(query="cls", complement=share).reduce(tokens, torch.tensor([8]))
        own = made.full_links()
        taking = {slot for slot, source in zip(own.slot.tolist(), own.source.tolist(), strict=True) if slot != source}
        assert int(made.kept.sum()) == 8 and len(taking) <= merged
        assert (len(taking) > 0) == (merged > 0)
    for wrong in ({"complement": 1.5}, {"complement": True}):
        with pytest.raises(MmaccelError):
            VisionTrim(**wrong)


def test_attention_from_the_other_patches() -> None:
    random = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 3, 1100, 4, generator=random).unbind(0)
    full = (query @ key.mT).softmax(-1).mean(1)[:, 1:]
    full.diagonal(1, 1, 2).zero_()
    torch.testing.assert_close(received_attention(query[:, :, 1:], key, None, 1.0, first=1), full.sum(1) / 1098)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["transformers", "open_clip"])
def test_a_text_tower_says_every_word(kind: str, tmp_path: Path) -> None:
    """The last token of a text is what the tower makes of the whole."""
    tower = TextTower.load(str(clip_folder(kind, tmp_path, 32)))
    text = "red cat"
    words, there = tower.embed([text, ""], words=True)
    whole, _ = tower.embed([text])
    assert words.shape[1] == int(there[0].sum()) > 1 and not there[1].any()
    assert torch.isclose(words[0], whole[0, 0], atol=1e-5).all(-1).any()


# --- VFlowOpt ---------------------------------------------------------------------------------------------------------
def test_vflowopt_recycles_what_it_drops_of_a_cell() -> None:
    score = torch.tensor([[0.8, 0.1, 0.2, 0.9], [0.3, 0.7, 0.6, 0.4]]).flatten()
    tokens = one_unit(torch.eye(8), (1, 2, 4), received_attention=score[None])
    method = VFlowOptMerge(cell=2)
    # two cells of four: dropped are 1, 2, 4, 7 and 6, of which 4 and 6 are the best of their cells
    made = method.reduce(tokens, torch.tensor([5]))
    assert made.kept[0].nonzero()[:, 0].tolist() == [0, 3, 4, 5, 6]
    weight = dense(made)[0].float()
    torch.testing.assert_close(weight[4], torch.tensor([0, 0.25, 0, 0, 0.75, 0, 0, 0]))
    torch.testing.assert_close(weight[6], torch.tensor([0, 0, 0.2, 0, 0, 0, 0.6, 0.4]) / 1.2)
    assert weight[0].tolist() == [1] + [0] * 7
    # a cell each and nothing else; then one token for two cells
    made = method.reduce(tokens, torch.tensor([2]))
    assert made.kept[0].nonzero()[:, 0].tolist() == [0, 3]
    torch.testing.assert_close(dense(made)[0].float().sum(1), made.kept[0].float())
    assert kept(method, tokens, 1) == [3] and kept(method, tokens, 8) == list(range(8))
    assert method.official_count(0.27, 1959) == 529


def test_vflowopt_counts_cells_by_frame_and_by_part() -> None:
    tokens = one_unit(torch.zeros(8, 1), (2, 2, 2), received_attention=torch.ones(1, 8))
    assert VFlowOptMerge(cell=2).number(tokens)[0].unique().numel() == 2
    halves = replace(tokens, segment=torch.tensor([[0, 1] * 4]))
    assert VFlowOptMerge(cell=2).number(halves)[0].unique().numel() == 4


# --- Token-level correlation ------------------------------------------------------------------------------------------
def test_tokencorr_keeps_as_many_as_do_not_repeat_others() -> None:
    # three alike, two alike, three on their own: with more than one counterpart of eight only the three are redundant
    key = directions(0, 1, 2, 60, 61, 120, 180, 240)
    attention = torch.stack([torch.arange(8).flip(0), torch.arange(8)]).float()
    tokens = one_unit(torch.zeros(8, 1), cls_attention=attention, keys=key[None])
    method = TokenCorr(query="cls", similarity=0.99, counterparts=1 / 8)
    assert count_similar(key[None], tokens.valid, 0.99).tolist() == [[2, 2, 2, 1, 1, 0, 0, 0]]
    # five stay: two by late attention, three by early
    assert kept(method, tokens, 8) == [0, 1, 2, 6, 7]
    assert kept(replace(method, late=1.0), tokens, 8) == [3, 4, 5, 6, 7]
    assert kept(method, tokens, 2) == [0, 7]
    still = one_unit(torch.zeros(8, 1), cls_attention=attention, keys=key[:1].expand(8, -1)[None])
    assert kept(method, still, 8) == [0]


# --- QG-VTC -----------------------------------------------------------------------------------------------------------
def test_qg_vtc_averages_the_rest_into_what_is_relevant() -> None:
    x = directions(0, 100, 5, 95)
    tokens = replace(one_unit(x), question=x[None, [0, 1]] * 3, question_valid=torch.ones(1, 2, dtype=torch.bool))
    # half-way between the words, 45 degrees off, 5 and 95 are nearest to both together
    method = QGVTC(temperature=1e6)
    assert kept(method, tokens, 2) == [2, 3]
    torch.testing.assert_close(
        dense(method.reduce(tokens, torch.tensor([2])))[0].float()[2:],
        torch.tensor([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]]),
    )
    sharp = dense(QGVTC(temperature=1e-3).reduce(tokens, torch.tensor([2])))[0].float()[2:]
    torch.testing.assert_close(sharp, torch.eye(4)[2:], atol=1e-4, rtol=0)
    with pytest.raises(MmaccelError, match="temperature"):
        QGVTC(temperature=0.0)


# --- Representation shift ---------------------------------------------------------------------------------------------
@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_representation_shift_is_the_length_of_what_an_mlp_adds(family: str, monkeypatch) -> None:
    model, added, seen = zoo.model(family), [], []
    made = family_of(model)
    layer = made.tower_layers(made.towers()[0])[made.tap_layer(None)]
    spot = made.second_half(layer)[1].register_forward_hook(lambda module, args, output: added.append(output))
    inner = RepresentationShift.reduce

    def spied(self, tokens, count):
        seen.append(tokens)
        return inner(self, tokens, count)

    monkeypatch.setattr(RepresentationShift, "reduce", spied)
    try:
        with accelerated(model, "representation-shift", retain=0.5):
            model(**zoo.inputs(family, "image"))
    finally:
        spot.remove()
    shift = added[0].float().norm(dim=-1).flatten()[int(made.has_cls) :]
    (tokens,) = seen
    found = tokens.signals["shift"][0, 0, tokens.valid[0], 0]
    if family == "llava":
        torch.testing.assert_close(found, shift)
    # of blocks of patches the means, in another order
    torch.testing.assert_close(found.mean(), shift.mean())
