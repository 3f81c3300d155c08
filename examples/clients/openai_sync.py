# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""A completion through OpenAI's own client: the same seed gives the same text, with speculation and without.

python examples/clients/openai_sync.py [BASE_URL]
"""

import sys

from openai import BadRequestError, OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id

texts: list[str] = []
for speculation in ("async", "off"):
    completion = client.completions.create(
        model=model,
        prompt="def fibonacci(n):\n",
        max_tokens=32,
        temperature=0.7,
        seed=1,
        stop=["\n\n"],
        # What OpenAI's API has no name for.
        extra_body={"top_k": 50, "speculation": speculation},
    )
    texts.append(completion.choices[0].text)
print(texts[0])
print("--- equal:", texts[0] == texts[1])

try:
    client.completions.create(model=model, prompt="import os", temperature=-1)
except BadRequestError as error:
    print(f"--- what is wrong is named: {error.param}: {error.message}")
