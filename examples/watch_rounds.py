"""Show the rounds of a generation, with how many nodes were verified and how many of them accepted.

python examples/watch_rounds.py [ENDPOINT]
"""

import sys

from outrider.client import Client

endpoint = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(endpoint) as client:
    output = client.generate("import os\nimport ", max_new_tokens=48, trace=True)

for one_round in output.rounds:
    grown = sum(growth.nodes for growth in one_round.growth)
    print(
        f"round {one_round.index:3}: {one_round.selected:3} nodes verified, {one_round.accepted:2} accepted, "
        f"{len(one_round.emitted_token_ids):2} tokens out, {one_round.step_ns / 1e6:6.2f} ms in the target, "
        f"{one_round.forward_ns / 1e6:6.2f} ms of them in the model; {grown:3} nodes grown since the round before"
    )
speculation = output.speculation
print(f"{speculation.acceptance_length:.2f} tokens a round over {speculation.verify_steps} of them")
