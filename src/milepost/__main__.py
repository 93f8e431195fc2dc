"""`python -m milepost` is `milepost`."""

from __future__ import annotations

import sys

from milepost.cli import main

sys.exit(main())
