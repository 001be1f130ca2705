"""This file draws the token by which services on one machine know each other.

python -m treewire.runtime.token /run/treewire/token
"""

import os
import secrets
import sys
import tempfile
from pathlib import Path

NUM_TOKEN_BYTES = 32
READABLE_BY_OWNER_AND_GROUP = 0o440


def ensure_token(path: Path) -> bool:
    """Put a random token at `path` unless a file is there; True if it is new.

    The file appears with its whole content at once, so whoever finds it can use it. OSError if the folder is missing or
    refuses the file.
    """
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(NUM_TOKEN_BYTES))
        os.chmod(draft, READABLE_BY_OWNER_AND_GROUP)
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)
    return True


def main() -> None:
    """Take the path from the command line and say what was done; the token itself is never printed."""
    (path,) = sys.argv[1:]
    print(f"drew a new token: {path}" if ensure_token(Path(path)) else f"the token is there already: {path}")


if __name__ == "__main__":
    main()
