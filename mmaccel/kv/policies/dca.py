"""Dual chunk attention: prompts longer than the trained length, read at positions that the model knows."""

import torch
from torch import Tensor

from ...errors import MmaccelError, UnsupportedError
from ...method import KeyBatch, ModelFacts, Policy, register


@register
class DualChunkAttention(Policy):
    """All keys stay, and no query is further from a key than the model was trained for.

    *Training-Free Long-Context Scaling of Large Language Models*, ICML 2024, arXiv 2402.17463.

    With ``c = chunk_size - local_window`` the key at position ``p`` is stored as if it were at ``p mod c``. A query at ``p``
    reads keys of its own chunk at ``p mod c``, those of the chunk before at ``min(p mod c + c, chunk_size)``, and older ones
    at ``min(2 c - 1, chunk_size)``; one softmax over all. Prompts of up to ``c`` tokens are read as by the bare model. Beyond
    the trained length logits are multiplied by the square of ``0.05 ln(length / trained) + 1``, as YaRN does.

    It composes with recipes that reduce tokens before or inside the language model. Nothing is evicted, so it needs no budget.
    Models whose positions have three axes are refused, and those in which tokens of a prompt attend to each other both ways.

    ``variant="official"``: weights of the three parts of a prompt are rounded to bfloat16, as in the authors' program.

    Parameters
    ----------
    chunk_size : positions; 0 for three quarters of the trained length, as in the program.
    local_window : positions within which the chunk before is read at true distances; 0 for an eighth of the trained length.
    """

    name = "dca"
    summary = "prompts beyond the trained length: keys at their positions within chunks; evicts nothing"
    paper = "arXiv 2402.17463"
    budget = "none"
    default_retain = None
    shared = True
    extends = True
    excludes = {
        "cache": "a recipe has at most one method at site 'cache'",
        "codec": "keys are stored at positions within chunks, which codecs do not know",
    }
    limits = {"chunk_size": "[0, inf)", "local_window": "[0, inf)"}

    chunk_size: int = 0
    local_window: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduled:
            raise MmaccelError(f"{self.name} evicts nothing; leave out every and cap.")
        if self.chunk_size and self.local_window >= self.chunk_size:
            raise MmaccelError(
                f"`local_window` of {self.name} must be less than chunk_size={self.chunk_size}, got {self.local_window}."
            )

    def check(self, family: ModelFacts) -> None:
        """Raise :class:`UnsupportedError` where a query attends to keys behind it, or keys cannot be moved."""
        super().check(family)
        if family.no_return is not None:
            raise UnsupportedError(
                f"{self.name} reads the keys up to a query, and the language model of {family.name} {family.no_return}; leave "
                "it out, and show fewer pictures or frames."
            )

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason: a layer reads the chunks of a prompt at once."""
        return "reads a prompt in chunks of its own"

    def sizes(self, trained: int | None) -> tuple[int, int]:
        """The chunk and the positions of it that keys take, for a model of so many ``trained`` positions."""
        if trained is None and not self.chunk_size:
            raise MmaccelError(f"This model does not say how many positions it has; give {self.name} a chunk_size.")
        size = self.chunk_size or max(2, 3 * (trained or 0) // 4)
        window = self.local_window or min(size - 1, (trained or 8 * size // 6) // 8)
        return size, max(1, size - window)

    def score(self, keys: KeyBatch) -> Tensor:
        """Zero for all keys: everything stays."""
        return torch.zeros(keys.keys.shape[:3], device=keys.keys.device)
