from __future__ import annotations

import pytest
import torch
from mmaccel_kernels.matching import best_match, best_match_cost, best_match_definition, best_match_kernel, naive, tiles
from traffic import counted

SHAPES = [(1, 1, 1, 1), (2, 70, 65, 33), (3, 5, 130, 64), (1, 129, 2, 80)]
TYPES = {"*fp32": torch.float32, "*bf16": torch.bfloat16, "*fp16": torch.float16}


def sets(n, a, b, d, dtype=torch.float32, device="cpu"):
    """Small whole numbers, whose products are exact in any order, so that there are many ties."""
    rng = torch.Generator().manual_seed(a + b)
    x, y = (torch.randint(-3, 4, (n, size, d), generator=rng).to(device, dtype) for size in (a, b))
    there = torch.rand(n, b, generator=rng) > 0.4
    there[0] = there[0] & (n == 1)
    return x, y, there.to(device)


def all_products(x, y, there, others):
    product = x.double() @ y.double().transpose(1, 2)
    if there is not None:
        product = product.masked_fill(~there[:, None], -torch.inf)
    if others:
        product.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    # the first of equals
    place = (product == product.amax(2, keepdim=True)).long().argmax(2)
    return product.amax(2).float(), place


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_definition(shape, masked, others, monkeypatch):
    x, y, there = sets(*shape)
    there = there if masked else None
    want = all_products(x, y, there, others)
    for block in (1, 300, 1 << 20):
        monkeypatch.setattr(naive, "BLOCK", block)
        for got, expected in zip(best_match(x, y, there, others=others), want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel(shape, masked, dtype, device):
    x, y, there = sets(*shape, dtype, device)
    for others in (False, True):
        want = best_match_definition(x, y, there if masked else None, others)
        for got, expected in zip(best_match_kernel(x, y, there if masked else None, others), want, strict=True):
            assert torch.equal(got, expected)


def test_strided_inputs_and_empty_sets(device):
    x, y, _ = sets(2, 20, 30, 16, device=device)
    want = best_match_definition(x[:, 0::2], y[:, 1::2], None, False)
    assert all(map(torch.equal, best_match_kernel(x[:, 0::2], y[:, 1::2], None, False), want))
    score, place = best_match(x, y[:, :0])
    assert (score == -torch.inf).all() and (place == 0).all() and score.shape == (2, 20)
    assert best_match(x[:, :0], y)[0].shape == (2, 0)


def test_what_a_launch_moves():
    n, a, b, d = 2, 150, 70, 33
    x, y, there = sets(n, a, b, d)
    side = tiles(4)["BLOCK_A"]
    with counted() as traffic:
        best_match_kernel(x, y, None, False)
    moved, operations = best_match_cost(n, a, b, d, 4)
    # every block of rows of x reads all of y, and every block of y all of these rows of x again
    blocks_a, blocks_b = -(-a // side), -(-b // side)
    again = 4 * n * d * ((blocks_a - 1) * b + (blocks_b - 1) * a)
    assert traffic.launches == 1 and traffic.loaded + traffic.stored == moved + again
    # whole tiles
    assert traffic.dots == operations * (blocks_a * side / a) * (blocks_b * side / b) * (64 / d)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x, y, t: (x[0], y, t), r"x \[N, a, D\] and y \[N, b, D\], not \(4, 8\)"),
        (lambda x, y, t: (x, y[..., :7], t), r"\(2, 5, 7\)"),
        (lambda x, y, t: (x, y.half(), t), "float32 and torch.float16"),
        (lambda x, y, t: (x.long(), y.long(), t), "int64"),
        (lambda x, y, t: (x, y, t[:, :4]), r"there \[N, b\] = \(2, 5\) bool, not \(2, 4\)"),
        (lambda x, y, t: (x, y, t.long()), "torch.int64"),
    ],
)
def test_wrong_shapes_are_refused_by_name(wrong, says):
    with pytest.raises(ValueError, match=f"best_match takes .*{says}"):
        best_match(*wrong(torch.ones(2, 4, 8), torch.ones(2, 5, 8), torch.ones(2, 5) > 0))
