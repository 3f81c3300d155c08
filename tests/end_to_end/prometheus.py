"""A real Prometheus that reads roles at work, where the program is installed (Debian's package `prometheus`)."""

import asyncio
import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from outrider.roles.ports import free_port

# What each Prometheus says that it takes; 3.x would take names in UTF-8 as they are. No package has a 3.x that tests
# could run, so of it this is what is held. Sources: 2.42 and 3.3 as they were sent, later ones scrape/scrape_test.go of
# https://github.com/prometheus/prometheus.
ACCEPTS = {
    "2.42": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "3.3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;escaping=allow-utf-8;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;escaping=allow-utf-8;q=0.3,"
    "*/*;q=0.2",
    "later 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
}
PROGRAM = shutil.which("prometheus")


async def ask(folder: Path, addresses: Sequence[str], queries: Iterable[str]) -> Mapping[str, list[Any]]:
    """Return the series that answer each query, once Prometheus has read every address three times."""
    assert PROGRAM is not None
    config, port = folder / "prometheus.yml", free_port()
    job = {"job_name": "outrider", "scrape_interval": "1s", "static_configs": [{"targets": list(addresses)}]}
    config.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    command = [
        PROGRAM, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(90):
            read = 'count(count_over_time(up{job="outrider"}[1m]) >= 3) and min(up{job="outrider"}) == 1'
            while not (found := await _query(port, read)) or found[0]["value"][1] != str(len(addresses)):
                await asyncio.sleep(0.2)
        return {query: await _query(port, query) for query in queries}
    finally:
        process.terminate()
        await process.wait()


async def _query(port: int, query: str) -> list[Any]:
    """The series of an answer; none while Prometheus starts.

    Raises:
        AssertionError: Prometheus does not understand the query.
    """

    def read() -> list[Any]:
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            assert error.code >= 500, f"{query}: {error.read().decode()}"
        except OSError:
            pass
        return []

    return await asyncio.to_thread(read)
