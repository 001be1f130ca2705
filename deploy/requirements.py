"""This file prints the requirements of one extra of the project, one a line, so that an image can install them in a
layer that outlives changes to the source.

    python deploy/requirements.py pyproject.toml verify > verify.txt
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SELF_REFERENCE = re.compile(r"treewire\[(?P<extras>[\w,\s-]+)\]")


def requirements(extra: str, extras: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The requirements of `extra`, those of the project's own extras that it names included; KeyError if it is unknown."""
    for requirement in extras[extra]:
        own = SELF_REFERENCE.fullmatch(requirement)
        if own is None:
            yield requirement
            continue
        for name in own["extras"].split(","):
            yield from requirements(name.strip(), extras)


def main() -> None:
    """Read the pyproject file and the extra from the command line; print the requirements, sorted, each once."""
    pyproject, extra = sys.argv[1:]
    project = tomllib.loads(Path(pyproject).read_text())["project"]
    wanted = {*project["dependencies"], *requirements(extra, project["optional-dependencies"])}
    print("\n".join(sorted(wanted)))


if __name__ == "__main__":
    main()
