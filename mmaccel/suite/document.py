"""Documents: pages that people photograph, with questions as people ask them.

Receipts, signs, notes, tables, charts and screens in everyday English, drawn with fonts that come with the package. A document
is data, like a scene: places are shares of the picture's side, so one page can be drawn at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmaccel.suite.questions import Turn
from mmaccel.suite.rng import Rng
from mmaccel.suite.scene import Box, Ground, finish, render_ground, sample_ground

Colour = tuple[int, int, int]

SANS, BOLD, SERIF, ITALIC, MONO, PLAIN = FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
    "DejaVuSansMono",
    "",  # the one that comes with Pillow
)
GLYPHS = "".join(map(chr, range(33, 127)))
"""The characters that a page may hold, space aside."""

_OVERSAMPLING = 2
_MEASURE = 200
_DARK: tuple[Colour, ...] = ((20, 20, 20), (30, 30, 70), (70, 20, 20), (15, 55, 35))
_PAPERS: tuple[Colour, ...] = ((250, 249, 244), (238, 234, 222), (247, 240, 205), (228, 236, 242))
_BARS: tuple[Colour, ...] = ((60, 110, 190), (200, 90, 60), (70, 150, 90), (150, 90, 170))
_BOARDS: tuple[Colour, ...] = (
    (30, 70, 150),
    (20, 110, 60),
    (170, 30, 30),
    (50, 50, 55),
    (240, 200, 40),
    (245, 245, 240),
)


@dataclass(frozen=True)
class Text:
    """One line of text: ``left`` and ``middle`` of its place, ``size`` of the font, all as shares of the picture's side."""

    text: str
    left: float
    middle: float
    size: float
    font: str
    ink: Colour


@dataclass(frozen=True)
class Document:
    """A photographed page as data: paper on a ground, ``turn`` radians askew, with filled ``marks`` and lines of text."""

    kind: str
    paper: Box
    colour: Colour
    texts: tuple[Text, ...]
    marks: tuple[tuple[Box, Colour], ...]
    turn: float
    ground: Ground

    @property
    def text(self) -> str:
        """All lines, those of one height joined by spaces."""
        rows: list[list[str]] = []
        for number, line in enumerate(self.texts):
            if number and line.middle == self.texts[number - 1].middle:
                rows[-1].append(line.text)
            else:
                rows.append([line.text])
        return "\n".join(" ".join(row) for row in rows)


@lru_cache(maxsize=256)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    if not name:
        return ImageFont.load_default(size)
    path = Path(__file__).with_name("fonts") / f"{name}.ttf"
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=4096)
def width_of(text: str, font: str) -> float:
    """Width of a text in units of the font's size."""
    return float(_font(font, _MEASURE).getlength(text)) / _MEASURE


# ---------------------------------------------------------------------------------------------------------- content

FIRST_NAMES = tuple(
    "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo Maria Nina Oscar Paul Rosa Sam Tom Vera".split()
)
CITIES = tuple("London Paris Rome Berlin Madrid Oslo Dublin Vienna Prague Athens Boston Tokyo".split())
DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTHS = tuple("January February March April May June July August September October November December".split())
GOODS = tuple(
    "Apples Bananas Bread Butter Cake Carrots Cheese Coffee Cookies Eggs Fish Flour Grapes Honey Juice Lemons Milk Onions "
    "Pasta Pears Pizza Rice Salad Salt Soap Soup Sugar Tea Tomatoes Water".split()
)
SHOPS = tuple(
    "Corner Market,City Cafe,Green Garden,Sunny Bakery,Blue Bird Cafe,Fresh Foods,Harbor Shop,Old Mill Store".split(",")
)
SPORTS = tuple("football tennis chess swimming running cycling golf hockey".split())
COURSES = tuple("Maths History Music Art Science English Sports French".split())
PLACES = tuple("station,library,museum,park,airport,school,market,theater,harbor,hotel".split(","))
WEATHER = tuple("sunny cloudy rainy windy snowy foggy".split())
THINGS = tuple("keys book umbrella ticket phone camera hat bag letter map".split())


def _price(rng: Rng) -> int:
    return 10 * rng.integer(5, 99) + rng.pick((0, 0, 5, 9))


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


