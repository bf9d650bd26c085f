"""Answers as HTML, figures as tables for Gradio's own parts. Whatever comes from outside is escaped here or shown as plain
text by Gradio; nothing is told by colour alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from mmaccel import MmaccelError, Recipe, get_method
from mmaccel.cli import ask
from mmaccel.cli.shared.text import nbytes, seconds

from .engine import Column, Exchange
from .overlay import View

#: columns by their heads
Table = dict[str, list[Any]]

_STATES = {"waits": "waits", "runs": "is answering ...", "stopped": "stopped", "refused": "not with this model"}
#: where a recipe works first, in the order of a token's way
SITES = ("frames", "patches", "encoder", "projector", "layers", "cache", "codec")
#: what is offered first, as far as the model can do it: one of each kind of work
CURATED = {
    "balanced": "a quarter, all different",
    "vtc-cls": "what the tower looks at",
    "pool": "neighbouring tokens averaged",
    "tome": "like tokens merged in the tower",
    "fastv": "dropped inside the language model",
    "prunevid-merge": "still places kept once",
    "evs": "what changes between frames",
    "snapkv": "a quarter of the KV cache",
    "kivi": "all keys, in fewer bits",
    "uniform": "every fourth token (baseline)",
}
#: of those, so many are shown; all others are found by typing
OFFERED = 8


def say(text: str, error: bool = False) -> str:
    """A sentence for the visitor; errors are read out at once."""
    kind, role = ("mm-error", "alert") if error else ("mm-note", "status")
    return f'<p class="mm-say {kind}" role="{role}">{escape(text)}</p>' if text else ""


# -------------------------------------------------------------------------------------------------------------- recipes


def site(recipe: Recipe) -> str:
    """The site of its first stage."""
    return get_method(recipe.stages[0].method).site if recipe.stages else "none"


def choices(found: Sequence[Recipe]) -> list[tuple[str, str]]:
    """Recipes for a list: what is shown, and the name. The curated ones stand first, the others by site."""
    names = {one.name for one in found}
    first = [name for name in CURATED if name in names][:OFFERED]
    rest = sorted((one for one in found if one.name not in first), key=lambda one: (SITES.index(site(one)), one.name))
    return [(f"{name} · {CURATED[name]}", name) for name in first] + [
        (f"{one.name} · {site(one)}", one.name) for one in rest
    ]


def about(recipe: Recipe) -> str:
    """Sites of a recipe, its summary, and the paper."""
    stages = " → ".join(dict.fromkeys(f"{get_method(s.method).site}: {s.method}" for s in recipe.stages))
    papers = [recipe.paper] if recipe.paper else [get_method(stage.method).paper for stage in recipe.stages]
    paper = ", ".join(_paper(one) for one in dict.fromkeys(papers) if one) or "no paper: a baseline, or ours"
    does = (recipe.summary or "a recipe of your own").rstrip(".")
    where = f"{escape(stages)}; {paper}.{_keeps(recipe)}"
    return f'<p class="mm-about"><b>{escape(recipe.name)}</b>: {escape(does)}.<br>{where}</p>'


def _keeps(recipe: Recipe) -> str:
    if recipe.retain is None:
        return ""
    return (
        f" Keeps {recipe.retain}." if isinstance(recipe.retain, int) else f" Keeps {recipe.retain:.3g} of the tokens."
    )


def _paper(name: str) -> str:
    if number := re.fullmatch(r"arXiv (\d{4}\.\d{4,5})", name):
        return f'<a href="https://arxiv.org/abs/{number[1]}" target="_blank" rel="noopener">{escape(name)}</a>'
    return escape(name)


# -------------------------------------------------------------------------------------------------------------- answers


def columns(exchange: Exchange) -> str:
    """The full answer and the accelerated ones side by side, and how far they agree."""
    cells = "".join(_column(one, exchange.stopping) for one in (exchange.full, *exchange.fast))
    return f'<div class="mm-columns">{cells}</div>{_agreement(exchange)}'


def _column(column: Column, stopping: bool) -> str:
    said = state(column, stopping)
    # of an answer that was broken off the rest is missing, and looks so
    more = " …" * bool(column.text and column.state == "stopped")
    shown = escape(column.text) + more or f'<span class="mm-dim">{said or "(an empty answer)"}</span>'
    badge = f' <span class="mm-state">{said}</span>' * bool(said)
    return (
        f'<section class="mm-column" data-state="{column.state}"><h3>{escape(column.title)}{badge}</h3>'
        f'<p class="mm-answer" aria-live="polite">{shown}</p></section>'
    )


def state(column: Column, stopping: bool) -> str:
    """Progress of an answer in words; empty once it is complete."""
    return "stops at its next token ..." if stopping and column.state == "runs" else _STATES.get(column.state, "")


def _agreement(exchange: Exchange) -> str:
    if len(exchange.fast) != 1 or (found := exchange.fast[0].agreement) is None:
        return ""
    same = "The two answers are equal" if found["same_answer"] else "The two answers differ"
    return (
        f'<p class="mm-agreement" role="status">{same}; their first {found["same_leading_tokens"]} tokens are the same; '
        f"KL divergence {found['kl']:.2g} nats (mean; tokens compared: {found['kl_tokens']}).</p>"
    )


def held(answer: ask.Answer) -> float:
    """Visual tokens whose keys a head of the KV cache holds, mean over layers and heads."""
    evicted = [stage for stage in answer.stats["stages"] if stage["site"] == "cache"]
    return float(evicted[-1]["tokens_kept"] if evicted else answer.visual_tokens_per_layer)


def _columns(heads: list[str], rows: Sequence[tuple[Any, ...]]) -> Table:
    return {head: [row[i] for row in rows] for i, head in enumerate(heads)}


def figures(exchange: Exchange) -> Table:
    """Time and memory of both answers, a row a figure, and the share that the accelerated one takes."""
    full, fast = exchange.full.answer, exchange.fast[0].answer
    assert full is not None and fast is not None
    rows = []

    def add(name: str, a: float | None, b: float | None, form: Any) -> None:
        if a is not None and b is not None:
            rows.append((name, form(a), form(b), f"{b / a:.0%}" if a else ""))

    a, b = exchange.full, exchange.fast[0]
    add("time to first token", a.first_token_seconds, b.first_token_seconds, seconds)
    add("tokens per second", a.tokens_per_second, b.tokens_per_second, lambda x: f"{x:.1f}")
    add(LEFT, full.visual_tokens_kept, fast.visual_tokens_kept, str)
    add(HELD, held(full), held(fast), lambda x: f"{x:.0f}")
    add("KV cache", full.kv_bytes, fast.kv_bytes, nbytes)
    add("peak memory", full.peak_memory_bytes, fast.peak_memory_bytes, nbytes)
    return _columns(["figure", "full", "fast", "share"], rows)


#: tokens that are in the hidden states of the last layer, and those whose keys are in the cache: not the same where a recipe
#: evicts from the cache, or drops inside the language model
LEFT, HELD = "visual tokens left", "visual keys a head"


def table(figures: Table, label: str) -> str:
    """As HTML; behind a share is a bar."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in figures)
    rows = []
    for first, *rest in zip(*figures.values(), strict=True):
        cells = "".join(
            f"<td{f' style=--share:{cell}' if str(cell).endswith('%') else ''}>{escape(str(cell))}</td>"
            for cell in rest
        )
        rows.append(f'<tr><th scope="row">{escape(str(first))}</th>{cells}</tr>')
    return (
        f'<div class="mm-figures"><table aria-label="{escape(label)}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def layers(view: View) -> Table:
    """A row a decoder layer: the visual tokens that reach it, and their keys that its cache holds, mean over heads."""
    places, rows = view.visual, []
    for layer in view.layers:
        tokens = int(layer.reaches[places].sum())
        keys = None if layer.heads is None else float(layer.heads[places].sum()) / layer.of
        held = ("none", "") if keys is None else (f"{keys:.0f}", f"{keys / max(1, len(places)):.0%}")
        rows.append((layer.number, tokens, f"{tokens / max(1, len(places)):.0%}", *held))
    return _columns(["layer", "tokens", "of all tokens", "keys a head", "of all keys"], rows)


# --------------------------------------------------------------------------------------------------------------- drafts


def drafts(exchange: Exchange) -> str:
    """Both answers, with every token underlined as its drafter's, and what the lines mean."""
    columns = [one for one in (exchange.full, *exchange.fast) if one.drafted is not None]
    found = [source for one in columns if one.drafted is not None for source in one.drafted.figures["sources"]]
    numbers = {source: number for number, source in enumerate(dict.fromkeys(found), 1)}
    cells = "".join(_drafted(one, numbers) for one in columns)
    keys = "".join(f"<li>{_token(name, number, name)}</li>" for name, number in numbers.items())
    legend = f'<ul class="mm-drafters" aria-label="who drafted"><li>plain: the model itself</li>{keys}</ul>'
    return f'<div class="mm-columns">{cells}</div>{legend}'


def _drafted(column: Column, numbers: dict[str, int]) -> str:
    assert column.drafted is not None
    text = "".join(_token(piece, numbers.get(source, 0), source) for piece, source in column.drafted.pieces)
    return f'<section class="mm-column"><h3>{escape(column.title)}</h3><p class="mm-answer mm-drafted">{text}</p></section>'


def _token(text: str, number: int, source: str) -> str:
    if not number or not text:
        return escape(text)
    return f'<mark data-drafter="{number}" title="drafted by {escape(source)}">{escape(text)}</mark>'


def drafting(exchange: Exchange) -> Table:
    """Figures of the drafts of both answers, a row a figure, and how many tokens each drafter has."""
    rows: dict[str, list[str]] = {}
    columns = [one for one in (exchange.full, *exchange.fast) if one.drafted is not None]
    for place, column in enumerate(columns):
        assert column.drafted is not None
        found, sources = column.drafted.figures, [source for _, source in column.drafted.pieces]
        cells = {
            "tokens": str(len(sources)),
            "forwards behind the prompt": str(found["verifications"]),
            "drafted tokens accepted": f"{found['accepted']} of {found['drafted']}",
            "tokens a forward": f"{found['tokens_a_verification']:.2f}",
            **{f"tokens drafted by {name}": str(sources.count(name)) for name in found["sources"]},
        }
        for name, cell in cells.items():
            rows.setdefault(name, [""] * len(columns))[place] = cell
    heads = ["figure", *(column.title for column in columns)]
    return _columns(heads, [(name, *cells) for name, cells in rows.items()])


# ----------------------------------------------------------------------------------------------------------- comparison


def comparison(exchange: Exchange) -> Table:
    """A row a recipe: answers, how far they agree, and what they took."""
    rows = []
    for column in (exchange.full, *exchange.fast):
        found, answer, said = column.agreement, column.answer, state(column, exchange.stopping)
        if column.state in ("done", "refused"):
            text = column.text or "(an empty answer)"
        else:
            text = f"{column.text} … ({said})" if column.text else f"({said})"
        agrees = "" if found is None else f"{'yes' if found['same_answer'] else 'no'}, KL {found['kl']:.2g}"
        cells = dict.fromkeys((LEFT, HELD, "KV cache", *(["first token"] if exchange.timed else [])), "")
        if answer is not None:
            cells |= {
                LEFT: str(answer.visual_tokens_kept),
                HELD: f"{held(answer):.0f}",
                "KV cache": nbytes(answer.kv_bytes),
            }
            cells |= {"first token": seconds(first)} if (first := column.first_token_seconds) is not None else {}
        rows.append({"recipe": column.title, "answer": text, "as full": agrees, **cells})
    return {head: [row[head] for row in rows] for head in rows[0]}


# --------------------------------------------------------------------------------------------------------------- stream


def memory(points: Sequence[tuple[int, int, int]], cap: int) -> str:
    """The last of the points of a stream, in words."""
    frames, held, keys = points[-1]
    return say(f"{frames} frames read, {nbytes(held)} in the cache, {keys} of at most {cap} keys a head")


def line(points: Sequence[tuple[int, int, int]]) -> Table:
    """KiB of the cache over the frames that came."""
    return _columns(["frames", "KiB"], [(frames, held / 1024) for frames, held, _ in points])


def asked(question: str, answer: str, frames: int) -> str:
    """One question of a stream with its answer."""
    return f'<p class="mm-asked">behind frame {frames}: {escape(question)} <b>{escape(answer) or "(an empty answer)"}</b></p>'


def sentence(error: Exception) -> str:
    """An error for the visitor: ours as it is; of any other only its kind, since its text may name what is not his."""
    if isinstance(error, MmaccelError):
        return str(error)
    return f"Something went wrong here ({type(error).__name__}); try again, or with another file or recipe."
