"""This file is what an output must match: a JSON schema, a regular expression or a grammar, as its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

StructureKind: TypeAlias = Literal["json_schema", "regex", "grammar"]


@dataclass(frozen=True)
class Structure:
    """A language of texts. A grammar is GBNF and starts at its rule root. Raises ValueError without a text."""

    kind: StructureKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructureKind):
            raise ValueError(f"{self.kind!r} is no kind of structure, known are {', '.join(get_args(StructureKind))}")
        if not self.text:
            raise ValueError(f"{self.kind} is empty")
