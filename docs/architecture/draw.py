"""The picture of the house and the table of its floors, made from the code and from `floors.toml`.

python docs/architecture/draw.py               # draw architecture.svg, and the table in README.md
python docs/architecture/draw.py --check       # 1 if either is not what the code gives
python docs/architecture/draw.py --problems    # arrows up or across, circles, modules on no floor; 1 if there are any
"""

from __future__ import annotations

import argparse
import textwrap
from html import escape
from pathlib import Path

from house import HERE, ROOT, Code, Floor, House, private_imports, problems

PICTURE = HERE / "architecture.svg"
PAGE = HERE / "README.md"
MARKS = ("<!-- floors -->", "<!-- /floors -->")

LEGEND = (
    "A square is about 500 lines. Rooms in dashed boxes are shared by the others of their floor, which do not know each other.",
    "On the right every floor has a line: a dot where it stands, heads where it imports. Orange: the one lazy import up.",
)
#: pixels of a letter of the small font, at most, and lines of code that a square stands for
LETTER = 6
SQUARE = 500

# pixels
WIDTH, MARGIN = 900, 8
#: the columns of names, of boxes and of arrows
LEFT, RIGHT, LANES = 182, 668, 686
LANE = 17
BOX, GAP = 46, 6
#: a row with one line of boxes, what each further line adds, and the space between rows
ROW, MORE, BETWEEN = 60, 52, 5
TOP = 44

STYLE = """
text { font: 11px -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.floor { font-size: 13px; font-weight: 600 }
.small { font-size: 10px; fill: #59636e }
.paper { fill: #ffffff; stroke: #d1d9e0 }
.row { fill: #f3f6f9 }
.box { fill: #ffffff; stroke: #0969da }
.shared { stroke-dasharray: 4 2 }
.square { fill: #afb8c1 }
.arrow { fill: none; stroke: #818b98 }
.head { fill: #0969da }
.up { fill: none; stroke: #bc4c00; stroke-dasharray: 3 2 }
.uphead { fill: #bc4c00 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .small { fill: #9198a1 }
  .paper { fill: #0d1117; stroke: #3d444d }
  .row { fill: #151b23 }
  .box { fill: #0d1117; stroke: #4493f8 }
  .square { fill: #656c76 }
  .arrow { stroke: #7d8590 }
  .head { fill: #4493f8 }
  .up { stroke: #f0883e }
  .uphead { fill: #f0883e }
}"""


def picture(code: Code, house: House) -> str:
    """The house as SVG: floors as rows, rooms as boxes, and one line for each floor, down to the floors that it imports."""
    rows, bottom = _rows(house)
    height = bottom + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'role="img" aria-label="The floors of mmaccel, the rooms on each, and the imports between floors, which point down">',
        f"<style>{STYLE}\n</style>",
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        _text(MARGIN + 8, 28, "mmaccel, floor by floor", "title"),
        _text(LANES, 28, "what each floor imports", "small"),
    ]
    for floor in house.floors:
        parts += _row(floor, *rows[floor.name], {room: _inside(code, house, room) for room in floor.rooms})
    parts += _falls(code, house, rows)
    parts += [
        _text(MARGIN + 8, bottom + 18, LEGEND[0], "small"),
        _text(MARGIN + 8, bottom + 32, LEGEND[1], "small"),
    ]
    return "\n".join([*parts, "</svg>", ""])


def table(house: House) -> str:
    """The floors as a table of Markdown, the highest first."""
    lines = ["| floor | rooms | what it knows |", "|---|---|---|"]
    for floor in reversed(house.floors):
        lines.append(f"| {floor.name} | {', '.join(f'`{room}`' for room in floor.rooms)} | {floor.knows} |")
    return "\n".join(lines)


def page(text: str, house: House) -> str:
    """The text of a page with the table of floors as it is now between its marks."""
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}\n{table(house)}\n{MARKS[1]}{after}"


# -- parts of the picture


def _lines(floor: Floor) -> list[tuple[str, ...]]:
    """The rooms of a floor by lines, the upper one first; shared rooms lie below those that use them."""
    apart = tuple(room for room in floor.rooms if room not in floor.shared)
    return [line for line in (apart, floor.shared) if line]


def _rows(house: House) -> tuple[dict[str, tuple[int, int]], int]:
    """Top and height of every floor's row, and where the last one ends."""
    rows, y = {}, TOP
    for floor in reversed(house.floors):
        depth = ROW + MORE * (len(_lines(floor)) - 1)
        rows[floor.name] = (y, depth)
        y += depth + BETWEEN
    return rows, y


