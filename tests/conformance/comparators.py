"""Which registered method answers for which function of an authors' program.

A comparator takes a vector's parameters and arrays, runs ours on the inputs (see harness.py) and asserts equality with the
outputs. It returns only after it has compared; a variant that ours lacks raises :class:`.harness.NotOffered`, and what
shows a fault of the authors' program is compared inside :func:`.harness.fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from harness import fault, make
from torch import Tensor

from mmaccel.core.reduction import Reduction
from mmaccel.method import EncoderTokens, TokenBatch

Params = Mapping[str, Any]
Arrays = Mapping[str, Tensor]


# --- building inputs, comparing outputs -------------------------------------------------------------------------------
def one_unit(features: Tensor, **signals: Tensor) -> TokenBatch:
    """A batch of one unit without padding or grid, features ``[n, D]``; signals get the batch axis in front."""
    n = len(features)
    return TokenBatch(
        features=features[None],
        valid=torch.ones(1, n, dtype=torch.bool),
        cells=torch.full((1, n, 3), -1),
        grid=torch.tensor([[1, 1, n]]),
        segment=torch.zeros(1, n, dtype=torch.long),
        signals={name: value[None] for name, value in signals.items()},
    )


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal within 1e-4, relative; entries that cancelled to almost nothing are measured against the largest."""
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-4, atol=1e-6 * float(theirs.abs().max()))


def same_set(ours: Tensor, theirs: Tensor) -> None:
    """Positions as sets; neither side may repeat one."""
    assert ours.unique().numel() == ours.numel() and theirs.unique().numel() == theirs.numel()
    assert torch.equal(ours.sort().values, theirs.long().sort().values)


def same_rows(ours: Tensor, theirs: Tensor) -> None:
    """Rows of features in any order: nearest rows must pair off one to one, and be close."""
    assert ours.shape == theirs.shape
    pair = torch.cdist(theirs.double(), ours.double()).argmin(1)
    assert pair.unique().numel() == len(pair), "two rows of theirs are nearest to the same row of ours"
    close(ours[pair], theirs)


def same_positions(ours: list[list[Tensor]], theirs: Tensor) -> None:
    """Per row and head the places that stay, against ``[B, H, n]``."""
    assert (len(ours), len(ours[0])) == theirs.shape[:2]
    for mine, row in zip(ours, theirs, strict=True):
        for one, positions in zip(mine, row, strict=True):
            same_set(one, positions)


def kept_of(reduction: Reduction) -> Tensor:
    """The slots that stay of the first unit."""
    return reduction.kept[0].nonzero()[:, 0]


def everything(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool)


def in_tower(keys: Tensor, size: Tensor | None = None, protected: int = 0) -> EncoderTokens:
    """What a method inside the tower sees of ``keys [N, T, d]``."""
    return EncoderTokens(keys, torch.ones(keys.shape[:2]) if size is None else size, protected=protected)


def rotate(queries: Tensor, first: int, theta: float = 10000.0) -> Tensor:
    """RoPE in the layout of two halves for ``[B, H, T, D]``, the first of which stands at position ``first``."""
    half = queries.shape[-1] // 2
    inverse = theta ** -(torch.arange(half) / half)
    angle = (torch.arange(queries.shape[2]) + first)[:, None] * inverse
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    swapped = torch.cat([-queries[..., half:], queries[..., :half]], -1)
    return queries * cos + swapped * sin


# --- visual tokens ----------------------------------------------------------------------------------------------------
def divprune(params: Params, arrays: Arrays) -> None:
    features, order = arrays["features"], arrays["selected_order"]
    # the program rounds half to even
    count = round(params["threshold_ratio"] * len(features))
    assert count == len(order)
    kept = kept_of(make("divprune").reduce(one_unit(features), torch.tensor([count])))
    assert len(kept) == count
    with fault(order.unique().numel() < len(order), "DivPrune picks a token again when only copies are left"):
        same_set(kept, order)
        same_set(kept, arrays["kept_sorted"])


