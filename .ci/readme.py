"""Run README's first program in this folder, as the metadata of the installed mmaccel has it, and compare what it prints."""

import contextlib
import io
import re
from importlib.metadata import metadata

text = metadata("mmaccel").get_payload()
program, wanted = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", text, re.S).groups()
heard = io.StringIO()
with contextlib.redirect_stdout(heard):
    exec(program)
print(heard.getvalue(), end="")
# how long something took differs
told, wanted = (re.sub(r", \w+ [\d.,]+ (ms|s)\b", "", one).split() for one in (heard.getvalue(), wanted))
assert told == wanted, f"README says {wanted}, its program printed {told}"