def _inside(code: Code, house: House, room: str) -> tuple[list[str], int]:
    """What is in a room, by its public names there, and how many squares stand for its lines."""
    here = [module for module in code.modules if house.room(module) == room]
    names = {module.removeprefix(f"{room}.").split(".")[0] for module in here if module.startswith(f"{room}.")}
    lines = sum((ROOT / code.modules[module]).read_text(encoding="utf-8").count("\n") for module in here)
    return sorted(name for name in names if not name.startswith("_")), max(1, round(lines / SQUARE))


def _row(floor: Floor, y: int, depth: int, inside: dict[str, tuple[list[str], int]]) -> list[str]:
    """One floor: its name, what it knows, and its rooms."""
    told = textwrap.wrap(floor.knows, (LEFT - 2 * MARGIN - 8) // LETTER + 2)
    start = y + depth / 2 - 5.5 * len(told) + 5
    parts = [
        f'<rect class="row" x="{MARGIN}" y="{y}" width="{WIDTH - 2 * MARGIN}" height="{depth}" rx="5"/>',
        _text(MARGIN + 8, start, floor.name, "floor"),
        *(_text(MARGIN + 8, start + 13 + 11 * number, line, "small") for number, line in enumerate(told)),
    ]
    for number, rooms in enumerate(_lines(floor)):
        width = (RIGHT - LEFT - GAP * (len(rooms) - 1)) / len(rooms)
        for place, room in enumerate(rooms):
            x, top = LEFT + place * (width + GAP), y + (ROW - BOX) // 2 + MORE * number
            parts += _box(x, top, width, room, *inside[room], room in floor.shared)
    return parts


def _box(x: float, y: float, width: float, room: str, names: list[str], squares: int, shared: bool) -> list[str]:
    kind, wide = "box shared" if shared else "box", width > 20 * LETTER
    told = textwrap.wrap(", ".join(names), int(width / LETTER), max_lines=2, placeholder=" ...") if wide else []
    top = y + BOX // 2 + (4 if wide else -2) - 6 * len(told)
    left, corner = (x + width - 8 * squares - 4, y + 6) if wide else (x + width / 2 - 4 * squares + 1, top + 8)
    return [
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX}" rx="4"/>',
        _text(x + width / 2, top, room.removeprefix("mmaccel.").replace("__init__", "import mmaccel"), anchor="middle"),
        *(f'<rect class="square" x="{left + 8 * n:.1f}" y="{corner}" width="6" height="6"/>' for n in range(squares)),
        *(_text(x + width / 2, top + 13 + 12 * n, line, "small", "middle") for n, line in enumerate(told)),
    ]


def _falls(code: Code, house: House, rows: dict[str, tuple[int, int]]) -> list[str]:
    """For every floor a line down with a head at each floor that it imports."""
    known = {(house.height(arrow.source), house.height(arrow.target)) for arrow in code.arrows}
    middle = [rows[floor.name][0] + rows[floor.name][1] / 2 for floor in house.floors]
    parts = []
    for here in range(len(house.floors)):
        x = LANES + LANE * (len(house.floors) - here - 0.5)
        there = [floor for floor in range(len(house.floors)) if (here, floor) in known and floor != here]
        parts.append(f'<circle class="head" cx="{x:.1f}" cy="{middle[here]:.1f}" r="3"/>')
        if min(there, default=here) < here:
            parts.append(f'<path class="arrow" d="M{x:.1f} {middle[here]:.1f}V{middle[min(there)]:.1f}"/>')
        if max(there, default=here) > here:
            parts.append(f'<path class="up" d="M{x:.1f} {middle[here]:.1f}V{middle[max(there)]:.1f}"/>')
        for floor in there:
            tip = 4 if floor < here else -4
            shape = f"M{x:.1f} {middle[floor] + tip:.1f}l4 {-2 * tip}h-8z"
            parts.append(f'<path class="{"head" if floor < here else "uphead"}" d="{shape}"/>')
    return parts


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def wanted(code: Code, house: House) -> dict[Path, str]:
    """What the picture and the page should be."""
    return {PICTURE: picture(code, house), PAGE: page(PAGE.read_text(encoding="utf-8"), house)}


def outdated(code: Code, house: House) -> list[str]:
    """Which of them are not, one sentence each."""
    old = [path for path, text in wanted(code, house).items() if not path.exists() or path.read_text("utf-8") != text]
    return [f"{path.name} is not what the code gives; run: python docs/architecture/draw.py" for path in old]


def main() -> int:
    """Draw, check or list; 1 if there is something to mend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if picture or table are not what the code gives")
    parser.add_argument("--problems", action="store_true", help="list what breaks the rules of floors.toml")
    options = parser.parse_args()
    code, house = Code.read(), House.read()
    found = [*problems(code, house), *private_imports()] if options.problems else []
    found += outdated(code, house) if options.check else []
    if options.check or options.problems:
        print(*found, f"{len(found)} problems", sep="\n")
        return bool(found)
    for path, text in wanted(code, house).items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
