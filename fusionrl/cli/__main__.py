"""`python -m fusionrl.cli`: the command `fusionrl` without an installed script."""

import sys

from fusionrl.cli import main

sys.exit(main())
