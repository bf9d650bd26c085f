"""What the tests of the traps of transformers share."""

from __future__ import annotations

import pytest
import transformers
from laws.helpers import FAMILIES, SHORT
from tail import few

families = pytest.mark.square("family", few(FAMILIES, SHORT), of="kinds")
OLD = int(transformers.__version__.split(".")[1]) < 23
#: stock code repeats pictures one by one and not row by row, so that the copies of a row see pictures of others
old_beams = pytest.mark.skipif(
    OLD, reason="5.17 mixes up the pictures (tiles) of rows with several when it makes beams"
)
