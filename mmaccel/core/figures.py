"""Statistics of a call for its user: a dict with attribute access, a one-line repr, a table in notebooks."""

import copy
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

#: seconds that round to a millisecond
LEAST = 0.0005


class Figures(dict[str, Any]):
    """Figures of the last call by name; empty before the first."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        why = "" if self else "; the model has not been called yet"
        raise AttributeError(f"{type(self).__name__} has no {name!r}{why}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def __repr__(self) -> str:
        return ", ".join(self._parts()) if self else "no call yet"

    def to_dict(self) -> dict[str, Any]:
        """A plain dict copy, as JSON takes it."""
        return copy.deepcopy(dict(self))

    def _parts(self) -> Iterator[str]:
        """Parts of the one-line repr."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """A table: the line, then every figure."""
        figures = {name: value for name, value in self.items() if value not in ([], {}, "")}
        stages = figures.pop("stages", [])
        rows = [(name.replace("_", " "), _cell(value)) for name, value in figures.items()]
        for number, stage in enumerate(stages):
            cells = (f"{name} {_cell(value)}" for name, value in stage.items() if value is not None)
            rows.append((f"stage {number}", ", ".join(cells)))
        body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
        return f"<table><caption>{escape(repr(self))}</caption>{body}</table>"


class CallStats(Figures):
    """Figures of one call of an accelerated model: what ``model.mmaccel.stats()`` returns.

    Its repr is the line of a log, ``2,025 -> 203 visual tokens (10 %), KV 24.7 -> 6.7 MiB, selection 3 ms``; a notebook shows a
    table. Every figure is an attribute and a key.
    """

    recipe: str
    """Name of the recipe that was in force in this call."""
    prompt_tokens: int
    """Tokens of the prompt, padding included, summed over rows."""
    visual_tokens: int
    """Those of them that represent pictures and clips."""
    visual_tokens_kept: int
    """Visual tokens that reach the last layer of the language model."""
    visual_tokens_per_layer: float
    """Their mean over the layers: the fair x-axis where recipes work at different sites."""
    sound_tokens: int
    """Tokens of the prompt that represent sounds, for models that are shown some."""
    sound_tokens_kept: int
    """Those of them that reach the language model."""
    stages: list[dict[str, Any]]
    """Of every stage of the recipe what :class:`mmaccel.core.stats.Stage` names: tokens in, budget, tokens kept."""
    kv_bytes: int
    """Bytes of the KV cache at the end of the call."""
    kv_bytes_bare: int
    """Bytes that the bare model would hold of the same tokens; computed, not measured."""
    labels_ignored: int
    """Labels that stood at dropped tokens and did not count in the loss."""
    notes: list[str]
    """In words, what numbers do not show."""
    decode_steps: int
    """Steps behind the prompt."""
    captured_steps: int
    """Those of them that were one captured graph."""
    uncaptured: str
    """Why the others were not."""
    tokens_returned: int
    """Visual tokens that came back while it decoded, once for every layer at which they had been dropped."""
    retraced: int
    """Rows of forwards in which ``memvr`` showed visual tokens again."""
    drafting: dict[str, Any]
    """Of a call with drafts: ``tokens`` of the answers, ``verifications`` (forwards behind the prompt), ``row_verifications``
    (the same, counted for every row), ``forwards_saved`` (fewer than one token a forward takes), tokens ``drafted`` and
    ``accepted``, ``tokens_a_verification`` of a row, ``verify_seconds``, of every source in ``sources`` its drafted and
    accepted tokens and its seconds, and ``drafted_by``, the source of every token of every answer, empty for the model's own.
    Empty without drafts."""
    fallback: dict[str, Any]
    """Of a call with a fallback: all ``readings`` (recipe, budget, visual tokens kept and per layer), and of every row the
    number of the ``reading`` that its answer comes from and the ``certainty`` of the last answer that was judged. The other
    figures are those of the last reading. Empty without one."""
    offload: dict[str, int]
    """Of a call with ``offload="host"``, in bytes: the cache on the ``device`` and on the ``host``; what went over the bus,
    ``fetched`` as whole layers, ``ahead`` those of them that were fetched while another layer computed, ``written`` to the
    host, ``read`` as chosen keys (at most), and ``a_step`` all of it in a step behind the prompt. Empty without."""
    seconds: dict[str, float]
    """Seconds by part of the call; asking for them waits for the device."""

    def _parts(self) -> Iterator[str]:
        if self.visual_tokens:
            yield _fewer(self.visual_tokens, self.visual_tokens_kept, "visual tokens")
        else:
            yield f"{self.prompt_tokens:,} tokens, none of them visual"
        if self.get("sound_tokens"):
            yield _fewer(self.sound_tokens, self.sound_tokens_kept, "sound tokens")
        if self.kv_bytes:
            yield f"KV {_bytes(self.kv_bytes_bare, self.kv_bytes)}"
        if offload := self.get("offload"):
            yield f"{_bytes(offload['host'], offload['host'])} of it in host memory"
        if drafting := self.get("drafting"):
            yield drafting_line(drafting)
        if fallback := self.get("fallback"):
            again = sum(number > 0 for number in fallback["reading"])
            yield f"{again} of {len(fallback['reading'])} answers read again"
        took = {name: self.seconds.get(name, 0.0) for name in ("selection", "packing")}
        yield from (f"{name} {_time(value)}" for name, value in took.items() if value >= LEAST)


class EncoderStats(Figures):
    """Figures of one call of an accelerated image encoder. Its repr is one line, a notebook shows a table; every figure is an
    attribute and a key."""

    recipe: str
    """Name of the recipe that was in force in this call."""
    site: str
    """``"encoder"``."""
    method: str
    """Name of the method."""
    tokens_in: int
    """Patches of all pictures."""
    resolved: int | None
    """How many of them the budget asks for."""
    tokens_kept: int
    """How many are left behind the last layer."""
    seconds: dict[str, float]
    """Seconds by part of the call; asking for them waits for the device."""

    def _parts(self) -> Iterator[str]:
        yield _fewer(self.tokens_in, self.tokens_kept, "patches")
        yield from (f"{name} {_time(value)}" for name, value in self.seconds.items())


#: figures of drafts that are summed over calls
DRAFT_SUMS = ("tokens", "verifications", "row_verifications", "forwards_saved", "drafted", "accepted")


def tokens_a_verification(sums: Mapping[str, Any]) -> float:
    """Tokens that a row commits in a forward on average, from :data:`DRAFT_SUMS`; 1 without drafts."""
    return 1 + sums["accepted"] / sums["row_verifications"] if sums["row_verifications"] else 1.0


def drafting_line(sums: Mapping[str, Any]) -> str:
    """:data:`DRAFT_SUMS` in words."""
    return (
        f"{sums['accepted']:,.0f} of {sums['drafted']:,.0f} drafted tokens accepted, {tokens_a_verification(sums):.2f} tokens "
        f"a verification, {sums['forwards_saved']:,.0f} forwards saved"
    )


def _fewer(total: int, kept: int, what: str) -> str:
    """``2,025 -> 203 visual tokens (10 %)``."""
    if kept == total:
        return f"{total:,} {what}"
    share = 100 * kept / total
    return f"{total:,} -> {kept:,} {what} ({share:{'.0f' if share >= 1 else '.1g'}} %)"


def _bytes(before: int, after: int) -> str:
    """``24.7 -> 6.7 MiB``, in the unit of the larger."""
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
    unit = next(unit for unit, size in units.items() if max(before, after) >= size)
    counts = [f"{count / units[unit]:,.{0 if unit == 'B' else 1}f}" for count in (before, after)]
    return f"{' -> '.join(dict.fromkeys(counts))} {unit}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= LEAST else "<1 ms"


def _part(value: Any) -> str:
    """A value of a dict as text: floats are seconds."""
    if isinstance(value, dict):
        return f"({_cell(value)})"
    return _time(value) if isinstance(value, float) else _cell(value)


def _cell(value: Any) -> str:
    """A value as text: numbers with commas, seconds as times."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_part(part)}" for name, part in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else str(value)
