# /// script
# dependencies = ["instructor==1.17.0"]
# ///
# pyright: reportMissingImports=false
"""An answer as an object of a class of yours, through instructor.

python examples/clients/instructor_tools.py [BASE_URL]
"""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Number(BaseModel):
    """A number's properties."""

    is_even: bool
    size: Literal["small", "large"]


base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = instructor.from_openai(OpenAI(base_url=base_url, api_key="none"), mode=instructor.Mode.TOOLS)
number = client.chat.completions.create(
    model="target",
    messages=[{"role": "user", "content": "Is 12 even, and is it small or large?"}],
    response_model=Number,
    max_completion_tokens=64,
)
print(repr(number))
