"""Ask once, then watch an answer come: the synchronous client.

treewire up &
python examples/chat.py "Why do trees branch?"
"""

import sys

from treewire import Client, Sampling
from treewire.events import Chunk

prompt = " ".join(sys.argv[1:]) or "Why do trees branch?"
with Client() as client:  # TREEWIRE_ADDRESS and TREEWIRE_TOKEN say where and as whom
    answer = client.generate(prompt, max_tokens=48)
    print(answer.text)
    print(f"{answer.statistics.mean_acceptance_length:.2f} tokens a round")

    with client.stream(prompt, max_tokens=48, sampling=Sampling(temperature=0.8, seed=7)) as stream:
        for event in stream:
            if isinstance(event, Chunk):
                print(event.text, end="", flush=True)
        print(f"\n{stream.final().finish_reason}")
