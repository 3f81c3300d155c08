# /// script
# dependencies = ["grpcio-reflection==1.84.0"]
# ///
"""A call without generated code: the service describes itself, as grpcurl uses it.

python examples/clients/reflection.py [ENDPOINT]
"""

import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

endpoint = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with grpc.insecure_channel(endpoint) as channel:
    described = ProtoReflectionDescriptorDatabase(channel)
    print(*described.get_services(), sep="\n")
    method = DescriptorPool(described).FindServiceByName("outrider.v1.GenerationService").FindMethodByName("Generate")
    request_class, response_class = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    call = channel.unary_stream(
        "/outrider.v1.GenerationService/Generate",
        request_serializer=request_class.SerializeToString,
        response_deserializer=response_class.FromString,
    )
    request = request_class(text="def fibonacci(n):\n", sampling_params={"max_new_tokens": 16, "temperature": 0})
    for response in call(request, timeout=60):
        print(response)
