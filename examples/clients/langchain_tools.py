# /// script
# dependencies = ["langchain-openai==1.7.4"]
# ///
# pyright: reportMissingImports=false
"""A chain of LangChain's whose model calls a function.

python examples/clients/langchain_tools.py [BASE_URL]
"""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


@tool
def get_weather(city: Literal["Bern", "Oslo"]) -> str:
    """Return the weather of a city today."""
    return f"It is sunny in {city}."


base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
model = ChatOpenAI(
    base_url=base_url, api_key=SecretStr("none"), model="target", temperature=0, max_completion_tokens=32
)
for chunk in model.stream("def fibonacci(n):\n"):
    print(chunk.text, end="", flush=True)
print("\n---")
for call in model.bind_tools([get_weather], tool_choice="get_weather").invoke("How warm is it in Oslo?").tool_calls:
    print(get_weather.invoke(call).content)
