"""SirLLM: keep the keys of tokens that the model did not expect."""

import torch
from torch import Tensor

from ...core.masks import ranks, suffix_sums
from ...method import KeyBatch, Policy, register


@register
class SirLLM(Policy):
    """Keep the first keys, those of the tokens with the highest token entropy, and the newest.

    *SirLLM: Streaming Infinite Retentive LLM*, ACL 2024, arXiv 2405.12528.

    The entropy of a token is ``-log p(token)`` under the model when it read it. Of the budget ``surprising`` keys are those of
    the highest entropy among all that compete, then ``sinks`` those of the first tokens, and the newest fill what is left.
    Visual tokens are no words: they count by what ``-log p`` is in the mean over the words that the model expected in their
    place. The first token of a prompt, and one behind a token that a method dropped, has the highest of its row.

    Parameters
    ----------
    surprising : float or int, the share of the budget, or the number of keys, that entropy chooses. Half of it by default; the
        authors give counts for each run.
    sinks : int, first keys that stay. 4 as in the authors' runs.

    Paper and program: they evict from a stream, while it is read, and let entropies of earlier turns fade; here a prompt is cut
    when it is over, and what stays of earlier turns stays.
    """

    name = "sirllm"
    summary = "keys of tokens that the model did not expect, and the newest"
    paper = "arXiv 2405.12528"
    default_retain = 0.25
    shared = True
    prompt_only = True
    needs_surprise = True
    limits = {"surprising": "[0, inf) or [0.0, 1.0]"}

    surprising: float = 0.5
    joint: bool = True
    sinks: int = 4

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason: probabilities are known when the last layer has run."""
        return "scores keys by what the last layer expected"

    def score(self, keys: KeyBatch) -> Tensor:
        assert keys.received is not None and keys.count is not None
        compete = keys.valid if self.joint else keys.valid & keys.visual
        given = keys.received[:, 0].masked_fill(~compete, -torch.inf)
        place = ranks(given.argsort(dim=1, descending=True, stable=True))
        whole = isinstance(self.surprising, int)
        most = keys.count.clamp(max=int(self.surprising)) if whole else (keys.count * self.surprising).floor().long()
        chosen = compete & (place < most[:, None])
        # the newest behind all that were chosen
        score = torch.where(chosen, keys.valid.sum(1, keepdim=True) - place, -suffix_sums(keys.valid)).float()
        return score[:, None].expand(-1, keys.keys.shape[1], -1)
