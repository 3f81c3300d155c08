"""Figures of a load test against records that were worked out by hand."""

import pytest

from outrider.coordinator.loadtest import metrics
from outrider.coordinator.loadtest.lag import ClientLoad, client_figures
from outrider.coordinator.loadtest.records import RequestRecord, positions, round_times
from outrider.v1.generation_pb2 import Round


def record(**changes) -> RequestRecord:
    """Intended at 1 s, sent half a second later; five tokens in three chunks, at 2, 2.5 and 4 s."""
    settings = {
        "index": 0,
        "intended_s": 1.0,
        "started_s": 1.25,
        "sent_s": 1.5,
        "chunk_s": [2.0, 2.5, 4.0],
        "chunk_tokens": [1, 3, 1],
        "prompt_tokens": 7,
        "output_tokens": 5,
    }
    return RequestRecord(**settings | changes)


def test_latencies_count_from_the_intended_arrival():
    one = record()
    assert (one.ttft_s, one.ttft_from_send_s) == (1.0, 0.5)
    assert (one.e2el_s, one.e2el_from_send_s) == (3.0, 2.5)
    assert one.tpot_s == pytest.approx((4.0 - 2.0) / 4)
    # Between chunks, however many tokens they hold.
    assert one.itl_s == [0.5, 1.5]
    assert (one.client_delay_s, one.start_lag_s) == (0.5, 0.25)


def test_an_output_of_one_token_has_no_tpot():
    assert record(chunk_s=[2.0], chunk_tokens=[1], output_tokens=1).tpot_s is None


def test_the_figures_of_a_run():
    records = [
        record(),
        record(index=1, intended_s=3.0, sent_s=3.0, chunk_s=[3.1, 3.3], chunk_tokens=[1, 1], output_tokens=2),
        record(index=2, chunk_s=[], chunk_tokens=[], output_tokens=0, error="Overloaded: the queue is full"),
    ]
    figures = metrics.summarise(records, slos={"ttft": 500.0}, duration_s=4.0)
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (14, 7)
    assert figures["request_throughput"] == 0.5
    assert figures["request_goodput"] == 0.25
    assert figures["output_throughput"] == 7 / 4
    assert figures["total_token_throughput"] == 21 / 4
    # TTFT of 1000 and 100 ms.
    assert figures["mean_ttft_ms"] == pytest.approx(550)
    assert figures["median_ttft_ms"] == pytest.approx(550)
    assert figures["std_ttft_ms"] == pytest.approx(450)
    assert figures["p99_ttft_ms"] == pytest.approx(991)
    # TPOT of 500 and 200 ms; ITL of 500, 1500 and 200 ms; E2EL of 3000 and 300 ms.
    assert figures["mean_tpot_ms"] == pytest.approx(350)
    assert figures["median_itl_ms"] == pytest.approx(500)
    assert figures["mean_e2el_ms"] == pytest.approx(1650)
    # From the sending: 500 and 100 ms.
    assert figures["mean_ttft_from_send_ms"] == pytest.approx(300)
    assert figures["mean_client_queue_time_ms"] == pytest.approx(250)
    assert figures["error_counts"] == {"Overloaded: the queue is full": 1}
    # In second 2 came 1 + 3 tokens, in second 3 two, in second 4 one.
    assert metrics.tokens_by_second(records[:2]) == [0, 0, 4, 2, 1]
    assert figures["max_output_tokens_per_s"] == 4
    assert figures["max_concurrent_requests"] == 2


def test_names_are_those_of_vllm_bench_serve():
    figures = metrics.summarise([record(verify_steps=3, drafted_tokens=6, accepted_tokens=2)], slos={}, duration_s=1.0)
    expected = {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
        "max_concurrent_requests", "spec_decode_acceptance_rate", "spec_decode_acceptance_length",
        "spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens",
        "spec_decode_per_position_acceptance_rates",
    }  # fmt: skip
    expected |= {
        f"{each}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for each in ("mean", "median", "std", "p50", "p90", "p99")
    }
    assert expected <= figures.keys()
    # Without objectives there is no goodput, as vLLM has it.
    assert figures["request_goodput"] is None


