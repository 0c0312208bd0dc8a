"""`pretrain_gpt.py` for ranks that share one GPU. NCCL refuses two ranks of a host on one device, so that to NCCL each rank
is a host with one GPU; messages then pass through sockets."""

import os
import sys

rank = os.environ["RANK"]
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank}
os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

from megalite.cli.train import main  # noqa: E402

sys.exit(main(sys.argv[1:], program="pretrain_gpt.py"))