def _hour(rng: Rng) -> str:
    return f"{rng.integer(1, 12)}:{rng.pick(('00', '15', '30', '45'))}"


def _ask(kind: str, question: str, answer: str, sentence: str = "") -> list[Turn]:
    """The question with a short answer, and, where there is a sentence, the one that asks for it."""
    turns = [Turn(kind, question, answer, "short")]
    if sentence:
        turns.append(Turn(kind, f"{question} Answer in a sentence.", sentence, "sentence"))
    return turns


def _fit(rows: list[str], font: str, width: float, height: float) -> float:
    """The largest size at which every row is at most ``width`` wide and all of them ``height`` high."""
    return min(0.72 * height / len(rows), width / max(width_of(row, font) for row in rows), 0.11)


def _rows(rows: list[str], font: str, ink: Colour, box: Box, align: str = "left") -> list[Text]:
    """Lines of one size that fill a box from the top."""
    left, top, right, bottom = box
    size, step = _fit(rows, font, right - left, bottom - top), (bottom - top) / len(rows)
    texts = []
    for number, row in enumerate(rows):
        free = right - left - size * width_of(row, font)
        at = left + free * {"left": 0.0, "centre": 0.5, "right": 1.0}[align]
        texts.append(Text(row, at, top + (number + 0.5) * step, size, font, ink))
    return texts


def _columns(rows: Sequence[tuple[str, ...]], font: str, ink: Colour, box: Box, last: str = "right") -> list[Text]:
    """Rows of cells in columns of one size, row after row; the last column ends at the right edge."""
    left, top, right, bottom = box
    widths = [max(width_of(row[at], font) for row in rows) for at in range(len(rows[0]))]
    size = min(0.72 * (bottom - top) / len(rows), (right - left) / (sum(widths) + 0.9 * (len(widths) - 1)), 0.10)
    gap = (right - left - size * sum(widths)) / max(1, len(widths) - 1)
    step, texts = (bottom - top) / len(rows), []
    for number, row in enumerate(rows):
        at = left
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            shift = size * (width - width_of(cell, font)) if column and last == "right" else 0.0
            texts.append(Text(cell, at + shift, top + (number + 0.5) * step, size, font, ink))
            at += size * width + gap
    return texts


Content = tuple[Box, Colour, list[Text], list[tuple[Box, Colour]], list[Turn]]


def receipt(rng: Rng) -> Content:
    """A receipt: shop, date, goods with prices, total."""
    goods = [(name, _price(rng)) for name in rng.some(GOODS, rng.integer(2, 5))]
    shop, total = rng.pick(SHOPS), sum(price for _, price in goods)
    date = f"{rng.integer(1, 28)} {rng.pick(MONTHS)[:3]} {rng.integer(2019, 2026)}"
    font, ink = rng.pick((MONO, SANS, PLAIN, BOLD)), rng.pick(_DARK)
    margin = rng.between(0.02, 0.12)
    paper = (margin, rng.between(0.01, 0.05), 1 - margin, rng.between(0.94, 0.99))
    left, right, top, bottom = paper[0] + 0.04, paper[2] - 0.04, paper[1] + 0.02, paper[3] - 0.02
    step = (bottom - top) / (len(goods) + 3)
    texts = _rows([shop], rng.pick((font, BOLD)), ink, (left, top, right, top + step), "centre")
    texts += _rows([date], font, ink, (left, top + step, right, top + 2 * step), "centre")
    lines = [(name, _money(price)) for name, price in goods] + [("Total", _money(total))]
    texts += _columns(lines, font, ink, (left, top + 2 * step, right, bottom))
    rule = bottom - step
    marks = [((left, rule, right, rule + 0.006), ink)] if rng.chance(0.7) else []
    turns = _ask("receipt", "What is the total?", _money(total), f"The total is {_money(total)}.")
    turns += _ask("receipt", "What is the name of the shop?", shop, f"The shop is called {shop}.")
    turns += _ask("receipt", "What is the date on the receipt?", date, f"The receipt is from {date}.")
    for name, price in goods:
        item, cost, many = name.lower(), _money(price), name.endswith("s")
        asked, told = (
            f"How much {'are' if many else 'is'} the {item}?",
            f"The {item} {'cost' if many else 'costs'} {cost}.",
        )
        turns += _ask("receipt", asked, cost, told)
        turns += _ask("receipt", f"What costs {cost}?", name) if [p for _, p in goods].count(price) == 1 else []
    names = [name for name, _ in goods]
    turns += _ask("receipt", "What is the first item?", names[0], f"The first item is {names[0].lower()}.")
    turns += _ask("receipt", f"Which item comes after {names[0].lower()}?", names[1])
    absent = rng.pick([name for name in GOODS if name not in names])
    turns += _ask("receipt", f"Did they buy {rng.pick(names).lower()}?", "Yes")
    turns += _ask("receipt", f"Did they buy {absent.lower()}?", "No")
    return paper, rng.pick(_PAPERS[:2]), texts, marks, turns


