"""Write ``mmaccel/core/recipe_names.py`` from the registry: run it after adding, renaming or removing a method or recipe.

python docs/making/recipe_names.py
"""

from __future__ import annotations

from pathlib import Path

from mmaccel.method.registry import methods
from mmaccel.recipe import recipes

FILE = Path(__file__).parents[2] / "mmaccel" / "core" / "recipe_names.py"
_HEAD = '''\
"""Names of the methods and recipes that come with mmaccel, for type checkers, editors and shells. Importing this is quick.

Generated: run ``python docs/making/recipe_names.py`` after adding, renaming or removing a method or recipe.
"""

from typing import Literal, TypeAlias

RecipeName: TypeAlias = Literal[
'''


def source() -> str:
    """The file for what is registered; methods of other packages and of the user are left out."""
    known = methods()
    own = [name for name in recipes() if name not in known or known[name].__module__.startswith("mmaccel.")]
    return _HEAD + "".join(f'    "{name}",\n' for name in own) + "]\n"


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")
