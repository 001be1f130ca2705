"""An answer that outlives its gateway: what was delivered is replayed to the next one, which goes on with the same tokens."""

from treewire import Client, Sampling

with (
    Client() as client,
    client.stream(
        "Tell a long story.", max_tokens=64, sampling=Sampling(temperature=0.8), resume=True, deadline_seconds=120
    ) as stream,
):
    story = stream.final()
print(story.text)
print(f"{story.output_tokens} tokens, seed {story.seed}")
