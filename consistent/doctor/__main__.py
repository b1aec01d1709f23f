"""Entry point that runs the doctor without importing the package ``consistent`` around it."""

import os
import sys

if not __package__:  # `python .../consistent/doctor`
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    import doctor.main as program  # pyright: ignore[reportMissingImports]

    del sys.path[0]  # the package's folders would hide other modules of the same names
else:
    from . import main as program

if __name__ == "__main__":
    sys.exit(program.main(sys.argv[1:]))
