"""Drafters and accept rules of lossless decoding, beside their authors' programs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from comparators import Arrays, Params, close
from harness import make_drafter, run
from torch import Tensor

from mmaccel.decoding.tree import ancestors, depths


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
    names = {"depth": "max_depth", "factor": "max_spec_factor", "offset": "max_spec_offset", "least": "min_token_prob"}
    drafter = make_drafter("suffixdecoding", **{name: params[theirs] for name, theirs in names.items()})
    index, most = drafter.index(), params["max_spec_tokens"]
    for tokens in arrays["in_sequences"]:
        index.begin()
        for token in tokens[tokens >= 0].tolist():
            index.extend(token)
    for row, context in enumerate(arrays["in_contexts"]):
        # all tokens are no match
        found = index.match(context[context >= 0].tolist()[1:][-index.depth :])
        best = drafter.best(index, *found, most, params["tree"])
        size = int((arrays["out_tokens"][row] >= 0).sum())
        theirs = arrays["out_tokens"][row, :size].tolist(), arrays["out_parents"][row, :size].tolist()
        chances = arrays["out_probs"][row, :size]
        assert len(best.tokens) == size
        close(torch.tensor(best.probabilities), chances)
        close(torch.tensor(best.score), arrays["out_score"][row])
        assert best.matched == arrays["out_match_len"][row]
        if params["tree"]:
            # of equal probability any order, and any of them at the end
            limit = min(most, int(best.matched * params["max_spec_factor"] + params["max_spec_offset"] + 1e-6))
            last = float(chances[-1]) + 1e-6 if size and size == limit else 0.0
            assert surer(best.tokens, best.parents, best.probabilities, last) == surer(*theirs, chances.tolist(), last)
        else:
            assert (best.tokens, list(range(-1, size - 1))) == theirs


def surer(tokens: list[int], parents: list[int], chances: list[float], least: float) -> set[tuple[int, ...]]:
    """The paths of a tree that are more probable than ``least``."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return {path for path, chance in zip(paths, chances, strict=True) if chance > least}


def tokenrecycling(params: Params, arrays: Arrays) -> None:
    """The table as it is, a tree behind every root, and the path that the model accepts."""
    table, nodes = arrays["in_adjacency"].tolist(), params["nodes"]
    for case, root in enumerate(arrays["in_roots"].tolist()):
        drafter = make_drafter("tokenrecycling")
        # a token that is read again counts as it was read last
        drafter.learn([*range(len(table)), *range(len(table))], [row[::-1] for row in table] + table)
        tree = drafter.tree([root], nodes - 1)
        assert [root, *tree.tokens] == arrays["out_tree_tokens"][case].tolist()
        check_shape(tree.parents, arrays["out_tree_mask"], arrays["out_depth"], arrays["out_paths"], by_length=True)
        best = arrays["in_argmax"][case].tolist()
        path = [node + 1 for node in run("accept_greedy", best, tree.tokens, tree.parents)]
        assert padded([0, *path], len(arrays["out_accepted"][case])) == arrays["out_accepted"][case].tolist()
        assert best[path[-1] if path else 0] == arrays["out_next"][case]


def check_shape(parents: list[int], mask: Tensor, depth: Tensor, paths: Tensor, by_length: bool = False) -> None:
    """Compare a tree below a root, which is the first node of theirs."""
    own = [-1, *(parent + 1 for parent in parents)]
    assert ancestors(own).long().tolist() == mask.long().tolist() and depths(own) == depth.tolist()
    found = []
    for leaf in set(range(len(own))) - set(own):
        path = [leaf]
        while own[path[0]] >= 0:
            path.insert(0, own[path[0]])
        found.append(path)
    found.sort(key=lambda path: (len(path) if by_length else 0, path))
    assert [padded(path, paths.shape[1]) for path in found] == paths.tolist()


def eagle_buffers(params: Params, arrays: Arrays) -> None:
    choices = [tuple(path[path >= 0].tolist()) for path in arrays["in_choices"]]
    tree = run("StaticTree", choices, params["topk"])
    check_shape(tree.parents, arrays["out_mask"], arrays["out_depth"], arrays["out_paths"])
    assert [0, *(1 + place for place in tree.index)] == arrays["out_indices"].tolist()


def eagle_accept(params: Params, arrays: Arrays) -> None:
    """Node 0 is the newest token of the row. Of nodes with one text the first stands for all where tokens are drawn."""
    paths = [path[path >= 0].tolist() for path in arrays["in_paths"]]
    before = {after: node for path in paths for node, after in pairwise(path)}
    parents = [before[node] - 1 for node in range(1, len(before) + 1)]

    def row_of(node: int) -> int:
        return next(row for row, path in enumerate(paths) if node + 1 in path)

    for case, logits in enumerate(arrays["in_node_logits"]):
        tokens = arrays["in_node_tokens"][case, 1:].tolist()
        best = logits.argmax(-1).tolist()
        path = run("accept_greedy", best, tokens, parents)
        last = path[-1] if path else -1
        assert (row_of(last), len(path)) == (arrays["out_greedy_path"][case], arrays["out_greedy_len"][case])
        assert best[last + 1] == arrays["out_greedy_next"][case]

        alike, length, uniform = [-1], 0, arrays["in_uniform"][case].tolist()
        while True:
            target = logits[alike[0] + 1].softmax(-1)
            branches: dict[int, list[int]] = {}
            for node in alike:
                for after in (one for one, parent in enumerate(parents) if parent == node):
                    branches.setdefault(tokens[after], []).append(after)
            number, left = run("accept_branch", target, list(branches), uniform[: len(branches)])
            if number is None:
                break
            uniform, length, alike = uniform[number + 1 :], length + 1, list(branches.values())[number]
        assert (row_of(alike[0]), length) == (arrays["out_sample_path"][case], arrays["out_sample_len"][case])
        close(left, arrays["out_sample_probs"][case])


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
    # theirs may have room for more drafts than any row has
    tokens, accepted = sampled.tokens.tolist(), sampled.accepted.tolist()
    best = with_bonus(rows_of(logits.argmax(-1), lengths), bonus).tolist()
    for row in greedy.nonzero()[:, 0].tolist():
        drafted = drafts[row, : lengths[row]].tolist()
        right = len(run("accept_greedy", best[row], drafted, list(range(-1, len(drafted) - 1))))
        tokens[row], accepted[row] = [*drafted[:right], best[row][right]], right
    width = arrays["out_tokens"].shape[1]
    assert [padded(row, width) for row in tokens] == arrays["out_tokens"].tolist()
    assert accepted == arrays["out_accepted"].tolist()

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
    ("Luowaterbi/TokenRecycling", "prepare_data / prepare_data_input_ids / acceptance lines"): tokenrecycling,
    ("SafeAILab/EAGLE", "generate_tree_buffers"): eagle_buffers,
    ("SafeAILab/EAGLE", "evaluate_posterior"): eagle_accept,
    (
        "vllm-project/vllm (PyPI vllm)",
        "rejection_greedy_sample_kernel, rejection_random_sample_kernel, sample_recovered_tokens_kernel",
    ): vllm,
    ("huggingface/transformers (PyPI)", "_speculative_sampling"): transformers,
}
