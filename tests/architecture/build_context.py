"""This file is what an image is built from: the sources that a Dockerfile copies, and what .dockerignore leaves of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_CONTINUED = re.compile(r"\\[ \t]*\n")


class Pattern(NamedTuple):
    """A line of .dockerignore: what it matches, and whether that is kept."""

    matches: re.Pattern[str]
    keeps: bool


class Ignore:
    """A .dockerignore. The last pattern that matches a path, or a folder above it, decides."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
        self._patterns = [_pattern(line) for line in lines if line]

    def passes(self, path: PurePosixPath) -> bool:
        """True if a path, relative to the context, is sent to the build."""
        paths = [str(each) for each in (path, *path.parents) if each.name]
        for pattern in reversed(self._patterns):
            if any(pattern.matches.fullmatch(each) for each in paths):
                return pattern.keeps
        return True


def sources(dockerfile: str) -> Iterator[str]:
    """What all stages copy from the context: the sources of COPY and ADD, not those from another stage or image."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    for line in _CONTINUED.sub(" ", "\n".join(lines)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction.upper() not in ("COPY", "ADD"):
            continue
        words = rest.split()
        flags = [word for word in words if word.startswith("--")]
        if any(flag.startswith("--from=") for flag in flags):
            continue
        names = words[len(flags) :]
        if names[0].startswith("["):
            names = json.loads(" ".join(names))
        yield from names[:-1]


def files_of(root: Path, source: str) -> list[PurePosixPath]:
    """The files that a source stands for, relative to the root; those of a folder are all in it."""
    found = sorted(root.glob(source.strip("/")))
    files = [file for path in found for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    return [PurePosixPath(file.relative_to(root).as_posix()) for file in files]


def _pattern(line: str) -> Pattern:
    keeps = line.startswith("!")
    return Pattern(_regex(line.removeprefix("!").strip().strip("/").removeprefix("./")), keeps)


def _regex(glob: str) -> re.Pattern[str]:
    """As Go's filepath.Match, and `**` for any number of folders."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", glob)
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meanings.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts))
