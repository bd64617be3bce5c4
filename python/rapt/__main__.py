"""`python -m rapt`: the command-line tool."""

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Becomes the tool."""
    tool = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "rapt")
    os.execv(tool, ["rapt", *sys.argv[1:]])


if __name__ == "__main__":
    main()
