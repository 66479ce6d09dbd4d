"""Which node takes which role, what is said if none does, and how a command runs there. No Ray is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.run import process_specs
from rose.run.cpu_affinity import Placement
from rose.run.process_specs import BORROWED, DEDICATED, GATEWAY, TRAFFIC
from rose.run.processes import Command, roses
from rose.run.ray_placement import (
    ROLE_OF,
    ClusterNode,
    NodeFacts,
    check_facts,
    missing,
    models_of,
    notes_of,
    on_node,
    port_of,
    roles_of,
    selectors,
)
from rose.run.run_settings import ClusterSettings, load_run_settings

OWN = ClusterSettings(kind="ray")
ALL = ("control", "serving", "dedicated")


def nodes(*roles: str | None, cpus: float = 2.0) -> list[ClusterNode]:
    return [ClusterNode(f"n{number}", f"10.0.0.{number}", role, cpus) for number, role in enumerate(roles)]


def test_every_process_of_a_run_has_a_role() -> None:
    assert {ROLE_OF[name] for name in (GATEWAY, BORROWED, TRAFFIC, DEDICATED)} == set(ALL)
    assert ROLE_OF[TRAFFIC] == ROLE_OF[BORROWED], "users are on the node of the device that serves them"


def test_a_run_without_a_dedicated_worker_needs_no_node_for_it() -> None:
    assert roles_of(load_run_settings()) == ALL
    assert roles_of(load_run_settings(None, ["worker.is_used=false"])) == ALL[:2]


@pytest.mark.parametrize(
    "there, words",
    [
        pytest.param(nodes("control", "serving", "dedicated"), [], id="a node for each"),
        pytest.param(nodes("control", "any", "any"), [], id="any takes every role"),
        pytest.param(nodes(None, None), [], id="no labels: every node takes every role"),
        pytest.param(
            nodes("control", "serving", None),
            [
                "no node has the label rose/role=dedicated (or rose/role=any)",
                "There are 3 nodes",
                "rose/role=-, 2 CPUs",
            ],
            id="a node without a label takes nothing once others have one",
        ),
        pytest.param(nodes(), ["no node", "There are 0 nodes"], id="no node"),
        pytest.param(
            nodes(None, cpus=2), ["its nodes have 2 of 3 places with 1 CPUs", "There is 1 node: 10.0.0.0"], id="too few"
        ),
        pytest.param(nodes("any", "any", "any", cpus=0.5), ["no node for control has 1 CPUs"], id="too small"),
    ],
)
def test_what_a_cluster_lacks_is_said_beside_what_it_has(there: list[ClusterNode], words: list[str]) -> None:
    what = missing(there, ALL, OWN)
    assert bool(what) == bool(words) and all(word in what for word in words), what


def test_bundles_select_nodes_by_label_if_there_are_labels() -> None:
    assert selectors(nodes("control", None), ALL[:2], "rose/role") == [
        {"rose/role": "in(control,any)"},
        {"rose/role": "in(serving,any)"},
    ]
    assert selectors(nodes(None, None), ALL[:2], "rose/role") == [{}, {}]


FACTS = NodeFacts("10.0.0.1", "0.1.0", "3.11.7", (0, 1), 0)


@pytest.mark.parametrize(
    "facts, words",
    [
        (replace(FACTS, rose="0.0.9"), "node 10.0.0.1 has rose 0.0.9, and this machine has 0.1.0"),
        (replace(FACTS, python="3.12.1"), "node 10.0.0.1 has Python 3.12.1, and this machine has 3.11.7"),
        (replace(FACTS, rose=None), "node 10.0.0.1 cannot import rose"),
    ],
)
def test_another_version_on_a_node_is_refused(facts: NodeFacts, words: str) -> None:
    check_facts([FACTS], "0.1.0", "3.11.7")
    with pytest.raises(ConfigError, match=words):
        check_facts([FACTS, facts], "0.1.0", "3.11.7")


def test_a_node_at_a_lower_priority_than_the_driver_is_noted() -> None:
    assert notes_of([replace(FACTS, niceness=5)], 5) == ()
    [note] = notes_of([FACTS, replace(FACTS, address="10.0.0.2", niceness=15)], 0)
    assert "10.0.0.2" in note and "10.0.0.1" not in note and "RAY_worker_niceness=0" in note


def test_a_command_gets_the_address_folders_and_port_of_its_node(tmp_path: Path) -> None:
    model = tmp_path / "models" / "one"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    settings = load_run_settings()
    command = process_specs.gateway(model, settings, Placement("cpu:0", "cpu:1", (1,)), tmp_path / "ledger.sqlite")
    folders = models_of(command)
    assert folders == {str(model): "models/0/one"}
    there = on_node(command, "10.0.0.2", Path("there"), folders, None)
    assert there.arguments[:4] == ("-m", "rose", "gateway", "there/models/0/one")
    assert there.arguments[-2:] == ("--host", "10.0.0.2") and port_of(there) == port_of(command)
    assert there.arguments[there.arguments.index("--ledger") + 1] == "there/ledger.sqlite"
    assert port_of(on_node(command, "10.0.0.2", Path("there"), folders, 4711)) == 4711


def test_a_command_that_listens_nowhere_gets_no_address() -> None:
    users = Command(TRAFFIC, ("-m", "rose.run.serving_traffic"))
    assert on_node(users, "10.0.0.2", Path("there"), {}, None) == users and port_of(users) is None
    lends = Command(DEDICATED, roses("serve", "--lend", "model"))
    assert on_node(lends, "10.0.0.2", Path("there"), {}, None).arguments[-2:] == ("--host", "10.0.0.2")
