"""Streaming dense video captioning: a memory of fixed size takes up frame after frame."""

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor

from ..core.masks import even_in_groups
from ..core.reduction import Links, Reduction, segment_sum
from ..method import ProjectorMethod, TokenBatch, register
from ..method.blocks import cosine_of, frame_numbers
from .film import Clip, Flat, by_clip, spare_newlines


@register
class StreamDvc(ProjectorMethod):
    """Weighted k-means of the memory and every new frame.

    *Streaming Dense Video Captioning*, CVPR 2024, arXiv 2404.01297; its memory, which has no parameters.

    The memory has as many tokens as the budget. It begins as the first frames, with weight one each; where the budget ends
    within a frame, evenly spaced tokens of that frame complete it. Every later frame is taken up by ``iterations`` rounds
    of k-means over the memory's tokens, with their weights, and those of the frame: a token joins the nearest centre by
    Euclidean distance (the first on a tie, its own before all others), and a centre becomes the weighted mean of what
    joined it. Centres begin as the memory. The weights of the last round are carried on, so that in the end a token is
    nearly the mean of all that flowed into it. A centre that nothing joins stays as it is and has weight zero. No later
    frame is looked at.

    A kept token takes the slot that its place in the memory had at first, so that all of them are in the first frames. Tiles of
    a picture count as frames. Newlines are dropped first.

    With ``neighbours`` the memory is the program's other one, which takes up token after token: of the memory and the new
    token behind it, the two neighbours with the highest cosine (the first on a tie) become their weighted mean in the place of
    the first, and the new token takes the place of the second, unless it is itself the second. So places are not in order of
    time.

    Parameters
    ----------
    iterations : 2 as in the program; of k-means.
    neighbours : merge neighbours one by one in place of k-means. One token waits for the other: a clip of 6,000 tokens takes
        about a second.

    Paper and program: the memory of the paper, 514 tokens, is a whole number of frames. Its captioner was trained with it. The
    program has memories of means beside these two, which are not offered.
    """

    name = "streamdvc"
    summary = "a memory of fixed size that takes up every frame by k-means"
    paper = "arXiv 2404.01297"
    unit = "picture"
    #: of an empty cluster, which stays what it was, the tokens count twice
    conserves_mass = False
    limits = {"iterations": "[1, inf)"}

    iterations: int = 2
    neighbours: bool = False

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> what every token of the memory is made of."""
        number = frame_numbers(tokens)

        def links(clip: Clip) -> Flat:
            at = clip.valid.flatten().nonzero()[:, 0]
            slots = clip.slots.flatten()[at]
            flow = self.clip(tokens.features[clip.row, slots], number[clip.row, slots], min(clip.count, len(at)))
            return at[flow.slot], at[flow.source], flow.weight

        return by_clip(tokens, count, links).keeping(spare_newlines(tokens, count))

    def clip(self, x: Tensor, frame: Tensor, count: int) -> Links:
        """The links of one clip ``x [n, D]`` whose tokens are of the frames ``frame [n]``, into ``count`` of them."""
        x, first = x.float(), beginning(frame, count)
        slots, valid = first.nonzero()[:, 0], torch.ones_like(first)
        if self.neighbours:
            later = (~first).nonzero()[:, 0]
            owner, share = merge_neighbours(x[slots], x[later])
            return Links(torch.zeros_like(owner), slots[owner], torch.cat([slots, later]), share)
        reduction = Reduction.identity(valid[None])
        memory, weight = x[slots], torch.ones_like(slots)
        for number in frame[~first].unique().tolist():
            new = (~first & (frame == number)).nonzero()[:, 0]
            memory, weight, centre, source, share = take_up(memory, weight, x[new], self.iterations)
            valid = valid.index_fill(0, new, False)
            flow = Links(torch.zeros_like(centre), slots[centre], torch.cat([slots, new])[source], share)
            reduction = reduction.then(Reduction(valid[None], reduction.kept, flow))
        return reduction.full_links()


def beginning(frame: Tensor, count: int) -> Tensor:
    """``[n]`` bool: the first ``count`` tokens: whole frames ``frame [n]``, and evenly spaced ones of the next."""
    whole = torch.bincount(frame).cumsum(0)[frame] <= count
    left = frame.masked_fill(whole, int(frame.max()) + 1)
    part = torch.where((left == left.min()) & ~whole, 0, -1)
    return whole | even_in_groups(part[None], (count - whole.sum())[None, None])[0]


def take_up(memory: Tensor, weight: Tensor, frame: Tensor, iterations: int) -> tuple[Tensor, ...]:
    """Weighted k-means of ``memory [M, D]`` with ``weight [M]`` long and ``frame [n, D]``, whose tokens weigh one each.

    Returns the centres ``[M, D]``, their weights ``[M]`` long, and of what they are made: centre, datum of ``[memory; frame]``
    and share, ``[L]`` each.
    """
    size, data = len(memory), torch.cat([memory, frame])
    heavy, datum = torch.cat([weight, torch.ones_like(frame[:, 0], dtype=weight.dtype)]), torch.arange(len(data))
    datum = datum.to(data.device)
    centres, asked = memory, datum >= size
    centre, source = datum[:size], datum[:size]
    share = torch.ones_like(memory[:, 0])
    for _ in range(iterations):
        # a datum of the memory stays with its own centre as long as that is where it was
        ask = asked.nonzero()[:, 0]
        joined = datum.clamp(max=size - 1).scatter(0, ask, nearest(data[ask], centres))
        weight = torch.zeros_like(weight).scatter_add_(0, joined, heavy)
        old, new = (weight == 0)[centre], heavy > 0
        centre, source = torch.cat([centre[old], joined[new]]), torch.cat([source[old], datum[new]])
        part = torch.cat([share[old], heavy[new]])
        share = torch.cat([share[old], (heavy / weight.clamp(min=1)[joined])[new]])
        order = centre.argsort(stable=True)
        centre, source, share, part = centre[order], source[order], share[order], part[order]
        # in double precision the mean of copies is a copy
        sums = segment_sum(data[source].double() * part[:, None], torch.bincount(centre, minlength=size))
        before, centres = centres, (sums / weight.clamp(min=1)[:, None]).to(centres.dtype)
        asked[:size] = (centres != before).any(1)
    return centres, weight, centre, source, share


def nearest(x: Tensor, centres: Tensor) -> Tensor:
    """``[n]`` long: the first of ``centres [M, D]`` that is nearest to each of ``x [n, D]``."""
    away, first = torch.cdist(x, centres), first_copies(centres[None])
    near = (away if first is None else away[:, first[0]]).argmin(1)
    return of_first(near[None], first_copies(x[None]))[0]


def merge_neighbours(memory: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """For every token of ``new [n, D]`` the two neighbours merge that are most alike; see :class:`StreamDvc`.

    Returns of every token of ``[memory; new]`` the place in the memory ``[M, D]`` that it flowed into, and its share there,
    ``[M + n]`` each.
    """
    size, total = len(memory), len(memory) + len(new)
    # the last place is that of the new token, and `alike` is of a place and the next one; sums of copies are exact
    data, weight = torch.cat([memory, memory[:1]]).double(), torch.ones_like(memory[:1, 0]).double().repeat(size + 1)
    alike = cosine_of(data[:-1], data[1:])
    number, beside = torch.arange(total, device=memory.device), torch.arange(-1, 2, device=memory.device)
    into, holder = number.clone(), number[: size + 1].clone()
    for at, token in zip(number[size:], new.double(), strict=True):
        data[size], weight[size], holder[size] = token, 1.0, at
        alike[size - 1 :] = cosine_of(data[size - 1 : size], data[size:])
        first = alike.argmax(0, keepdim=True)
        second = first + 1
        heavy = weight[first] + weight[second]
        merged = (data[first] * weight[first] + data[second] * weight[second]) / heavy
        into[holder[second]] = holder[first]
        data[first], weight[first] = merged, heavy
        data[second], weight[second], holder[second] = token, 1.0, at
        pairs = (first + beside).clamp(0, size - 1)
        alike[pairs] = cosine_of(data[pairs], data[pairs + 1])
    for _ in range(total.bit_length()):
        into = into[into]
    place = torch.empty_like(into)
    place[holder[:size]] = number[:size]
    owner = place[into]
    return owner, (1 / weight)[owner].to(memory.dtype)
