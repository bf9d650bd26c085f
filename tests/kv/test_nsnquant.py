"""NSNQuant: what is coded is nearly normal, and two scales and a mean bring it back."""

from __future__ import annotations

import math

import pytest
import torch
from coded import HEADS, WIDTH, centred, error, flat, keys_like

from mmaccel import MmaccelError
from mmaccel.kv.codecs.nsnquant import NSNQuant, shifted
from mmaccel.kv.codecs.turboquant import TurboQuant


def far(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Keys of which every channel is far from zero, by another distance, and tokens of different lengths."""
    keys = keys_like(rows, HEADS, tokens, WIDTH, seed=seed)
    rng = torch.Generator().manual_seed(seed + 1)
    away = 4 * torch.randn(HEADS, 1, WIDTH, generator=rng)
    return (keys + away) * (0.5 + torch.rand(rows, HEADS, tokens, 1, generator=rng))


def test_tokens_are_normalised_shifted_and_normalised() -> None:
    """By hand: channels of a page have the mean 0, and what has the length of its token and the mean back is the token."""
    tokens = torch.tensor([[[3.0, 4.0], [0.0, 5.0], [7.0, 7.0]]])
    length, mean = shifted(tokens.masked_fill(torch.tensor([False, False, True])[:, None], 0.0), torch.tensor([2]))
    # of length 5 both, so sqrt(25 / 2); the third is none
    torch.testing.assert_close(length[0, :2, 0], torch.full((2,), math.sqrt(12.5)))
    torch.testing.assert_close(mean[0, 0], torch.tensor([1.5, 4.5]) / math.sqrt(12.5))
    pages = far(1, 64).unflatten(2, (2, 32)).flatten(0, 2)
    length, mean = shifted(pages, torch.full((len(pages),), 32))
    left = pages / length - mean
    assert left.mean(1).abs().max() < 1e-5
    torch.testing.assert_close(length * (left + mean), pages)
    assert not shifted(torch.zeros(1, 4, 8), torch.tensor([4]))[1].any()


def test_the_mean_of_a_page_needs_no_codes() -> None:
    keys = far(2, 128)
    values = centred(keys)
    count = torch.full((2, HEADS), 128)
    errors = []
    for codec in (NSNQuant(page=64), TurboQuant(page=64, bits=2)):
        pages = codec.pack(flat(keys), flat(values), count)
        errors.append(error(pages.decoded()[0], flat(keys)))
    assert errors[0] < 0.6 * errors[1]
    finer = [
        error(NSNQuant(page=64, bits=b).pack(flat(keys), flat(values), count).decoded()[0], flat(keys))
        for b in (1, 2, 3, 4)
    ]
    assert all(more < 0.7 * less for less, more in zip(finer, finer[1:], strict=False))


def test_bytes_are_as_arithmetic_says() -> None:
    keys = far(1, 128).half()
    for bits in (1, 2, 3, 4):
        codec = NSNQuant(page=128, bits=bits)
        pages = codec.pack(flat(keys), flat(keys), torch.full((1, HEADS), 128))
        held = sum(
            t.numel() * t.element_size() for side in (pages.keys, pages.values) for p in side for t in p.tensors()
        )
        numbers = 2 * HEADS * 128 * WIDTH
        assert held * 8 / numbers == pytest.approx(codec.packed_bits(WIDTH))
        assert codec.packed_bits(WIDTH) == bits + 16 / WIDTH + 16 / WIDTH + 16 / 128


def test_a_page_keeps_what_it_is() -> None:
    """Behind other pages, and in another row."""
    first, more = (
        NSNQuant(page=32).pack(*[flat(far(2, n, seed))] * 2, torch.full((2, HEADS), n))
        for n, seed in ((64, 0), (32, 5))
    )
    both = first.appended(more)
    swapped = both.selected(torch.tensor([1, 0]))
    a, b, whole, picked = (
        pages.decoded()[0].view(2, HEADS, n, WIDTH) for pages, n in ((first, 64), (more, 32), (both, 96), (swapped, 96))
    )
    assert torch.equal(whole, torch.cat([a, b], dim=2)) and torch.equal(picked, whole[[1, 0]])


def test_bits_are_those_of_the_levels() -> None:
    with pytest.raises(MmaccelError, match="`bits` of nsnquant"):
        NSNQuant(bits=5)  # type: ignore[arg-type]