def sign(rng: Rng) -> Content:
    """A sign or a poster: opening hours, a platform, a distance, an event, a warning."""
    which, turns = rng.integer(0, 4), []
    if which == 0:
        opens, closes, place = rng.integer(6, 11), rng.integer(3, 9), rng.pick(PLACES)
        closed = rng.pick(DAYS)
        rows = [place.capitalize(), f"Open {opens} to {closes}", f"Closed {closed}"]
        turns += _ask("sign", "When does it open?", str(opens), f"It opens at {opens}.")
        turns += _ask("sign", "When does it close?", str(closes), f"It closes at {closes}.")
        turns += _ask("sign", "On which day is it closed?", closed, f"It is closed on {closed}.")
        turns += _ask("sign", "What is open?", place.capitalize())
    elif which == 1:
        city, platform, time = rng.pick(CITIES), rng.integer(1, 19), _hour(rng)
        rows = [f"Train to {city}", f"Platform {platform}", time]
        turns += _ask("sign", "Where does the train go?", city, f"The train goes to {city}.")
        turns += _ask("sign", "Which platform is it?", str(platform), f"It is platform {platform}.")
        turns += _ask("sign", "When does the train leave?", time, f"The train leaves at {time}.")
    elif which == 2:
        cities = rng.some(CITIES, 3)
        far = [rng.integer(3, 240) for _ in cities]
        rows = [f"{city} {many} km" for city, many in zip(cities, far, strict=True)]
        for city, many in zip(cities, far, strict=True):
            turns += _ask("sign", f"How far is {city}?", f"{many} km", f"{city} is {many} km away.")
        turns += _ask("sign", "Which city is named first?", cities[0])
    elif which == 3:
        what, day = rng.pick(("concert", "market", "dance", "film", "party")), rng.pick(DAYS)
        time, place = _hour(rng), rng.pick(PLACES)
        rows = [what.capitalize(), day, f"at {time}", f"in the {place}"]
        turns += _ask("sign", f"When is the {what}?", f"{day} at {time}", f"The {what} is on {day} at {time}.")
        turns += _ask("sign", f"Where is the {what}?", f"in the {place}", f"The {what} is in the {place}.")
        turns += _ask("sign", f"On which day is the {what}?", day)
    else:
        word = rng.pick("parking smoking swimming fishing camping cooking singing".split())
        number = rng.integer(1, 99)
        rows = [f"No {word}", rng.pick(("please", "allowed", "here", "today")), f"Gate {number}"]
        turns += _ask("sign", "What is not allowed?", word.capitalize(), f"{word.capitalize()} is not allowed.")
        turns += _ask("sign", "Which gate is it?", str(number), f"It is gate {number}.")
    turns += _ask("sign", "What does it say?", " ".join(rows))
    turns += _ask("sign", "What does the first line say?", rows[0])
    board = rng.pick(_BOARDS)
    ink = (20, 20, 20) if sum(board) > 450 else (250, 250, 250)
    half = rng.between(0.24, 0.46)
    paper = (rng.between(0.01, 0.06), 0.5 - half, rng.between(0.94, 0.99), 0.5 + half)
    box = (paper[0] + 0.04, paper[1] + 0.03, paper[2] - 0.04, paper[3] - 0.03)
    texts = _rows(rows, rng.pick((BOLD, SANS, PLAIN, SERIF)), ink, box, rng.pick(("centre", "left")))
    return paper, board, texts, [], turns


def _wrapped(words: list[str], most: int) -> list[str]:
    rows = [words[0]]
    for word in words[1:]:
        if len(rows[-1]) + 1 + len(word) <= most:
            rows[-1] += f" {word}"
        else:
            rows.append(word)
    return rows


