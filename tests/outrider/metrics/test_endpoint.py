"""The port that Prometheus reads, and who may."""

import asyncio
import contextlib
import socket
import ssl
import threading
import urllib.error
import urllib.request

import pytest

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.metrics import endpoint as endpoint_module
from outrider.metrics.endpoint import MetricsEndpoint, on_loop
from outrider.metrics.families import Families
from outrider.security.certificates import write_development_set
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.target_worker.config import TargetWorkerConfig


def read(url: str, context: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(url, timeout=30, context=context) as answer:
        return answer.read().decode()


async def test_values_of_a_loop_are_read_on_the_loop():
    threads = []

    def describe(families: Families) -> None:
        threads.append(threading.current_thread())
        families.gauge("answer", "a", 42)

    endpoint = MetricsEndpoint(on_loop(describe, asyncio.get_running_loop()), host="127.0.0.1", port=0)
    try:
        text = await asyncio.to_thread(read, f"http://{endpoint.address}/metrics")
        assert "outrider_answer 42.0" in text.splitlines()
        assert "process_resident_memory_bytes" in text
        assert set(threads) == {threading.main_thread()}
    finally:
        await endpoint.close()
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(read, f"http://{endpoint.address}/metrics")


async def test_a_port_that_is_taken_is_an_error_that_says_so():
    first = MetricsEndpoint(lambda families: None, host="127.0.0.1", port=0)
    try:
        with pytest.raises(OSError, match="metrics_port"):
            MetricsEndpoint(lambda families: None, host="127.0.0.1", port=int(first.address.rpartition(":")[2]))
    finally:
        await first.close()


@pytest.mark.parametrize("config", [CoordinatorConfig, TargetWorkerConfig, DraftWorkerConfig])
def test_beyond_loopback_a_role_has_to_be_protected(config):
    with pytest.raises(ValueError, match=r"metrics_host: 0\.0\.0\.0 given"):
        config(metrics_port=0, metrics_host="0.0.0.0")
    with pytest.raises(ValueError, match="metrics_port: 70000 given"):
        config(metrics_port=70000)
    assert config(metrics_port=0, metrics_host="0.0.0.0", insecure=True).metrics_port == 0
    assert config(metrics_host="0.0.0.0").metrics_port is None


async def test_with_tls_who_reads_shows_a_certificate_of_the_same_authority(tmp_path):
    write_development_set(tmp_path, days=1)
    tls = TlsConfig.of_folder(tmp_path, Role.DRAFT)
    endpoint = MetricsEndpoint(lambda families: families.gauge("answer", "a", 42), host="127.0.0.1", port=0, tls=tls)
    try:
        url = f"https://{endpoint.address}/metrics"
        stranger = ssl.create_default_context(cafile=str(tls.ca))
        stranger.check_hostname = False
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(read, url, stranger)
        known = ssl.create_default_context(cafile=str(tls.ca))
        known.check_hostname = False
        known.load_cert_chain(str(tls.certificate), str(tls.key))
        assert "outrider_answer 42.0" in await asyncio.to_thread(read, url, known)
    finally:
        await endpoint.close()


@pytest.mark.parametrize("is_secured", [True, False])
async def test_who_connects_and_says_nothing_holds_up_neither_readers_nor_the_end(tmp_path, monkeypatch, is_secured):
    # Nobody is let go before the readers have given up.
    monkeypatch.setattr(endpoint_module._Connection, "timeout", 600.0)
    write_development_set(tmp_path, days=1)
    tls = TlsConfig.of_folder(tmp_path, Role.DRAFT) if is_secured else None
    endpoint = MetricsEndpoint(lambda families: families.gauge("answer", "a", 42), host="127.0.0.1", port=0, tls=tls)
    host, _, port = endpoint.address.rpartition(":")
    known = None
    if tls is not None:
        known = ssl.create_default_context(cafile=str(tls.ca))
        known.check_hostname = False
        known.load_cert_chain(str(tls.certificate), str(tls.key))
    with socket.create_connection((host, int(port))):
        url = f"{'https' if is_secured else 'http'}://{endpoint.address}/metrics"
        try:
            assert "outrider_answer 42.0" in await asyncio.to_thread(read, url, known)
        finally:
            closing = asyncio.create_task(endpoint.close())
            ended, _ = await asyncio.wait({closing}, timeout=60)
    await closing
    assert ended


async def test_a_connection_that_breaks_off_is_not_told_of(tmp_path, capfd):
    write_development_set(tmp_path, days=1)
    tls = TlsConfig.of_folder(tmp_path, Role.DRAFT)
    endpoint = MetricsEndpoint(lambda families: None, host="127.0.0.1", port=0, tls=tls)
    host, _, port = endpoint.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while connection.recv(1024):
                    pass
    finally:
        await endpoint.close()
    assert capfd.readouterr().err == ""
