"""Scenes: the content of a picture, its drawing, and the thing that owns each cell of a token grid.

A scene is data; coordinates are shares of the picture's side, so one scene can be drawn at any size. Things are large
(15 to 60 visual tokens of a 14x14 grid) and the details on them small, as in photographs; the ground is textured,
lit unevenly, noisy and cluttered, so that neither a constant background nor plain saliency gives the answer away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmaccel.suite.rng import Rng

Box = tuple[float, float, float, float]
"""Left, top, right, bottom as shares of the picture's width and height."""

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross")
PLURALS = {shape: "crosses" if shape == "cross" else shape + "s" for shape in SHAPES}
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (212, 38, 44),
    "green": (42, 158, 62),
    "blue": (40, 82, 214),
    "yellow": (242, 216, 48),
    "purple": (136, 56, 176),
    "orange": (246, 132, 26),
    "white": (242, 242, 242),
}
COLOURS = tuple(PALETTE)
CHARACTERS = tuple("0123456789ACEFHKLPTX")
"""Digits, and the letters that cannot be taken for a digit or for each other when they are ten pixels tall."""

CHARACTER_HEIGHTS = {"small": 0.095, "medium": 0.135, "large": 0.19}
"""Height of a character as a share of the picture's side, by the name of its size."""

MAX_THINGS = 5
_LIGHT = ("yellow", "orange", "white")
_LARGEST_SIDE = {1: 0.54, 2: 0.47, 3: 0.41, 4: 0.36, 5: 0.33}
_SMALLEST_SIDE = 0.30
_OVERSAMPLING = 2


@dataclass(frozen=True)
class Thing:
    """One coloured shape, with at most one character written on it."""

    shape: str
    colour: str
    box: Box
    turn: float = 0.0
    character: str = ""
    size: str = ""
    shade: tuple[int, int, int] = (0, 0, 0)

    @property
    def name(self) -> str:
        """Colour and shape, the words by which a question refers to the thing."""
        return f"{self.colour} {self.shape}"

    @property
    def centre(self) -> tuple[float, float]:
        """The middle of the box."""
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass(frozen=True)
class Sign:
    """A small plate with a code of two characters."""

    text: str
    box: Box
    size: str


@dataclass(frozen=True)
class Ground:
    """Everything that is drawn but never asked: texture, light, clutter and noise, all from one seed."""

    seed: int
    clutter: int
    roughness: float


@dataclass(frozen=True)
class Scene:
    """A picture as data."""

    things: tuple[Thing, ...]
    sign: Sign | None
    ground: Ground

    def ordered(self) -> list[Thing]:
        """The things from left to right (by their written left edge, then by their top edge)."""
        return sorted(self.things, key=lambda thing: (snap(thing.box[0]), snap(thing.box[1]), thing.box))

    def unique(self) -> list[Thing]:
        """The things whose colour and shape together name exactly one thing."""
        names = [thing.name for thing in self.things]
        return [thing for thing in self.things if names.count(thing.name) == 1]


def snap(value: float) -> int:
    """A coordinate in twentieths of the picture's side, the precision of written boxes."""
    return min(20, max(0, round(value * 20)))


def _apart(box: Box, other: Box, gap: float) -> bool:
    return box[2] + gap < other[0] or other[2] + gap < box[0] or box[3] + gap < other[1] or other[3] + gap < box[1]


def _place(rng: Rng, width: float, height: float, taken: list[Box], tries: int = 40) -> Box | None:
    for _ in range(tries):
        left, top = rng.between(0.01, 0.99 - width), rng.between(0.01, 0.99 - height)
        box = (left, top, left + width, top + height)
        if all(_apart(box, other, 0.005) for other in taken):
            return box
    return None


def sample_thing(rng: Rng, taken: list[Box], largest: float, written: float = 0.55) -> Thing | None:
    """A thing on a free place, or None when no place was found."""
    side = rng.between(_SMALLEST_SIDE, largest)
    box = _place(rng, side, side, taken) or _place(rng, 0.27, 0.27, taken)
    if box is None:
        return None
    side = box[2] - box[0]
    shape, colour = rng.pick(SHAPES), rng.pick(COLOURS)
    character = rng.pick(CHARACTERS) if rng.chance(written) else ""
    sizes = [name for name, height in CHARACTER_HEIGHTS.items() if height <= 0.48 * side]
    size = rng.pick(sizes) if character else ""
    return Thing(shape, colour, box, rng.between(-0.2, 0.2), character, size, _shade(rng, colour))


