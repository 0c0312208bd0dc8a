"""The synchronous latency of a plan: what a step takes at least, by its slowest stage."""

from megalite.planner.chain.costs import PlanCosts


def latency(costs: PlanCosts, microbatches: int, in_flight: list[int]) -> float:
    """Seconds from the first forward to the last reduced gradient, as a maximum over chains of work that must follow.

    With stage q as the pivot: the first microbatch gets to it, it does all forwards and backwards without a pause,
    and the last microbatch returns, each stage on the way reducing its gradients when its last backward is done:

        L_q = sum_{s<q} (F_s + c_s) + M (F_q + B_q) + max_{s<=q} (sum_{s<=a<q} (B_a + c_a) + AR_s)

    That is DAPPLE's warm-up + steady + ending; the paper picks q by a rule of thumb, which misses slow early stages, and
    this takes the largest. A message between stages is a pivot too, once for each direction. And a stage that holds K
    microbatches starts the next only when the first of them has been to the end of the pipeline and back.

    No plan is faster than this where links carry what they must (`simulate` is never below it).

    Source: Fan et al., "DAPPLE" (arXiv 2007.01045), section 4.1.

    Args:
        in_flight: Per stage, K: the microbatches it holds at most.
    """
    count = len(costs.forward)
    hops = (*costs.hops, 0.0)
    # Of a microbatch, from the start of its forward on stage s to the end of its backward there.
    there_and_back = [0.0] * (count + 1)
    for s in reversed(range(count)):
        there_and_back[s] = costs.forward[s] + costs.backward[s] + 2 * hops[s] + there_and_back[s + 1]
    longest = entry = ending = 0.0
    for s in range(count):
        forward, backward, hop = costs.forward[s], costs.backward[s], hops[s]
        if s:
            ending += costs.backward[s - 1] + hops[s - 1]
        ending = max(ending, costs.reduce[s])
        turns, rest = divmod(microbatches - 1, in_flight[s])
        steady = max(
            microbatches * (forward + backward),
            (turns + 1) * there_and_back[s] + rest * backward,
            there_and_back[s] + (microbatches - 1) * hop,
        )
        longest = max(longest, entry + steady + ending)
        entry += forward + hop
    return longest
