"""Merging and temporal methods against the authors' programs; see comparators.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from comparators import Arrays, Fault, Params, close, same_rows, same_set
from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.merging.aim import AimMerge, halvings, merge_in_rounds
from mmaccel.merging.centerclip import k_medoids
from mmaccel.merging.dycoke import DyCoke
from mmaccel.merging.holitom import HoliTomMerge
from mmaccel.merging.moviechat import memory
from mmaccel.merging.pitome import energy, energy_bipartite_matching, energy_matching, text_matching
from mmaccel.merging.segments import static_segments
from mmaccel.method import TokenBatch
from mmaccel.reduction import Reduction


def film_of(frames: Tensor) -> TokenBatch:
    """One clip ``[T, n, D]`` as a unit whose frames are single rows of cells."""
    length, places = frames.shape[:2]
    cells = torch.cartesian_prod(torch.arange(length), torch.arange(1), torch.arange(places))
    return TokenBatch(
        features=frames.flatten(0, 1)[None],
        valid=torch.ones(1, length * places, dtype=torch.bool),
        cells=cells[None],
        grid=torch.tensor([[length, 1, places]]),
        segment=torch.zeros(1, length * places, dtype=torch.long),
    )


def everything(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool)


# --- PiToMe -----------------------------------------------------------------------------------------------------------
def pitome(text: bool) -> Callable[[Params, Arrays], None]:
    """Outputs are compared as rows together with their sizes; the program's order is by energy."""

    def compare(params: Params, arrays: Arrays) -> None:
        metric, x = arrays["metric"], arrays["x"]
        protected = int(params["class_token"])
        present = metric.shape[1] - protected
        remove = math.floor(present - present * params["ratio"])
        assert params.get("r", remove) == remove
        options = {"margin": params["margin"], "protected": protected}
        if not text:
            options["alpha"] = params.get("alpha", 1.0)
        matching = energy_bipartite_matching if params.get("use_bsm_pitome") else energy_matching
        target = (text_matching if text else matching)(metric, remove, **options)
        made = Reduction.merge(target, everything(metric))
        out, mass = made.apply(x), made.mass()
        for row in range(len(x)):
            size = mass[row][made.kept[row]][:, None]
            same_rows(torch.cat([out[row], size], 1), torch.cat([arrays["out"][row], arrays["size"][row]], 1))
        if protected:
            close(out[:, 0], arrays["out"][:, 0])
        if "energy_check" in arrays:
            close(energy(metric[:, protected:], params["margin"], params["alpha"]), arrays["energy_check"])

    return compare


# --- AIM --------------------------------------------------------------------------------------------------------------
def aim_merge(params: Params, arrays: Arrays) -> None:
    """The program's calls, each output as rows (its order is by similarity); then the method to the same budget."""
    x = arrays["x"]

    def compare(removals: list[int], theirs: Tensor) -> None:
        target, weight = merge_in_rounds(x, removals)
        for mine, row in zip(Reduction.merge(target, everything(x), weight).apply(x), theirs, strict=True):
            same_rows(mine, row)

    sequence = params["r_sequence"]
    assert len(sequence) == 2
    compare(sequence[:1], arrays["after_half"])
    compare(sequence, arrays["after_quarter"])
    if "single_r_fifth" in arrays:
        compare([params["r_single"]], arrays["single_r_fifth"])
    if halvings(x.shape[1], arrays["after_quarter"].shape[1]) == sequence:
        clip = film_of(x)
        ours = AimMerge().reduce(clip, torch.tensor([arrays["after_quarter"].shape[:2].numel()]))
        same_rows(ours.apply(clip.features)[0], arrays["after_quarter"].flatten(0, 1))


