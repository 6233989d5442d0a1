"""`minifer serve --ray` between the command line and Ray, which it does not need."""

from __future__ import annotations

import argparse
import sys

import pytest

from minifer.cli import main, serve_ray
from minifer.cli.parser import Parser
from minifer.cli.serve_replicas import add_options as add_replica_options
from minifer.serving.ray_serve.settings import RaySettings


def arguments(options: str) -> argparse.Namespace:
    parser = Parser(prog="minifer serve")
    add_replica_options(parser)
    serve_ray.add_options(parser)
    parser.set_defaults(disaggregate=None)
    return parser.parse_args(["--ray", *options.split()])


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ("", {}),
        ("--replicas 3", {"min_replicas": 3, "max_replicas": 3}),
        ("--max-replicas 4", {"max_replicas": 4}),
        ("--min-replicas 2", {"min_replicas": 2, "max_replicas": 2}),
        ("--min-replicas 2 --max-replicas 4", {"min_replicas": 2, "max_replicas": 4}),
        ("--router least_load --ray-address auto", {"router": "least_load", "address": "auto"}),
        ("--replica-cpus 0.5 --upscale-delay 0", {"replica_cpus": 0.5, "upscale_delay": 0.0}),
    ],
)
def test_options_become_settings(options: str, fields: dict) -> None:
    assert serve_ray.ray_settings(arguments(options)) == RaySettings(**fields)


@pytest.mark.parametrize(("options", "gpus"), [("", 1), ("--replica-gpus 0.25", 0.25)])
def test_an_engine_on_a_gpu_is_given_one(options: str, gpus: float) -> None:
    assert serve_ray.ray_settings(arguments(options), "cuda").replica_gpus == gpus
    assert serve_ray.ray_settings(arguments(""), "auto").replica_gpus == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--min-replicas 2", "--min-replicas needs --ray"),
        ("--ray-address auto", "--ray-address needs --ray"),
        ("--ray --replicas 2 --max-replicas 3", "--replicas is a fixed number"),
        ("--ray --replicas 0", "--replicas must be at least 1, got 0"),
        ("--ray --min-replicas 3 --max-replicas 2", "at least min_replicas, which is 3, got 2"),
        ("--ray --router best", "router must be one of"),
        ("--ray --ray-address ray://head:10001", "run the server on a node"),
        ("--ray --replica-cpus -1", "replica_cpus must be at least 0"),
        ("--ray --target-requests 0", "target_requests must be at least 0.1"),
        ("--ray --disaggregate 1:1", "exclude each other"),
    ],
)
def test_bad_usage_is_refused_in_a_sentence(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "minifer-tiny", "--port", "0", *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_without_ray_the_way_to_install_it_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith("minifer.serving.ray_serve.") and not name.endswith(".settings"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--model", "minifer-tiny", "--port", "0", "--ray"]) == 1
    assert 'needs Ray: pip install "minifer[ray]"' in capsys.readouterr().err