def test_speculation_adds_up_over_requests():
    records = [
        record(verify_steps=4, drafted_tokens=12, accepted_tokens=6, accepted_per_position=[3, 2, 1], position_steps=4),
        record(verify_steps=2, drafted_tokens=4, accepted_tokens=1, accepted_per_position=[1], position_steps=2),
        record(verify_steps=4, drafted_tokens=0, accepted_tokens=0),
    ]
    figures = metrics.speculation(records)
    assert figures["spec_decode_num_drafts"] == 10
    assert figures["spec_decode_acceptance_length"] == pytest.approx(1.7)
    assert figures["spec_decode_acceptance_rate"] == pytest.approx(100 * 7 / 16)
    # Over the six verifications of which it is known.
    assert figures["spec_decode_per_position_acceptance_rates"] == pytest.approx([4 / 6, 2 / 6, 1 / 6])
    assert metrics.speculation([record()]) == {}


def test_positions_count_the_verifications_that_went_so_deep():
    assert positions([0, 2, 1, 3, 0]) == [3, 2, 1]
    assert positions([]) == []


def test_a_rounds_parts_make_up_the_time_from_result_to_result():
    prefill = Round(result_ns=100, step_ns=80, forward_ns=70)
    second = Round(result_ns=290, step_ns=110, forward_ns=90)
    (parts,) = round_times([prefill, second])
    assert (parts.forward_ns, parts.host_ns, parts.between_ns) == (90, 20, 80)
    assert parts.forward_ns + parts.host_ns + parts.between_ns == second.result_ns - prefill.result_ns
    figures = metrics.round_shares([record(rounds=[parts])])
    assert figures["traced_rounds"] == 1
    assert figures["round_forward_ms"] == pytest.approx(90e-6)


def test_objectives_are_read_with_spaces_or_commas():
    assert metrics.parse_slos(["ttft:500 tpot:50", "e2el:2e3"]) == {"ttft": 500.0, "tpot": 50.0, "e2el": 2000.0}
    assert metrics.parse_slos(["ttft:500,tpot:50"]) == {"ttft": 500.0, "tpot": 50.0}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:fast", "itl:5", "tpot:-1", "tpot:0", "ttft:nan"])
def test_bad_objectives_are_named(text):
    with pytest.raises(ValueError, match=f"goodput: '{text}'"):
        metrics.parse_slos([text])


def test_a_request_is_good_only_if_it_meets_every_objective():
    assert metrics.is_good(record(), {"ttft": 1000.0, "tpot": 500.0, "e2el": 3000.0})
    assert not metrics.is_good(record(), {"ttft": 1000.0, "tpot": 499.0})
    assert not metrics.is_good(record(error="no"), {"ttft": 1e9})


def test_nothing_at_all_has_figures_too():
    figures = metrics.summarise([], slos={}, duration_s=0.0)
    assert figures["completed"] == figures["mean_ttft_ms"] == figures["request_throughput"] == 0


def test_a_busy_client_says_that_it_is_the_bottleneck():
    calm = ClientLoad(loop_lag_s=[0.001] * 100, cpu_share=0.3)
    late = ClientLoad(loop_lag_s=[0.050] * 100, cpu_share=0.3)
    busy = ClientLoad(loop_lag_s=[0.001] * 100, cpu_share=0.97)
    assert not client_figures([calm], [0.0], 100.0)["client_is_bottleneck"]
    assert client_figures([calm, late], [0.0], 100.0)["client_is_bottleneck"]
    assert client_figures([busy], [0.0], 100.0)["client_is_bottleneck"]
    # Of a first token that takes a second, 50 ms do not matter.
    assert not client_figures([late], [0.0], 1000.0)["client_is_bottleneck"]
    assert client_figures([calm], [0.2], 1000.0)["client_is_bottleneck"]
