"""Run notebooks without a server, and make pages of them.

python docs/making/cells.py notebooks/accelerate.ipynb     # run it and store what its cells show

A cell is executed as Jupyter does it: what is printed, and the value of a last line that is an expression.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

Cell = dict[str, Any]


def read(path: Path) -> list[Cell]:
    """The cells of a notebook."""
    found: list[Cell] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def run(path: Path) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    """Every code cell and what it shows now, as nbformat 4 stores it; what a cell raises is raised."""
    names = vars(ModuleType("notebook"))
    for number, cell in enumerate(read(path)):
        if cell["cell_type"] == "code":
            yield cell, execute("".join(cell["source"]), names, f"{path.name}, cell {number}")


def execute(code: str, names: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Execute one cell in ``names``."""
    tree = ast.parse(code, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    heard, value = io.StringIO(), None
    with contextlib.redirect_stdout(heard):
        exec(compile(tree, where, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if heard.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": heard.getvalue().splitlines(keepends=True)})
    if value is not None:
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": shown(value)})
    return outputs


def shown(value: Any) -> dict[str, Any]:
    """A value as Jupyter shows it: a picture, HTML, or its repr."""
    if hasattr(value, "save") and hasattr(value, "quantize"):
        file = io.BytesIO()
        value.quantize(32, dither=0).save(file, "png", optimize=True)
        return {"image/png": base64.b64encode(file.getvalue()).decode("ascii"), "text/plain": ["<picture>"]}
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return data


def text_of(outputs: list[dict[str, Any]]) -> str:
    """What outputs say, without their pictures."""
    return "".join("".join(output.get("text") or output["data"]["text/plain"]) for output in outputs)


def store(path: Path) -> None:
    """Run a notebook and write it anew with its outputs."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    found = iter([outputs for _, outputs in run(path)])
    for cell in whole["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = next(found), None
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the pictures that it shows by their file names."""
    parts, pictures = [], {}
    for number, cell in enumerate(read(path)):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{number}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![what the cell shows]({name})")
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                parts.append("```text\n" + text_of([output]).rstrip() + "\n```")
    return "\n\n".join(parts) + "\n", pictures


if __name__ == "__main__":
    store(Path(sys.argv[1]))