def note(rng: Rng) -> Content:
    """A note: a paragraph of a few sentences with a greeting and a name."""
    to, by, other = rng.some(FIRST_NAMES, 3)
    day, time, place, thing = rng.pick(DAYS), _hour(rng), rng.pick(PLACES), rng.pick(THINGS)
    turns = _ask("note", "Who wrote the note?", by, f"The note is from {by}.")
    turns += _ask("note", "Who is the note for?", to, f"The note is for {to}.")
    facts: list[tuple[str, list[Turn]]] = [
        (
            f"We meet at the {place} on {day}.",
            _ask("note", "Where do they meet?", f"at the {place}", f"They meet at the {place}.")
            + _ask("note", "On which day do they meet?", day, f"They meet on {day}."),
        ),
        (
            f"{other} comes at {time}.",
            _ask("note", "Who comes?", other)
            + _ask("note", f"When does {other} come?", time, f"{other} comes at {time}."),
        ),
        (
            f"Please bring the {thing}.",
            _ask("note", f"What should {to} bring?", f"the {thing}", f"{to} should bring the {thing}."),
        ),
    ]
    shown = rng.some(facts, rng.integer(1, 3))
    turns += [turn for _, asked in shown for turn in asked]
    body = _wrapped(" ".join(sentence for sentence, _ in shown).split(), rng.integer(17, 21))
    rows = [f"Dear {to},", *body, by]
    turns += _ask("note", "What does the note say?", " ".join(rows))
    paper = (rng.between(0.01, 0.05), rng.between(0.02, 0.1), rng.between(0.95, 0.99), rng.between(0.9, 0.98))
    box = (paper[0] + 0.04, paper[1] + 0.04, paper[2] - 0.03, paper[3] - 0.04)
    texts = _rows(rows, rng.pick((SERIF, ITALIC, SANS, PLAIN)), rng.pick(_DARK), box)
    return paper, rng.pick(_PAPERS), texts, [], turns


def table(rng: Rng) -> Content:
    """A table of two or three columns with a heading."""
    names, turns = rng.some(FIRST_NAMES, rng.integer(3, 5)), []
    if rng.chance(0.5):
        head: tuple[str, ...] = ("Name", "Age", "City")
        rows = [(name, str(rng.integer(6, 89)), rng.pick(CITIES)) for name in names]
        for name, age, city in rows:
            turns += _ask("table", f"How old is {name}?", age, f"{name} is {age} years old.")
            turns += _ask("table", f"Where does {name} live?", city, f"{name} lives in {city}.")
    else:
        head = ("Name", "Course", "Room") if rng.chance(0.5) else ("Name", "Day", "Room")
        options = COURSES if head[1] == "Course" else tuple(day[:3] for day in DAYS)
        rows = [(name, rng.pick(options), str(rng.integer(1, 60))) for name in names]
        for name, what, room in rows:
            asked = f"Which course does {name} take?" if head[1] == "Course" else f"On which day does {name} come?"
            turns += _ask("table", asked, what)
            turns += _ask("table", f"In which room is {name}?", room, f"{name} is in room {room}.")
    turns += _ask("table", "Who is in the first row?", names[0])
    turns += _ask("table", "Who is in the last row?", names[-1], f"{names[-1]} is in the last row.")
    turns += _ask("table", "How many names are in the table?", str(len(names)))
    absent = rng.pick([name for name in FIRST_NAMES if name not in names])
    turns += _ask("table", f"Is {rng.pick(names)} in the table?", "Yes")
    turns += _ask("table", f"Is {absent} in the table?", "No")
    font, ink = rng.pick((SANS, SERIF, PLAIN, MONO)), rng.pick(_DARK)
    half = rng.between(0.3, 0.46)
    paper = (rng.between(0.01, 0.04), 0.5 - half, rng.between(0.96, 0.99), 0.5 + half)
    box = (paper[0] + 0.03, paper[1] + 0.02, paper[2] - 0.03, paper[3] - 0.02)
    texts = _columns([head, *rows], font, ink, box, rng.pick(("right", "left")))
    step = (box[3] - box[1]) / (len(rows) + 1)
    ruled = range(1, len(rows) + 1) if rng.chance(0.5) else (1,)
    marks = [
        ((box[0], box[1] + at * step - 0.003, box[2], box[1] + at * step + 0.003), (120, 120, 120)) for at in ruled
    ]
    return paper, rng.pick(_PAPERS), texts, marks, turns


