"""How Linux shares cores between the ranks of a CPU run."""

import os


def schedule_as_batch() -> bool:
    """Put this process, and threads that it starts from now on, under SCHED_BATCH; True where that was done.

    Each gloo collective wakes three threads of a rank in turn. Under the usual policy whoever is woken takes the core from
    whoever computes or sends there, who then has to be woken again: an all-reduce takes three to four times as long
    (docs/performance.md). Under SCHED_BATCH the woken wait until the core is free. Weights and shares of the cores stay as
    they are, and no privilege is needed.

    Left alone: systems without the policy, those that forbid it, and a policy that somebody chose (chrt).
    """
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):
        return False
    return True
