"""Methods for clips with sounds, against the authors' programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from comparators import Arrays, Params, close, one_unit
from harness import make, whole

from mmaccel.method import TokenBatch


def heard_and_seen(params: Params, arrays: Arrays) -> tuple[TokenBatch, torch.Tensor]:
    """The sounds and frames of a prompt as one row, and their places in it."""
    ids = arrays["ids"]
    heard, seen = ids == params["audio_token_id"], ids == params["video_token_id"]
    places = (heard | seen).nonzero()[:, 0]
    (frames, height, width), kinds = arrays["grid_thw"][0].tolist(), ids[places]
    grid = frames, height // 2, width // 2
    cells = torch.full((len(places), 3), -1)
    cells[kinds == params["video_token_id"]] = torch.cartesian_prod(*map(torch.arange, grid))
    begins = torch.cat([torch.tensor([True]), (kinds[1:] != kinds[:-1]) | (places.diff() > 1)])
    attention = torch.full((len(places),), torch.nan)
    attention[kinds == params["audio_token_id"]] = arrays["audio_attn"]
    tokens = one_unit(arrays["embeds"][places], sound_attention=attention)
    return replace(tokens, cells=cells[None], grid=torch.tensor([grid]), segment=begins.cumsum(0)[None] - 1), places


def omnizip(params: Params, arrays: Arrays) -> None:
    tokens, places = heard_and_seen(params, arrays)
    method = make(
        "omnizip",
        sounds=1 - params["merging_ratio_audio"],
        anchors=params["contextual_ratio"],
        members=params["g"],
    )
    size, tries = int(tokens.celled.sum()), []
    for count in whole(1 - params["merging_ratio_v"], size):
        ours = method.reduce(tokens, torch.tensor([count]))
        mask, out = torch.ones_like(arrays["mask"]), arrays["embeds"].clone()
        mask[places], out[places] = ours.kept[0], ours.substitute(tokens.features)[0]
        tries.append((mask, out))
    mask, out = next((one for one in tries if torch.equal(one[0], arrays["mask"])), tries[0])
    assert torch.equal(mask, arrays["mask"])
    close(out, arrays["out"])


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("KD-TAO/OmniZip", "omnizip/omnizip_core.py:omnizip"): omnizip,
}
