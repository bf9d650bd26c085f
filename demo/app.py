"""The demo as hosting services start it: ``python demo/app.py``."""

from mmaccel_demo.serve import main

raise SystemExit(main())
