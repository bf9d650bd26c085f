"""Comparators for the codecs of the cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from comparators import Arrays, Params, close
from compare_kv import last_queries
from harness import NotOffered, make
from mmaccel_kernels.pages import Pages, Plane, unpack
from torch import Tensor

from mmaccel.kv.codecs.base import Codec
from mmaccel.kv.scoring.importance import energy


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


_CACHE = "QuantizedCacheVLM._quantize_key/_quantize_value/_dequantize_*"
_KIVI = "quant_and_pack_kcache / quant_and_pack_vcache / unpack_and_dequant_* / triton_quantize_and_pack_along_last_dim"

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("jy-yuan/KIVI", _KIVI): kivi,
    ("insuhan/calibquant", "quant"): calibquant,
    ("SalesforceAIResearch/ThinK", "key_pruner_query_driven"): think,
    ("NVIDIA/kvpress", "ThinKPress.compress"): think_kvpress,
    ("KD-TAO/VidKV", _CACHE): vidkv,
    ("KD-TAO/VidKV", "triton_quantize_and_pack_along_last_dim"): vidkv_pack,
}
