"""Law of rounding noise: a unit in the last place of a product changes no choice that has a margin, and copies tie.

Products of matrices are perturbed by an amount that depends on their shapes, as machines do (see :mod:`noise`). Copies have
no margin, and yet the choice among them is settled: they are one candidate, and the lower slot wins. All methods that choose
among tokens or keys are taken from the registry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import synthetic
import torch
import zoo
from noise import noisy
from synthetic import attention_of, copied
from torch import Tensor

from mmaccel import get_method
from mmaccel.families import family_of
from mmaccel.kv.merge import merge
from mmaccel.kv.select import choose, rank
from mmaccel.method import (
    CHOICES,
    ChunkMethod,
    DraftMethod,
    EncoderMethod,
    EncoderTokens,
    KeyBatch,
    LayerMethod,
    Policy,
    PreviewMethod,
    TokenBatch,
    TokenMethod,
)
from mmaccel.method.registry import methods

pytestmark = pytest.mark.usefixtures("no_gradients")

#: (t, h, w) and whether a newline stands behind every row
UNITS = (((1, 6, 6), False), ((5, 3, 4), False), ((1, 6, 5), True), ((4, 4, 4), False))
#: fewer channels than tokens, and more: what picks by all pairs picks otherwise
WIDTHS = (16, 80)
SEEDS = range(2)
#: what stays
SHARE = 0.3


@functools.cache
def fitted(name: str, width: int) -> Any:
    """The method with its default options for tokens of a width, on a model whose tower has a CLS token."""
    model = zoo.model("llava")
    return methods()[name](**synthetic.given(methods()[name], width)).fit(family_of(model))


# --------------------------------------------------------------------------------------------------------- what they see


def tokens_of(method: TokenMethod, width: int, copies: bool, seed: int = 0) -> TokenBatch:
    """A ragged batch; what a token is and every figure about it are the same for copies, and newlines are copies anyway."""
    random = torch.Generator().manual_seed(seed)
    taps = {tap.kind: len(tap.layers) for tap in method.taps()}
    rows = []
    for (t, h, w), newline in UNITS:
        cells = [(f, r, c) if c < w else (-1, -1, -1) for f in range(t) for r in range(h) for c in range(w + newline)]
        at = torch.tensor(cells)
        x = torch.randn(len(at), width + 8, generator=random)
        if t > 1:
            # frames resemble each other, and without noise are the same at a third of the places
            still = x[: h * w].repeat(t, 1)
            moves = (torch.rand(h * w, generator=random) > 1 / 3).repeat(t)[:, None]
            x = still + 0.4 * x * moves if copies else still + 0.4 * x
        elif copies:
            x = copied(x, random)
        x[(at < 0).any(-1)] = torch.randn(width + 8, generator=random)
        rows.append((at, x))
    n = max(len(at) for at, _ in rows)
    valid = torch.stack([torch.arange(n) < len(at) for at, _ in rows])
    cells = torch.stack([torch.cat([at, at.new_full((n - len(at), 3), -1)]) for at, _ in rows])
    x = torch.stack([torch.cat([x, x.new_zeros(n - len(x), width + 8)]) for _, x in rows])
    features, figures, blank = x[..., :width], x[..., width:].sigmoid(), (cells < 0).any(-1)
    signals: dict[str, Tensor] = {}
    said: dict[str, Tensor] = {}
    for kind, layers in taps.items():
        if "keys" in kind or kind in ("features", "shift"):
            signals[kind] = features[:, None].expand(-1, layers, -1, -1).clone()
        else:
            signals[kind] = figures[..., :layers].transpose(1, 2).masked_fill(blank[:, None], torch.nan)
    if isinstance(method, ChunkMethod):
        names = method.observe(attention_of(1, 9), torch.arange(9)[None], 0).keys()
        signals |= {name: figures[..., i] for i, name in enumerate(names)}
    if method.needs_sounds:
        # newlines, which frames have none of
        signals["sound_attention"] = figures[..., 0].masked_fill(~blank, torch.nan)
    if isinstance(method, DraftMethod):
        signals["draft_match"] = figures[..., 0]
    if isinstance(method, LayerMethod | PreviewMethod):
        names = method.observe(attention_of(1, 9)).keys()
        signals |= {name: figures[..., i] for i, name in enumerate(names)}
        said = {name: figures[:, :3, i] for i, name in enumerate(names)}
    return TokenBatch(
        features=features.contiguous(),
        valid=valid,
        cells=cells,
        grid=torch.tensor([grid for grid, _ in UNITS]),
        segment=torch.where(valid, 0, -1),
        question=torch.randn(len(rows), 3, width, generator=random),
        question_valid=torch.ones(len(rows), 3, dtype=torch.bool),
        question_signals=said,
        signals=signals,
    )


def alone(tokens: TokenBatch, row: int) -> TokenBatch:
    """A unit by itself, without padding."""
    one, real = slice(row, row + 1), tokens.valid[row]

    def cut(x: Tensor, dim: int = 1) -> Tensor:
        return x[one].index_select(dim, real.nonzero()[:, 0])

    assert tokens.question is not None and tokens.question_valid is not None
    return TokenBatch(
        features=cut(tokens.features),
        valid=tokens.valid[one, real],
        cells=cut(tokens.cells),
        grid=tokens.grid[one],
        segment=cut(tokens.segment),
        question=tokens.question[one],
        question_valid=tokens.question_valid[one],
        question_signals={name: x[one] for name, x in tokens.question_signals.items()},
        signals={name: cut(x, 2 if name in TAPPED else 1) for name, x in tokens.signals.items()},
    )


TAPPED = (
    "cls_attention",
    "received_attention",
    "patch_attention",
    "keys",
    "features",
    "shift",
    "cls_attention_unsplit",
    "keys_unsplit",
)

# ---------------------------------------------------------------------------------------------------------- what they do

#: one line of what was chosen for every unit, all that is compared
Choice = list[list[int]]


def reduced(method: TokenMethod, tokens: TokenBatch) -> Choice:
    """For every unit and slot the slot that it flows into, -1 for none."""
    count = (tokens.valid.sum(1) * SHARE).long()
    made = method.reduce(tokens, count)
    links = made.full_links()
    # a token may flow into several
    flows = [sorted(zip(links.slot[m].tolist(), links.source[m].tolist(), strict=True)) for m in one_each(links, made)]
    return [[s * 1000 + t for s, t in flow] for flow in flows]


def one_each(links: Any, made: Any) -> list[Tensor]:
    """Which links are of each unit."""
    return [links.batch == row for row in range(len(made.kept))]


def token_choices(
    name: str, width: int, copies: bool, seed: int = 0
) -> tuple[Callable[[], Choice], Callable[[], Choice]]:
    """A method on a batch of units, and on each alone."""
    method = fitted(name, width)
    tokens = tokens_of(method, width, copies, seed)
    singles = [alone(tokens, row) for row in range(len(UNITS))]
    return lambda: reduced(method, tokens), lambda: [reduced(method, one)[0] for one in singles]


def encoder_choices(
    name: str, width: int, copies: bool, seed: int = 0
) -> tuple[Callable[[], Choice], Callable[[], Choice]]:
    """Two steps of a method inside a tower, behind a CLS token."""
    method, random = fitted(name, width), torch.Generator().manual_seed(seed)
    keys = torch.randn(3, 41, width + 1, generator=random)
    if copies:
        keys[:, 1:] = torch.stack([copied(row, random) for row in keys[:, 1:]])
    seen = EncoderTokens(keys[..., :-1].contiguous(), torch.ones(3, 41), 1, 0.5, keys[..., -1].sigmoid())

    def part(rows: slice) -> EncoderTokens:
        assert seen.cls_attention is not None
        return EncoderTokens(seen.keys[rows], seen.size[rows], 1, 0.5, seen.cls_attention[rows])

    parts = [part(slice(row, row + 1)) for row in range(3)]
    return lambda: method.match(seen, 13).tolist(), lambda: [method.match(one, 13)[0].tolist() for one in parts]


def policy_choices(
    name: str, width: int, copies: bool, seed: int = 0
) -> tuple[Callable[[], Choice], Callable[[], Choice]]:
    """A cache policy on two rows, the second with padding in front."""
    policy, random = fitted(name, width), torch.Generator().manual_seed(seed)
    total, heads, pad = 60, 2, 7
    shape = (2, heads, total, width)
    x, y = torch.randn(*shape, generator=random), torch.randn(*shape, generator=random)
    figures = torch.rand(2, heads, total, 2, generator=random)
    if copies:
        # a key, its value and all figures about it
        both = torch.cat([x, y, figures], -1).transpose(1, 2)
        both[:, pad:40] = torch.stack([copied(row, random) for row in both[:, pad:40]])
        x, y, figures = both.transpose(1, 2).contiguous().split((width, width, 2), -1)
    valid = torch.arange(total) >= torch.tensor([[0], [pad]])
    visual = (torch.arange(total) >= pad) & (torch.arange(total) < 40) & valid
    at = torch.arange(total) - pad
    cells = torch.stack([at // 11, at % 11 // 4, at % 4], -1).expand(2, -1, -1)
    spread = torch.randn(2, 2 * heads, width, width, generator=random) / width
    window = min(policy.window, 12) if policy.window else 0
    queries = torch.randn(2, 2 * heads, window, width, generator=random)
    mean = torch.randn(2, 2 * heads, width, generator=random)
    survivors = torch.rand(2, total, generator=random) > 0.4

    def keys(rows: slice, places: slice) -> KeyBatch:
        take = lambda t: t[rows, :, places].contiguous()  # noqa: E731
        return KeyBatch(
            keys=take(x),
            values=take(y),
            queries=queries[rows],
            valid=valid[rows, places],
            visual=visual[rows, places],
            index=torch.arange(total)[places].expand(len(visual[rows]), -1),
            scaling=width**-0.5,
            received=take(figures)[..., 0],
            count=torch.full((len(visual[rows]),), 10),
            picture=torch.where(visual, 0, -1)[rows, places],
            cells=torch.where(visual[..., None], cells, -1)[rows, places],
            survivors=survivors[rows, places],
            expected=(mean[rows], (spread @ spread.mT)[rows]),
            outgoing=take(figures)[..., 1],
        )

    def kept(seen: KeyBatch, first: int) -> Choice:
        assert seen.count is not None
        made = choose(policy, rank(policy, seen), seen.visual, seen.count)
        return [[1000 * head + first + place for head, place in row.nonzero().tolist()] for row in made]

    batch, every = keys(slice(0, 2), slice(0, total)), slice(0, total)
    parts = [(keys(slice(0, 1), every), 0), (keys(slice(1, 2), slice(pad, total)), pad)]
    return lambda: kept(batch, 0), lambda: [kept(seen, first)[0] for seen, first in parts]


CASES = [
    pytest.param(choices, name, id=name)
    for kind, choices in ((TokenMethod, token_choices), (EncoderMethod, encoder_choices), (Policy, policy_choices))
    for name in synthetic.offered(kind)
]


# --------------------------------------------------------------------------------------------------------------- the law


@pytest.mark.square(("choices", "name"), CASES)
def test_copies_are_one_candidate(choices: Any, name: str) -> None:
    """Whatever the last bit says, in a batch and alone."""
    for width in WIDTHS:
        batch, singles = choices(name, width, copies=True)
        clean = batch()
        assert any(clean) and singles() == clean
        for seed in SEEDS:
            with noisy(seed):
                assert batch() == clean, "in a batch"
                assert singles() == clean, "alone"


@pytest.mark.square("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.full)])
@pytest.mark.square(("choices", "name"), CASES)
def test_what_has_a_margin_does_not_change(choices: Any, name: str, seeds: range) -> None:
    """Units on which louder noise of several kinds agrees; they are nearly all."""
    steady = units = 0
    for seed in seeds:
        batch, singles = choices(name, WIDTHS[seed % 2], copies=False, seed=seed)
        loud = []
        for other in range(3):
            with noisy(100 + other, units=8):
                loud.append(batch())
        quiet = [batch(), singles()]
        for other in SEEDS:
            with noisy(other):
                quiet += [batch(), singles()]
        for unit, choice in enumerate(loud[0]):
            units += 1
            if all(more[unit] == choice for more in loud):
                steady += 1
                assert all(more[unit] == choice for more in quiet), f"unit {unit} of batch {seed}"
    assert steady >= 0.9 * units, f"{steady} of {units} have a margin"


@pytest.mark.parametrize("how", [how for how in CHOICES["compact"] if how not in ("evict", "residual")])
def test_keys_that_leave_are_merged_into_the_same(how: str) -> None:
    """Copies among the keys that stay: the first takes them up."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 40, 16, generator=random)
    x = torch.stack([torch.stack([copied(head, random) for head in row]) for row in x])
    values = torch.randn(x.shape, generator=random)
    kept = torch.rand(2, 2, 40, generator=random) < 0.4
    clean = merge(how, x, values, kept, ~kept)
    for seed in SEEDS:
        with noisy(seed):
            made = merge(how, x, values, kept, ~kept)
            ones = [merge(how, *(part[row : row + 1] for part in (x, values, kept, ~kept))) for row in range(2)]
        torch.testing.assert_close((made.keys, made.values), (clean.keys, clean.values), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([one.values for one in ones]), clean.values, rtol=1e-4, atol=1e-5)