# --- HoliTom ----------------------------------------------------------------------------------------------------------
def holitom(params: Params, arrays: Arrays) -> None:
    """Segments exactly, every segment's output as rows; in a grid, the newline behind every row with tokens too."""
    x, attention = arrays["tokens"], arrays["attn"]
    frames, places = attention.shape
    there = everything(attention)
    method = HoliTomMerge(
        tau=params["tau"],
        contextual=params["D"],
        # the variable is tested against "0", which leaves beta in use
        beta=params["Beta"] if params["NO_BETA"] == "0" else None,
        neighbours=params["K"],
        longest=params["max_window_size"],
    )
    similar = torch.cosine_similarity(x[:-1], x[1:], dim=-1) > params["tau"]
    segments, saved = static_segments(similar, params["max_window_size"])
    assert segments == [tuple(pair) for pair in arrays["segments"].tolist()]
    assert saved == params["total_reduced"]

    # golden densities carry no noise, so that equally dense tokens do not rank
    slot, source, weight = method.clip(x, attention, there, params["retain_ratio"], strict=True)
    out = torch.zeros(frames * places, x.shape[2])
    out.index_add_(0, slot, weight[:, None] * x.flatten(0, 1)[source])
    start = 0
    for (first, last), length in zip(segments, arrays["segment_out_len"].tolist(), strict=True):
        kept = slot.unique()
        kept = kept[(kept >= first * places) & (kept < (last + 1) * places)]
        ours = out[kept]
        theirs = arrays["out"][start : start + length]
        if params["mm_newline_position"] == "grid":
            newline = (theirs == arrays["newline"]).all(1)
            side = math.isqrt(places)
            assert int(newline.sum()) == (kept // side).unique().numel()
            # in a grid both are in the order of their places
            close(ours, theirs[~newline])
        same_rows(ours, theirs[(theirs != arrays["newline"]).any(1)])
        start += length
    assert start == len(arrays["out"])


# --- DyCoke -----------------------------------------------------------------------------------------------------------
def dycoke(params: Params, arrays: Arrays) -> None:
    length, places = params["num_frames"], params["num_tokens_per_frame"]
    if length <= 4:
        raise Fault("DyCoke cannot take four frames or fewer")
    keep = int((1 - params["merging_ratio"]) * places)
    assert keep == params["kept_per_pruned_frame"]
    clip = film_of(arrays["tokens"].unflatten(0, (length, places)))
    theirs = arrays["out_src_idx"]
    made = DyCoke(official_tail=True).reduce(clip, torch.tensor([len(theirs)]))
    ours = made.kept[0].nonzero()[:, 0]
    same_set(ours, theirs)
    # theirs come out frame by frame, in ascending similarity
    close(made.apply(clip.features)[0], arrays["out"][theirs.argsort()])


# --- CenterCLIP -------------------------------------------------------------------------------------------------------
def centerclip(params: Params, arrays: Arrays) -> None:
    x = arrays["X"]
    if params["pre_norm"]:
        x = normalize(x, p=params["norm_p"], dim=-1)
    if params["distance"] == "euclidean":
        away = torch.cdist(x, x)
    else:
        unit = normalize(x, dim=-1)
        away = 1.0 - unit @ unit.transpose(1, 2)
    # as the program shifts them: its rounding decides which of two members is the medoid
    parts = []
    for chunk in away.split(params["split_size"]):
        parts.append(chunk - (chunk.max() + 1.0) - torch.eye(x.shape[1]))
    medoids, cluster = k_medoids(x, torch.cat(parts), params["K"], params["iter_limit"])
    assert params["id_sort"]
    assert torch.equal(medoids, arrays["medoids"])
    assert torch.equal(cluster, arrays["assign"])


# --- MovieChat --------------------------------------------------------------------------------------------------------
def moviechat(params: Params, arrays: Arrays) -> None:
    names = sorted((name for name in arrays if name.startswith("fragment")), key=lambda name: int(name[8:]))
    fragments = [arrays[name][: params["n_frame"]] for name in names]
    ours = memory(fragments, params["short_memory_length"], params["short_memory_merge"], "official_dot")
    close(ours, arrays["long_memory"])


_AIM = "llava/model/token_merge.py:bipartite_soft_matching_merge (called as in llava_arch.py:get_2dPool)"
_HOLITOM = "holitom/llava_arch.py:LlavaMetaForCausalLM_holitom"

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("hchautran/PiToMe", "algo/pitome/merge.py:pitome_vision + merge_wavg"): pitome(text=False),
    ("hchautran/PiToMe", "algo/pitome/merge.py:pitome_text + merge_wavg"): pitome(text=True),
    ("LaVi-Lab/AIM", _AIM): aim_merge,
    ("cokeshao/HoliTom", f"{_HOLITOM}.{{select_static_windows,get_static_dynamic_features,holitom}}"): holitom,
    ("KD-TAO/DyCoke", "llava/model/llava_arch.py:dycole_ttm"): dycoke,
    ("mzhaoshuai/CenterCLIP", "modules/cluster/fast_kmeans.py:batch_fast_kmedoids_with_split"): centerclip,
    ("rese1f/MovieChat", "MovieChat/models/moviechat.py:MovieChat.encode_short_memory_frame"): moviechat,
}
