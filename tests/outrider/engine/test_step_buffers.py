"""A step's bytes: what is packed is what is copied, whatever the buffer held before."""

import random

import numpy as np
import pytest
import torch

from outrider.engine import step_buffers
from outrider.engine.buckets import Bucket
from outrider.engine.step_buffers import StepBuffer, StepLayout


def bucket(tokens: int, sessions: int) -> Bucket:
    return Bucket(tokens=tokens, sessions=sessions, keys=64, query_len=tokens, logit_rows=tokens, nodes=tokens, words=1)


@pytest.mark.parametrize("most_layouts", [3, 512])
def test_views_are_of_the_bytes_that_are_copied_as_buffers_grow(monkeypatch: pytest.MonkeyPatch, most_layouts: int):
    monkeypatch.setattr(step_buffers, "_MOST_LAYOUTS", most_layouts)
    chance, buffer = random.Random(0), StepBuffer(torch.device("cpu"))
    for turn in range(300):
        # Ever larger ones, and smaller ones in between.
        tokens = 1 << chance.randint(0, 3 + turn // 30)
        layout = StepLayout.of(bucket(tokens, chance.choice((1, 4, 16))))
        data, arrays = buffer.step(layout)
        np.testing.assert_array_equal(data, layout.template)
        arrays["token_ids"][:] = turn
        views = buffer.views(layout.nbytes)
        views.wide[0] += 1
        views.words[2] += 1
        sent = buffer.step_tensor(layout.nbytes)
        assert sent.data_ptr() == data.ctypes.data == views.data.ctypes.data
        np.testing.assert_array_equal(sent.numpy(), data)
        assert layout.arrays(sent.numpy())["token_ids"][0] == turn + 1
        answer = buffer.answer(3 * tokens)
        answer.fill_(turn)
        assert buffer.answer(3 * tokens).tolist() == [turn] * (3 * tokens)
