from __future__ import annotations

import pytest
import torch
from mmaccel_kernels import compact as compaction
from mmaccel_kernels import launch
from mmaccel_kernels.compact import compact, compact_cost, compact_definition, compact_kernel, compact_plan
from traffic import counted

from mmaccel.kv.cache import CacheState

#: batch, heads, slots, channels of keys and of values
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 37, 20, 130), (2, 2, 20, 256, 64)]
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def storage(b, h, slots, d, dv, dtype=torch.float32, device="cpu"):
    """Keys, values, what is kept (some heads nothing, one everything), owners and weights."""
    rng = torch.Generator().manual_seed(slots)
    keys, values = (torch.randn(b, h, slots, width, generator=rng).to(device, dtype) for width in (d, dv))
    kept = torch.rand(b, h, slots, generator=rng) > 0.6
    kept[0, 0], kept[-1, -1] = True, b * h == 1
    first = kept.long().argmax(-1, keepdim=True)
    onto = torch.where(torch.rand(b, h, slots, generator=rng) > 0.3, first, -1)
    owner = torch.where(kept, torch.arange(slots), onto).masked_fill(~kept.any(-1, keepdim=True), -1)
    weight = torch.rand(b, h, slots, generator=rng)
    return keys, values, *(t.to(device) for t in (kept, owner, weight))


