"""Drafters and accept rules of lossless decoding, beside their authors' programs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from comparators import Arrays, Params, close
from harness import NotOffered, make_drafter, run
from torch import Tensor


def padded(tokens: list[int], size: int, fill: int = -1) -> list[int]:
    assert len(tokens) <= size
    return tokens + [fill] * (size - len(tokens))


def promptlookup(params: Params, arrays: Arrays) -> None:
    most = params["num_pred_tokens"]
    for tokens, theirs in zip(arrays["in_ids"].tolist(), arrays["out_draft"].tolist(), strict=True):
        drafter = make_drafter("promptlookup", ngram=params["max_ngram_size"], whole=True)
        # tokens may come in any pieces
        drafter.draft(tokens[: len(tokens) // 2], most)
        assert padded(drafter.draft(tokens, most), most) == theirs


def copyspec(params: Params, arrays: Arrays) -> None:
    most = params["number_copy"]
    for tokens, theirs in zip(arrays["in_ids"].tolist(), arrays["out_draft"].tolist(), strict=True):
        drafter = make_drafter("copyspec", gamma=params["gamma"])
        drafter.draft(tokens[: len(tokens) // 2], most)
        assert padded(drafter.draft(tokens, most), most) == theirs


def samdecoding(params: Params, arrays: Arrays) -> None:
    """The draft of a match of any length; its first token is the newest of the row."""
    tokens, most = arrays["in_ids"].tolist(), params["n_predicts"]
    drafter = make_drafter("samdecoding")
    probes = zip(arrays["out_match_length"].tolist(), arrays["out_draft"].tolist(), strict=True)
    for newest, (length, theirs) in enumerate(probes, params["first_probe"] + 1):
        assert drafter.match(tokens[: newest + 1]) == length
        drafted = drafter.copy(most - 1) if length else theirs[1:]
        assert padded([tokens[newest], *drafted], most, 0) == theirs


def suffixdecoding(params: Params, arrays: Arrays) -> None:
    if params["tree"]:
        raise NotOffered("drafts are chains, no trees")
    names = {"depth": "max_depth", "factor": "max_spec_factor", "offset": "max_spec_offset", "least": "min_token_prob"}
    drafter = make_drafter("suffixdecoding", **{name: params[theirs] for name, theirs in names.items()})
    index, most = drafter.index(), params["max_spec_tokens"]
    for tokens in arrays["in_sequences"]:
        index.begin()
        for token in tokens[tokens >= 0].tolist():
            index.extend(token)
    for row, context in enumerate(arrays["in_contexts"]):
        chain = drafter.chain(index, context[context >= 0].tolist(), most)
        assert padded(chain.tokens, most) == arrays["out_tokens"][row].tolist()
        parents = padded(list(range(-1, len(chain.tokens) - 1)), most, -2)
        assert parents == arrays["out_parents"][row].tolist()
        close(torch.tensor(chain.probabilities), arrays["out_probs"][row, : len(chain.tokens)])
        close(torch.tensor(chain.score), arrays["out_score"][row])
        assert chain.matched == arrays["out_match_len"][row]


def rows_of(flat: Tensor, lengths: Tensor, fill: float = 0) -> Tensor:
    """``[sum of lengths, ...] -> [B, n, ...]``."""
    return torch.nn.utils.rnn.pad_sequence(flat.split(lengths.tolist()), batch_first=True, padding_value=fill)


def vllm(params: Params, arrays: Arrays) -> None:
    """Rows of both kinds in one batch. The token after the last draft is given: its row is that token alone."""
    lengths, bonus, greedy = arrays["in_lengths"], arrays["in_bonus"], arrays["in_is_greedy"].bool()
    logits, chosen = arrays["in_target_logits"], arrays["in_draft_tokens"]
    q = None if params["no_draft_probs"] else arrays["in_draft_probs"]
    drafts, vocabulary = rows_of(chosen, lengths, -1), logits.shape[1]
    behind = (torch.arange(len(lengths)), lengths)

    def with_bonus(rows: Tensor, last: Tensor) -> Tensor:
        whole = torch.cat([rows, torch.zeros_like(rows[:, :1])], 1)
        whole[behind] = last.to(rows)
        return whole

    sampled = run(
        "accept_sampled",
        with_bonus(rows_of(logits.softmax(-1), lengths), torch.nn.functional.one_hot(bonus, vocabulary)),
        drafts,
        rows_of(arrays["in_uniform"], lengths),
        arrays["in_exponential"],
        None if q is None else rows_of(q, lengths),
    )
    best = run("accept_greedy", with_bonus(rows_of(logits.argmax(-1), lengths), bonus), drafts)
    tokens, theirs = torch.where(greedy[:, None], best.tokens, sampled.tokens), arrays["out_tokens"]
    # theirs may have room for more drafts than any row has
    assert torch.equal(tokens, theirs[:, : tokens.shape[1]]) and (theirs[:, tokens.shape[1] :] == -1).all()
    assert torch.equal(torch.where(greedy, best.accepted, sampled.accepted), arrays["out_accepted"])

    # a block a draft, each of which is rejected
    recovered = run(
        "accept_sampled",
        logits.softmax(-1)[:, None].expand(-1, 2, -1),
        chosen[:, None],
        torch.full((len(chosen), 1), torch.inf),
        arrays["in_exponential"].repeat_interleave(lengths, 0),
        None if q is None else q[:, None],
    )
    shown = ~greedy.repeat_interleave(lengths)
    assert torch.equal(recovered.tokens[:, 0][shown], arrays["out_recovered"][shown])


def transformers(params: Params, arrays: Arrays) -> None:
    """The last token is drawn from a residual that is not normalised, which gives the same one."""
    target, q = (arrays[f"in_{name}_logits"].softmax(-1) for name in ("target", "draft"))
    made = run("accept_sampled", target, arrays["in_draft_tokens"], arrays["in_uniform"], arrays["in_exponential"], q)
    assert torch.equal(made.tokens, arrays["out_tokens"]) and torch.equal(made.accepted, arrays["out_accepted"])


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("apoorvumang/prompt-lookup-decoding", "find_candidate_pred_tokens"): promptlookup,
    ("RazvanDu/CopySpec", "SpeculativeDecoder.preprocess_prompt / find_text_position"): copyspec,
    ("hyx1999/SAM-Decoding", "DynSAM.add_tokens / lookup / gen_draft"): samdecoding,
    ("snowflakedb/ArcticInference", "SuffixTree.extend, .speculate"): suffixdecoding,
    (
        "vllm-project/vllm (PyPI vllm)",
        "rejection_greedy_sample_kernel, rejection_random_sample_kernel, sample_recovered_tokens_kernel",
    ): vllm,
    ("huggingface/transformers (PyPI)", "_speculative_sampling"): transformers,
}
