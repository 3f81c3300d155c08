"""Graphs that are captured one after the other use the same memory, and give what their work gives."""

import pytest
import torch

from outrider.engine.graph_memory import GraphMemory


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_take_no_more_memory_than_the_largest() -> None:
    device = torch.device("cuda")
    # Products of many rows are cuBLAS's, which has a workspace.
    weight = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    rows, out = (torch.randn_like(weight) for _ in range(2))
    memory, graphs, reserved = GraphMemory(device), list[torch.cuda.CUDAGraph](), list[int]()
    for count in (4096, 2048, 1024, 4096):

        def run(count: int = count) -> None:
            out[:count] = torch.relu(rows[:count] @ weight) @ weight

        with torch.cuda.stream(memory.stream):
            run()
        torch.cuda.synchronize()
        graphs.append(memory.capture(run))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved == [reserved[0]] * 4
    for graph, count in ((graphs[1], 2048), (graphs[3], 4096), (graphs[2], 1024), (graphs[0], 4096)):
        out.zero_()
        graph.replay()
        expected = torch.relu(rows[:count] @ weight) @ weight
        # Some thousand where nothing cancels out.
        torch.testing.assert_close(out[:count], expected, rtol=0.02, atol=20)
        assert not out[count:].any()
