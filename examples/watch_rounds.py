"""What a generation is made of: every verification with the tree that was sent and the path that was accepted.

python examples/watch_rounds.py [ENDPOINT]
"""

import sys

from outrider.client import Client

endpoint = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(endpoint) as client:
    output = client.generate("import os\nimport ", max_new_tokens=48, trace=True)

for verification in output.rounds:
    nodes, accepted = len(verification.node_tokens), len(verification.accepted_nodes)
    arrived = [growth for growth in verification.growth if growth.during_verify]
    print(
        f"step {verification.step:4}: {nodes:3} nodes sent, {accepted:2} accepted, "
        f"{len(verification.emitted_token_ids):2} tokens out, {verification.step_ns / 1e6:6.2f} ms in the target, "
        f"waited {verification.waited_ns / 1e6:.2f} ms, drafts grew {len(arrived)} times meanwhile"
    )
speculation = output.speculation
print(f"{speculation.acceptance_length:.2f} tokens a verification over {speculation.verify_steps} of them")
