"""HOMER: chunks of a prompt drop what the question attends to least and merge level by level, as a tree over layers."""

from torch import Tensor

from ..errors import MmaccelError, UnsupportedError
from ..method import ChunkMethod, LayerAttention, ModelFacts, Ranking, register


@register
class HOMER(Ranking, ChunkMethod):
    """Hierarchical context merging: prompts that are longer than the model's positions, and shorter attention below.

    *Hierarchical Context Merging: Better Long Context Understanding for Pre-trained LLMs*, ICLR 2024, arXiv 2404.10308.

    A clip becomes chunks, groups of frames, each with the text before and behind all of them and with positions of its own, so
    that none is further than a chunk; :class:`mmaccel.method.ChunkMethod` says how they are cut, read and joined. In the last
    layer before a join every visual token has the significance

        s_j = max_h A[h, last, j] - bias[layer][p_last - p_j]

    where ``last`` is the last token of the prompt, of which each chunk has a copy, and ``p`` are positions; those of highest
    significance stay, and so does all text. With ``c`` chunks of ``C`` tokens and ``T`` of text, attention in the lower layers
    costs ``c (C + T)^2`` in place of ``(c C + T)^2``.

    Use it for prompts that do not fit the model; where they do, chunks lose answers about places: at half of the tokens
    mini-llava-deep answers 58 % of 72 questions, with ``fastv`` 83 % (``mmaccel eval --model mini-llava-deep --limit 8
    --recipe homer fastv --retain 0.5``, on a CPU).

    By default a chunk has as many tokens as stay in the end (the authors' chunks and target are 2,048 each), and at most half
    of the model's positions where the prompt exceeds them. A picture that keeps everything in a prompt that fits is one chunk,
    and the model then is the bare one.

    Parameters
    ----------
    layer : layers that belong to the chunks as they were cut, before the others are shared out over the tree: 12 of 32.
    length : tokens of a chunk at most, text around it apart; 0 for as many as stay.
    bias : the authors' calibration: for every layer of the model, or once for all of them, what attention is on average at a
        distance of 0, 1, ... positions; further ones have the last value. By default zero: their table is not in their
        repository.

    Paper and program: the program drops tokens and joins chunks between the attention and the MLP of a layer, here both happen
    behind the layer. It goes through the tree depth first and holds the keys of one branch at a time; here all chunks of a
    level are rows of one batch, with the same result and the keys of all tokens below the first join in memory. The method is
    for text, and all of the context competes in a chunk; here visual tokens compete, each picture for its own budget, and text
    between them stays. A chunk keeps half of a chunk's length there, and half of the budget here, by default the same. With
    M-RoPE time begins anew in every chunk, rows and columns go on, and distances are in time. ``positions`` changes nothing.
    """

    name = "homer"
    summary = "chunks with positions of their own that drop what the last token attends to least, joined level by level"
    paper = "arXiv 2404.10308"
    ranks_by = "significance"

    layer: float = 12 / 32
    length: int = 0
    bias: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.bias):
            raise MmaccelError("homer: a row of bias has no value; give one or more, for distances from 0 on.")

    def check(self, family: ModelFacts) -> None:
        super().check(family)
        if len(self.bias) not in (0, 1, family.depth):
            raise UnsupportedError(
                f"homer: bias has rows for {len(self.bias)} layers, and this {family.name} model has {family.depth}; give a "
                "row for each of them, or one for all."
            )

    def observe(self, attention: LayerAttention, positions: Tensor, layer: int) -> dict[str, Tensor]:
        """``significance [R, q]``."""
        rows = attention.query.shape[2]
        significance = attention.attention(rows - 1, rows)[..., -rows:].amax((1, 2))
        if self.bias:
            table = significance.new_tensor(self.bias[min(layer, len(self.bias) - 1)])
            away = (positions[:, -1:] - positions).long()
            significance = significance - table[away.clamp(0, len(table) - 1)]
        return {"significance": significance}
