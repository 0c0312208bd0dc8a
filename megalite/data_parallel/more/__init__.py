"""Strategies beyond all-reduce and ZeRO: servers, local steps, gossip, compression. Imported when a config names one."""
