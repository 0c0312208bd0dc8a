"""Test the message of a broken connection. (tests/e2e/test_lost_peer.py kills a rank.)"""

import pytest

from megalite.data_parallel.strategy import AllReduce
from megalite.topology.group import Group
from megalite.topology.lost_peers import PeerLostError, raise_if_peer_lost
from tests.data_parallel.toy import Toy, bare

CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24250.")


def said(error: BaseException, dp: Group, world: Group) -> str | None:
    strategy = bare(AllReduce, {0: Toy()}, groups={"dp": dp, "world": world})
    strategy.step = 7
    try:
        raise_if_peer_lost(error, strategy.groups.world, strategy.groups.between_replicas, step=strategy.step)
    except PeerLostError as found:
        assert found.__cause__ is error
        return str(found)
    return None


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("Connection closed by peer"), KeyError()])
def test_other_errors_are_unchanged(error: BaseException) -> None:
    assert said(error, Group("dp-cp", (0, 2), 0), Group.solo("world")) is None


def test_group_and_peers_are_named_if_no_rank_can_be() -> None:
    found = said(CLOSED, Group("dp-cp", (0, 2), 0), Group.solo("world"))
    assert "step 7: a connection of rank 0 broke, to a peer in its dp group [0, 2]" in str(found)


def test_world_is_named_without_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.topology.lost_peers.lost_ranks", lambda group: [])
    found = said(CLOSED, Group.solo("dp-cp"), Group("world", (0, 1), 1))
    assert "a connection of rank 1 broke, to a peer in its world [0, 1];" in str(found)


def test_each_lost_rank_is_named_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.topology.lost_peers.lost_ranks", lambda group: [1, 2])
    found = said(CLOSED, Group("dp-cp", (0, 2), 0), Group("world", (0, 1, 2), 0))
    assert "rank 1; rank 2 of dp group [0, 2] are gone: connections were closed in step 7" in str(found)