def chart(rng: Rng) -> Content:
    """A bar chart with names and values."""
    days, months = (tuple(name[:3] for name in names) for names in (DAYS, MONTHS))
    subjects = (("Cups sold", days), ("Rain in mm", months), ("Points", FIRST_NAMES), ("Visitors", CITIES))
    what, options = rng.pick(subjects)
    names = rng.some(options, rng.integer(3, 5))
    values = rng.some(range(5, 99), len(names))
    turns = _ask("chart", "What does the chart show?", what)
    for name, value in zip(names, values, strict=True):
        turns += _ask("chart", f"What is the value of {name}?", str(value), f"The value of {name} is {value}.")
        turns += _ask("chart", f"Which bar has the value {value}?", name)
    most, least = names[values.index(max(values))], names[values.index(min(values))]
    turns += _ask("chart", "Which bar is the longest?", most, f"The longest bar is {most}.")
    turns += _ask("chart", "Which bar is the shortest?", least, f"The shortest bar is {least}.")
    turns += _ask("chart", "What is the highest value?", str(max(values)))
    turns += _ask("chart", "How many bars are there?", str(len(names)))
    turns += _ask("chart", f"Is {names[0]} more than {names[1]}?", "Yes" if values[0] > values[1] else "No")
    font, ink = rng.pick((SANS, PLAIN, SERIF)), rng.pick(_DARK)
    paper = (rng.between(0.01, 0.04), rng.between(0.03, 0.12), rng.between(0.96, 0.99), rng.between(0.88, 0.97))
    left, top, right, bottom = paper[0] + 0.03, paper[1] + 0.03, paper[2] - 0.03, paper[3] - 0.03
    step = (bottom - top) / (len(names) + 1)
    texts = _rows([what], rng.pick((font, BOLD)), ink, (left, top, right, top + step), "centre")
    size = min(0.5 * step, 0.075, 0.3 / max(width_of(name, font) for name in names))
    start = left + size * max(width_of(name, font) for name in names) + 0.02
    reach, colour, marks = right - start - 2.2 * size, rng.pick(_BARS), []
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        middle = top + (number + 1.5) * step
        end = start + max(0.01, reach * value / max(values))
        marks.append(((start, middle - 0.3 * step, end, middle + 0.3 * step), colour))
        texts.append(Text(name, left, middle, size, font, ink))
        texts.append(Text(str(value), end + 0.015, middle, size, font, ink))
    return paper, rng.pick(_PAPERS), texts, marks, turns


def screen(rng: Rng) -> Content:
    """A telephone's screen: the time, the battery, and the weather or messages."""
    time, battery = _hour(rng), rng.integer(5, 99)
    turns = _ask("screen", "What time is it?", time, f"It is {time}.")
    turns += _ask("screen", "How full is the battery?", f"{battery}%", f"The battery is at {battery}%.")
    if rng.chance(0.5):
        city, sky, warm, wind = rng.pick(CITIES), rng.pick(WEATHER), rng.integer(-9, 38), rng.integer(2, 60)
        rows = [city, f"{warm} degrees", sky.capitalize(), f"Wind {wind} km/h"]
        turns += _ask("screen", "Which city is shown?", city, f"The city is {city}.")
        turns += _ask("screen", "How warm is it?", f"{warm} degrees", f"It is {warm} degrees.")
        turns += _ask("screen", f"What is the weather in {city}?", sky.capitalize(), f"It is {sky} in {city}.")
        turns += _ask("screen", "How strong is the wind?", f"{wind} km/h", f"The wind blows at {wind} km/h.")
    else:
        people = rng.some(FIRST_NAMES, 3)
        said = rng.some(
            (
                f"see you at {_hour(rng)}",
                f"I am at the {rng.pick(PLACES)}",
                f"call me {rng.pick(DAYS)}",
                f"I have the {rng.pick(THINGS)}",
                "happy birthday",
                "good night",
                "thank you",
                "I am late",
            ),
            3,
        )
        rows = [row for person, words in zip(people, said, strict=True) for row in (f"{person}:", words)]
        for person, words in zip(people, said, strict=True):
            turns += _ask("screen", f"What did {person} write?", words, f"{person} wrote: {words}.")
            turns += _ask("screen", f"Who wrote {words}?", person)
        turns += _ask("screen", "Whose message is the last?", people[-1], f"The last message is from {people[-1]}.")
    dark = rng.chance(0.5)
    ink, colour = ((240, 240, 240), (25, 28, 40)) if dark else ((25, 25, 30), (242, 244, 248))
    margin = rng.between(0.01, 0.1)
    paper = (margin, rng.between(0.01, 0.04), 1 - margin, rng.between(0.95, 0.99))
    left, top, right, bottom = paper[0] + 0.04, paper[1] + 0.02, paper[2] - 0.04, paper[3] - 0.02
    font, step = rng.pick((SANS, PLAIN, BOLD)), (bottom - top) / (len(rows) + 1.5)
    texts = _columns([(time, f"{battery}%")], font, ink, (left, top, right, top + step))
    texts += _rows(rows, font, ink, (left, top + 1.4 * step, right, bottom))
    return paper, colour, texts, [((left, top + 1.15 * step, right, top + 1.15 * step + 0.005), (128, 128, 128))], turns


