"""Comparators for the codecs of the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from comparators import Arrays, Params, close
from compare_kv import last_queries
from harness import NotOffered, make
from mmaccel_kernels.decode import decode_attention
from mmaccel_kernels.pages import Format, Pages, Plane, matrix, pack, rotate, unpack
from mmaccel_kernels.pages import rotation as rotations
from torch import Tensor

from mmaccel.kv.cache import CacheState
from mmaccel.kv.codecs import gear as gear_codec
from mmaccel.kv.codecs.base import Codec, Eligible, token_groups
from mmaccel.kv.codecs.gear import low_rank
from mmaccel.kv.index import KeyIndex
from mmaccel.kv.packed import SharedPacking, demote
from mmaccel.kv.scoring.importance import energy
from mmaccel.method import LayerAttention


def fields(words: Tensor, bits: int) -> Tensor:
    """Whole numbers packed along the last axis of int32 words, lowest bits first."""
    shift = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shift & (1 << bits) - 1).flatten(-2)


def codes(pages: Pages, plane: Plane, like: Tensor) -> Tensor:
    """The codes of full pages in the shape of ``like [1, heads, tokens, D]``."""
    return unpack(plane.codes, plane.format, pages.page, pages.tile).reshape(*like.shape[:3], -1).int()


def packed(codec: Codec, keys: Tensor, values: Tensor):
    """``[1, heads, tokens, D]`` each -> pages."""
    lengths = torch.full(keys.shape[:2], keys.shape[2])
    assert torch.equal(codec.packable(lengths), lengths)
    return codec.pack(keys.flatten(0, 2), values.flatten(0, 2), lengths)


def kivi(params: Params, arrays: Arrays) -> None:
    bits, group, (_, heads, tokens, width) = params["bits"], params["group_size"], arrays["in_k"].shape
    codec = make("kivi", bits=bits, group=group, page=max(group, 64), residual=0)
    pages = packed(codec, arrays["in_k"], arrays["in_v"])
    (keys,), (values,) = pages.keys, pages.values
    k, v = codes(pages, keys, arrays["in_k"]), codes(pages, values, arrays["in_v"])
    assert torch.equal(k, fields(arrays["out_k_code"].mT, bits).mT)
    assert torch.equal(k.mT, fields(arrays["out_kt_code"], bits))
    for name in ("v", "vt"):
        assert torch.equal(v, fields(arrays[f"out_{name}_code"], bits))
    for ours, name in ((keys.scale, "scale"), (keys.zero, "min")):
        assert ours is not None
        ours = ours.reshape(1, heads, tokens // group, width)
        close(ours, arrays[f"out_k_{name}"][:, :, :, 0])
        close(ours.mT, arrays[f"out_kt_{name}"])
    for ours, name in ((values.scale, "scale"), (values.zero, "min")):
        assert ours is not None
        ours = ours.reshape(1, heads, tokens, width // group)
        close(ours, arrays[f"out_v_{name}"][..., 0])
        close(ours, arrays[f"out_vt_{name}"])
    for ours, name in zip(pages.decoded(), "kv", strict=True):
        close(ours.reshape(1, heads, tokens, width), arrays[f"out_{name}_dequant"])


def calibquant(params: Params, arrays: Arrays) -> None:
    if not params.get("per_channel", True):
        raise NotOffered("calibquant with one range for all channels")
    k, v = arrays["in_k"].transpose(1, 2), arrays["in_v"].transpose(1, 2)
    codec = make("calibquant", bits=params["bits"], shrink_keys=params["scale_k"], shrink_values=params["scale_v"])
    pages = packed(codec, k, v)
    for planes, decoded, name, like in (
        (pages.keys, pages.decoded()[0], "k", k),
        (pages.values, pages.decoded()[1], "v", v),
    ):
        (plane,) = planes
        assert torch.equal(codes(pages, plane, like).transpose(1, 2), arrays[f"out_{name}_code"].int())
        close(plane.scale[:, 0][None, None], arrays[f"out_{name}_scale"])
        assert plane.zero is not None
        close(plane.zero, -plane.scale * arrays[f"out_{name}_zero"][0, 0][:, None])
        close(decoded.reshape(like.shape).transpose(1, 2), arrays[f"out_{name}_dequant"])


def vidkv(params: Params, arrays: Arrays) -> None:
    key_bits, value_bits = params["nbits"]
    if not 1 < key_bits <= 2 or value_bits not in (1.58, 2) or params["q_group_size"] != 32:
        raise NotOffered(f"vidkv with {key_bits}, {value_bits} bits and groups of {params['q_group_size']}")
    vidkv_exact(params, arrays)
    k, v = arrays["in_k"], arrays["in_v"]
    codec = make("vidkv", key_bits=key_bits, value_bits=value_bits)
    pages = packed(codec, k, v)
    hard = pages.keys[0]
    assert hard.channels is not None and pages.keys[1].channels is not None
    for plane, name in zip(pages.keys, ("hard", "easy"), strict=True):
        assert plane.channels is not None
        assert torch.equal(plane.channels[0].long(), arrays[f"out_{name}_idx"])
    assert torch.equal(codes(pages, hard, k).mT, fields(arrays["out_hard_code"], 2))
    groups = k.shape[2] // 32
    for ours, name in ((hard.scale, "scale"), (hard.zero, "min")):
        assert ours is not None
        close(ours.reshape(1, k.shape[1], groups, -1).mT, arrays[f"out_hard_{name}"])
    # their dequantiser is right where it has 2 bits
    at = arrays["out_hard_idx"]
    close(pages.decoded()[0].reshape(k.shape)[..., at], arrays["out_k_dequant_as_shipped"][..., at])

    # theirs are codes of both parts at every frequency, of which ours are a half: real parts, then imaginary ones
    easy = pages.keys[1]
    width = len(arrays["out_easy_idx"])
    both = torch.cat([2 * torch.arange(width // 2 + 1), 2 * torch.arange(1, (width + 1) // 2) + 1])
    theirs = fields(arrays["out_easy_code"], 1)
    theirs[:, :, both] = same_signs(
        codes(pages, easy, k).mT.to(theirs.dtype), theirs[:, :, both], k[..., arrays["out_easy_idx"]]
    )
    alone = (both == 0) | (both == width)
    weight = torch.where(alone, 1.0, 2**0.5) / width**0.5
    # 1-bit codes are a scale apart here, and two of theirs; frequencies that stand for two weigh more
    ours = easy.scale.reshape(1, k.shape[1], groups, -1).mT / 2
    close(ours, arrays["out_easy_scale"][:, :, both] * weight[:, None])
    signs = (2 * theirs - 1) * arrays["out_easy_scale"].repeat_interleave(32, dim=-1)
    half = torch.view_as_complex(signs.mT.unflatten(-1, (-1, 2)).contiguous())[..., : width // 2 + 1]
    easy_keys = pages.decoded()[0].reshape(k.shape)[..., arrays["out_easy_idx"]]
    close(easy_keys, torch.fft.irfft(half, n=width))

    value = pages.values[0]
    if value_bits == 2:
        assert torch.equal(codes(pages, value, v).mT, fields(arrays["out_v_code"], 2))
        close(value.scale.reshape(1, v.shape[1], groups, -1).mT, arrays["out_v_scale"])
        return
    ternary = codes(pages, value, v)
    assert torch.equal(ternary.mT, fields(arrays["out_v_code"], 2))
    close(value.scale.reshape(1, v.shape[1], groups, -1).mT, arrays["out_v_scale"])
    # as shipped, values come back without their scale: the codes are theirs all the same
    close(ternary - 1, arrays["out_v_dequant_as_shipped"])
    scale = arrays["out_v_scale"].mT.repeat_interleave(32, dim=2)
    close(pages.decoded()[1].reshape(v.shape), (fields(arrays["out_v_code"], 2).mT - 1) * scale)


def vidkv_exact(params: Params, arrays: Arrays) -> None:
    """The variant without a transform: hard channels and values as the program has them, signs of the easy channels."""
    k, v = arrays["in_k"], arrays["in_v"]
    codec = make("vidkv", variant="exact", key_bits=params["nbits"][0], value_bits=params["nbits"][1], page=64)
    pages = packed(codec, k, v)
    hard, easy = pages.keys
    for plane, name in ((hard, "hard"), (easy, "easy")):
        assert plane.channels is not None and torch.equal(plane.channels[0].long(), arrays[f"out_{name}_idx"])
    assert torch.equal(codes(pages, hard, k).mT, fields(arrays["out_hard_code"], 2))
    assert torch.equal(codes(pages, pages.values[0], v).mT, fields(arrays["out_v_code"], 2))
    plain = k[..., arrays["out_easy_idx"]]
    size = plain.abs().unflatten(2, (-1, 32)).mean(3).repeat_interleave(32, dim=2)
    close(pages.decoded()[0].reshape(k.shape)[..., arrays["out_easy_idx"]], torch.where(plain < 0, -size, size))


def same_signs(ours: Tensor, theirs: Tensor, x: Tensor) -> Tensor:
    """Our codes ``[1, H, D, T]`` of the parts of the transform of ``x [1, H, T, D]``. Keys in few bits have parts that are
    zero, whose sign is the rounding of the transform; where ours and theirs differ, it is no more than that."""
    spectrum, width = torch.fft.rfft(x.double()), x.shape[3]
    parts = torch.cat([spectrum.real, spectrum.imag[..., 1 : (width + 1) // 2]], dim=-1).mT
    rounding = 4 * torch.finfo(torch.float32).eps * x.abs().sum(-1)[:, :, None]
    assert (parts.abs() <= rounding)[ours != theirs].all(), "codes differ where the transform is not zero"
    return ours


def think(params: Params, arrays: Arrays) -> None:
    """The channels that stay, and keys of eight bits on them; theirs are in full precision."""
    keys, queries, recent = arrays["in_k"], arrays["in_q_window"], params["recent_size"]
    there = torch.ones(1, queries.shape[2], dtype=torch.bool)
    mask, pages = thinned(keys, queries, there, params["ratio"])
    assert torch.equal(mask, arrays["out_channel_mask"][0])
    older = pages.decoded()[0].view_as(keys)[:, :, :-recent]
    ours = older[mask[None, :, None].expand_as(older)].view(arrays["out_k_pruned"].shape)
    # half a step of the 255 that a group of 32 tokens spans
    spread = float(keys.amax((2,)).sub(keys.amin((2,))).max())
    assert float((ours - arrays["out_k_pruned"]).abs().max()) <= spread / 255 / 2 * 1.001
    assert not older[~mask[None, :, None].expand_as(older)].any()
    assert torch.equal(keys[:, :, -recent:], arrays["out_k_recent"])


def think_kvpress(params: Params, arrays: Arrays) -> None:
    keys, window = arrays["in_k"], params["window_size"]
    there = torch.ones(1, window, dtype=torch.bool)
    mask, _ = thinned(keys, last_queries(params, arrays), there, params["key_channel_compression_ratio"])
    assert torch.equal(mask, arrays["out_channel_kept"])


def thinned(keys: Tensor, queries: Tensor, there: Tensor, ratio: float):
    """``[H, D]`` bool, the channels of ``keys [1, H, T, D]`` that stay, and the pages."""
    codec, heads, tokens, width = make("think", prune=ratio, align=1, residual=0, bits=8, page=64), *keys.shape[1:]
    lengths = torch.full((1, heads), tokens)
    pages = codec.pack(*[keys.flatten(0, 2)] * 2, lengths, query_energy=energy(queries, there, heads))
    channels = pages.keys[0].channels
    assert channels is not None
    return torch.zeros(heads, width, dtype=torch.bool).scatter_(1, channels.long(), True), pages


def vidkv_pack(params: Params, arrays: Arrays) -> None:
    """One code at a time, ``[1, heads, channels, tokens]``: of the easy channels of keys, or of values."""
    if params["group_size"] != 32:
        raise NotOffered(f"vidkv with groups of {params['group_size']}")
    x, bit = arrays["in_x"].mT, params["bit"]
    (_, heads, tokens, width), sign = x.shape, bit == 1
    if sign:
        # beside a channel that is wider than all, which is the only hard one
        wide = 1e3 * (torch.arange(tokens) % 2 - 0.5).expand(1, heads, -1)[..., None]
        codec = make("vidkv", key_bits=1 + 1 / (width + 1))
        pages = packed(codec, torch.cat([x, wide], dim=3), x)
        plane = pages.keys[1]
        assert plane.channels is not None and (plane.channels == torch.arange(width)).all()
    else:
        codec = make("vidkv", value_bits=bit)
        pages = packed(codec, x, x)
        (plane,) = pages.values
    assert torch.equal(codes(pages, plane, x).mT, fields(arrays["out_code"], 1 if sign else 2))

    def grouped(scale: Tensor) -> Tensor:
        return scale.reshape(1, heads, tokens // 32, width).mT

    # 1-bit codes are a scale apart here, and two of theirs
    close(grouped(plane.scale) / (2 if sign else 1), arrays["out_scale"])
    if plane.zero is not None:
        close(grouped(plane.zero), arrays["out_min"])
    else:
        assert (arrays["out_min"] == (0 if sign else -1)).all()


def gear(params: Params, arrays: Arrays) -> None:
    """The program rounds what codes represent to half precision, and measures what they lack behind that."""
    bits, group, (*_, tokens, width) = params["bits"], params["group_size"], arrays["in_k"].shape
    if bits not in (2, 4) or width % group:
        raise NotOffered(f"gear with {bits} bits in groups of {group} of {width} channels")
    options = {"bits": bits, "group": group, "page": tokens, "sparsity": params["sparsity"], "rounds": params["loop"]}
    whole, sparse = make("gear", rank=params["rank"], **options), make("gear", rank=0, **options)
    half = {"rtol": 2**-10, "atol": 1e-4}
    for number, side in enumerate("kv"):
        x, coded, begin = (arrays[name] for name in (f"in_{side}", f"out_{side}_sparse_quant", f"in_{side}_p_init"))
        with patch.object(gear_codec, "first_directions", lambda *_, given=begin: given.flatten(0, 1)):
            ours, plain = (
                packed(one, arrays["in_k"], arrays["in_v"]).decoded()[number].view_as(x) for one in (whole, sparse)
            )
        torch.testing.assert_close(plain, coded, **half)
        left, right = low_rank((x - coded).flatten(0, 1), begin.flatten(0, 1), params["loop"])
        close(coded + (left @ right).view_as(x), arrays[f"out_{side}_out"])
        # what is rounded away has a part in the product
        torch.testing.assert_close(ours, arrays[f"out_{side}_out"], rtol=2**-10, atol=3e-3)


# --- TurboQuant -------------------------------------------------------------------------------------------------------
def as_ours(x: Tensor, rotation: Tensor) -> Tensor:
    """``x [..., D]`` so turned that our rotation makes of it what theirs makes of ``x``."""
    return (x.double() @ rotation.double().mT @ matrix(x.shape[-1], 0)).float()


def as_theirs(x: Tensor, rotation: Tensor) -> Tensor:
    return (x.double() @ matrix(x.shape[-1], 0).mT @ rotation.double()).float()


def turbo(x: Tensor, side: int = 0, **options: Any) -> tuple[Pages, tuple[Plane, ...], Tensor]:
    """Pages of ``x [heads, tokens, D]`` as keys, or as values (1): their planes of it, and what comes back in that shape."""
    pages = one_page(x, x, **options)
    return pages, (pages.values if side else pages.keys), pages.decoded()[side].view_as(x)


def one_page(keys: Tensor, of_values: Tensor, /, **options: Any) -> Pages:
    """Pages of keys and values ``[heads, tokens, D]``, one for each head."""
    heads, tokens = keys.shape[:2]
    codec = make("turboquant", page=-(-tokens // 16) * 16, **options)
    return codec.pack(keys.flatten(0, 1), of_values.flatten(0, 1), torch.full((1, heads), tokens))


def codes_in_page(pages: Pages, plane: Plane, like: Tensor) -> Tensor:
    """The codes of ``like [heads, tokens, D]``."""
    return unpack(plane.codes, plane.format, pages.page, pages.tile)[:, : like.shape[1]].int()


def ascending(pages: Pages, plane: Plane, like: Tensor) -> Tensor:
    """Codes as indices of ascending levels."""
    own, half = codes_in_page(pages, plane, like), plane.format.levels // 2
    return torch.where(own >= half, 2 * half - 1 - own, own + half)


def book_is(format: Format, centroids: Tensor, most: float) -> None:
    both = torch.tensor([*(-x for x in reversed(format.book)), *format.book])
    torch.testing.assert_close(both, centroids * format.group**0.5, rtol=most, atol=most)


def same_levels(ours: Tensor, theirs: Tensor, x: Tensor, rotation: Tensor, centroids: Tensor) -> None:
    """Their solver stops before ours: a coordinate between their decision point and ours may have either of two levels."""
    y = x / x.norm(dim=-1, keepdim=True) @ rotation.mT
    bounds = (centroids[1:] + centroids[:-1]) / 2
    apart = ours != theirs
    assert float(apart.float().mean()) < 2e-3 and ((ours - theirs).abs() <= 1).all()
    assert ((y[apart][:, None] - bounds).abs().amin(-1) < 2e-3 * x.shape[-1] ** -0.5).all()


def with_levels(pages: Pages, plane: Plane, index: Tensor) -> Plane:
    """The plane with these levels ``[heads, tokens, D]``."""
    half, mine = plane.format.levels // 2, unpack(plane.codes, plane.format, pages.page, pages.tile).int()
    own = torch.where(index >= half, index - half, 2 * half - 1 - index)
    padded = torch.nn.functional.pad(own, (0, 0, 0, pages.page - own.shape[1]))
    codes, scale = pack(padded, plane.format, pages.tile), plane.scale
    if plane.format.corrected:
        lengths = [torch.tensor(plane.format.book)[x & half - 1].norm(dim=-1, keepdim=True) for x in (mine, padded)]
        scale = scale * lengths[0] / lengths[1]
    return replace(plane, codes=codes, scale=scale)


def turboquant_mse(params: Params, arrays: Arrays) -> None:
    mse_of(arrays, params["bits"], "three_sigma", "out_norm")
    if "out_packed" in arrays:
        pairs = arrays["out_indices"].int().unflatten(-1, (-1, 2))
        assert torch.equal(pairs[..., 0] << 4 | pairs[..., 1], arrays["out_packed"].int())


def turboquant_mlx(params: Params, arrays: Arrays) -> None:
    bits = params["bits"]
    mse_of(arrays, bits, "sphere", "out_norm")
    index = arrays["out_indices"].long()
    stream = (index[..., None] >> torch.arange(bits) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 32)).unflatten(-1, (-1, 32))
    assert torch.equal((stream << torch.arange(32)).sum(-1), arrays["out_packed"].long())


def mse_of(arrays: Arrays, bits: int, codebook: str, norm: str) -> None:
    x, rotation = arrays["in_x"], arrays["in_rotation"]
    pages, (plane,), back = turbo(as_ours(x, rotation), bits=bits, codebook=codebook, correct=False)
    book_is(plane.format, arrays["in_centroids"], 2e-3)
    theirs = arrays["out_indices"].int()
    same_levels(ascending(pages, plane, x), theirs, x, rotation, arrays["in_centroids"])
    back = with_levels(pages, plane, theirs).decoded(pages.page, pages.tile, None, None)[:, : x.shape[1]]
    theirs = arrays[norm].reshape(-1)
    torch.testing.assert_close(
        plane.scale[:, : x.shape[1]].flatten() * x.shape[-1] ** 0.5, theirs, rtol=6e-4, atol=1e-6
    )
    torch.testing.assert_close(as_theirs(back, rotation), arrays["out_x"], rtol=5e-3, atol=5e-3)


def turboquant_split(params: Params, arrays: Arrays) -> None:
    x, bits = arrays["in_x"], params["bits"]
    pages, planes, _ = turbo(x, bits=bits, codebook="sphere", correct=False)
    out = torch.zeros_like(x)
    for plane, name in zip(planes, ("high", "low"), strict=True):
        at, rotation = arrays[f"out_{name}_channels"], arrays[f"in_rotation_{name}"]
        assert plane.channels is not None and (plane.channels == at.int()).all()
        book_is(plane.format, arrays[f"in_centroids_{name}"], 2e-3)
        whole = as_ours(x[..., at], rotation)
        _, (half,), back = turbo(
            whole, bits=len(arrays[f"in_centroids_{name}"]).bit_length() - 1, codebook="sphere", correct=False
        )
        assert half.format == plane.format
        out[..., at] = as_theirs(back, rotation)
    # a coordinate between their decision point and ours moves what comes back of its token
    far = (out - arrays["out_x"]).norm(dim=-1) > 3e-3 * x.norm(dim=-1)
    assert float(far.float().mean()) < 0.1


def turboquant_prod(params: Params, arrays: Arrays) -> None:
    keys, queries, rotation, width = arrays["in_k"], arrays["in_q"], arrays["in_rotation"], params["dim"]
    if params["qjl_dim"] != width:
        raise NotOffered("turboquant with a sketch of another size")
    # theirs is of the residual before our turn, and divided by the root of its size
    ours = as_ours(torch.eye(width), rotation)
    sketch = arrays["in_sketch"].double() * width**0.5 @ ours.double()
    options = {"bits": 4, "value_bits": params["bits"], "codebook": "three_sigma", "correct": False, "sketch": True}
    with patch.object(rotations, "_matrix", lambda *_: sketch):
        pages, (coded, signs), back = turbo(as_ours(keys, rotation)[None], side=1, **options)
    book_is(coded.format, arrays["in_centroids"], 2e-3)
    assert torch.equal(ascending(pages, coded, keys[None])[0], arrays["out_indices"].int())
    assert torch.equal(codes_in_page(pages, signs, keys[None])[0] * 2 - 1, arrays["out_signs"].int())
    close(coded.scale.flatten()[: len(keys), None] * width**0.5, arrays["out_norm"])
    unit = 2 * (torch.pi / 2) ** 0.5 / width
    torch.testing.assert_close(
        signs.scale.flatten()[: len(keys), None] / unit, arrays["out_residual_norm"], rtol=2e-4, atol=2e-4
    )
    right = queries @ as_theirs(back[0], rotation).mT
    torch.testing.assert_close(right, arrays["out_logits_right"], rtol=2e-3, atol=2e-3)
    # as shipped what is left is estimated too small by the root of the size
    first = turbo(
        as_ours(keys, rotation)[None], **options | {"bits": params["bits"] - 1, "sketch": False, "value_bits": 4}
    )[2]
    alone = queries @ as_theirs(first[0], rotation).mT
    shipped = alone + (right - alone) / width**0.5
    torch.testing.assert_close(shipped, arrays["out_logits_as_shipped"], rtol=2e-3, atol=2e-3)


def turboquant_vllm(params: Params, arrays: Arrays) -> None:
    keys, values = (arrays[name].transpose(0, 1).contiguous() for name in ("in_k", "in_v"))
    bits, rotation, width = (params["key_bits"], params["value_bits"]), arrays["in_rotation"], keys.shape[2]
    pages = one_page(as_ours(keys, rotation), values, bits=bits[0], value_bits=bits[1], values="uniform")
    (key,), (value,), (heads, tokens) = pages.keys, pages.values, keys.shape[:2]
    book_is(key.format, arrays["in_centroids"], 2e-3)
    cache = arrays["out_cache"].transpose(0, 1).int()
    ends = [width * bits[0] // 8, width * bits[0] // 8 + 2]
    ends.append(ends[1] + width * bits[1] // 8)

    def read(first: int, last: int, each: int) -> Tensor:
        stream = (cache[..., first:last, None] >> torch.arange(8) & 1).flatten(-2).unflatten(-1, (-1, each))
        return (stream << torch.arange(each)).sum(-1).int()

    index = read(0, ends[0], bits[0])
    same_levels(ascending(pages, key, keys), index, keys, rotation, arrays["in_centroids"])
    assert torch.equal(codes_in_page(pages, value, values), read(ends[1], ends[2], bits[1]))
    pages = replace(pages, keys=(with_levels(pages, key, index),))
    decoded_keys, decoded_values = (x.view_as(keys) for x in pages.decoded())
    # a level of theirs is a thousandth from ours
    rotated = decoded_keys.double() @ matrix(width, 0).mT
    torch.testing.assert_close(rotated.float(), arrays["out_k_rotated"], rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(decoded_values, arrays["out_v"], rtol=2e-3, atol=2e-3)

    def half(at: int) -> Tensor:
        return (cache[..., at] | cache[..., at + 1] << 8).to(torch.int16).view(torch.float16).float()

    assert value.zero is not None

    def there(x: Tensor) -> Tensor:
        return x.flatten(1).reshape(heads, -1)[:, :tokens]

    close_half = {"rtol": 2e-3, "atol": 1e-5}
    torch.testing.assert_close(half(ends[0]), keys.norm(dim=-1), **close_half)
    torch.testing.assert_close(half(ends[2]), there(value.scale), **close_half)
    torch.testing.assert_close(half(ends[2] + 2), there(value.zero), rtol=2e-3, atol=2e-3)
    assert not cache[..., ends[2] + 4 :].any()
    query = arrays["in_q"].view(1, -1, 1, width)
    tail = torch.zeros(1, heads, 0, width)
    asked = as_ours(query, rotation)
    out, lse = decode_attention(asked, tail, tail, pages=pages)
    torch.testing.assert_close(out[0, :, 0], arrays["out_attn"], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse[0, :, 0], arrays["out_lse"], rtol=2e-3, atol=2e-3)


def turboquant_books(params: Params, arrays: Arrays) -> None:
    for width in arrays["in_dims"].tolist():
        for bits in arrays["in_bits"].tolist():
            want = arrays[f"out_centroids_d{width}_b{bits}"]
            # the sketch takes a bit of what values have
            codebook = "sphere" if params["use_exact"] else "three_sigma"
            options = {"bits": 4, "codebook": codebook, "correct": False}
            if bits < 4:
                options |= {"value_bits": bits + 1, "sketch": True}
            x = torch.randn(1, 16, width, generator=torch.Generator().manual_seed(bits))
            pages = one_page(x, x, **options)
            plane = pages.values[0] if bits < 4 else pages.keys[0]
            book_is(plane.format, want, 2e-4)
            unit = rotate(x, 0) / x.norm(dim=-1, keepdim=True)
            index = (unit[..., None] - want).abs().argmin(-1)
            back = plane.decoded(16, pages.tile, None, None)
            close_levels = rotate(back, 0) / x.norm(dim=-1, keepdim=True) - want[index]
            assert float((close_levels.abs() > 1e-3).float().mean()) < 2e-3


_CACHE = "QuantizedCacheVLM._quantize_key/_quantize_value/_dequantize_*"
_KIVI = "quant_and_pack_kcache / quant_and_pack_vcache / unpack_and_dequant_* / triton_quantize_and_pack_along_last_dim"


def zipcache(params: Params, arrays: Arrays) -> None:
    """Both classes of a prompt, as the cache packs them: what is not salient first, then the others."""
    more, less = params["bits_important"], params["bits_unimportant"]
    k, v = (arrays[name].reshape(1, *arrays[name].shape[-3:]) for name in ("in_k", "in_v"))
    _, heads, tokens, width = k.shape
    policy = make("zipcache-tokens", rest=f"zip{less}")
    if "in_q_probe" in arrays:
        seen = torch.arange(tokens) <= arrays["in_probe_ids"][:, None]
        text = torch.ones(1, len(seen), dtype=torch.bool)
        saliency = policy.saliency(LayerAttention(arrays["in_q_probe"], k, seen[None, None], width**-0.5, text))
        close(saliency, arrays["out_saliency"])
    else:
        saliency = arrays["in_saliency"].reshape(1, heads, tokens)
    low = int(params["unimportant_ratio"] * tokens)
    lowest = saliency.argsort(dim=-1, stable=True)[..., :low].sort(-1).values
    kept = torch.ones(1, heads, tokens, dtype=torch.bool).scatter(2, lowest, False)
    if "in_unimportant" in arrays:
        assert torch.equal(lowest, arrays["in_unimportant"].sort(-1).values)
        lowest = arrays["in_unimportant"]
    # which tokens of heads share steps depends on the order of those that are not salient
    salient = kept.nonzero()[:, 2].view(1, heads, tokens - low)
    at = torch.cat([lowest, salient], dim=-1)[..., None].expand(-1, -1, -1, width)
    layer = CacheState(1).layers[0]
    layer.index = KeyIndex(torch.zeros(1, 0, dtype=torch.int32), False, 0)
    layer.update(k.gather(2, at), v.gather(2, at))
    first = (torch.arange(tokens) >= low).expand(1, heads, -1)
    groups = token_groups({0: make("zipcache-codec", bits=more)}, (1, policy.rest_codec()))
    demote(layer, groups[1], first, torch.full((1, heads), tokens - low))
    layer.pack(groups[0], Eligible(torch.ones(1, tokens, dtype=torch.bool), 0, False), SharedPacking())
    assert layer.width == len(layer.index)
    places = layer.index.by_head.long()
    order = places.masked_fill(places < 0, tokens).argsort(dim=-1, stable=True)[..., :tokens, None]
    for ours, side in zip(layer.stored(), "kv", strict=True):
        name = f"out_{side}_dequant" if f"out_{side}_dequant" in arrays else f"out_{side}"
        ours = torch.empty_like(ours).scatter(2, at, ours.gather(2, order.expand(-1, -1, -1, width)))
        close(ours.view(arrays[name].shape), arrays[name])
    scale = arrays.get("out_v_channel_scale", arrays.get("out_channel_scale"))
    for number, (bits, which) in enumerate(((more, "imp"), (less, "unimp"))):
        pages = layer.packed.pages[number]
        assert pages is not None and pages.values[0].factor is not None
        close(pages.values[0].factor.flatten(), scale.flatten())
        for (plane,), side in ((pages.keys, "k"), (pages.values, "v")):
            long = which.replace("imp", "important")
            theirs = arrays.get(f"out_{side}_{which}_code", arrays.get(f"out_{side}_codes_{long}"))
            if theirs is None:
                continue
            there = torch.arange(pages.page) < pages.count[:, None]
            flat = unpack(plane.codes, plane.format, pages.page, pages.tile)[there].view(heads, -1, width)
            row = flat.transpose(0, 1).flatten(1).int()
            parts = [theirs.view(len(row), -1).int() >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
            assert torch.equal(row, torch.cat(parts, dim=1))


_PACKAGE = "Alberto-Codes/turboquant-vllm (PyPI turboquant-vllm)"
_BY_CHANNEL = "true_mixedprec_compress_channelwise"
_BY_TOKEN = "true_channel_separate_mixedprec_tokenwise_compress"
_VLLM = "triton_turboquant_store, _tq_full_dequant_kv, _tq_decode_stage1"

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("jy-yuan/KIVI", _KIVI): kivi,
    ("insuhan/calibquant", "quant"): calibquant,
    ("HaoKang-Timmy/GEAR", "gearslkivi_channelQ_new / gearslkivi_tokenQ_new"): gear,
    ("ThisisBillhe/ZipCache", f"{_BY_CHANNEL} / {_BY_TOKEN} (+ decompress)"): zipcache,
    ("ThisisBillhe/ZipCache", f"{_BY_CHANNEL}, {_BY_TOKEN} and their decompress functions"): zipcache,
    ("SalesforceAIResearch/ThinK", "key_pruner_query_driven"): think,
    ("NVIDIA/kvpress", "ThinKPress.compress"): think_kvpress,
    (_PACKAGE, "TurboQuantMSE.quantize, .dequantize"): turboquant_mse,
    (_PACKAGE, "TurboQuantProd.quantize, .estimate_inner_product"): turboquant_prod,
    (_PACKAGE, "solve_lloyd_max"): turboquant_books,
    ("Blaizzy/mlx-vlm", "_TurboQuantMSECodec.quantize, .dequantize"): turboquant_mlx,
    ("Blaizzy/mlx-vlm", "_SplitCodec.quantize, .dequantize"): turboquant_split,
    ("vllm-project/vllm (PyPI vllm)", _VLLM): turboquant_vllm,
    ("KD-TAO/VidKV", _CACHE): vidkv,
    ("KD-TAO/VidKV", "triton_quantize_and_pack_along_last_dim"): vidkv_pack,
}
