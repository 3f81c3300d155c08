"""`GET /metrics` on the coordinator's HTTP server."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def metrics_routes(registry: CollectorRegistry) -> list[Route]:
    """The route that Prometheus reads.

    Args:
        registry: is read on the event loop.
    """

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return [Route("/metrics", metrics, methods=["GET"])]
