"""This file is the workspace: where a training run keeps what it makes, outside the repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import platformdirs

HELD_OUT_PROMPTS = Path(__file__).parent / "prompts" / "held_out.txt"


@dataclass(frozen=True)
class Workspace:
    """The directory of one target. Prompts, generations and captures are shared by all runs on it."""

    root: Path

    @classmethod
    def default(cls, target_name: str) -> Workspace:
        """Under the user's cache directory."""
        return cls(Path(platformdirs.user_cache_dir("treewire")) / "training" / target_name.replace("/", "--"))

    @property
    def prompts(self) -> Path:
        """Prompts to answer, one JSON object a line."""
        return self.root / "prompts.jsonl"

    @property
    def generations(self) -> Path:
        """Directory of corpus files, .jsonl or .jsonl.gz."""
        return self.root / "generations"

    @property
    def shards(self) -> Path:
        """Directory of the captured corpus."""
        return self.root / "shards"

    @property
    def held_out_generations(self) -> Path:
        """The target's greedy answers to the held-out prompts."""
        return self.root / "held_out.jsonl"

    @property
    def held_out_shards(self) -> Path:
        """Directory of the captured held-out answers."""
        return self.root / "held_out"

    @property
    def candidates(self) -> Path:
        """The candidate token ids of the drafters trained here."""
        return self.root / "candidates.json"

    def run(self, name: str) -> Path:
        """Directory of one training run."""
        return self.root / "runs" / name
