"""The table of recipes and families in the README is what running them gives."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest

from mmaccel import MmaccelError


@pytest.mark.full
def test_readme_is_current():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert matrix.readme_matrix() in readme, "run: python tests/matrix.py --update README.md"


def test_update_asks_for_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no markers")
    with pytest.raises(MmaccelError, match="<!-- matrix -->"):
        matrix.put_between(page, "matrix", "a table")
    assert page.read_text() == "no markers"
