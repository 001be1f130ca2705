"""This file is the corpus: what the target said to which prompt, as token ids, one JSON object a line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Generation:
    """A prompt (chat template applied) and the target's own continuation. Raises ValueError if either is empty."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    temperature: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.output_ids:
            raise ValueError(
                f"a generation has a prompt and an output, this one {len(self.prompt_ids)} and {len(self.output_ids)} tokens"
            )

    def __len__(self) -> int:
        """Tokens, prompt included."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole sequence."""
        return self.prompt_ids + self.output_ids


def read_generations(path: Path) -> Iterator[Generation]:
    """The generations of a .jsonl or .jsonl.gz file, in order. Raises ValueError on a line that is not one."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                yield Generation(
                    tuple(row["prompt_ids"]), tuple(row["output_ids"]), row.get("temperature"), row.get("source", path.stem)
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} line {number} is not a generation: {error!r}") from error


def append_generations(path: Path, generations: Iterable[Generation]) -> None:
    """Add generations to the end of a .jsonl file, which is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        for generation in generations:
            lines.write(json.dumps(asdict(generation), separators=(",", ":")) + "\n")
