"""This file is llama.cpp's part of the peer comparison, run by the python of an environment that has a binding of it.

One JSON object on standard input, one on standard output. Imports nothing of treewire.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

_CONTEXT = 2048


def by_llama_cpp_python(gguf: str, prompts: list[list[int]], max_tokens: int) -> Iterator[tuple[int, float]]:
    """Tokens and seconds to the first of each answer, greedily."""
    from llama_cpp import Llama

    model = Llama(gguf, n_ctx=_CONTEXT, verbose=False)
    for prompt in prompts:
        begun, first, produced = time.perf_counter(), 0.0, 0
        for token in model.generate(prompt, temp=0.0):
            first = first or time.perf_counter() - begun
            produced += 1
            if produced >= max_tokens or token == model.token_eos():
                break
        yield produced, first


def by_xllamacpp(gguf: str, prompts: list[list[int]], max_tokens: int) -> Iterator[tuple[int, float]]:
    """Tokens and seconds to the first of each answer, greedily, from llama.cpp's own server in this process."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = gguf
    parameters.n_ctx = _CONTEXT
    parameters.n_parallel = 1
    parameters.warmup = True
    server = xllamacpp.Server(parameters)
    for prompt in prompts:
        asked = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0.0, "cache_prompt": False}
        answer: Any = server.handle_completions(asked)
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        timings = answer["timings"]
        yield int(timings["predicted_n"]), (timings["prompt_ms"] + timings["predicted_per_token_ms"]) / 1000


def main() -> None:
    """Run whichever binding is there."""
    asked = json.load(sys.stdin)
    missing = []
    for name, run in (("llama-cpp-python", by_llama_cpp_python), ("xllamacpp", by_xllamacpp)):
        try:
            answers = run(asked["gguf"], asked["prompts"], asked["max_tokens"])
            first = next(answers)  # the first answer pays for what is loaded lazily
        except ImportError as error:
            missing.append((f"llama.cpp by {name}", f"{error}; see .venv-peers/{name}.log if it did not build"))
            continue
        del first
        started = time.perf_counter()
        results = list(answers)
        seconds = time.perf_counter() - started
        tokens = sum(count for count, _ in results)
        answer = {"tokens": tokens, "seconds": seconds, "first_seconds": [first for _, first in results]}
        print(json.dumps({**answer, "binding": name, "missing": missing}))
        return
    sys.exit("; ".join(reason for _, reason in missing))


if __name__ == "__main__":
    main()
