"""A deployment from a file: every field has one place there, and an error names the key as it is called there."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider import cli
from outrider.deploy import serve_command
from outrider.deploy.config import Bind, DeployConfig
from outrider.deploy.config_file import KEYS, SECTIONS, read_config, read_fields
from outrider.deploy.plan import Plan

EXAMPLES = sorted((Path(__file__).parents[2] / "deploy").glob("*.yaml"))


def written(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


def test_every_field_has_one_key():
    fields = [field.name for field in dataclasses.fields(DeployConfig)]
    assert sorted(KEYS) == sorted(fields)
    assert sum(len(keys) for keys in SECTIONS.values()) == len(fields)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_can_be_read(path: Path):
    config = read_config(path)
    assert config.name == "outrider"
    assert (config.bind is Bind.NODE) == (config.certs is not None and config.token_file is not None)


def test_there_are_examples_of_all_that_the_file_is_for():
    one, cluster, several = (read_config(path.parent / path.name) for path in sorted(EXAMPLES, key=_place))
    assert (one.address, one.drafts) == ("local", 2)
    assert (cluster.tensor_parallel_size, cluster.min_drafts, cluster.max_drafts) == (4, 0, 6)
    assert cluster.target_resources == ("big_gpu=4",)
    assert (several.coordinators, several.targets, several.drafts_beside_target) == (2, 2, 1)


def _place(path: Path) -> int:
    return ["one-machine.yaml", "cluster.yaml", "several-coordinators.yaml"].index(path.name)


def test_values_arrive_as_the_fields_want_them(tmp_path: Path):
    text = """
    bind: node
    security: {insecure: true}
    target: {model: /m, gpus: 2, kv_cache_dtype: fp8_e4m3, quantization: null}
    draft: {workers: 0, resources: {cheap: 0.5, any: 2}, source: ngram, ngram_corpus: [/a.jsonl, b.jsonl]}
    timeouts: {hang_timeout_s: 3}
    observe: {log_format: json, otlp_endpoint: "http://collector:4317"}
    ray:
    """
    config = read_config(written(tmp_path, text))
    assert (config.bind, config.target_model, config.target_gpus) == (Bind.NODE, "/m", 2.0)
    assert isinstance(config.target_gpus, float)
    assert config.draft_resources == ("cheap=0.5", "any=2")
    assert (config.hang_timeout_s, config.quantization, config.drafts) == (3.0, None, 0)
    assert (config.source, config.ngram_corpus) == ("ngram", (Path("/a.jsonl"), Path("b.jsonl")))
    assert (config.log_format, config.otlp_endpoint) == ("json", "http://collector:4317")
    assert read_config(written(tmp_path, "")) == DeployConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("draft: {worker: 2}", "draft.worker: unknown; did you mean workers?"),
        ("drafts: {workers: 2}", "drafts: unknown; did you mean draft?"),
        (
            "observe: {otlp_endpoint: 'collector:4317'}",
            "observe.otlp_endpoint: 'collector:4317' given, http://HOST:PORT",
        ),
        ("observe: {log_format: xml}", "observe.log_format: 'xml' given, one of text, json needed"),
        ("colour: red", "colour: unknown; known are name, address, bind, metrics_port"),
        ("draft: 4", "draft: 4 given, keys with values needed"),
        ("[1]", "the file: [1] given, keys with values needed"),
        ("draft: {workers: four}", "draft.workers: 'four' given, a whole number needed"),
        ("draft: {workers: yes}", "draft.workers: True given, a whole number needed"),
        ("draft: {workers: 1.5}", "draft.workers: 1.5 given, a whole number needed"),
        ("target: {workers: null}", "target.workers: None given, a whole number needed"),
        ("draft: {model: 3}", "draft.model: 3 given, a text needed"),
        ("draft: {resources: {cheap: much}}", "draft.resources.cheap: 'much' given, a number needed"),
        ("draft: {resources: [cheap]}", "draft.resources: ['cheap'] given, keys with values needed"),
        ("draft: {resources: {cheap: 0}}", "draft.resources: 'cheap=0' given, NAME=AMOUNT with an amount above 0"),
        ("draft: {ngram_corpus: a.jsonl}", "draft.ngram_corpus: 'a.jsonl' given, a list of texts needed"),
        ("draft: {source: words}", "draft.source: 'words' given, one of model, ngram, model+ngram needed"),
        ("target: {enforce_eager: 1}", "target.enforce_eager: 1 given, true or false needed"),
        ("target: {kv_cache_dtype: int4}", "target.kv_cache_dtype: 'int4' given, one of auto, fp8_e4m3 needed"),
        ("bind: everywhere", "bind: 'everywhere' given, one of loopback, node needed"),
        ("bind: node", "bind: node given, which other machines may reach: give certs and token_file"),
        ("draft: {workers: -1}", "draft.workers: -1 given, 0 or more needed"),
        ("draft: {workers: 5, max_workers: 4}", "draft.max_workers: 4 given, with drafts 5 between"),
        ("autoscale: {up_s: 0}\ndraft: {max_workers: 4}", "autoscale.up_s: 0.0 given"),
        ("name: a\nname: b", "name: given twice, the second time in line 2"),
        ("name: !!python/name:os.system", "could not determine a constructor"),
        ("draft:\n  ? [workers]\n  : 2", "a key that is no text, in line 2"),
        ("autoscale: {probe_s: -1}", "autoscale.probe_s: -1.0 given, more than 0 needed"),
        ("{", "expected the node content"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(tmp_path: Path, text: str, words: str):
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_config(path)
    assert str(error.value).startswith(f"{path}: ")
    assert words in str(error.value)


def test_options_go_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seen: list[Any] = []

    def note(config: DeployConfig) -> Plan:
        seen.append(config)
        return Plan(given=config, config=config, lines=(), missing=())

    monkeypatch.setattr(serve_command, "make_plan", note)
    path = written(tmp_path, "name: filed\ndraft: {workers: 3}\ntarget: {workers: 2}")
    assert cli.run(["serve", "--dry-run", "--config", str(path), "--drafts", "1"]) == 0
    assert (seen[0].name, seen[0].drafts, seen[0].targets, seen[0].port) == ("filed", 1, 2, 50051)
    # Given with its default value, an option still goes first.
    assert cli.run(["serve", "--dry-run", "--config", str(path), "--targets", "1"]) == 0
    assert (seen[1].drafts, seen[1].targets) == (3, 1)
    assert capsys.readouterr().err == ""
    assert cli.run(["serve", "--config", str(written(tmp_path, "drafts: 3"))]) == 2
    assert "deployment.yaml: drafts: unknown" in capsys.readouterr().err
    wrong = str(written(tmp_path, "draft: {workers: -1}"))
    for options, words in [([], "deployment.yaml: draft.workers: -1"), (["--drafts", "-2"], "value: drafts: -2")]:
        assert cli.run(["serve", "--config", wrong, *options]) == 2
        assert words in capsys.readouterr().err
    assert cli.run(["serve", "--detach"]) == 2
    assert "--detach needs a running cluster" in capsys.readouterr().err


def test_what_a_file_sets_is_all_that_it_sets(tmp_path: Path):
    path = written(tmp_path, yaml.safe_dump({"coordinator": {"count": 2}}))
    assert read_fields(path) == {"coordinators": 2}
