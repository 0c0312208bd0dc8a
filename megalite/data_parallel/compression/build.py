"""The codec of a setting."""

from megalite.config.data_parallel import DataParallelConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.compression.codec import Codec
from megalite.data_parallel.compression.onebit import OneBit
from megalite.data_parallel.compression.powersgd import PowerSGD
from megalite.data_parallel.compression.topk import TopK
from megalite.data_parallel.compression.uint8 import Uint8
from megalite.data_parallel.wire import Channel


def build_codec(name: str, bucket: Bucket, channel: Channel, settings: DataParallelConfig) -> Codec:
    """What `grad_compression` names, other than `none`."""
    if name == "onebit":
        return OneBit(bucket, channel)
    if name == "uint8":
        return Uint8(bucket, channel)
    if name == "topk":
        return TopK(bucket, channel, density=settings.topk_density)
    assert name == "powersgd", name
    return PowerSGD(bucket, channel, rank=settings.powersgd_rank)