def _shade(rng: Rng, colour: str) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, level + rng.integer(-14, 14))) for level in PALETTE[colour])
    return red, green, blue


def repaint(thing: Thing, colour: str, rng: Rng) -> Thing:
    """The same thing in another colour."""
    return replace(thing, colour=colour, shade=_shade(rng, colour))


def sample_sign(rng: Rng, taken: list[Box]) -> Sign | None:
    """A sign on a free place, or None when no place was found."""
    size = rng.pick(tuple(CHARACTER_HEIGHTS))
    height = CHARACTER_HEIGHTS[size]
    box = _place(rng, 2.1 * height, 1.35 * height, taken)
    return Sign(rng.pick(CHARACTERS) + rng.pick(CHARACTERS), box, size) if box else None


def sample_ground(rng: Rng) -> Ground:
    """A textured ground with clutter."""
    return Ground(rng.integer(0, 2**31 - 1), rng.integer(3, 12), rng.between(3.0, 16.0))


def sample_scene(rng: Rng, most: int = MAX_THINGS, sign: float = 0.5) -> Scene:
    """A scene of one to ``most`` things that do not overlap, with a sign in a share ``sign`` of the scenes."""
    wanted = min(most, rng.pick((1, 2, 2, 3, 3, 3, 4, 4, 4, 5)))
    taken: list[Box] = []
    plate = sample_sign(rng, taken) if rng.chance(sign) else None
    if plate:
        taken.append(plate.box)
    things: list[Thing] = []
    for _ in range(wanted):
        thing = sample_thing(rng, taken, _LARGEST_SIDE[min(wanted, 5)])
        if thing is None:
            continue
        if things and rng.chance(0.35):  # share a colour or a shape with another thing, so that both words are needed
            other = rng.pick(things)
            thing = replace(thing, shape=other.shape) if rng.chance(0.5) else repaint(thing, other.colour, rng)
        things.append(thing)
        taken.append(thing.box)
    return Scene(tuple(things), plate, sample_ground(rng))


def outline(thing: Thing, pixels: float) -> list[tuple[float, float]]:
    """Corner points of a thing on a canvas of ``pixels`` pixels a side; a circle, drawn as an ellipse, has none."""
    radius = (thing.box[2] - thing.box[0]) / 2 * pixels
    middle_x, middle_y = (value * pixels for value in thing.centre)
    polar: list[tuple[float, float]]
    if thing.shape == "square":
        polar = [(1.0, math.pi / 4 + quarter * math.pi / 2) for quarter in range(4)]
        shrink = 1.0 / (math.cos(math.pi / 4 - abs(thing.turn)) * 1.0)
        polar = [(min(shrink, 1.3), angle) for _, angle in polar]
    elif thing.shape == "triangle":
        polar = [(1.12, -math.pi / 2 + third * 2 * math.pi / 3) for third in range(3)]
    elif thing.shape == "diamond":
        polar = [(1.0 if even % 2 else 0.84, even * math.pi / 2) for even in range(4)]
    elif thing.shape == "star":
        polar = [(1.08 if tip % 2 == 0 else 0.56, -math.pi / 2 + tip * math.pi / 5) for tip in range(10)]
    elif thing.shape == "cross":
        arm = math.atan2(0.34, 1.0)
        reach, inner = math.hypot(1.0, 0.34) * 0.95, 0.34 * math.sqrt(2.0)
        polar = []
        for quarter in range(4):
            middle = quarter * math.pi / 2
            polar += [(reach, middle - arm), (reach, middle + arm), (inner, middle + math.pi / 4)]
    else:
        raise ValueError(f"a {thing.shape} has no corners")
    turn = thing.turn if thing.shape != "diamond" else thing.turn / 3
    return [
        (middle_x + reach * radius * math.cos(angle + turn), middle_y + reach * radius * math.sin(angle + turn))
        for reach, angle in polar
    ]


def _fill(draw: ImageDraw.ImageDraw, thing: Thing, pixels: float, paint: tuple[int, int, int] | int) -> None:
    if thing.shape == "circle":
        draw.ellipse([value * pixels for value in thing.box], fill=paint)
    else:
        draw.polygon(outline(thing, pixels), fill=paint)


