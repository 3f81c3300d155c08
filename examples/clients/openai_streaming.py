# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""A completion as it comes, and how its drafts fared.

python examples/clients/openai_streaming.py [BASE_URL]
"""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
chunks = client.completions.create(
    model=client.models.list().data[0].id,
    prompt="def fibonacci(n):\n",
    max_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"per_request_spec_decode_metrics": "summary"},
)
for chunk in chunks:
    if chunk.choices:
        print(chunk.choices[0].text, end="", flush=True)
    elif chunk.usage and chunk.model_extra:
        drafts = chunk.model_extra["metrics"]["speculative_decoding"]
        print(f"\n--- {chunk.usage.completion_tokens} tokens, {drafts['mean_acceptance_length']:.2f} a verification")
