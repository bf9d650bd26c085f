"""InfiniGen: a layer's keys are chosen while the layer before it computes, by a guess of the query in a few channels."""

from dataclasses import replace

import torch
from torch import Tensor

from ...method import KeyUnits, Picked, ReadingPolicy, ReadStep, register
from ...method.sparse_read import agree, best, by_kv_head


@register
class InfiniGen(ReadingPolicy):
    """A layer reads the visual keys that a guess finds, which is made of the input of the layer before; all stay stored.

    *InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management*, OSDI 2024, arXiv
    2406.19707.

    The input of a layer is like that of the next one, so that the next layer's projection of it is a guess of the next query.
    Of every query head the ``D share`` channels of the largest ``sum |q|`` over the prompt are compared. Keys whose logit is
    above ``max - alpha`` count, and all heads of a layer read as many keys: the mean of their counts, rounded down, at least
    one, and at most the budget; each head its best ones. The first layer reads everything.

    Paper and program: channels are chosen after a rotation of the weights that gathers large entries in few of them, which RoPE
    undoes, and is left out. The authors choose for every query head, here those of one KV head agree on the largest logit. With
    ``offload="host"`` the chosen keys are read from the host when the layer attends; the program copies them a layer ahead.

    Parameters
    ----------
    share : of the channels of a head that are compared. 0.2 as in the program's runs.
    alpha : how far below the largest logit of a head a key counts. 4 as in the program's runs.
    queries : at the end of the prompt, by which channels are chosen.
    layer : layers before this one read everything; at least 1.
    """

    name = "infinigen"
    summary = "visual keys that a layer is guessed to need, by the input of the layer before it (adaptive)"
    paper = "arXiv 2406.19707"
    #: heads read as many keys as they need on average
    mixes_heads = True
    ahead = True
    partial = True
    budget = "adaptive"
    default_retain = 0.2
    limits = {"share": "(0, 1]", "alpha": "(0, inf)", "queries": "[1, inf)"}

    share: float = 0.2
    alpha: float = 4.0
    queries: int = 256
    layer: float = 1

    @property
    def noted(self) -> int:
        return self.queries

    def note_queries(self, queries: Tensor, seen: Tensor) -> Tensor:
        """``[B, Hq, r]`` long: the channels of every query head that are compared, heaviest first."""
        sums = (queries.float().abs() * seen[:, None, :, None]).sum(2)
        return sums.argsort(dim=-1, descending=True, stable=True)[..., : max(1, int(sums.shape[2] * self.share))]

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``channels [B, Hq, r]`` long, and ``keys [B, Hq, P, r]``: the visual keys in the channels of each query head."""
        assert units.noted is not None
        channels, keys = units.noted, units.keys[:, :, :, 0].masked_fill(~units.there, 0.0)
        group = channels.shape[1] // keys.shape[1]
        at = channels[:, :, None].expand(-1, -1, keys.shape[2], -1)
        return {"channels": channels, "keys": keys.repeat_interleave(group, dim=1).gather(3, at)}

    def rate(self, step: ReadStep) -> Tensor:
        """``[B, Hkv, P]`` float32: the largest logit of the query heads, as guessed."""
        channels, keys = step.summary["channels"], step.summary["keys"].float()
        query = step.query.float().gather(2, channels)[..., None, :]
        return agree(by_kv_head((query @ keys.mT)[:, :, 0], step.keys.shape[1]), "max") * step.scaling

    def pick(self, step: ReadStep) -> tuple[Picked, dict[str, Tensor]]:
        """The best keys, as many as heads need on average."""
        ratings = self.rate(step).masked_fill(step.gone, -torch.inf)
        near = (ratings > ratings.amax(-1, keepdim=True) - self.alpha).sum(-1)
        needed = near.float().mean(1, keepdim=True).long().clamp(min=1)
        # pages of which any key is read are read as a whole
        needed = (needed + step.each - 1) // step.each
        count = torch.minimum(step.count, needed.to(step.count))
        return best(ratings, replace(step, count=count, even=False)), {}
