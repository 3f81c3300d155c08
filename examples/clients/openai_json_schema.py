# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""JSON that matches a schema, whatever the model would rather have said.

python examples/clients/openai_json_schema.py [BASE_URL]
"""

import json
import sys
from typing import Any

from openai import OpenAI

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"is_even": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["is_even", "size"],
    "additionalProperties": False,
}

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
chat = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Is 12 even, and is it small or large?"}],
    max_completion_tokens=64,
    response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA, "strict": True}},
)
print(json.loads(chat.choices[0].message.content or ""))
