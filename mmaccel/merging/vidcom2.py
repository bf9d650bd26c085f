"""VidCom2: tokens unlike their frame and unlike the whole clip stay, and frames unlike the others keep more of them."""

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.budget import apportion
from ..core.masks import group_sizes, top_in_groups
from ..core.reduction import Reduction
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import BLOCK, frame_numbers
from .film import spare_newlines

#: variances of the Gaussians by which a token is near a centre, as in the program
_WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)


@register
class VidCom2(ProjectorMethod):
    """Keep the tokens that are far from the mean of their frame and of the clip; unusual frames get more of the budget.

    *Video Compression Commander: Plug-and-Play Inference Acceleration for Video Large Language Models*, EMNLP 2025,
    arXiv 2505.14454.

    1. The half of the channels with the lowest variance over the clip is looked at, as unit vectors ``x``.
    2. ``g(x, c) = sum_a exp(-||x - c||^2 / 2a)``, ``a`` in 1/8, 1/4, 1/2, 1, 2, with ``v`` for the clip's mean as ``c`` and
       ``f`` for the frame's. Of every frame the tokens with the smallest ``v + f`` stay, the lower slot on a tie.
    3. A frame is as unusual as ``u_t = -mean v``; with ``p = softmax(u / temperature)`` its share of the budget is proportional
       to ``1 + p_t - mean p``, at most all of its tokens.

    The budget is exact over the clip. Tiles of a picture count as frames. Newlines are dropped first.

    Parameters
    ----------
    temperature : 0.01 as in the program; one frame then gets most of what is not shared evenly.

    Paper and program: the program rounds ``share n`` in every frame (half to even, at least one), so that the sum differs from
    the budget by a few tokens; here the largest remainders are rounded up. For LLaVA-Video it moves the newlines of a frame
    behind its tokens.
    """

    name = "vidcom2"
    summary = "tokens unlike their frame and the clip; unusual frames keep more"
    paper = "arXiv 2505.14454"
    unit = "picture"
    limits = {"temperature": "(0, inf)"}

    temperature: float = 0.01

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> the most unusual tokens of every frame."""
        here, part = tokens.celled, frame_numbers(tokens)
        groups = max(1, int(part.max()) + 1)
        quiet = quiet_channels(tokens.features, torch.where(here, 0, -1), 1)[:, 0]
        seen = tokens.features.gather(2, quiet[:, None].expand(*here.shape, -1)).float()
        seen = seen.masked_fill(~here[..., None], 0.0)
        x = normalize(seen, dim=-1)
        video = nearness(x, part_means(x, torch.where(here, 0, -1), 1), torch.zeros_like(part))
        frame = nearness(x, part_means(x, part, groups), part)
        sizes = group_sizes(part, groups)
        unusual = -part_means(video[..., None], part, groups)[..., 0]
        weight = (unusual / self.temperature).masked_fill(sizes == 0, -torch.inf).softmax(1).nan_to_num(0.0)
        frames = (sizes > 0).sum(1, keepdim=True).clamp(min=1)
        # in whole millionths, so that rounding decides nothing between frames that are alike
        scale = ((1 + weight - weight.sum(1, keepdim=True) / frames) * 1e6).round().long()
        rows = zip(count.tolist(), sizes.tolist(), (scale * sizes).tolist(), strict=True)
        shares = torch.tensor([apportion(k, size, share) for k, size, share in rows], device=part.device)
        kept = top_in_groups(-of_first(video + frame, copies_in(seen, part)), part, shares.view_as(sizes))
        return Reduction(kept | spare_newlines(tokens, count), tokens.valid)


def part_means(x: Tensor, part: Tensor, groups: int) -> Tensor:
    """``[N, groups, D]`` float32: the mean of ``x [N, n, D]`` over the slots of each part ``part [N, n]``; 0 of none.

    ``x`` is finite where no part is, too. A product with zeros and ones: no atomics, and no loop over parts.
    """
    member = part[:, None] == torch.arange(groups, device=part.device)[:, None]
    return member.float() @ x.float() / member.sum(2, keepdim=True).clamp(min=1)


def copies_in(x: Tensor, part: Tensor) -> Tensor | None:
    """The first copy of every token of ``x [N, n, D]`` within its part ``part [N, n]``; see :func:`first_copies`."""
    return first_copies(torch.cat([x, part[..., None].to(x.dtype)], 2))


def quiet_channels(features: Tensor, part: Tensor, groups: int) -> Tensor:
    """``[N, groups, D // 2]`` long: the channels of ``features [N, n, D]`` with the lowest population variance over each part
    ``part [N, n]``, the lowest first, of equal ones the first."""
    variance = torch.cat([_variance(block, part, groups) for block in _in_blocks(features, part)], 2)
    return variance.argsort(dim=2, stable=True)[..., : max(1, features.shape[2] // 2)]


def _in_blocks(features: Tensor, part: Tensor) -> list[Tensor]:
    """``features [N, n, D]`` in float32 by blocks of channels, 0 where no part is."""
    width = max(1, BLOCK // max(1, part.numel()))
    gone = (part < 0)[..., None]
    return [block.float().masked_fill(gone, 0.0) for block in features.split(width, 2)]


def _variance(x: Tensor, part: Tensor, groups: int) -> Tensor:
    mean = part_means(x, part, groups)
    inside = part.clamp(min=0)[..., None].expand(*part.shape, x.shape[2])
    away = (x - mean.gather(1, inside)).square().masked_fill((part < 0)[..., None], 0.0)
    return part_means(away, part, groups)


def nearness(x: Tensor, centres: Tensor, part: Tensor) -> Tensor:
    """``[N, n]``: how near every token of ``x [N, n, D]`` is to the centre of its part, ``centres [N, G, D]`` at ``part [N,
    n]``: the sum of five Gaussians of their distance."""
    row, step = torch.arange(len(x), device=x.device)[:, None], max(1, BLOCK // max(1, len(x) * x.shape[2]))
    mine = part.clamp(min=0).split(step, 1)
    away = [(one - centres[row, at]).square().sum(-1) for one, at in zip(x.split(step, 1), mine, strict=True)]
    return torch.stack([(-torch.cat(away, 1) / (2 * a)).exp() for a in _WIDTHS]).sum(0)
