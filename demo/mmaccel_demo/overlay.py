"""Overlays: the fate of every visual token, drawn over the picture or the frames that it came from.

A :class:`View` holds plain data on the CPU; :func:`draw` makes HTML of it: the drawing of :mod:`.media.draw` below, and above
it an SVG with one rectangle a token, whose title says which token it is, where it stands, and what it was worth. Drawings stay
readable without colour: dropped is dark, merged is outlined with a dot on the token that stays.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.Image import Image as PILImage
from torch import Tensor

from mmaccel import Recipe
from mmaccel.core.layout import Layout, Segment
from mmaccel.core.reduction import Links, Reduction
from mmaccel.kv.cache import CacheState, state_of
from mmaccel.kv.recurrent import RecurrentLayer
from mmaccel.media.draw import kept
from mmaccel.media.files import Prompt
from mmaccel.method import FramesMethod

#: pixels along the longer side of a drawn picture, and of a frame in a strip
_SIDE, _FRAME = 560, 224
#: of more tokens, rectangles with titles would make the page slow
_MOST = 6000


@dataclass(frozen=True)
class Step:
    """The tokens at one point of their way.

    title : where that is.
    reduction : ``[1, S]``, from the prompt as the processor made it up to here.
    scores : figures that the method saw there, ``[S]`` by name, NaN where none.
    heads : ``[S]``, how many of ``of`` heads hold the token; None where nothing is held yet.
    """

    title: str
    reduction: Reduction
    scores: dict[str, Tensor] = field(default_factory=dict)
    heads: Tensor | None = None
    of: int = 1


@dataclass(frozen=True, kw_only=True)
class LayerStep(Step):
    """The tokens and keys of one decoder layer at the end of the answer.

    number : of the layer in the model; one that keeps no keys, such as a recurrent layer, has no ``heads``.
    reaches : ``[S]`` bool, tokens in the hidden states that it read in the prefill.
    """

    number: int
    reaches: Tensor


@dataclass(frozen=True)
class Panel:
    """One picture, tile or frame: what it shows, and which slice of which segment holds its tokens.

    picture : None where it is not known which part of the picture a tile shows.
    segment : None for a frame that the model was not shown.
    """

    picture: PILImage | None
    caption: str
    segment: Segment | None = None
    slice: int = 0


@dataclass(frozen=True)
class View:
    """Everything the overlay needs, on the CPU. ``moves``: the panels are frames of a clip."""

    panels: list[Panel]
    steps: Sequence[Step]
    moves: bool = False
    layers: list[LayerStep] = field(default_factory=list)

    @property
    def visual(self) -> list[int]:
        """The places of all visual tokens, ascending."""
        return sorted(int(p) for panel in self._segments() for p in panel.places)

    def _segments(self) -> list[Segment]:
        return list({id(p.segment): p.segment for p in self.panels if p.segment is not None}.values())

    def segments(self, step: Step) -> list[int]:
        """For every panel the number of its temporal segment: frames whose tokens were merged with each other, and those
        between them, are one."""
        owner = step.reduction.owner()[0]
        at: dict[int, int] = {}
        for number, panel in enumerate(self.panels):
            if panel.segment is not None:
                places = panel.segment.places[panel.segment.tile.cells[:, 0] == panel.slice]
                at |= dict.fromkeys(places.tolist(), number)
        joined = [False] * len(self.panels)  # panel i with panel i + 1
        for place, number in at.items():
            onto = at.get(int(owner[place]), number)
            for between in range(min(number, onto), max(number, onto)):
                joined[between] = True
        found = [0]
        for join in joined[: len(self.panels) - 1]:
            found.append(found[-1] + (not join))
        return found


# -------------------------------------------------------------------------------------------------- from a finished run


def view_of(model: Any, cache: Any, prompt: Prompt, chosen: Recipe) -> View:
    """The view of the last prompt of an accelerated model whose cache still holds what it kept."""
    handle = model.mmaccel
    layout: Layout | None = handle.layout
    state = state_of(cache)
    layers = [] if layout is None or state is None else _layers(handle, layout, state)
    panels, steps = _panels(handle, layout, prompt, chosen), _steps(handle, layout, layers)
    return View(panels, steps, prompt.clip is not None, layers)


def _steps(handle: Any, layout: Layout | None, layers: list[LayerStep]) -> list[Step]:
    if layout is None:
        return []
    steps = [Step("before the recipe: every token", Reduction.identity(layout.valid))]
    for passage in handle.history:
        method = handle.plan.stages[passage.stage].method
        where = f"decoder layer {passage.layer}" if method.site == "layers" else str(method.site)
        scores = {name.replace("_", " "): x[0] for name, x in passage.scores().items()}
        steps.append(Step(f"{where}: {method.name}", _on_cpu(passage.reduction), scores))
    if handle.plan.policy is not None:
        steps += [layer for layer in layers if layer.heads is not None]
    return steps


def _layers(handle: Any, layout: Layout, state: CacheState) -> list[LayerStep]:
    """A step a layer: what its cache holds at the end of the answer."""
    policy, width = handle.plan.policy, layout.valid.shape[1]
    title = "cache of layer {}" + (f": {policy.method.name}" if policy is not None else "")
    steps = []
    for number, layer in enumerate(state.every):
        before = [p.reduction for p in handle.history if p.layer <= number]
        base = _on_cpu(before[-1]) if before else Reduction.identity(layout.valid)
        reaches = base.kept[0]
        if isinstance(layer, RecurrentLayer) or layer.empty:
            steps.append(LayerStep(f"layer {number}, which keeps no keys", base, number=number, reaches=reaches))
            continue
        held = layer.index.by_head[0].cpu().long()
        heads = torch.zeros(width, dtype=torch.long)
        for head in held:
            heads[head[(head >= 0) & (head < width)]] += 1
        stays = base.then(Reduction(base.kept & (heads > 0)[None], base.kept))
        at = title.format(number)
        steps.append(LayerStep(at, stays, heads=heads, of=len(held), number=number, reaches=reaches))
    return steps


def _on_cpu(reduction: Reduction) -> Reduction:
    links = reduction.links
    if links is not None:
        links = Links(links.batch.cpu(), links.slot.cpu(), links.source.cpu(), links.weight.cpu())
    return Reduction(reduction.kept.cpu(), reduction.valid.cpu(), links)


def _panels(handle: Any, layout: Layout | None, prompt: Prompt, chosen: Recipe) -> list[Panel]:
    if prompt.clip is not None:
        return _film(handle, layout, prompt, chosen)
    panels = []
    parts = [] if layout is None else layout.segments
    for number, picture in enumerate(prompt.pictures):
        mine = [s for s in parts if s.picture == number]
        if not mine:
            panels.append(Panel(picture, ""))
        for i, segment in enumerate(mine):
            # one segment shows the picture, two show it at two resolutions, more are tiles and the whole picture last
            whole = len(mine) < 3 or i == len(mine) - 1
            caption = "" if len(mine) == 1 else "the whole picture" if whole else f"tile {i + 1}"
            shown = _cropped(picture, handle.processor, "image_processor", len(mine)) if whole else None
            panels.append(Panel(shown, caption, segment))
    return panels


def _film(handle: Any, layout: Layout | None, prompt: Prompt, chosen: Recipe) -> list[Panel]:
    """All frames; those that carry tokens with their slice."""
    clip = prompt.clip
    assert clip is not None
    stay = np.arange(len(clip.frames))
    for stage, method in chosen.build():
        if isinstance(method, FramesMethod):
            stay = stay[method.choose(clip.frames[stay], 1.0 if stage.retain is None else float(stage.retain))]
    slices = []
    for segment in [] if layout is None else layout.segments:
        slices += [(segment, t) for t in sorted(set(segment.tile.cells[:, 0].tolist()) - {-1})]
    # some models join neighbouring frames into one slice: its first frame represents it
    holds = {int(stay[k * len(stay) // len(slices)]): one for k, one in enumerate(slices)}
    panels = []
    for number, frame in enumerate(clip.frames):
        caption = f"{clip.timestamps[number]:.1f} s"
        picture = _cropped(Image.fromarray(frame), handle.processor, "video_processor", 1)
        if number in holds:
            panels.append(Panel(picture, caption, *holds[number]))
        elif number not in stay:
            panels.append(Panel(picture, f"{caption}, left out"))
        elif layout is None:
            panels.append(Panel(picture, caption))
    return panels


def _cropped(picture: PILImage, processor: Any, part: str, segments: int) -> PILImage:
    """The middle of the picture where the processor cuts that out, else the picture."""
    reader = getattr(processor, part, None)
    shortest = _get(getattr(reader, "size", None), "shortest_edge")
    crop = _get(getattr(reader, "crop_size", None), "height")
    if segments != 1 or not getattr(reader, "do_center_crop", False) or not shortest or not crop:
        return picture
    side = min(picture.size) * min(1.0, crop / shortest)
    left, top = (picture.width - side) / 2, (picture.height - side) / 2
    return picture.crop((round(left), round(top), round(left + side), round(top + side)))


def _get(sizes: Any, name: str) -> int | None:
    found = sizes.get(name) if hasattr(sizes, "get") else getattr(sizes, name, None)
    return None if found is None else int(found)


# ------------------------------------------------------------------------------------------------------------- as HTML


def draw(view: View | None, number: int) -> str:
    """Step ``number`` as HTML: the picture, its tiles, or the strip of frames, with a line that says what is shown."""
    if view is None or not view.panels:
        return ""
    side = _SIDE if len(view.panels) == 1 else _FRAME
    if not view.steps:
        body = "".join(_panel(panel, _image(panel, None, side), "", panel.segment is None) for panel in view.panels)
        return f'<div class="mm-strip">{body}</div><p>This recipe works on pixels only; its tokens all stay.</p>'
    step = view.steps[number]
    visual = torch.tensor(view.visual, dtype=torch.long)
    tokens = _Tokens(view, step)
    body, last = "", -1
    segments = view.segments(step) if view.moves else []
    several = view.moves and len(set(segments)) < len(view.panels)
    for i, panel in enumerate(view.panels):
        drawn = _panel(panel, _image(panel, step, side), tokens.rectangles(panel), panel.segment is None)
        if several and segments[i] != last:
            count, last = segments.count(segments[i]), segments[i]
            body += "</div></div>" * bool(i) + (
                f'<div class="mm-segment"><p>segment {last + 1}, {count} frame{"s" * (count > 1)}</p><div class="mm-strip">'
            )
        body += drawn
    body = (
        f'<div class="mm-strip">{body}</div>' if not several else f'<div class="mm-segments">{body}</div></div></div>'
    )
    how = "Point at a token, or go there with Tab and the arrow keys."
    if len(visual) > _MOST:
        how = f"There are {len(visual)} tokens, too many to point at."
    return (
        f'<div class="mm-view"><p class="mm-count"><b>{escape(step.title)}</b>: '
        f"{_count(step, visual)}</p>{body}"
        f'<p class="mm-readout" aria-live="polite">{how}</p>{_LEGEND}</div>'
    )


Shown = tuple[PILImage, str]


def pair(view: View | None, number: int) -> list[Shown]:
    """A picture as it came and as step ``number`` leaves it; empty of a clip, or where no panel shows the picture."""
    if view is None or view.moves or not view.steps:
        return []
    shown = [panel for panel in view.panels if panel.picture is not None and panel.segment is not None]
    step = view.steps[number]
    return [(_image(shown[-1], None, _SIDE), "full"), (_image(shown[-1], step, _SIDE), step.title)] if shown else []


def sheet(views: Sequence[tuple[str, View]]) -> list[Shown]:
    """The picture as it came, and what is left of it at the last step of every view, under its title with a count."""
    found: list[Shown] = []
    for title, view in views:
        panel = next((one for one in reversed(view.panels) if one.picture is not None), view.panels[0])
        step = view.steps[-1] if view.steps else None
        found = found or [(_image(panel, None, _SIDE), "full model")]
        count = "all tokens stay" if step is None else _share(step, torch.tensor(view.visual, dtype=torch.long))
        found.append((_image(panel, step, _SIDE), f"{title}: {count}"))
    return found


def divided(shown: Sequence[Shown]) -> str:
    """Two drawings of one picture above each other, with a slider between them: the last two of ``shown`` at first. Of more
    the visitor chooses both, and all of them stand below."""
    if len(shown) < 2:
        return ""
    left, right = (0, 1) if len(shown) < 3 else (1, 2)
    sources = [_source(image) for image, _ in shown]
    titles = [escape(title) for _, title in shown]

    def side(name: str, chosen: int) -> str:
        if len(shown) < 3:
            return f"<span>{titles[chosen]}</span>"
        options = "".join(f"<option{' selected' * (i == chosen)}>{title}</option>" for i, title in enumerate(titles))
        return f'<label>{name} <select data-side="{name}">{options}</select></label>'

    figures = "".join(
        f'<figure><img src="{source}" alt=""><figcaption>{title}</figcaption></figure>'
        for source, title in zip(sources, titles, strict=True)
    )
    return (
        f'<div class="mm-pair"><div class="mm-sides">{side("Left", left)}{side("Right", right)}</div>'
        f'<div class="mm-stack"><img data-side="Left" src="{sources[left]}" alt="{titles[left]}">'
        f'<img data-side="Right" src="{sources[right]}" alt="{titles[right]}">'
        '<input type="range" value="50" aria-label="Share of the picture that shows the left one, in per cent"></div>'
        f'{f"""<div class="mm-sheet">{figures}</div>""" if len(shown) > 2 else ""}</div>'
    )


def frame(pixels: np.ndarray) -> str:
    """One frame, ``[H, W, 3]`` uint8, by itself."""
    return _panel(Panel(None, ""), Image.fromarray(pixels), "", False)


def _count(step: Step, visual: Tensor) -> str:
    """How many visual tokens are left, or how many of their keys, as a sentence."""
    if step.heads is None or step.of == 1:
        return f"{_share(step, visual)}."
    return f"{_share(step, visual)}; {int(step.reduction.kept[0, visual].sum())} tokens are held by one head or more."


def _share(step: Step, visual: Tensor) -> str:
    """The same without what single heads hold."""
    of, stays = len(visual), int(step.reduction.kept[0, visual].sum())
    if step.heads is None:
        return f"{stays} of {of} visual tokens stay ({stays / max(1, of):.0%})"
    keys = float(step.heads[visual].sum()) / step.of
    return f"a head holds the keys of {keys:.0f} of {of} visual tokens ({keys / max(1, of):.0%})"


_LEGEND = (
    '<p class="mm-legend"><span class="mm-key mm-key-kept"></span> kept <span class="mm-key mm-key-dropped"></span> dropped '
    '<span class="mm-key mm-key-merged">&bull;</span> merged: outlined groups, the dot is where the token stays</p>'
)


def _panel(panel: Panel, image: PILImage, tokens: str, out: bool) -> str:
    caption = f"<figcaption>{escape(panel.caption)}</figcaption>" if panel.caption else ""
    width, height = image.size
    return (
        f'<figure class="mm-panel{" mm-out" * out}"><svg viewBox="0 0 {width} {height}" role="group" '
        f'aria-label="visual tokens {escape(panel.caption)}"><image href="{_source(image)}" '
        f'width="{width}" height="{height}" preserveAspectRatio="none"/>{tokens}</svg>{caption}</figure>'
    )


def _source(image: PILImage) -> str:
    """As the source of an image in HTML."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _image(panel: Panel, step: Step | None, side: int) -> PILImage:
    picture = panel.picture or Image.new("RGB", (side, side), "#d8d8d8")
    scale = side / max(picture.size)
    picture = picture.convert("RGB").resize(
        (max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), Image.Resampling.LANCZOS
    )
    if step is None or panel.segment is None:
        return picture
    return kept(picture, panel.segment, step.reduction, panel.slice)


