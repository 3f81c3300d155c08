"""Many requests at once over one connection; what the service has no room for is tried again when it says.

python examples/many_requests.py [ENDPOINT]
"""

import asyncio
import sys

from outrider.client import AsyncClient
from outrider.errors import Overloaded

PROMPTS = [f"def {name}(" for name in ("add", "area", "copy", "count", "find", "join", "load", "max", "parse", "save")]


async def completed(client: AsyncClient, prompt: str) -> str:
    """The prompt with what follows it, however busy the service is."""
    while True:
        try:
            return prompt + (await client.generate(prompt, max_new_tokens=16, stop="\n\n")).text
        except Overloaded as busy:
            await asyncio.sleep(busy.retry_after_s)


async def main(endpoint: str) -> None:
    """Send all prompts at once, and print the outcome of each."""
    async with AsyncClient(endpoint) as client:
        for text in await asyncio.gather(*(completed(client, prompt) for prompt in PROMPTS)):
            print(text, end="\n---\n")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
