"""Functions in chats and responses, by the official client: whole and streamed, and what goes back to the model."""

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from tests.coordinator.http_door import TOKENIZER, A, Door, serving
from tests.coordinator.scripted_scheduler import Play, delta, result
from tests.coordinator.test_http_tool_calls import ADD, TEXTS, WEATHER

from outrider.coordinator.api.http.chat_template import ChatTemplate
from outrider.coordinator.sessions.messages import FinishReason, GenerationEvent, GenerationRequest

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TEMPLATE = ChatTemplate(
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}|{% endfor %}"
)
TWO = TEXTS["hermes"][0].replace("</tool_call>", '</tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call>')
EXPECTED = [("get_weather", {"city": "Bern"}), ("add", {})]


def saying(text: str, *, reason: str = "stop") -> Play:
    """Play a text, three characters a token."""

    def play(request: GenerationRequest) -> Sequence[GenerationEvent]:
        del request
        parts = [text[place : place + 3] for place in range(0, len(text), 3)]
        ended = result(len(parts))
        choice = ended.choices[0]
        assert choice.finish_reason is FinishReason.LENGTH
        if reason == "stop":
            ended = result(len(parts), finish_reason=FinishReason.STOP, stop_string="x")
        return [*(delta(A, text=part) for part in parts), ended]

    return play


def prompt_of(door: Door) -> str:
    return TOKENIZER.decode(door.scheduler.requests[-1].prompt_token_ids)


async def test_calls_of_a_chat_whole_and_streamed() -> None:
    async with serving(saying(TWO), template=TEMPLATE) as door, door.client() as client:
        options: Any = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, ADD]}
        choice = (await client.chat.completions.create(**options)).choices[0]
        assert prompt_of(door) == "get_weather;add;user:hi|"
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see.\n"
        calls: Any = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == EXPECTED
        async with client.chat.completions.stream(**options) as stream:
            message = (await stream.get_final_completion()).choices[0]
        streamed: Any = message.message.tool_calls
        assert message.finish_reason == "tool_calls"
        assert message.message.content == choice.message.content
        assert [(call.function.name, call.function.arguments) for call in streamed] == [
            (call.function.name, call.function.arguments) for call in calls
        ]
        # Arguments are sent as they are written, and not at the end.
        pieces = [
            call.function.arguments
            async for chunk in await client.chat.completions.create(stream=True, **options)
            for call in chunk.choices[0].delta.tool_calls or []
            if call.function and call.function.arguments
        ]
        assert len(pieces) > 3


async def test_an_answer_without_calls_is_text_and_one_cut_off_says_so() -> None:
    async with serving(saying("Hello {you}."), template=TEMPLATE) as door, door.client() as client:
        options: Any = {"model": "tiny", "messages": MESSAGES, "tools": [ADD]}
        choice = (await client.chat.completions.create(**options)).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
            "Hello {you}.",
            None,
            "stop",
        )
        # Without tools nobody looks for calls.
        door.scheduler.play = saying(TWO)
        for given in ({"tools": [ADD], "tool_choice": "none"}, {}):
            plain = (await client.chat.completions.create(model="tiny", messages=MESSAGES, **given)).choices[0]
            assert (plain.message.content, plain.message.tool_calls) == (TWO, None)
            assert prompt_of(door) == "user:hi|"
        door.scheduler.play = saying('{"name": "add", "arguments": {"a": 1', reason="length")
        cut = (await client.chat.completions.create(**options)).choices[0]
        assert cut.finish_reason == "length"
        assert cut.message.tool_calls is not None


async def test_the_conversation_goes_back_to_the_template_with_arguments_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    async with serving(template=TEMPLATE) as door, door.client() as client:
        await client.chat.completions.create(model="tiny", messages=messages)
        assert prompt_of(door) == "user:hi|assistant:get_weather(Bern)|tool:sunny|"
        await client.responses.create(model="tiny", input=items, instructions="Be brief.")
        assert prompt_of(door) == "system:Be brief.|user:hi|assistant:get_weather(Bern)|tool:sunny|"
        call["function"]["arguments"] = "{"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=messages)
        assert caught.value.param == "messages[1].tool_calls"


async def test_calls_that_are_required_are_held_by_a_grammar() -> None:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    options: Any = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, ADD]}
    called = '[{"name": "get_weather", "parameters": {"city": "Bern"}}]'
    async with serving(saying(called), template=TEMPLATE) as door, door.client() as client:
        choice = (await client.chat.completions.create(tool_choice="required", **options)).choices[0]
        calls: Any = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == EXPECTED[:1]
        assert choice.finish_reason == "tool_calls"
        assert "get_weather" in door.scheduler.requests[-1].sampling.grammar
        door.scheduler.play = saying('{"city": "Bern"}')
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        choice = (await client.chat.completions.create(tool_choice=named, **options)).choices[0]
        calls = choice.message.tool_calls
        # As OpenAI has it: what was named ends as any answer.
        assert (calls[0].function.arguments, choice.finish_reason) == ('{"city": "Bern"}', "stop")
        bad: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[bad], tool_choice="required")
        assert caught.value.param == "tools"


async def test_responses_whole_and_streamed() -> None:
    async with serving(saying("Hello."), template=TEMPLATE) as door, door.client() as client:
        response = await client.responses.create(model="tiny", input="hi", max_output_tokens=7, temperature=0)
        assert (response.output_text, response.status, response.object) == ("Hello.", "completed", "response")
        assert response.id.startswith("resp-")
        assert response.usage is not None
        assert (response.usage.output_tokens, response.usage.input_tokens) == (2, len(TOKENIZER.encode("user:hi|")))
        assert door.scheduler.requests[-1].sampling.max_new_tokens == 7
        events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello."
        last: Any = events[-1]
        assert last.response.output_text == "Hello."
        door.scheduler.play = saying("Hel", reason="length")
        cut = await client.responses.create(model="tiny", input="hi")
        assert cut.incomplete_details is not None
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_calls_of_a_response() -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, ADD)]
    async with serving(saying(TWO), template=TEMPLATE) as door, door.client() as client:
        response = await client.responses.create(model="tiny", input="hi", tools=tools)
        assert prompt_of(door) == "get_weather;add;user:hi|"
        assert response.output_text == "Let me see.\n"
        calls: list[Any] = [item for item in response.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == EXPECTED
        async with client.responses.stream(model="tiny", input="hi", tools=tools) as stream:
            final = await stream.get_final_response()
        streamed: list[Any] = [item for item in final.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in streamed] == [(call.name, call.arguments) for call in calls]


async def test_what_is_wrong_with_a_response_is_named_as_it_is_called_there() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("input", {"input": []}),
        ("input[0]", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input[0].content", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("max_output_tokens", {"max_output_tokens": 100_000}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("temperature", {"temperature": 3}),
        ("tool_choice", {"tool_choice": "required"}),
        ("zzz", {"extra_body": {"zzz": 1}}),
    ]
    async with serving(template=TEMPLATE) as door, door.client() as client:
        for field, given in wrong:
            arguments: dict[str, Any] = {"model": "tiny", "input": "hi"} | given
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(**arguments)
            assert caught.value.param == field, given
        assert not door.scheduler.requests
