"""The Python client: text or token ids in, a streamed generation out (torch-free).

    with Client("127.0.0.1:50051") as client:
        print(client.generate("def fibonacci(n):", max_new_tokens=64).text)
        with client.stream("import os", temperature=0.8, seed=7) as stream:
            for delta in stream:
                print(delta.text, end="")
        print(stream.result.usage)

`AsyncClient` is the same with `async`. Given several coordinators ("a:50051,b:50051" or a list), requests are spread
over them. A stream that breaks (UNAVAILABLE) is resumed, at another one where there is one, with the same request id,
the same seed and the tokens received so far: the continuation is the one that would have come. Errors are those of
`outrider.errors`; a deadline that passes raises TimeoutError.
"""

from outrider.client.client import AsyncClient, AsyncStream, Client, Stream
from outrider.client.outputs import ChoiceOutput, Delta, GenerationOutput
from outrider.client.request import GenerateOptions

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "ChoiceOutput",
    "Client",
    "Delta",
    "GenerateOptions",
    "GenerationOutput",
    "Stream",
]
