"""Run a program with slime's names: `python -m fusionrl.compat.slime PROGRAM.py [ARGUMENT …]`.

For a slime user's programs that run next to a run and import `slime`, such as a reward server.
"""

import runpy
import sys
from pathlib import Path

from fusionrl.config.hook_files import install_stand_ins


def main() -> None:
    """Run the program as Python would, with its folder first in sys.path.

    Raises:
        SystemExit: no program is named, or the file does not exist.
    """
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit("python -m fusionrl.compat.slime PROGRAM.py [ARGUMENT …]: name a program that exists")
    install_stand_ins()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
