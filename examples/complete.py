"""One completion as a whole, then one as it comes.

python examples/complete.py [ENDPOINT]
"""

import sys

from outrider.client import Client

endpoint = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(endpoint) as client:
    output = client.generate("def fibonacci(n):", max_new_tokens=32)
    print(output.text)
    print(f"--- {output.finish_reason}, {output.speculation.acceptance_length:.2f} tokens a verification")

    # With the same seed the same text comes, with speculation or without.
    with client.stream("class Stack:", temperature=0.8, seed=7, max_new_tokens=32) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    timings = stream.result.timings
    print(f"\n--- first token after {timings.ttft_ms:.0f} ms, then {timings.tpot_ms:.1f} ms each")