def vtc_cls(params: Params, arrays: Arrays) -> None:
    first = params["first_saved_layer"]
    layers = range(params["start_layer"], params["num_layers"] - 1)
    saved = arrays["cls_attn_layers"][layers.start - first : layers.stop - first]
    assert len(saved) == len(layers)
    batch = one_unit(arrays["features"], cls_attention=saved.mean(1))
    ours = make("vtc-cls", layers=tuple(layers)).reduce(batch, torch.tensor([params["token_num"]]))
    same_set(kept_of(ours), arrays["kept_idx"])
    close(ours.apply(batch.features)[0], arrays["kept_features"])


def tome(params: Params, arrays: Arrays) -> None:
    metric, x = arrays["metric"], arrays["x"]
    protected = int(params["class_token"]) + int(params.get("distill_token", False))
    method = make("tome")

    target = method.match(in_tower(metric, protected=protected), params["r"])
    assert int((target != torch.arange(target.shape[1])).sum(1).max()) == params["r_effective"]
    ours, source = Reduction.merge(target, everything(metric)), arrays["source"]
    for row in range(len(x)):
        # the tokens of one output of theirs all flow into one slot of ours, and no others do
        slots = source[row].long().argmax(1)
        into = target[row][slots]
        assert torch.equal(source[row], target[row][None] == into[:, None])
        close(ours.substitute(x)[row, into], arrays["out"][row])
        close(ours.mass()[row, into], arrays["size"][row, :, 0])

    if "metric2" in arrays:
        size = arrays["size"][..., 0]
        tokens = in_tower(arrays["metric2"], size, protected)
        target = method.match(tokens, params["r2"])
        weight = method.weigh(tokens, target)
        ours = Reduction.merge(target, everything(size), size)
        mass = ours.mass(size)
        for row, held in enumerate(arrays["out"]):
            merged = torch.zeros_like(held).index_add(0, target[row], weight[row, :, None] * held)
            weighed = torch.cat([merged, mass[row][:, None]], 1)[ours.kept[row]]
            same_rows(weighed, torch.cat([arrays["out2"][row], arrays["size2"][row]], 1))


def tome_coarse(params: Params, arrays: Arrays) -> None:
    metric, x = arrays["metric"], arrays["x"]
    total = metric.shape[1]
    target = make("tome", coarse=True).match(in_tower(metric), total - total // params["k"])
    ours = Reduction.merge(target, everything(metric)).apply(x)
    for mine, theirs in zip(ours, arrays["out"], strict=True):
        close(mine, theirs)


def tome_schedule(params: Params, arrays: Arrays) -> None:
    """The program is told a number for every layer, or one and its inflection, or some for the first layers."""
    assert params
    for case, told in params.items():
        layers, r, tokens, pace = told["num_layers"], told["r"], 10_000, 0.0
        if isinstance(r, list) and isinstance(r[1], float):
            r, pace = r
        listed = isinstance(r, list)
        removed = sum(r) if listed else r * layers
        method = make("tome", pace=tuple(map(float, r)) if listed else float(pace))
        assert method.schedule(tokens, layers, tokens - removed) == arrays[case].tolist()


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("facebookresearch/ToMe", "tome/merge.py:kth_bipartite_soft_matching"): tome_coarse,
    ("facebookresearch/ToMe", "tome/utils.py:parse_r"): tome_schedule,
    ("vbdi/divprune", "LLaVA/llava/model/llava_arch.py:LlavaMetaForCausalLM.DivPrune"): divprune,
    (
        "THU-MIG/VTC-CLS",
        "llava/model/multimodal_encoder/clip_encoder.py:cls_token_only + llava/model/llava_arch.py:encode_images",
    ): vtc_cls,
    ("facebookresearch/ToMe", "tome/merge.py:bipartite_soft_matching + merge_wavg + merge_source"): tome,
}
