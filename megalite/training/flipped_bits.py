"""Silent corruption: replicas that should be equal are compared every so many steps."""

from megalite.data_parallel.replica_check import check_replicas
from megalite.training.replica import Replica
from megalite.training.state_tensors import replicated_states


def compare_replicas(replica: Replica, step: int) -> None:
    """After `step`, if it is one after which `check_replicas_interval` asks for it.

    Collectives: those of `check_replicas`.

    Raises:
        ReplicasDifferError: as `check_replicas`.
    """
    every, strategy = replica.config.data_parallel.check_replicas_interval, replica.strategy
    if every and step % every == 0 and strategy.replicas_agree:
        strategy.wait_for_parameters()
        with strategy.main_in_memory():
            states = replicated_states(replica)
            check_replicas(strategy, states=states, step=step, world=replica.topology.world)
