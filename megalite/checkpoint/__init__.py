"""Checkpoints: safetensors shards and a JSON manifest, committed by rename and verified before use."""
