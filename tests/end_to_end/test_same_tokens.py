"""Speculation changes nothing: every mode, any number of drafts, any batch gives the tokens of the plain loop.

Fifty prompts sixteen at a time, twelve of them one by one.
"""

import pytest

from .conftest import RULES, generate_all

NEW_TOKENS = 18
ONE_BY_ONE = 12


@pytest.fixture(scope="module")
def expected(reference, prompts):
    """By rule, the plain loop's output of every prompt."""
    return reference.generate_by_rule(prompts, NEW_TOKENS)


def accepted_in(outputs: list) -> int:
    return sum(output.speculation.accepted_tokens for output in outputs)


# Without drafts, and in sync mode one by one, it is the same to have two of them.
SETTINGS = [(1, batch, mode) for batch in (1, 16) for mode in ("off", "sync", "async")]
SETTINGS += [(2, 16, "sync"), (2, 1, "async"), (2, 16, "async")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("drafts", "batch", "speculation"), SETTINGS)
@pytest.mark.parametrize("rule", RULES)
async def test_prompts(request, prompts, expected, differs, *, speculation, batch, drafts, rule):
    service = request.getfixturevalue("one_draft" if drafts == 1 else "two_drafts")
    options = RULES[rule] | {"max_new_tokens": NEW_TOKENS, "speculation": speculation, "at_once": batch}
    # One by one they take five times as long each.
    asked = prompts if batch > 1 else prompts[:ONE_BY_ONE]
    outputs = await generate_all(service.endpoint, asked, **options)
    for number, (output, wanted) in enumerate(zip(outputs, expected[rule][: len(asked)], strict=True)):
        place = differs(output.token_ids, wanted)
        assert place is None, f"prompt {number} parts at token {place}"
        if list(output.token_ids) == list(wanted.token_ids):
            assert output.finish_reason == wanted.finish_reason
            assert output.usage.completion_tokens == len(wanted.token_ids)
    if speculation == "off":
        assert all(output.speculation.drafted_tokens == 0 for output in outputs)
    elif speculation == "sync":
        assert accepted_in(outputs) > 2 * len(asked)
    else:
        # Rounds do not wait for a draft that gets no core; sooner or later it gets one.
        while not accepted_in(outputs):
            outputs = await generate_all(service.endpoint, asked, **options)
