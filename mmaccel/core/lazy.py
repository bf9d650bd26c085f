"""Lazy imports of a package. The stub beside its ``__init__.py`` is the one list of its names, for type checkers,
editors and the package itself."""

import ast
from pathlib import Path


def in_stub(init: str) -> tuple[dict[str, str], list[str]]:
    """Names in the stub of the package with file ``init``: a dict from name to its module, relative to the package, and
    ``__all__``."""
    modules: dict[str, str] = {}
    public: list[str] = []
    for node in ast.parse(Path(init).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            modules.update({alias.name: node.module or "" for alias in node.names})
        elif isinstance(node, ast.Assign):
            public = ast.literal_eval(node.value)
    return modules, public
