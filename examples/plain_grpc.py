"""The protocol without our client, as a program in any language would speak it: generated stubs and nothing else.

python examples/plain_grpc.py [ENDPOINT]
"""

import sys

import grpc

from outrider.v1 import generation_pb2, generation_pb2_grpc

endpoint = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
request = generation_pb2.GenerateRequest(
    text="def is_prime(n):",
    sampling_params=generation_pb2.SamplingParams(temperature=0.0, max_new_tokens=32, stop=["\n\n"]),
)
with grpc.insecure_channel(endpoint) as channel:
    # A deadline bounds every call; ending the call ends the generation.
    for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60):
        match response.WhichOneof("event"):
            case "started":
                print(f"--- request {response.started.request_id}, seed {response.started.seed}")
            case "delta":
                print(response.delta.text, end="", flush=True)
            case "finished":
                (choice,) = response.finished.choices
                print(f"\n--- {choice.completion_tokens} tokens, finish reason {choice.finish_reason}")