def by_hand(x, kept, owner, weight):
    rows = []
    for b, h, slot in kept.nonzero().tolist():
        mine = owner[b, h] == slot
        rows.append((x[b, h, mine].float() * weight[b, h, mine, None]).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_definition(shape):
    keys, values, kept, owner, weight = storage(*shape)
    plain = compact(keys, values, kept)
    assert torch.equal(plain.keys, keys[kept]) and torch.equal(plain.values, values[kept])
    assert torch.equal(plain.lengths, kept.sum(-1))
    for factor in (None, weight):
        merged = compact(keys, values, kept, owner=owner, weight=factor)
        for got, x in ((merged.keys, keys), (merged.values, values)):
            torch.testing.assert_close(
                got, by_hand(x, kept, owner, torch.ones_like(weight) if factor is None else factor)
            )
        assert torch.equal(merged.lengths, kept.sum(-1))


EQUAL = {"atol": 0, "rtol": 0}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_kernel(shape, dtype, device):
    keys, values, kept, owner, weight = storage(*shape, dtype, device)
    for given in ((None, None), (owner, None), (owner, weight)):
        want = compact_definition(keys, values, kept, *given, None)
        for total in (None, int(kept.sum())):
            got = compact_kernel(keys, values, kept, *given, total)
            assert torch.equal(got.lengths, want.lengths) and got.keys.dtype == dtype
            # the interpreter rounds to bfloat16 in its own way; a GPU multiplies and adds in one, which rounds once
            merged, units = given[0] is not None, torch.finfo(dtype).eps
            fused = {"atol": 1e-6, "rtol": 2 * units} if keys.is_cuda else {"atol": 0, "rtol": 1e-6}
            near = {"atol": 0, "rtol": 2**-7} if merged and dtype == torch.bfloat16 else fused if merged else EQUAL
            torch.testing.assert_close(got.keys, want.keys, **near)
            torch.testing.assert_close(got.values, want.values, **near)


def test_lists_of_slots_say_the_same_as_a_mask(device):
    keys, values, kept, owner, weight = storage(2, 3, 37, 20, 24, device=device)
    lengths = kept.sum(-1, keepdim=True)
    order = (~kept).long().argsort(dim=-1, stable=True)
    slots = torch.where(torch.arange(37, device=device) < lengths, order, -1)[..., : int(lengths.max())]
    for listed in (slots, slots.int()):
        for got, want in zip(compact(keys, values, listed), compact(keys, values, kept), strict=True):
            assert torch.equal(got, want)


def test_one_plan_gathers_from_several_layers(device):
    *layer, kept, _, _ = storage(2, 3, 37, 20, 24, device=device)
    made = compact_plan(kept, int(kept.sum()))
    for keys, values in (layer, [x.flip(2) for x in layer]):
        want = compact(keys, values, kept)
        for run in (compact_definition, compact_kernel):
            for mine, its in zip(run(keys, values, made, None, None, None), want, strict=True):
                assert torch.equal(mine, its)


def test_strided_keys_and_nothing_kept(device):
    keys, values, kept, owner, weight = storage(2, 3, 37, 20, 24, device=device)
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    room = torch.full((2, 3, 50, 24), torch.nan, device=device)
    room[:, :, :37] = values
    assert torch.equal(compact_kernel(turned, values, kept, None, None, None).keys, keys[kept])
    for given in ((None, None), (owner, weight)):
        want = compact_kernel(keys, values, kept, *given, None)
        # the last has channels apart
        for ours in (turned, keys.mT.contiguous().mT):
            got = compact_kernel(ours, room[:, :, :37], kept, *given, None)
            assert torch.equal(got.keys, want.keys) and torch.equal(got.values, want.values)
    none = torch.zeros_like(kept)
    for run in (compact_definition, compact_kernel):
        for owners in (None, owner.fill_(-1)):
            got = run(keys, values, none, owners, None, None)
            assert got.keys.shape == (0, 20) and got.values.shape == (0, 24) and not got.lengths.any()


@pytest.mark.parametrize("kind", ["ragged", "dense", "nothing"])
def test_a_layer_of_the_cache_evicts_alike(kind, device, guard, monkeypatch):
    """The cache compacts by the kernel where there is one; what it stores then is what the definition leaves."""
    keys, values, kept, _, _ = storage(2, 3, 37, 20, 24, device=device)
    if kind != "ragged":
        kept = (torch.arange(37, device=device) % 3 == (1 if kind == "dense" else 3)).expand(2, 3, -1)
    launched, layers = [], []
    for by_kernel in (False, True):
        run = compaction.compact_kernel if by_kernel else compaction.compact_definition
        monkeypatch.setattr(launch, "works", lambda device, by_kernel=by_kernel: by_kernel)
        monkeypatch.setattr(compaction, run.__name__, lambda *args, run=run: launched.append(run) or run(*args))
        state = CacheState(1)
        layer = state.layers[0]
        layer.update(keys, values)
        layer.evict(kept)
        layer.update(keys[:, :, :2], values[:, :, :2])
        layers.append(layer)
        monkeypatch.setattr(compaction, run.__name__, run)
    assert launched == [compaction.compact_definition, compaction.compact_kernel]
    for ours, theirs in zip(layers[1].stored(), layers[0].stored(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(layers[1].index.index, layers[0].index.index)
    assert (layers[1].ragged is None) == (kind != "ragged")


def test_what_a_launch_moves():
    keys, values, kept, owner, weight = storage(2, 3, 37, 20, 24)
    total, members, width = int(kept.sum()), int((owner >= 0).sum()), 44
    with counted() as plain:
        compact_kernel(keys, values, kept, None, None, total)
    # and the index of each row, for keys and for values
    assert plain.launches == 1
    assert (
        plain.loaded + plain.stored
        == compact_cost(total, total, width, 4)[0] - 12 * total - 8 * (total + 1) + 16 * total
    )
    with counted() as merged:
        compact_kernel(keys, values, kept, owner, weight, total)
    # owners' bounds are read twice, as an end and as a beginning, and everything beside the values for keys and values
    assert merged.launches == 1
    assert merged.loaded + merged.stored == compact_cost(total, members, width, 4)[
        0
    ] + 12 * members + 32 * total - 8 * (total + 1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"keys": torch.ones(2, 3, 4)}, r"keys \[B, H, K, D\] and values .* not \(2, 3, 4\)"),
        ({"values": torch.ones(1, 2, 4, 8)}, r"\(1, 2, 4, 8\)"),
        ({"values": torch.ones(1, 2, 5, 8).half()}, "float32 and torch.float16"),
        ({"kept": torch.ones(1, 2, 4) > 0}, r"kept \[B, H, K\] = \(1, 2, 5\) bool or a list of slots"),
        ({"kept": torch.ones(1, 2, 5)}, "torch.float32"),
        ({"owner": torch.ones(1, 2, 5)}, r"owner \[B, H, K\] = \(1, 2, 5\) long"),
        ({"weight": torch.ones(1, 2, 5)}, "beside an owner"),
        ({"kept": compact_plan(torch.ones(2, 2, 5) > 0, 20)}, r"a plan of \[1, 2\] rows and heads .* not of \[2, 2\]"),
        ({"owner": torch.zeros(1, 2, 5).long(), "weight": torch.ones(1, 2, 4)}, r"weight .* not \(1, 2, 4\)"),
    ],
)
def test_wrong_shapes_are_refused_by_name(wrong, says):
    right = {"keys": torch.ones(1, 2, 5, 8), "values": torch.ones(1, 2, 5, 8), "kept": torch.ones(1, 2, 5) > 0}
    with pytest.raises(ValueError, match=f"compact takes .*{says}"):
        compact(**right | wrong)
