"""HERMES: shallow layers remember the newest keys, deep ones what a summary attends to, and a mean of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ...core.reduction import top_mask
from ...errors import UnsupportedError
from ...method import ModelFacts, register
from ...method.guides import Fold, GuidedPolicy, RatedKeys, last_true
from ...method.keys import fixed_keys


@register
class HERMES(GuidedPolicy):
    """One budget for every layer of a stream, which layers spend by their role.

    *HERMES: KV Cache as Hierarchical Memory for Efficient Streaming Video Understanding*, arXiv 2601.14724.

    With ``L`` layers, the first ``int(L short)`` are shallow, those from ``int(L (1 - long))`` on deep. The score of key ``i``
    of ``V`` is ``(1 - a) mm(v) + a mm(r)``: ``v`` is the attention of a guide text, mean over heads and the text's tokens,
    ``r = exp(-k (V - 1 - i) / (V - 1))``, and ``mm`` scales to 0 to 1. Shallow layers have ``a = 1, k = 20`` and the question
    ``local``; deep ones ``a = 0`` and the question ``theme``; between them, at the share ``p``, ``a = 1 - .9 p``,
    ``k = 20 - 19.5 p`` and both questions. From the second deepest layer down, scores are mixed with those of the layer above,
    of which 40, 30 and 10 % count in deep, middle and shallow layers. In deep layers one slot of the budget holds the mean of
    all evicted keys, turned to the position behind the last that stays, and of their values.

    In a :class:`~mmaccel.VideoSession` this is done whenever a layer holds more than ``cap_tokens`` keys a head, and nothing
    when a question is asked. Without a processor, the question of the prompt is read in place of both texts.

    Parameters
    ----------
    short, long : the shares of shallow and of deep layers, 0.1 and 0.3 as the program loads them.
    local, theme : the questions about now, and about all of the video.
    dialogue : text before both questions; a session gives its last question and answer.
    reindex : ``lazy``: when fewer than ``spare`` positions of the model are left, the keys of every layer get positions behind
        each other, so that a stream does not end, as in the program; ``eager``: always, as in the paper. Models whose
        positions have three axes keep them.
    spare : positions, 1024 as in the program.

    ``variant="official"``: the guide's tokens enter every layer as they enter the first, and all of them see each other; and
    each layer counts its own positions, so that a mean moves older keys of deep layers back by one. By default the guide is
    read as any text, and keys that stay do not move.

    Paper and program: the words of both questions are ours. The program evicts from all layers when its first one holds too
    many keys, here each layer is looked at.
    """

    name = "hermes"
    summary = "streams: newest keys in shallow layers, what a summary attends to in deep ones, and a mean of the others"
    paper = "arXiv 2601.14724"
    default_retain = 0.25
    moves = True
    limits = {"short": "[0, 1]", "long": "[0, 1]", "spare": "[0, inf)"}

    short: float = 0.1
    long: float = 0.3
    local: str = "What is happening right now? Describe the details of what is visible."
    theme: str = "What is the video about? Summarize its main theme and events."
    dialogue: str = ""
    reindex: Literal["lazy", "eager"] = "lazy"
    spare: int = 1024

    def check(self, family: ModelFacts) -> None:
        super().check(family)
        if self.reindex == "eager" and (why := fixed_keys(family)):
            raise UnsupportedError(f"reindex='eager' of {self.name}: {why}; leave out reindex.")

    def bound(self, limit: int | None) -> int | None:
        if self.reindex == "eager":
            return -1
        return None if limit is None else limit - self.spare

    def guides(self, template: str) -> tuple[str, ...]:
        texts = self.local, self.theme, f"{self.local} {self.theme}"
        return tuple(f"{self.dialogue} {text}".strip() for text in texts)

    def guide(self, layer: int, depth: int) -> int:
        return {"shallow": 0, "deep": 1, "middle": 2}[self.role(layer, depth)]

    def role(self, layer: int, depth: int) -> str:
        """``shallow``, ``middle`` or ``deep``."""
        if layer < int(depth * self.short):
            return "shallow"
        return "deep" if layer >= int(depth * (1 - self.long)) else "middle"

    def rate(self, paid: Sequence[Tensor], there: Sequence[Tensor]) -> list[Tensor]:
        depth = len(paid)
        scores = [self._mixed(n, depth, *one) for n, one in enumerate(zip(paid, there, strict=True))]
        shares = {"deep": 0.4, "middle": 0.3, "shallow": 0.1}
        for n in range(depth - 2, -1, -1):
            share = shares[self.role(n, depth)]
            above = _resized(scores[n + 1].to(scores[n].device), there[n + 1].to(scores[n].device), there[n])
            scores[n] = (1 - share) * scores[n] + share * above
        return scores

    def _mixed(self, layer: int, depth: int, paid: Tensor, there: Tensor) -> Tensor:
        """``[B, n]``: attention and recency in the proportion of a layer."""
        first, deep = int(depth * self.short), int(depth * (1 - self.long))
        role = self.role(layer, depth)
        part = (layer - first) / (deep - first) if role == "middle" else 0.0
        share = 0.0 if role == "deep" else 1 - 0.9 * part
        decay = 0.0 if role == "deep" else 20 - 19.5 * part
        last = there.sum(1, keepdim=True) - 1
        age = last - torch.arange(there.shape[1], device=there.device)
        recency = (-decay * age / last.clamp(min=1)).exp()
        return (1 - share) * _scaled(paid, there) + share * _scaled(recency, there)

    def fold(self, keys: RatedKeys) -> Fold | None:
        if self.role(keys.layer, keys.depth) != "deep":
            return None
        stay = top_mask(keys.scores, keys.compete, (keys.count - 1).clamp(min=0))
        protected = (keys.compete & (keys.scores == torch.inf)).sum(1)
        full = (keys.compete.sum(1) > keys.count) & (protected < keys.count)
        gone = keys.compete & ~stay & full[:, None]
        onto = torch.where(gone, last_true(gone)[:, None], -1)
        return Fold(onto, torch.ones_like(keys.paid), behind=True)


def _scaled(x: Tensor, there: Tensor) -> Tensor:
    """``x [B, n]`` scaled to 0 to 1 over the keys that are ``there``."""
    low = x.masked_fill(~there, torch.inf).amin(1, keepdim=True)
    high = x.masked_fill(~there, -torch.inf).amax(1, keepdim=True)
    return ((x - low) / (high - low + 1e-6)).masked_fill(~there, 0.0)


def _resized(x: Tensor, there: Tensor, onto: Tensor) -> Tensor:
    """``[B, m]``: the values of ``x [B, n]`` that are ``there``, resized linearly to as many as ``onto [B, m]`` has, with
    half-pixel centres."""
    size, wanted = there.sum(1, keepdim=True), onto.sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(onto.shape[1], device=x.device) + 0.5
    at = (place * (size / wanted) - 0.5).clamp(min=0)
    low = at.floor().long().minimum(size - 1).clamp(min=0)
    high = (low + 1).minimum(size - 1).clamp(min=0)
    part = (at - low).clamp(0, 1)
    return x.gather(1, low) * (1 - part) + x.gather(1, high) * part
