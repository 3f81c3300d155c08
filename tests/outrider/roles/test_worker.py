"""Who a worker says that it is."""

from outrider.roles.worker import introduce
from outrider.v1 import common_pb2, registry_pb2


def introduction() -> registry_pb2.WorkerIntroduction:
    return introduce(
        registry_pb2.WORKER_ROLE_TARGET,
        address="127.0.0.1:1",
        model=common_pb2.ModelInfo(name="tiny", vocab_size=61),
        limits=registry_pb2.WorkerLimits(max_sessions=2),
        name="place 3",
    )


def test_ids_are_unique_and_name_the_role_and_the_name_stays() -> None:
    first, second = introduction(), introduction()
    assert first.worker_id != second.worker_id
    assert first.worker_id.startswith("target-")
    assert first.version
    assert first.name == second.name == "place 3"
