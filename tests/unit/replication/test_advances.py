"""What apply has made of the high water marks that a node proposes (rule 9) is counted."""

from smq.raft_state.commands import AdvanceHwms
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.replies import HwmsAdvanced, Reply
from smq.replication.partition.high_water_mark import propose_advances
from tests.unit.replication.hot_path import NODES, HotPath
from tests.unit.replication.support import Host, batch

TIMED_OUT = SmqError(ErrorCode.TIMED_OUT, "no answer")


def test_rule_09_what_apply_made_of_each_mark_is_counted() -> None:
    host = Host()
    owner, replies = host.node_host(), list[Reply | SmqError]()
    for answer in (HwmsAdvanced(accepted=(True,)), HwmsAdvanced(accepted=(True, False, False)), TIMED_OUT):
        propose_advances(owner, AdvanceHwms(items=()), 1, replies.append)
        host.answers[-1](answer)
        assert replies[-1] is answer
    assert owner.measures.advances.values == {("accepted",): 2, ("rejected",): 2}


def test_rule_09_a_node_counts_the_marks_that_it_proposes() -> None:
    world = HotPath(partitions=3)
    leader = NODES[0]
    led = world.led_by(leader)
    world.produce(leader, [(partition, batch()) for partition in led])
    world.scheduler.run_for_ms(1_000)
    assert world.nodes[leader].measures.advances.values == {("accepted",): len(led), ("rejected",): 0}