DOCUMENTS: dict[str, Callable[[Rng], Content]] = {
    "receipt": receipt,
    "sign": sign,
    "note": note,
    "table": table,
    "chart": chart,
    "screen": screen,
}
"""The kinds of document: from rng to paper, texts, marks and questions."""


def sample_document(kind: str, rng: Rng) -> tuple[Document, list[Turn]]:
    """A page of a kind and every question about it."""
    paper, colour, texts, marks, turns = DOCUMENTS[kind](rng)
    page = Document(kind, paper, colour, tuple(texts), tuple(marks), rng.between(-0.025, 0.025), sample_ground(rng))
    return page, list(dict.fromkeys(turns))


# ------------------------------------------------------------------------------------------------ drawing and labels


def render_document(page: Document, pixels: int = 200) -> np.ndarray:
    """Draw a page: uint8 ``[pixels, pixels, 3]``."""
    side = pixels * _OVERSAMPLING
    canvas = render_ground(page.ground, pixels)
    paper, cover = canvas.copy(), Image.new("L", canvas.size, 0)
    draw = ImageDraw.Draw(paper)
    for box, colour in ((page.paper, page.colour), *page.marks):
        draw.rectangle([value * side for value in box], fill=colour)
    ImageDraw.Draw(cover).rectangle([value * side for value in page.paper], fill=255)
    for line in page.texts:
        font = _font(line.font, max(6, round(line.size * side)))
        draw.text((line.left * side, line.middle * side), line.text, fill=line.ink, font=font, anchor="lm")
    angle = -math.degrees(page.turn)
    paper, cover = (layer.rotate(angle, Image.Resampling.BILINEAR) for layer in (paper, cover))
    canvas.paste(paper, (0, 0), cover)
    return finish(canvas, page.ground, pixels)


def glyph_places(page: Document) -> list[tuple[str, float, float, int]]:
    """Every character, a space before it included, with the middle of its place in the picture and its line's number."""
    sine, cosine = math.sin(page.turn), math.cos(page.turn)
    places = []
    for number, line in enumerate(page.texts):
        for at, glyph in enumerate(line.text):
            if glyph == " ":
                continue
            begin, end = (width_of(line.text[:stop], line.font) for stop in (at, at + 1))
            across, down = line.left + line.size * (begin + end) / 2 - 0.5, line.middle - 0.5
            opens = not at or line.text[at - 1] == " "
            x, y = 0.5 + cosine * across - sine * down, 0.5 + sine * across + cosine * down
            places.append((" " * opens + glyph, x, y, number))
    return places


def document_cells(page: Document, grid: int) -> list[list[str]]:
    """Text of every cell of a ``grid x grid`` token grid: the characters whose middle it holds, with spaces before words."""
    cells = [["" for _ in range(grid)] for _ in range(grid)]
    for glyphs, x, y, _ in glyph_places(page):
        row, column = (min(grid - 1, max(0, int(value * grid))) for value in (y, x))
        cells[row][column] += glyphs
    return cells
