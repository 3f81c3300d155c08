# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""A model that calls a function: its answer is held to the function's parameters.

python examples/clients/openai_tools.py [BASE_URL]
"""

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionFunctionToolParam

WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city today.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Oslo"]}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
chat = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "How warm is it in Oslo?"}],
    tools=[WEATHER],
    tool_choice="required",
    # A small model would make calls until it is cut off.
    parallel_tool_calls=False,
    max_completion_tokens=64,
)
for call in chat.choices[0].message.tool_calls or []:
    if call.type == "function":
        print(call.function.name, json.loads(call.function.arguments))
