"""`python -m fusionrl.cli`: the command `fusionrl` without an installed script."""

from __future__ import annotations

import sys

from fusionrl.cli import main

sys.exit(main())
