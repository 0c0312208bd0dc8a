"""Where what stands in a heartbeat file: fixed places, so that a beat is one or two stores into mapped memory."""

import struct

MAGIC = b"megabeat"
LANES = 64  # groups that a rank may have; what happens in further ones counts as a beat and is not distinguished

HEADER = struct.Struct("<8sIIQ")  # magic, rank, process id, and the start time of the process in the kernel's ticks
PULSE = struct.Struct("<Qd")  # beats so far, and the host's monotonic clock at the last one
PLACE = struct.Struct("<q?32s")  # step, whether a long silence is to be expected, and the phase
ACTION = struct.Struct("<16si")  # text of the pipeline's action, and its place in the rank's list
LAST_LANE = struct.Struct("<i")  # index of the lane that was used last
LANE_NAME = struct.Struct("<112s")
LANE = struct.Struct("<QQ")  # operations begun, and the number of the one that a thread waits for, or 0
RECENT = 8  # operations of a lane that are remembered: number n in place n modulo this
OPERATION = struct.Struct("<QB?6x")  # bytes, code, and whether it was another one in the step before

HEADER_AT, PULSE_AT, PLACE_AT, ACTION_AT, LAST_LANE_AT, LANES_AT = 0, 64, 96, 160, 192, 256
RECENT_AT = LANE_NAME.size + LANE.size
LANE_BYTES = RECENT_AT + RECENT * OPERATION.size
SIZE = LANES_AT + LANES * LANE_BYTES

OPERATIONS = (
    *("nothing", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "rotate", "send", "receive", "synchronise"),
)
SYNCHRONISE = "synchronise"
"""Of a rank alone: the host reads numbers of the device, and waits for all that was queued there before."""
CODES = {name: code for code, name in enumerate(OPERATIONS)}


def lane_name(kind: str, ranks: tuple[int, ...]) -> str:
    """`tp [0, 1]`, the same on every rank of a group and on no other; short for any number of ranks."""
    if len(ranks) <= 8:
        return f"{kind} {list(ranks)}"
    step = ranks[1] - ranks[0]
    if ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"{kind} [{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"
    digest = sum(rank * (index + 1) for index, rank in enumerate(ranks)) % 0xFFFF
    return f"{kind} [{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}; {len(ranks)} ranks, sum {digest:04x}]"
