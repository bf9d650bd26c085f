"""LazyLLM: tokens that were dropped between layers come back in the decode step that attends to them."""

from collections.abc import Mapping

from torch import Tensor

from ..core.reduction import top_mask
from ..method import Ranking, ReactivatingMethod, register


@register
class LazyLLM(Ranking, ReactivatingMethod):
    """Every step ranks visual tokens by the attention that its newest token pays, and the layers behind see the best.

    *LazyLLM: Dynamic Token Pruning for Efficient Long Context LLM Inference*, arXiv 2407.14057.

    ``s_j = mean_h A_{l-1}[h, last, j]`` over the visual tokens ``j`` that layer ``l - 1`` sees; the layers from ``l`` on see
    the ``count`` highest, at their original positions, and all text. In a prompt the others are dropped there, and their hidden
    states kept (the paper's auxiliary cache). In every forward behind it ``s`` is that of its last token, and the choice is
    made anew: keys that are stored and not chosen are not read, and a token that is chosen and has no keys goes on from its
    hidden state, so that every token is computed at most once in a layer. It sees what is read then and stands before it.

    Parameters
    ----------
    layer : ``l``, counted from 0; the first of the paper's three for Llama 2, behind layer 9 of 32, with 0.7 of the tokens
        (``default_retain``). The recipe ``lazyllm`` has all three, each of which keeps 0.7 of what reaches it.

    Made from the paper alone; no program of its authors is known to us. There any token but the last may be dropped, and a
    quantile of the scores decides; here text always stays, and the budget is a count: of every picture in a prompt, of all
    pictures of a row together behind it. A later turn is a forward like any other, and a picture in it adds to the tokens that
    may come back.

    It saves time at the prompt, and no memory: a dropped token leaves a hidden state at every layer, and its keys once it comes
    back. With ``output_hidden_states`` a layer shows the tokens that came back in front of the new ones. Beams work; steps are
    not captured, since their number of tokens varies. ``stats()`` counts the tokens, ``tokens_returned``.
    """

    name = "lazyllm-tokens"
    summary = "tokens that every decode step attends to, from layer 9 on; dropped ones can come back"
    paper = "arXiv 2407.14057"
    ranks_by = "prompt_attention"
    default_retain = 0.7

    layer: float = 9

    def recall(self, figures: Mapping[str, Tensor], candidates: Tensor, count: Tensor) -> Tensor:
        return top_mask(figures["prompt_attention"], candidates, count)