@lru_cache(maxsize=512)
def _glyph(character: str, height: int) -> Image.Image:
    """A character as a mask of ``height`` pixels, cut to its ink."""
    size = height
    for _ in range(8):
        left, top, right, bottom = ImageFont.load_default(size).getbbox(character)
        if bottom - top >= height:
            break
        size += max(1, height - int(bottom - top))
    mask = Image.new("L", (int(right - left) + 2, int(bottom - top)), 0)
    ImageDraw.Draw(mask).text((1 - left, -top), character, font=ImageFont.load_default(size), fill=255)
    return mask


def _write(canvas: Image.Image, character: str, middle: tuple[float, float], height: float, ink: int) -> None:
    mask = _glyph(character, max(4, round(height)))
    corner = round(middle[0] - mask.width / 2), round(middle[1] - mask.height / 2)
    canvas.paste((ink, ink, ink), (*corner, corner[0] + mask.width, corner[1] + mask.height), mask)


def character_places(scene: Scene) -> list[tuple[str, tuple[float, float], float]]:
    """Every written character with the middle of its place and its height, as shares of the picture's side."""
    places = []
    for thing in scene.things:
        if thing.character:
            x, y = thing.centre
            drop = 0.06 * (thing.box[3] - thing.box[1]) if thing.shape == "triangle" else 0.0
            places.append((thing.character, (x, y + drop), CHARACTER_HEIGHTS[thing.size]))
    if scene.sign:
        left, top, right, bottom = scene.sign.box
        for number, character in enumerate(scene.sign.text):
            x = left + (right - left) * (0.28 + 0.44 * number)
            places.append((character, (x, (top + bottom) / 2), CHARACTER_HEIGHTS[scene.sign.size]))
    return places


def _blown_up(small: np.ndarray, pixels: int) -> np.ndarray:
    return np.asarray(Image.fromarray(small).resize((pixels, pixels), Image.Resampling.BICUBIC))


def _texture(noise: np.random.Generator, rng: Rng, pixels: int) -> Image.Image:
    """A muted texture: two octaves of colour noise, or stripes, or checks, tinted."""
    base = np.array([rng.between(70, 165)] * 3) + noise.uniform(-22, 22, 3)
    coarse = noise.normal(0, rng.between(6, 22), (rng.integer(2, 6), rng.integer(2, 6), 1)) + noise.normal(0, 6, 3)
    fine_side = rng.integer(10, 40)
    fine = noise.normal(0, rng.between(3, 14), (fine_side, fine_side, 3))
    style = rng.integer(0, 3)
    ramp = np.linspace(0, rng.between(3, 14) * math.pi, fine_side)
    if style == 1:
        fine = fine + rng.between(6, 18) * np.sin(ramp * rng.between(0.2, 1.0) + ramp[:, None])[..., None]
    elif style == 2:
        fine = fine + rng.between(6, 16) * np.sign(np.sin(ramp) * np.sin(ramp)[:, None])[..., None]
    layers = [np.clip(octave + middle, 0, 255).astype(np.uint8) for octave, middle in ((coarse + base, 0), (fine, 128))]
    total = _blown_up(layers[0], pixels).astype(np.int16) + _blown_up(layers[1], pixels) - 128
    return Image.fromarray(np.clip(total, 0, 255).astype(np.uint8))


def _muted(rng: Rng) -> tuple[int, int, int]:
    grey = rng.integer(30, 200)
    red, green, blue = (min(255, max(0, grey + rng.integer(-28, 28))) for _ in range(3))
    return red, green, blue


def _clutter(draw: ImageDraw.ImageDraw, rng: Rng, count: int, pixels: int) -> None:
    for _ in range(count):
        x, y = rng.between(0, pixels), rng.between(0, pixels)
        reach = rng.between(0.02, 0.07) * pixels
        kind = rng.integer(0, 3)
        if kind == 0:
            far_x, far_y = x + rng.between(-0.4, 0.4) * pixels, y + rng.between(-0.4, 0.4) * pixels
            draw.line((x, y, far_x, far_y), fill=_muted(rng), width=rng.integer(1, 4))
        elif kind == 1:
            draw.ellipse((x - reach, y - reach, x + reach, y + reach), fill=_muted(rng))
        elif kind == 2:
            draw.arc((x - 2 * reach, y - reach, x + 2 * reach, y + reach), 20, 250, fill=_muted(rng), width=2)
        else:
            draw.rectangle((x, y, x + reach * rng.between(0.5, 2.0), y + reach), fill=_muted(rng))


