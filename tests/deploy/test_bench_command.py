"""The service that `outrider bench` starts."""

from pathlib import Path

import pytest
import typer

from outrider.deploy.bench_command import default_prompts, service_config


def test_the_embedded_pair_is_the_default():
    config = service_config(None, None, None)
    assert (config.target_model, config.draft_model) == (None, None)
    assert {prompt.category for prompt in default_prompts(config)} == {"python"}


def test_models_are_those_of_serve():
    config = service_config("target", "draft.gguf", None)
    assert (config.target_model, config.draft_model) == ("target", "draft.gguf")
    assert len({prompt.category for prompt in default_prompts(config)}) == 9
    assert len({prompt.category for prompt in default_prompts(None)}) == 9


def test_a_file_says_the_rest_but_neither_ports_nor_name(tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "name: production\n"
        "coordinator: {port: 50051, http_port: 8000, shared_http_port: 8100}\n"
        "target: {model: one}\n"
        "draft: {model: small, workers: 3}\n"
    )
    config = service_config("other", None, file)
    assert (config.target_model, config.draft_model, config.drafts) == ("other", "small", 3)
    assert config.name != "production"
    assert (config.port, config.shared_http_port) == (0, None)
    assert config.http_port not in (None, 8000)


def test_a_file_that_is_wrong_is_a_wrong_argument(tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_text("drafts: many\n")
    with pytest.raises(typer.BadParameter, match="cluster"):
        service_config(None, None, file)
