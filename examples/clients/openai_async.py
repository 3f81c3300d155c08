# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""Many chats at once through OpenAI's asynchronous client.

python examples/clients/openai_async.py [BASE_URL]
"""

import asyncio
import sys

from openai import AsyncOpenAI

NAMES = ("add", "area", "copy", "count", "find", "join", "load", "max", "parse", "save")


async def main(base_url: str) -> None:
    """Ask about every name, and print what came of each."""
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = (await client.models.list()).data[0].id
        chats = (
            client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"def {name}("}],
                max_completion_tokens=16,
                temperature=0,
            )
            for name in NAMES
        )
        for name, chat in zip(NAMES, await asyncio.gather(*chats), strict=True):
            print(f"def {name}({chat.choices[0].message.content}\n---")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"))
