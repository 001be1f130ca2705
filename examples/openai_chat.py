"""OpenAI's own client at the gateway's HTTP door, with what speculation did in the last chunk.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/openai_chat.py
"""

from openai import OpenAI

with OpenAI() as client:
    model = client.models.list().data[0].id
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why do trees branch?"}],
        max_completion_tokens=48,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"budget": 24},  # nodes of each draft tree
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:
            print(f"\n{chunk.usage.completion_tokens} tokens")
            print((chunk.model_extra or {})["metrics"]["speculative_decoding"])
