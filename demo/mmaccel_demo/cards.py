"""Answers, figures and charts as HTML. Whatever comes from outside is escaped; nothing is told by colour alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from mmaccel import MmaccelError, Recipe, method
from mmaccel.cli.shared.text import nbytes, seconds

from .engine import Column, Exchange

_STATES = {"waits": "waits", "runs": "is answering ...", "stopped": "stopped", "refused": "not with this model"}
#: where a recipe works first, in the order of a token's way
SITES = ("frames", "encoder", "projector", "layers", "cache", "codec")


def say(text: str, error: bool = False) -> str:
    """A sentence for the visitor; errors are read out at once."""
    kind, role = ("mm-error", "alert") if error else ("mm-note", "status")
    return f'<p class="mm-say {kind}" role="{role}">{escape(text)}</p>' if text else ""


# -------------------------------------------------------------------------------------------------------------- recipes


def site(recipe: Recipe) -> str:
    """The site of its first stage."""
    return method(recipe.stages[0].method).site if recipe.stages else "none"


def choices(found: Sequence[Recipe]) -> list[tuple[str, str]]:
    """Recipes for a list, grouped by site: what is shown, and the name."""
    order = sorted(found, key=lambda one: (SITES.index(site(one)), one.name))
    return [(f"{site(one)} · {one.name}", one.name) for one in order]


def about(recipe: Recipe) -> str:
    """Where a recipe works, what it does, and the paper."""
    stages = " → ".join(dict.fromkeys(f"{method(s.method).site}: {s.method}" for s in recipe.stages))
    papers = [recipe.paper] if recipe.paper else [method(stage.method).paper for stage in recipe.stages]
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
    """The full answer and the accelerated ones side by side, with their figures."""
    cells = "".join(_column(one, exchange.stopping) for one in (exchange.full, *exchange.fast))
    return f'<div class="mm-columns">{cells}</div>{_agreement(exchange)}'


def _column(column: Column, stopping: bool) -> str:
    said = _state(column, stopping)
    shown = escape(column.text) or f'<span class="mm-dim">{said or "(an empty answer)"}</span>'
    state = f' <span class="mm-state">{said}</span>' * bool(said)
    return (
        f'<section class="mm-column" data-state="{column.state}"><h3>{escape(column.title)}{state}</h3>'
        f'<p class="mm-answer" aria-live="polite">{shown}</p>{_figures(column)}</section>'
    )


def _state(column: Column, stopping: bool) -> str:
    return "stops at its next token ..." if stopping and column.state == "runs" else _STATES.get(column.state, "")


def _figures(column: Column) -> str:
    answer = column.answer
    if answer is None:
        return ""
    rate = answer.tokens_per_second
    rows = [
        ("time to first token", seconds(answer.first_token_seconds)),
        ("tokens per second", "-" if rate is None else f"{rate:.1f}"),
        ("visual tokens kept", f"{answer.visual_tokens_kept} of {answer.visual_tokens}"),
        ("KV cache", nbytes(answer.kv_bytes)),
    ]
    if answer.peak_memory_bytes is not None:
        rows.append(("peak memory", nbytes(answer.peak_memory_bytes)))
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows) + "</dl>"


def _agreement(exchange: Exchange) -> str:
    if len(exchange.fast) != 1 or (found := exchange.fast[0].agreement) is None:
        return ""
    same = "The two answers are equal" if found["same_answer"] else "The two answers differ"
    return (
        f'<p class="mm-agreement" role="status">{same}; their first {found["same_leading_tokens"]} tokens are the same; KL '
        f"divergence of the first token {found['kl_first_token']:.2g} nats.</p>{_bars(exchange)}"
    )


def _bars(exchange: Exchange) -> str:
    """What it cost, as pairs of bars; the accelerated ones are hatched."""
    full, fast = exchange.full.answer, exchange.fast[0].answer
    assert full is not None and fast is not None
    rows: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("time to first token", full.first_token_seconds, fast.first_token_seconds, seconds),
        ("visual tokens kept", full.visual_tokens_kept, fast.visual_tokens_kept, lambda x: f"{x:.0f}"),
        ("KV cache", full.kv_bytes, fast.kv_bytes, nbytes),
    ]
    body = ""
    for name, a, b, form in rows:
        most = max(a, b, 1e-12)
        body += (
            f'<div class="mm-bars"><span>{name}</span><div>{_bar(a / most, f"full {form(a)}", "mm-full")}'
            f"{_bar(b / most, f'accelerated {form(b)}', 'mm-fast')}</div></div>"
        )
    return f'<div class="mm-chart" role="group" aria-label="what both answers cost">{body}</div>'


def _bar(share: float, text: str, kind: str) -> str:
    return f'<div class="mm-bar"><em>{escape(text)}</em><i class="{kind}" style="width:{100 * share:.1f}%"></i></div>'


# ----------------------------------------------------------------------------------------------------------- comparison


def comparison(exchange: Exchange) -> str:
    """A table of recipes, a row each, with bars beside the figures."""
    done = [one.answer for one in (exchange.full, *exchange.fast) if one.answer is not None]
    slowest = max((one.first_token_seconds for one in done), default=1.0)
    largest = max((one.kv_bytes for one in done), default=1)
    head = ("recipe", "answer", "agrees with full", "visual tokens", "time to first token", "KV cache")
    body = ""
    for column in (exchange.full, *exchange.fast):
        found, answer = column.agreement, column.answer
        agrees = "-"
        if found is not None:
            agrees = f"{'yes' if found['same_answer'] else 'no'}, KL {found['kl_first_token']:.2g}"
        cells = [escape(column.text) or _state(column, exchange.stopping) or "(an empty answer)", agrees]
        if answer is None:
            cells += ["", "", ""]
        else:
            cells += [
                f"{answer.visual_tokens_kept} of {answer.visual_tokens}",
                _bar(answer.first_token_seconds / slowest, seconds(answer.first_token_seconds), "mm-fast"),
                _bar(answer.kv_bytes / max(1, largest), nbytes(answer.kv_bytes), "mm-fast"),
            ]
        named = "".join(f'<td data-name="{name}">{cell}</td>' for name, cell in zip(head[1:], cells, strict=True))
        body += f'<tr><th scope="row">{escape(column.title)}</th>{named}</tr>'
    heads = "".join(f'<th scope="col">{name}</th>' for name in head)
    return (
        '<div class="mm-table" tabindex="0" role="region" aria-label="recipes compared"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


# --------------------------------------------------------------------------------------------------------------- stream


def memory(points: Sequence[tuple[int, int, int]], cap: int) -> str:
    """Bytes of the cache over the frames that came, as a line; and the last of them in words."""
    if not points:
        return ""
    frames, held, keys = points[-1]
    width, height, most = 560, 120, max(p[1] for p in points) * 1.15
    line = " ".join(f"{width * p[0] / frames:.1f},{height - height * p[1] / most:.1f}" for p in points)
    text = f"{frames} frames read, {nbytes(held)} in the cache, {keys} of at most {cap} keys a head"
    return (
        f'<figure class="mm-memory"><svg viewBox="-4 -4 {width + 8} {height + 8}" role="img" aria-label="{text}">'
        f'<path class="mm-axis" d="M0 0V{height}H{width}"/><polyline class="mm-line" points="0,{height} {line}"/></svg>'
        f'<figcaption role="status">{text}. The line is memory over frames.</figcaption></figure>'
    )


def asked(question: str, answer: str, frames: int) -> str:
    """One question of a stream with its answer."""
    return f'<p class="mm-asked">behind frame {frames}: {escape(question)} <b>{escape(answer) or "(an empty answer)"}</b></p>'


def sentence(error: Exception) -> str:
    """An error for the visitor: ours as it is; of any other only its kind, since its text may name what is not his."""
    if isinstance(error, MmaccelError):
        return str(error)
    return f"Something went wrong here ({type(error).__name__}); try again, or with another file or recipe."
