"""Planes with a factor for every channel: decoded, read and stored as what they represent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coded import HEADS, WIDTH, centred, error, flat, keys_like
from mmaccel_kernels.decode import decode_attention_definition, decode_attention_kernel

from mmaccel.kv.codecs import Codec
from mmaccel.kv.codecs.qserve import QServe
from mmaccel.kv.codecs.zipcache_codec import ZipCacheCodec

CODECS = (
    QServe(page=32),
    QServe(page=32, bits=8, smooth=1.0),
    QServe(page=32, balance="queries"),
    ZipCacheCodec(page=32),
    ZipCacheCodec(page=32, bits=8),
)


def packed(codec: Codec, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Any]:
    keys = keys_like(2, HEADS, tokens, WIDTH, seed=seed)
    values = centred(keys)
    return keys, values, codec.pack(flat(keys), flat(values), torch.full((2, HEADS), tokens))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_decoded_is_near(codec: Codec) -> None:
    keys, values, pages = packed(codec, 64)
    for ours, x in zip(pages.decoded(), (keys, values), strict=True):
        assert error(ours, flat(x)) < (0.35 if codec.options().get("bits", 4) == 4 else 0.03)


def test_balanced_channels_code_better() -> None:
    """A few channels of keys are large everywhere; without a factor the steps of a token are theirs."""
    keys, _, balanced = packed(QServe(page=32), 64)
    _, _, plain = packed(QServe(page=32, smooth=0.0), 64)
    small = slice(3, None)
    assert plain.keys[0].factor is None
    errors = [error(p.decoded()[0][:, small], flat(keys)[:, small]) for p in (balanced, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_pairs_of_rope_share_a_factor() -> None:
    keys, _, pages = packed(QServe(page=32), 64)
    factor = pages.keys[0].factor
    assert torch.equal(factor[:, : WIDTH // 2], factor[:, WIDTH // 2 :])
    size = keys.abs().amax(2).flatten(0, 1)
    torch.testing.assert_close(factor[:, : WIDTH // 2], size.view(-1, 2, WIDTH // 2).amax(1).sqrt())


def test_queries_share_in_the_balance() -> None:
    """By hand: the largest keys are 8, 2, 4 and 1, and the largest queries of both heads and of tokens that are none 2, 8, 1
    and 0."""
    codec = QServe(page=16, bits=8, balance="queries")
    keys = torch.tensor([[8.0, -2, 0, 1], [1, 1, -4, 0]])
    query = torch.tensor([[[9.0, 9, 9, 9], [-2, 0, 1, 0]], [[9, 9, 9, 9], [1, 8, 0, 0]]])[None]
    energy = codec.query_energy(query, torch.tensor([[-1, 5]]), 1)
    assert energy is not None and energy.tolist() == [[[4, 64, 1, 0]]]
    pages = codec.pack(keys, keys, torch.tensor([[2]]), query_energy=energy)
    assert pages.keys[0].factor is not None
    # a channel that no query has is balanced by the keys alone
    assert pages.keys[0].factor.tolist() == [[2, 0.5, 2, 1]]
    assert error(pages.decoded()[0], keys) < 0.01


def test_balanced_by_queries_products_are_nearer() -> None:
    """Keys are large where queries are small, so that their error matters less there."""
    keys, _, plain = packed(QServe(page=32, bits=2), 64)
    rng = torch.Generator().manual_seed(2)
    query = torch.randn(2, HEADS, 16, WIDTH, generator=rng) / keys.abs().amax((0, 1, 2))
    codec = QServe(page=32, bits=2, balance="queries")
    energy = codec.query_energy(query, torch.zeros(2, 16), HEADS)
    balanced = codec.pack(flat(keys), flat(keys), torch.full((2, HEADS), 64), query_energy=energy)
    wanted = query @ keys.mT
    errors = [error(query @ p.decoded()[0].view(2, HEADS, 64, WIDTH).mT, wanted) for p in (balanced, plain)]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_rows_appended_and_cropped(codec: Codec) -> None:
    """Factors stay with their heads, and later tokens have those of the first ones."""
    _, _, first = packed(codec, 32)
    keys, values, _ = packed(codec, 16, seed=5)
    more = codec.pack(flat(keys), flat(values), torch.full((2, HEADS), 16), first)
    both = first.appended(more)
    for side in ("keys", "values"):
        assert getattr(both, side)[0].factor is getattr(first, side)[0].factor or torch.equal(
            getattr(both, side)[0].factor, getattr(first, side)[0].factor
        )
    swapped = both.selected(torch.tensor([1, 0, 1]))
    whole, picked = (p.decoded()[0].view(-1, HEADS, 48, WIDTH) for p in (both, swapped))
    assert torch.equal(picked, whole[[1, 0, 1]])
    cut = both.cropped(torch.full((2, HEADS), 40))
    assert torch.equal(
        cut.decoded()[1].view(2, HEADS, 40, WIDTH), both.decoded()[1].view(2, HEADS, 48, WIDTH)[:, :, :40]
    )


@pytest.mark.kernel
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("tail", [0, 5])
def test_the_kernel_reads_what_the_definition_does(codec: Codec, tail: int) -> None:
    _, _, pages = packed(codec, 40)
    rng = torch.Generator().manual_seed(1)
    query = torch.randn(2, 2 * HEADS, 1, WIDTH, generator=rng)
    keys, values = (torch.randn(2, HEADS, tail, WIDTH, generator=rng) for _ in range(2))
    scaling = WIDTH**-0.5
    ours = decode_attention_kernel(query, keys, values, scaling, None, pages)
    theirs = decode_attention_definition(query, keys, values, scaling, None, pages)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
