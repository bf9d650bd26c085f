"""The table of recipes and families in the documentation is what running them gives."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest

from mmaccel import MmaccelError


@pytest.mark.full
def test_the_table_is_current():
    page = (Path(__file__).parents[1] / "docs" / "families.md").read_text(encoding="utf-8")
    assert matrix.block() in page, "run: python tests/matrix.py --update docs/families.md"


def test_update_asks_for_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no markers")
    with pytest.raises(MmaccelError, match="<!-- matrix -->"):
        matrix.put_between(page, "matrix", "a table")
    assert page.read_text() == "no markers"