class _Tokens:
    """The rectangles over the panels of one step."""

    def __init__(self, view: View, step: Step) -> None:
        self.step = step
        self.owner = step.reduction.owner()[0].tolist()
        self.mass = step.reduction.mass()[0].tolist()
        visual = view.visual
        self.rank = {place: i + 1 for i, place in enumerate(visual)}
        self.many = len(visual) > _MOST

    def rectangles(self, panel: Panel) -> str:
        """``<rect>`` with a title for every token of a panel, in the coordinates of its drawing."""
        segment = panel.segment
        if segment is None or self.many:
            return ""
        _, height, width = segment.tile.grid
        cells = segment.tile.cells.tolist()
        drawn, first = [], True
        for place, (t, row, column) in zip(segment.places.tolist(), cells, strict=True):
            if t != panel.slice or row < 0:
                continue
            kind, text = self.about(place)
            where = f"row {row + 1}, column {column + 1}"
            drawn.append(
                f'<rect class="mm-t" data-at="{row},{column}" tabindex="{0 if first else -1}" role="img" '
                f'x="{100 * column / width:.4g}%" y="{100 * row / height:.4g}%" '
                f'width="{100 / width:.4g}%" height="{100 / height:.4g}%">'
                f"<title>token {self.rank[place]} of {len(self.rank)}, {where}, place {place} in the prompt: {text}</title>"
                "</rect>"
            )
            if kind == "group":
                drawn.append(
                    f'<circle class="mm-dot" cx="{100 * (column + 0.5) / width:.4g}%" '
                    f'cy="{100 * (row + 0.5) / height:.4g}%" r="{12 / max(width, height):.3g}%"/>'
                )
            first = False
        return "".join(drawn)

    def about(self, place: int) -> tuple[str, str]:
        """State of the token at a place: ``kept``, ``group`` (kept, with others in it), ``merged`` or ``dropped``; and
        the same in words, with its figures."""
        owner = self.owner[place]
        stands = self.mass[place]
        if owner == -1:
            kind, text = "dropped", "dropped"
        elif owner != place:
            kind, text = "merged", f"merged into token {self.rank.get(owner, '?')}"
        elif stands > 1:
            kind, text = "group", f"kept, represents {stands:.0f} tokens"
        else:
            kind, text = "kept", "kept"
        if self.step.heads is not None and kind in ("kept", "group") and self.step.of > 1:
            text += f" by {int(self.step.heads[place])} of {self.step.of} heads"
        for name, figures in self.step.scores.items():
            value = float(figures[place])
            text += f"; {name} {value:.3g}" if value == value else f"; no {name}"
        return kind, text
