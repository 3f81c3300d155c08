"""The official `openai` client against Outrider.

outrider up --http-port 8000                       # in one terminal
python examples/openai_client.py                   # in another; needs `pip install openai`
python examples/openai_client.py --base-url https://host:8000/v1 --api-key outrider_...
"""

import argparse
import sys
from typing import Any

from openai import BadRequestError, OpenAI

PROMPT = "def fibonacci(n):\n"


def main() -> None:
    """Completes a prompt in several ways, and prints each."""
    parser = argparse.ArgumentParser(description="The official openai client against Outrider.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="a token, where the service asks for one")
    options = parser.parse_args()
    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    model = client.models.list().data[0].id
    print(f"model {model}\n")

    print("--- the same seed gives the same text, with speculation and without")
    texts = [complete(client, model, speculation=mode) for mode in ("async", "off")]
    print(texts[0])
    print("equal:", texts[0] == texts[1])

    print("\n--- as it comes, and how the drafts fared")
    metrics = stream(client, model)
    print(f"\n{metrics['mean_acceptance_length']:.2f} tokens a verification, {metrics['num_spec_steps']} of them")

    print("\n--- a chat, and the likeliest first tokens")
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_completion_tokens=16,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    print(chat.choices[0].message.content)
    entries = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    if entries:
        print([(best.token, round(best.logprob, 2)) for best in entries[0].top_logprobs])

    print("\n--- what is wrong is named")
    try:
        client.completions.create(model=model, prompt=PROMPT, temperature=-1)
    except BadRequestError as error:
        print(error.param, "-", error.body["message"] if isinstance(error.body, dict) else error.body)


def complete(client: OpenAI, model: str, *, speculation: str) -> str:
    """A whole completion; what OpenAI's API has no name for goes into extra_body."""
    completion = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=32,
        temperature=0.7,
        seed=1,
        stop=["\n\n"],
        extra_body={"top_k": 50, "speculation": speculation},
    )
    return completion.choices[0].text


def stream(client: OpenAI, model: str) -> dict[str, Any]:
    """A completion as it comes; returns what the last chunk says of speculation."""
    chunks = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"per_request_spec_decode_metrics": "summary"},
    )
    metrics: dict[str, Any] = {}
    for chunk in chunks:
        if chunk.choices:
            sys.stdout.write(chunk.choices[0].text)
            sys.stdout.flush()
        else:
            metrics = (chunk.model_extra or {})["metrics"]["speculative_decoding"]
    return metrics


if __name__ == "__main__":
    main()
