"""The demo as hosting services start it: ``python demo/app.py``."""

import sys

from mmaccel_demo.serve import main

raise SystemExit(main(["--allow-host", "*.hf.space", *sys.argv[1:]]))
