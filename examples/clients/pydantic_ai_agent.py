# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.66.0"]
# ///
# pyright: reportMissingImports=false
"""An agent of Pydantic AI whose answer is an object.

python examples/clients/pydantic_ai_agent.py [BASE_URL]
"""

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Number(BaseModel):
    """A number's properties."""

    is_even: bool
    size: Literal["small", "large"]


base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
model = OpenAIChatModel("target", provider=OpenAIProvider(base_url=base_url, api_key="none"))
agent = Agent(model, output_type=Number, model_settings={"max_tokens": 64})
print(repr(agent.run_sync("Is 12 even, and is it small or large?").output))
