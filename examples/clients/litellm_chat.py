# /// script
# dependencies = ["litellm==1.110.2"]
# ///
# pyright: reportMissingImports=false
"""A chat through LiteLLM, streamed.

python examples/clients/litellm_chat.py [BASE_URL]
"""

import sys

import litellm

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
chunks = litellm.completion(
    # Any name will do where one model is served; the prefix says which API it speaks.
    model="openai/target",
    api_base=base_url,
    api_key="none",
    messages=[{"role": "user", "content": "def fibonacci(n):\n"}],
    max_tokens=32,
    temperature=0,
    stream=True,
)
for chunk in chunks:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print("\n---")
try:
    litellm.completion(
        model="openai/target",
        api_base=base_url,
        api_key="none",
        messages=[{"role": "user", "content": "import os\n" * 10_000}],
    )
except litellm.ContextWindowExceededError:
    print("a prompt beyond the context is told as one")
