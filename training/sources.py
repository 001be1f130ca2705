"""This file is where prompts come from: generated instructions and openly licensed text, each with its source and licence."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

OWN_LICENCE, PYTHON_LICENCE, WORDNET_LICENCE = "Apache-2.0", "PSF-2.0", "WordNet-3.0"

PROMPTS = Path(__file__).parent / "prompts"
SUMS = (
    "What is {a} plus {b}? Show the steps.",
    "A shop sells {a} apples on Monday and {b} on Tuesday. How many is that in total?",
    "If a book costs {a} dollars, what do {c} books cost?",
    "Share {a} sweets among {c} children. How many does each get, and how many are left?",
)
_LONGEST_DOCUMENTATION = 300
_DICTIONARY_GLOSS = re.compile(r"^\d{8} \d\d n [0-9a-f]{2} (?P<word>\S+) .*\| (?P<gloss>[^;\"]+)", re.MULTILINE)


@dataclass(frozen=True)
class Prompt:
    """A question for the target, with where its words come from."""

    text: str
    source: str
    licence: str


def instructions() -> Iterator[Prompt]:
    """Own topics in own templates."""
    for template, topic in itertools.product(_lines(PROMPTS / "templates.txt"), _lines(PROMPTS / "topics.txt")):
        yield Prompt(template.format(topic), "instructions", OWN_LICENCE)


def sums(count: int, seed: int = 0) -> Iterator[Prompt]:
    """Small calculations in words."""
    chance = random.Random(seed)
    for number in range(count):
        values = {"a": chance.randint(12, 400), "b": chance.randint(12, 400), "c": chance.randint(2, 12)}
        yield Prompt(SUMS[number % len(SUMS)].format(**values), "sums", OWN_LICENCE)


def standard_library() -> Iterator[Prompt]:
    """Public functions of the running Python's standard library, with the first paragraph of their documentation."""
    directory = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        path = directory / f"{name}.py"
        if name.startswith("_") or not path.is_file():
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            if documentation := ast.get_docstring(node):
                text = " ".join(documentation.split("\n\n")[0].split())[:_LONGEST_DOCUMENTATION]
                question = f"Show how to use {name}.{node.name} in Python. Its documentation says: {text}"
                yield Prompt(question, "standard_library", PYTHON_LICENCE)


def wordnet(nouns: Path) -> Iterator[Prompt]:
    """Nouns and their glosses out of WordNet's `data.noun`, which Debian's wordnet-base has."""
    for match in _DICTIONARY_GLOSS.finditer(nouns.read_text(encoding="utf-8")):
        word = match["word"].replace("_", " ")
        yield Prompt(f"Tell me about {word}, in the sense of {match['gloss'].strip()}.", "wordnet", WORDNET_LICENCE)


def held_out(path: Path) -> list[str]:
    """The prompts that no drafter may learn from: one a line. They are a source of their own, written by hand."""
    return _lines(path)


def without(prompts: Iterable[Prompt], held_out_texts: Iterable[str]) -> Iterator[Prompt]:
    """The prompts that differ from every held-out one by more than case, spaces and punctuation; each once."""
    seen = {_essence(text) for text in held_out_texts}
    for prompt in prompts:
        essence = _essence(prompt.text)
        if essence not in seen:
            seen.add(essence)
            yield prompt


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Replace a prompt file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(prompt)) + "\n" for prompt in prompts), encoding="utf-8")


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file."""
    return [Prompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _essence(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