def test_tokens_that_cover_each_other_tie() -> None:
    """Either of a pair covers both as well as the other: the lower slot is picked, however the sums round."""
    random = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(64, 64, generator=random)).Q
    pairs = torch.stack([axes[:16], 0.6 * axes[:16] + 0.8 * axes[16:32]], 1).flatten(0, 1)[None]
    row, columns = torch.zeros(1, 32, dtype=torch.long), torch.arange(32)[None]
    cells = torch.stack([row, row, columns], -1)
    tokens = TokenBatch(pairs, row == 0, cells, torch.tensor([[1, 1, 32]]), row)
    for seed in range(8):
        with noisy(seed, units=4):
            kept = get_method("coverage")().reduce(tokens, torch.tensor([16])).kept
        assert kept.nonzero()[:, 1].tolist() == columns[0, ::2].tolist()


def test_the_noise_is_noise() -> None:
    """It moves products, another way for another shape and seed, and nothing but the last places."""
    x = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(0))
    clean = [x @ x.mT, torch.einsum("nid,njd->nij", x, x), torch.cdist(x, x), torch.nn.functional.linear(x, x[0])]
    seen = []
    for seed in range(2):
        with noisy(seed):
            seen.append(
                [x @ x.mT, torch.einsum("nid,njd->nij", x, x), torch.cdist(x, x), torch.nn.functional.linear(x, x[0])]
            )
            again, alone_ = x @ x.mT, (x[:1] @ x[:1].mT)[0]
        assert torch.equal(again, seen[-1][0]) and not torch.equal(alone_, again[0])
        for moved, still in zip(seen[-1][:2] + seen[-1][3:], clean[:2] + clean[3:], strict=True):
            assert not torch.equal(moved, still)
            assert ((moved - still).abs() <= 1.2e-7 * still.abs()).all()
        assert 1e-5 < (seen[-1][2] - clean[2]).abs().max() < 5e-3
    assert not torch.equal(seen[0][0], seen[1][0])
