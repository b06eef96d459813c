"""Settings of a feature level that the cluster has not reached: neither described nor taken, and harmless to others."""

from collections.abc import Iterator

import pytest

from chaos_tests.sim.levels import LEVEL_TWO, SETTING, level_two
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.config_view import topic_entries
from smq.coordinator.kafka.errors import KafkaError, code_of
from smq.raft_state.commands import AlterClusterConfig, AlterTopicConfig
from smq.raft_state.errors import ErrorCode, SmqError
from tests.unit.coordinator.kafka.test_lagging_node import ask
from tests.unit.coordinator.lagging import TOPIC, TOPIC_ID, LaggingNode, state_with

NOT_ENABLED = code_of(SmqError(ErrorCode.FEATURE_NOT_ENABLED, ""))
RESOURCES = [(2, TOPIC), (4, "")]


@pytest.fixture(autouse=True)
def newer() -> Iterator[None]:
    with level_two():
        yield


def node_at(level: int) -> LaggingNode:
    node = LaggingNode()
    node.state = state_with((TOPIC, TOPIC_ID))
    node.state.feature_level = level
    return node


def alter(node: LaggingNode, kind: int, name: str, *keys: str, is_dry: bool = False) -> list[KafkaError]:
    configs = [{"name": key, "value": "1"} for key in keys]
    resource: Struct = {"resource_type": kind, "resource_name": name, "configs": configs}
    return ask(node, ApiKey.ALTER_CONFIGS, 2, {"validate_only": is_dry, "resources": [resource]})


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize(("kind", "name"), RESOURCES)
def test_a_setting_is_refused_below_its_level(kind: int, name: str, *, is_dry: bool) -> None:
    node = node_at(1)
    assert alter(node, kind, name, SETTING, is_dry=is_dry) == [NOT_ENABLED]
    assert node.proposed == []
    assert alter(node_at(LEVEL_TWO), kind, name, SETTING, is_dry=is_dry) == [KafkaError.NONE]


@pytest.mark.parametrize(("kind", "name"), RESOURCES)
def test_a_replacement_of_all_keys_names_those_of_the_level_only(kind: int, name: str) -> None:
    for level in (1, LEVEL_TWO):
        node = node_at(level)
        assert alter(node, kind, name) == [KafkaError.NONE]
        (command,) = node.proposed
        assert isinstance(command, AlterTopicConfig | AlterClusterConfig)
        assert (SETTING in command.unset) == (level == LEVEL_TWO)


def test_a_setting_is_described_from_its_level_on() -> None:
    for level in (1, LEVEL_TWO):
        assert (SETTING in {entry["name"] for entry in topic_entries({}, 1, {}, level)}) == (level == LEVEL_TWO)
