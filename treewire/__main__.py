"""This file is the entry of the command line: `treewire`, or `python -m treewire`."""

from __future__ import annotations

import os
import sys

_USAGE_EXIT_CODE = 2
_CLI_PACKAGES = frozenset({"typer", "rich", "grpc_health"})


def main() -> None:
    """Runs the command line; without its extra packages, says how to get them."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a connection that ends is no news for standard error
    try:
        from treewire.cli import app
    except ModuleNotFoundError as error:
        if error.name not in _CLI_PACKAGES:
            raise
        print(f'the command line needs {error.name}: pip install "treewire[cli]"', file=sys.stderr)
        sys.exit(_USAGE_EXIT_CODE)
    app()


if __name__ == "__main__":
    main()