def render_ground(ground: Ground, pixels: int) -> Image.Image:
    """The ground alone at the drawing size: RGB, ``pixels * 2`` a side, to be passed to :func:`render`."""
    rng = Rng(ground.seed)
    canvas = _texture(np.random.default_rng(ground.seed), rng, pixels).resize(
        (pixels * _OVERSAMPLING,) * 2, Image.Resampling.NEAREST
    )
    _clutter(ImageDraw.Draw(canvas), rng, ground.clutter, pixels * _OVERSAMPLING)
    return canvas


def render(scene: Scene, pixels: int = 112, *, ground: Image.Image | None = None, frame: int = 0) -> np.ndarray:
    """Draw a scene.

    Parameters
    ----------
    scene : what to draw.
    pixels : side of the square picture.
    ground : the result of :func:`render_ground` when many frames share it.
    frame : number of the frame in a clip; only the pixel noise depends on it.

    Returns
    -------
    uint8 array ``[pixels, pixels, 3]``.
    """
    canvas = render_ground(scene.ground, pixels) if ground is None else ground.copy()
    draw, side = ImageDraw.Draw(canvas), pixels * _OVERSAMPLING
    for thing in scene.things:
        _fill(draw, thing, side, thing.shade)
    if scene.sign:
        draw.rectangle([value * side for value in scene.sign.box], fill=(236, 234, 224), outline=(40, 40, 40), width=2)
    inks = [15 if thing.colour in _LIGHT else 250 for thing in scene.things if thing.character] + [15, 15]
    for (character, (x, y), height), ink in zip(character_places(scene), inks, strict=False):
        _write(canvas, character, (x * side, y * side), height * side, ink)
    return finish(canvas, scene.ground, pixels, frame)


def finish(canvas: Image.Image, ground: Ground, pixels: int, frame: int = 0) -> np.ndarray:
    """Reduce a canvas of twice the size, and add uneven light and the noise of a frame: uint8 ``[pixels, pixels, 3]``."""
    picture = np.asarray(canvas.reduce(_OVERSAMPLING)).astype(np.int16)
    noise = np.random.default_rng((ground.seed, frame))
    light = np.linspace(1 - (tilt := noise.uniform(-0.16, 0.16)), 1 + tilt, pixels, dtype=np.float32)
    grain = noise.integers(-128, 128, (pixels, pixels, 1), dtype=np.int16)
    picture = picture * light[:, None, None] + grain * (ground.roughness / 74.0)
    return np.clip(picture, 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class CellLabels:
    """Labels of every cell of a token grid: int64 ``[grid, grid]`` each (0 = ground), and the owner's box.

    ``shape``: 1 + index into :data:`SHAPES`, a sign is ``len(SHAPES) + 1``; ``colour``: 1 + index into
    :data:`COLOURS`; ``character``: 1 + index into :data:`CHARACTERS`; ``box``: float32 ``[grid, grid, 4]``.
    """

    shape: np.ndarray
    colour: np.ndarray
    character: np.ndarray
    box: np.ndarray


def cell_labels(scene: Scene, grid: int) -> CellLabels:
    """Dense labels of a scene on a ``grid x grid`` token grid; a cell belongs to the thing under its middle."""
    owners = Image.new("L", (grid * 3, grid * 3), 0)
    draw = ImageDraw.Draw(owners)
    for number, thing in enumerate(scene.things, 1):
        _fill(draw, thing, grid * 3, number)
    sign_number = len(scene.things) + 1
    if scene.sign:
        draw.rectangle([value * grid * 3 for value in scene.sign.box], fill=sign_number)
    owner = np.asarray(owners)[1::3, 1::3].astype(np.int64)
    shapes = [0, *(1 + SHAPES.index(thing.shape) for thing in scene.things), 1 + len(SHAPES)]
    colours = [0, *(1 + COLOURS.index(thing.colour) for thing in scene.things), 0]
    boxes = [(0.0,) * 4, *(thing.box for thing in scene.things), scene.sign.box if scene.sign else (0.0,) * 4]
    character = np.zeros((grid, grid), np.int64)
    nearest = np.full((grid, grid), np.inf)
    middles = (np.arange(grid) + 0.5) / grid
    for letter, (x, y), height in character_places(scene):
        across, down = np.abs(middles - x), np.abs(middles - y)[:, None]
        near = np.hypot(across, down)
        inside = (across <= 0.32 * height + 0.35 / grid) & (down <= 0.5 * height + 0.3 / grid) & (near < nearest)
        character[inside] = 1 + CHARACTERS.index(letter)
        nearest[inside] = near[inside]
    return CellLabels(np.array(shapes)[owner], np.array(colours)[owner], character, np.array(boxes, np.float32)[owner])
