"""Names of a package that are imported when they are asked for. The stub beside its ``__init__.py`` is the one list of them:
type checkers and editors read it, and so does the package."""

from __future__ import annotations

import ast
from pathlib import Path


def in_stub(init: str) -> tuple[dict[str, str], list[str]]:
    """What the stub of ``init``, the ``__file__`` of a package, imports from the package: by name its module, relative to the
    package; and ``__all__`` of the stub."""
    modules: dict[str, str] = {}
    public: list[str] = []
    for node in ast.parse(Path(init).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            modules.update({alias.name: node.module or "" for alias in node.names})
        elif isinstance(node, ast.Assign):
            public = ast.literal_eval(node.value)
    return modules, public
