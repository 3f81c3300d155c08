"""Messages to text, by templates that nobody here has written."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.coordinator.api.http.chat_template import ChatTemplate, load_chat_template
from outrider.errors import CheckpointError, InvalidRequest
from outrider.models import embedded_target_path

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a < b & 'c'"}]

CHATML = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\n' + 'default' + '<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- generation %}{{- message.content }}{% endgeneration %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def test_a_usual_template() -> None:
    text = ChatTemplate(CHATML).render(MESSAGES)
    assert text == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na < b & 'c'<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(CHATML).render(MESSAGES[1:], add_generation_prompt=False).startswith("<|im_start|>system\nde")


def test_what_templates_are_written_for() -> None:
    def render(source: str, **more: Any) -> str:
        return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, more=more)

    assert render("{{ bos_token }}{{ eos_token }}") == "<s>"
    assert render("{{ messages[1].content | tojson }}") == "\"a < b & 'c'\""
    assert render("{{ {'ä': 1} | tojson(indent=1) }}") == '{\n "ä": 1\n}'
    assert render("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == (
        "system"
    )
    assert render("{{ tone }}", tone="low") == "low"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    # What the request brings along does not replace the conversation.
    assert render("{{ messages | length }}", messages=[]) == "2"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system message here') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].nothing.at_all }}",
        "{% include 'other' %}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_senders_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: the model's chat template does not take them"):
        ChatTemplate(source).render(MESSAGES)


def test_where_a_template_lies(tmp_path: Path) -> None:
    def rendered() -> str:
        return load_chat_template(tmp_path).render(MESSAGES)

    with pytest.raises(InvalidRequest, match=r"no chat template.*--chat-template"):
        rendered()
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "chat_template": "one{{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered() == "one<s>"
    config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered() == "two"
    (tmp_path / "chat_template.jinja").write_text("three{{ bos_token }}")
    assert rendered() == "three<s>"
    own = tmp_path / "own.jinja"
    own.write_text("four{{ bos_token }}")
    assert load_chat_template(tmp_path, own).render(MESSAGES) == "four<s>"


def test_templates_that_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(CheckpointError, match="chat template cannot be used"):
        load_chat_template(tmp_path, tmp_path / "chat_template.jinja")
    with pytest.raises(CheckpointError, match=r"other\.jinja cannot be read"):
        load_chat_template(tmp_path, tmp_path / "other.jinja")
    # The model can complete without it.
    with pytest.raises(InvalidRequest, match="cannot be used"):
        load_chat_template(tmp_path).render(MESSAGES)
    assert "is refused" in caplog.text
    (tmp_path / "tokenizer_config.json").write_text("[")
    (tmp_path / "chat_template.jinja").write_text("fine")
    assert load_chat_template(tmp_path).render(MESSAGES) == "fine"


def test_the_embedded_target_continues_what_was_said() -> None:
    template = load_chat_template(embedded_target_path())
    assert template.render(MESSAGES) == "<|endoftext|>be kind\na < b & 'c'"
