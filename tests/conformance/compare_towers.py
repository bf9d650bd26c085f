"""Methods that change which frames or patches the layers of a tower compute, against the authors' programs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from comparators import Arrays, Params, close
from compare_films import film
from harness import make
from torch import Tensor, nn

from mmaccel.core.stats import Stats
from mmaccel.families.tower import ModelTowers
from mmaccel.method import Method
from mmaccel.runtime.call.call import Call, CallInputs, VisionState, pop, push
from mmaccel.runtime.call.plan import PlannedStage
from mmaccel.runtime.call.vision_output import VisionOutput
from mmaccel.runtime.tower.frame_merging import MergedFrames
from mmaccel.runtime.tower.rebuilding import Rebuilding, Rebuilt


# --- frames that merge ------------------------------------------------------------------------------------------------
def earlytom_frames(params: Params, arrays: Arrays) -> None:
    hidden, attention = arrays["hidden"], arrays["attn"]
    method = make(
        "earlytom-frames",
        tau=params["tau"],
        longest=params["max_window"],
        ema=params["ema"],
        mixing={"mixing": "pairs", "naive_mixing": "mean"}[params["mode"]],
    )
    merged = MergedFrames([hidden.shape[:2]], 0, False, hidden.device)
    ours, [(_, weights, _)] = merged.merge(method, hidden)
    close(ours, arrays["merged"])
    close(torch.einsum("fg,ghst->fhst", weights, attention), arrays["merged_attn"])
    chooser = make("earlytom-tokens", tau=params["tau"], longest=params["max_window"], ema=params["ema"])
    segments = chooser.segments(ours if params["last_layer"] else hidden)
    assert [list(one) for one in segments] == arrays["groups"].tolist()


def earlytom_tokens(params: Params, arrays: Arrays) -> None:
    x, attention, groups = arrays["features"], arrays["attn"], arrays["groups"]
    assert params["D"] == 0.0
    frames, places = attention.shape
    method = make("earlytom-tokens", {"segments": lambda self, states: [tuple(one) for one in groups.tolist()]})
    tokens = film(x, received_attention=attention)
    signals = {"received_attention": attention.reshape(1, 1, -1), "features": x.reshape(1, 1, frames * places, -1)}
    tokens = SimpleNamespace(**{**vars(tokens), "signals": signals, "celled": tokens.celled, "tiles": tokens.tiles})
    count = method.official_count(params["retain_ratio"], frames * places)
    ours = method.reduce(tokens, torch.tensor([count]))
    close(ours.apply(x.reshape(1, frames * places, -1))[0], arrays["out"])
    kept = ours.kept.view(frames, places)
    assert [int(kept[a : b + 1].sum()) for a, b in groups.tolist()] == arrays["out_counts"].tolist()


# --- patches that are rebuilt -----------------------------------------------------------------------------------------
class _Family(ModelTowers):
    """A tower of these blocks, over one packed sequence of frames."""

    name, has_cls, feature_layer = "stand-in", False, 0  # type: ignore[assignment]

    def __init__(self, blocks: list[nn.Module], grids: list[list[int]]) -> None:
        self.blocks_, self.grids = blocks, grids
        self.feature_layer = len(blocks) - 1  # type: ignore[misc]

    def towers(self) -> list[Any]:
        return [self]

    def tower_layers(self, tower: Any) -> list[nn.Module]:
        return self.blocks_

    @property
    def read_at(self) -> list[int]:
        return [len(self.blocks_) - 1]

    def frames(self, encoded: Any) -> list[list[tuple[int, int]]]:
        return [[(h, w)] * t for t, h, w in self.grids]


class _Block(nn.Module):
    """The stand-in of a vector, named as in Qwen's towers; a frame attends to itself."""

    def __init__(
        self, norms: list[nn.Module], attention: Callable[..., Tensor], mlp: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.mlp, self.attention = _Function(mlp), attention
        self.bounds: list[int] = []

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        self.bounds, normed = cu_seqlens.tolist(), self.norm1(hidden)
        parts = zip(self.bounds, self.bounds[1:], strict=False)
        cosine, sine = position_embeddings
        hidden = hidden + torch.cat([self.attention(normed[a:b], cosine[a:b], sine[a:b]) for a, b in parts])
        added: Tensor = self.mlp(self.norm2(hidden))
        return hidden + added


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _heads(qkv: Tensor, heads: int, cosine: Tensor, sine: Tensor) -> Tensor:
    """Attention of ``qkv [n, 3 C]`` in heads, turned by RoPE."""
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
    half = query.shape[-1] // 2

    def turned(x: Tensor) -> Tensor:
        return x * cosine + torch.cat([-x[..., half:], x[..., :half]], -1) * sine

    made = (turned(query) @ turned(key).mT * query.shape[-1] ** -0.5).softmax(-1) @ value
    return made.transpose(0, 1).flatten(1)


def _block_of(arrays: Arrays, number: int, params: Params) -> _Block:
    """Block ``number`` of a vector with all weights."""
    w = {name.removeprefix(f"b{number}."): x for name, x in arrays.items() if name.startswith(f"b{number}.")}
    norms: list[nn.Module] = []
    for one in ("norm1", "norm2"):
        norm = nn.LayerNorm(len(w[f"{one}.weight"]), eps=params["ln_eps"])
        norm.weight.data, norm.bias.data = w[f"{one}.weight"], w[f"{one}.bias"]
        norms.append(norm)

    def linear(name: str, x: Tensor) -> Tensor:
        return nn.functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def attention(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        return linear("attn.proj", _heads(linear("attn.qkv", x), params["num_heads"], cosine, sine))

    def mlp(x: Tensor) -> Tensor:
        inside = linear("mlp.fc1", x)
        return linear("mlp.fc2", inside * torch.sigmoid(1.702 * inside))

    return _Block(norms, attention, mlp)


def _plain_block(arrays: Arrays, number: int, params: Params) -> _Block:
    """Block ``number`` of a vector with one head and no positions."""
    wq, wk, wv, wo = arrays["W"][number]
    norms: list[nn.Module] = [nn.LayerNorm(len(wq), eps=params["ln_eps"], elementwise_affine=False) for _ in range(2)]

    def attention(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        return ((x @ wq) @ (x @ wk).mT * x.shape[-1] ** -0.5).softmax(-1) @ (x @ wv) @ wo

    return _Block(norms, attention, lambda x: nn.functional.gelu(x @ arrays["M1"][number]) @ arrays["M2"][number])


def _through(
    method: Method, blocks: list[_Block], grids: list[list[int]], x: Tensor, angles: Tensor
) -> tuple[Tensor, Rebuilt]:
    """What a tower of ``blocks`` makes of patches ``x [n, C]``, and what the method chose."""
    family = _Family(list(blocks), grids)
    stage = PlannedStage(0, method, None)
    plan: Any = SimpleNamespace(family=family, rebuilding=stage, origin=None, kernels="auto")
    Rebuilding(plan, stage, lambda *handles: None)  # type: ignore[arg-type]
    sizes = [h * w for t, h, w in grids for _ in range(t)]
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    rotary = torch.cat([angles, angles], -1)
    output = VisionOutput({}, modality="image")
    call: Any = Call(plan, Stats("conformance"), VisionState(None, running=output), CallInputs())  # type: ignore[arg-type]
    push(call)
    try:
        for block in blocks:
            x = block(x, cu_seqlens=bounds, position_embeddings=(rotary.cos(), rotary.sin()))
    finally:
        pop(call)
    assert isinstance(output.merged, Rebuilt)
    return x, output.merged


def ipcv(params: Params, arrays: Arrays) -> None:
    """The authors' tower, with its frame boundaries as shipped."""
    method = make(
        "ipcv",
        layer=params["vit_pruned_layer"],
        reduction=params["vit_reduction_ratio"],
        stabilised=params["AS_layer"],
        neighbours=params["Top_K"],
    )
    blocks = [_block_of(arrays, number, params) for number in range(params["depth"])]
    ours, rebuilt = _through(method, blocks, params["grid_thw"], arrays["x0"], arrays["rotary"])
    assert torch.equal(rebuilt.place, arrays["keep"].long())
    close(rebuilt.states, arrays["state_k"])
    close(ours, arrays["full"])


def ipcv_stand_in(params: Params, arrays: Arrays) -> None:
    """A stand-in of the authors' tower, with its frame boundaries as shipped."""
    method = make(
        "ipcv",
        layer=params["prune_layer"],
        reduction=params["reduction"],
        stabilised=params["stabilised_layers"],
        neighbours=params["neighbours"],
    )
    blocks = [_plain_block(arrays, number, params) for number in range(params["depth"])]
    x = arrays["patches"]
    ours, rebuilt = _through(method, blocks, [params["grid"]], x, torch.zeros(len(x), 1))
    assert torch.equal(rebuilt.place, arrays["kept"].long())
    assert blocks[-1].bounds == arrays["bounds"].tolist()
    close(ours, arrays["output"])


_IPCV = "Qwen2-VL/Qwen2VL_IPCV/modeling_qwen2_vl_IPCV.py:IPCV_ViT.forward"
COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    (
        "viridisGreen/EarlyTom",
        "LLaVA-NeXT/llava/model/multimodal_encoder/siglip_encoder.py:SigLipEncoder.compression",
    ): earlytom_frames,
    ("viridisGreen/EarlyTom", "earlytom/llava_arch.py:divided_static_dynamic, spatial_compression"): earlytom_tokens,
    ("Perkzi/IPCV", _IPCV): ipcv,
    ("Perkzi/IPCV", f"{_IPCV}, get_retained_image_token_diff, Qwen2VLVisionBlock.forward"): ipcv_stand_in,
}
